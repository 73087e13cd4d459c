"The train notebook as users start it."

import os
import subprocess
import sys
import time

import nbformat
import pytest
from conftest import ROOT, read_json
from papermill.exceptions import PapermillExecutionError

from vitposnb.runs import verify


def papermill(*args):
    return subprocess.run([sys.executable, "-m", "papermill", *map(str, args)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, env=os.environ)  # fmt: skip


def test_one_command_trains(tmp_path):
    out = papermill("nbs/train.ipynb", tmp_path / "out.ipynb", "-p", "preset", "smoke", "-p", "pe", "NONE", "-p", "runs_dir", tmp_path)
    assert out.returncode == 0, out.stderr[-2000:]
    run = tmp_path / "smoke" / "none-s0"
    assert verify(run, weights=True) and read_json(run / "config.json")["pe"] == "none"
    cells = nbformat.read(tmp_path / "out.ipynb", 4).cells
    assert sum("image/png" in o.get("data", {}) for c in cells for o in c.get("outputs", [])) == 4


def test_without_an_output_path_and_captured_it_leaves_the_same_run(tmp_path, run_notebook):
    source = (ROOT / "nbs/train.ipynb").read_bytes()
    out = papermill("nbs/train.ipynb", "-p", "preset", "smoke", "-p", "pe", "rope", "-p", "runs_dir", tmp_path / "a")
    assert out.returncode == 0, out.stderr[-2000:]
    assert (ROOT / "nbs/train.ipynb").read_bytes() == source
    run_notebook("train", preset="smoke", pe="rope", runs_dir=str(tmp_path / "b"))
    a, b = (verify(tmp_path / d / "smoke" / "rope-s0")["files"]["model.safetensors"] for d in "ab")
    assert a == b


WRONG = [
    (dict(pe="ropee"), "pe = 'ropee'"),
    (dict(per="rope"), "per is not a parameter"),
    (dict(epochs="ten"), "epochs = 'ten'"),
    (dict(epochs="-3"), "epochs = -3"),
    (dict(preset="defualt"), "preset = 'defualt'"),
    (dict(seed="1.5"), "seed = 1.5"),
    (dict(batch_size="0"), "batch_size = 0"),
    (dict(data="./nowhere"), "data = './nowhere'"),
    (dict(embed_dim="72", num_heads="12"), "embed_dim = 72"),
]


@pytest.mark.parametrize("raw, names", WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_parameters_stop_at_the_first_cell(raw, names, run_notebook):
    start = time.time()
    with pytest.raises(PapermillExecutionError) as error:
        run_notebook("train", **raw)
    assert error.value.ename == "ConfigError" and error.value.evalue.startswith(names) and "allowed" in error.value.evalue
    assert "\n" not in error.value.evalue and len(error.value.traceback) == 1
    assert error.value.exec_count <= 3 and time.time() - start < 20


def test_a_lost_parameters_tag_is_noticed(tmp_path):
    nb = nbformat.read(ROOT / "nbs/train.ipynb", 4)
    for cell in nb.cells:
        cell.metadata.pop("tags", None)
    nbformat.write(nb, tmp_path / "untagged.ipynb")
    out = papermill(tmp_path / "untagged.ipynb", tmp_path / "out.ipynb", "-p", "pe", "ape", "-p", "preset", "smoke")
    assert out.returncode != 0 and "has lost the tag `parameters`" in out.stderr
