"Every test session has a cache of its own, so that it neither reads nor changes the user's."

import json

import nbformat
import papermill
import pytest
import torch

from vitposnb.config import configure, project_root
from vitposnb.data import load_images

ROOT = project_root()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITPOSNB_CACHE", str(tmp_path_factory.mktemp("cache")))
        torch.set_num_threads(1)
        yield


@pytest.fixture(scope="session")
def smoke(own_cache):
    "The images of the smoke preset."
    return load_images(configure(preset="smoke"))


@pytest.fixture
def run_notebook(tmp_path):
    "Execute a run notebook as papermill's command line does: parameters pass through its own type resolution."

    def run(name, **raw):
        from papermill.cli import _resolve_type

        parameters = {k: _resolve_type(v) if isinstance(v, str) else v for k, v in raw.items()}
        output = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}.ipynb"
        papermill.execute_notebook(ROOT / "nbs" / f"{name}.ipynb", output, parameters, progress_bar=False, cwd=ROOT)
        return nbformat.read(output, 4)

    return run


def read_json(path):
    return json.loads(path.read_text())
