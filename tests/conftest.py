"Every test session has a cache of its own, so that it neither reads nor changes the user's."

import json

import nbformat
import numpy as np
import papermill
import pytest
import torch
from PIL import Image

from vitposnb.analysis import read_table
from vitposnb.config import configure, project_root
from vitposnb.data import load_images
from vitposnb.runs import verify

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


def at(table, **where):
    "The rows where the columns have these values; None: empty."
    for name, value in where.items(): table = table[table[name].isna() if value is None else table[name] == value]
    return table


def analysed(name, run, output, **quick):
    "The verified table that a run notebook leaves in a run's folder."
    papermill.execute_notebook(ROOT / "nbs" / f"{name}.ipynb", output, dict(run=str(run), progress=False, **quick), progress_bar=False, cwd=ROOT)
    folder = next(run.glob(f"{name}*"))
    assert verify(folder) and verify(run, weights=True)
    return read_table(folder)


def photos(folder, train=3, test=6):
    "A folder of noise photos of two classes, that many of each; 40 x 52 pixels."
    rng = np.random.default_rng(0)
    for split, n in (("train", train), ("test", test)):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for i in range(n):
                Image.fromarray(rng.integers(0, 255, (40, 52, 3), dtype=np.uint8)).save(folder / split / name / f"{i}.png")
    return str(folder)


def shake(model, seed=1):
    "Weights far from their start; the positions are left as they are."
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if name not in ("pos_embed", "rope.freqs"):
                p += 0.1 * torch.randn(p.shape, generator=generator)
    return model.eval()
