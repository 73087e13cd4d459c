"Every library notebook runs from top to bottom with nbdev's own runner: one test each, in a process of its own."
import os
import subprocess
import sys
from pathlib import Path

import pytest

NBS = Path(__file__).resolve().parents[1] / "nbs"
LIBRARY = [path for path in sorted(NBS.glob("[!._]*.ipynb")) if "#| default_exp" in path.read_text()]
RUNNER = "import sys, pathlib, nbdev.test as t; sys.exit(not t.test_nb(pathlib.Path(sys.argv[1]), skip_flags=sys.argv[2:])[0])"


def run_notebook(path: Path) -> subprocess.CompletedProcess:
    from nbdev.config import get_config
    skip = get_config(path=NBS.parent).tst_flags.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    return subprocess.run([sys.executable, "-c", RUNNER, str(path), *skip], cwd=NBS, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("path", [*LIBRARY, NBS / "index.ipynb"], ids=lambda p: p.stem)
def test_notebook_runs(path):
    done = run_notebook(path)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_failing_notebook_fails(tmp_path):
    import nbformat
    cells = [nbformat.v4.new_code_cell("assert 1 == 2")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "bad.ipynb")
    assert "AssertionError" in run_notebook(tmp_path / "bad.ipynb").stderr
