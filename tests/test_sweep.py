"The Snakefile as users start it: from nothing to tables, a second time for nothing, and on after a kill."

import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from conftest import ROOT, read_json

from vitposnb.config import Analysis, configure, run_name
from vitposnb.runs import find_runs, verify
from vitposnb.sweep import ANALYSES, analyses, plan

pytest.importorskip("snakemake")
ENV = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "PE", "PRESET", "SEED", "SEEDS", "CONDITIONS", "CORES", "ARGS")}


def start(folder, *words, cores=1):
    "As `make study` calls it; Snakemake's own notes stay in the test's folder."
    line = [sys.executable, "-m", "snakemake", "-s", ROOT / "Snakefile", "--directory", folder, "--cores", cores, "--nolock", "--keep-going",
            "--rerun-incomplete", "--config", f"runs_dir={folder / 'runs'}", *words]  # fmt: skip
    return subprocess.Popen(list(map(str, line)), env={**ENV, "VITPOSNB_CACHE": os.environ["VITPOSNB_CACHE"]}, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)  # fmt: skip


def sweep(folder, *words, cores=1):
    job = start(folder, *words, cores=cores)
    return job.communicate()[0], job.returncode


def manifests(folder):
    "Their text holds the wall time, so a folder that was made anew has another one."
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("manifest.json")}


def test_one_run_from_nothing_and_then_nothing_to_do(tmp_path):
    words = ("preset=smoke", "conditions=ape+ape_init=1.0", "seeds=1", "analyses=geometry")
    text, code = sweep(tmp_path, *words)
    assert code == 0, text[-3000:]
    run = tmp_path / "runs" / "smoke" / run_name(configure(preset="smoke", pe="ape", ape_init=1.0, seed=1))
    assert verify(run, weights=True) and read_json(run / "config.json")["ape_init"] == 1.0
    assert [verify(p.parent)["kind"] for p in run.glob("*/table.csv")] == ["geometry"]
    assert {p.name for p in run.parent.glob("*.ipynb")} == {f"{run.name}.{n}.ipynb" for n in ("train", "geometry")}
    text, code = sweep(tmp_path, *words, "-n")
    assert code == 0 and "Nothing to be done" in text, text[-2000:]


def test_the_paper_scale_sweep_is_listed_without_being_started(tmp_path):
    text, code = sweep(tmp_path, "preset=imagenet100", "device=cuda", "-n")
    assert code == 0 and "20 trainings of preset imagenet100" in text and "hours unknown" in text
    assert all(f"{c}-s{s}.train.ipynb" in text for c in ("ape", "sincos", "rope", "none", "ape-rpt") for s in range(4))
    assert "gpu=1" in text and "runtime=2880" in text and not (tmp_path / "runs").exists()


def test_every_analysis_of_a_run_that_exists_is_in_the_sweep():
    "A run notebook with a configuration of its own is listed in ANALYSES."
    kinds = {c.__name__.lower() for c in Analysis.__subclasses__()}
    assert {k for k in kinds if (ROOT / "nbs" / f"{k}.ipynb").exists()} == set(analyses(ROOT / "nbs")) <= set(ANALYSES)


@pytest.mark.slow
def test_the_whole_grid_killed_on_the_way_and_continued(tmp_path):
    grid = plan(dict(preset="smoke"))
    assert len(grid) == 6
    kinds, runs = list(analyses(ROOT / "nbs")), tmp_path / "runs"
    job = start(tmp_path, "preset=smoke", cores=2)
    while len(find_runs(runs)) < 2 and job.poll() is None:
        time.sleep(0.2)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    before = manifests(runs)
    assert 2 <= len(before) < 6 * (1 + len(kinds))
    text, code = sweep(tmp_path, "preset=smoke", cores=2)
    assert code == 0, text[-3000:]
    assert [p.name for p in find_runs(runs)] == sorted(grid)
    after = manifests(runs)
    assert len(after) == 6 * (1 + len(kinds)) and all(after[k] == v for k, v in before.items())
    for run in find_runs(runs):
        assert verify(run, weights=True) and {verify(p.parent)["kind"] for p in run.glob("*/table.csv")} == set(kinds)
    text, code = sweep(tmp_path, "preset=smoke", cores=2)
    assert code == 0 and "Nothing to be done" in text and manifests(runs) == after
    (find_runs(runs)[0] / "model.safetensors").unlink()
    text, code = sweep(tmp_path, "preset=smoke", "-n")
    assert "Nothing to be done" in text, "weights are not needed once every table is there"


@pytest.mark.slow
def test_a_failed_job_keeps_its_notebook_and_stops_no_other(tmp_path):
    text, code = sweep(tmp_path, "preset=smoke", "conditions=rope+train_images=9999,none", "seeds=0", "analyses=geometry")
    folder = tmp_path / "runs" / "smoke"
    assert code != 0 and verify(folder / "none-s0") and len(list(folder.glob("none-s0/*/table.csv"))) == 1
    cells = nbformat.read(folder / "rope-s0+train_images=9999.train.ipynb", 4).cells
    errors = [o.evalue for c in cells for o in c.get("outputs", []) if o.output_type == "error"]
    assert len(errors) == 1 and errors[0].startswith("train_images = 9999")
