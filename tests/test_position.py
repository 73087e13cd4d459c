"position.ipynb end to end: its table holds what claims read, agrees with the library called directly, and says what does not apply."

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import analysed, at, photos
from papermill.exceptions import PapermillExecutionError

from vitposnb.analysis import open_subject, read_table
from vitposnb.config import ConfigError, Position, configure
from vitposnb.position_figures import dissociation, head_costs, head_heatmaps, leakage, rebuilding_curves
from vitposnb.rotary import balanced_shams, rotary_mask
from vitposnb.training import train

QUICK = dict(images=40, accuracy_images=60, controls=1, shams=4, resamples=100)
MIXED = pytest.param("rope-mixed", marks=pytest.mark.slow)
READ = ["metric", "intervention", "target", "layer", "head", "weights", "window", "half", "border"]


@pytest.fixture(scope="session")
def position_runs(smoke, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    return lambda pe: train(configure(preset="smoke", pe=pe, progress=False, runs_dir=folder), smoke)


@pytest.fixture(scope="session")
def measured(position_runs, tmp_path_factory):
    "The table of a run, analysed once by the notebook."
    return cache(lambda pe: analysed("position", position_runs(pe), tmp_path_factory.mktemp("out") / f"{pe}.ipynb", **QUICK))


@pytest.mark.parametrize("pe", ["rope", "ape", MIXED])
def test_rows_are_named_once_and_have_intervals(measured, pe):
    table = measured(pe)
    assert not table.duplicated([c for c in READ if c in table]).any()
    known = table[table["value"].notna()]
    assert (known["n"] > 0).all() and (known["low"] <= known["high"]).all()
    assert table.loc[table["value"].isna(), "note"].notna().all()
    names = dict(rope="smoke/rope-s0", ape="smoke/ape-s0")
    assert set(table["run"]) == {names.get(pe, "smoke/rope-mixed-s0")}


def test_what_the_claims_read_is_there(measured):
    table = measured("rope")
    cells = ["rpi", "rpi, rows masked", "rpi, columns masked", "rpi, sham", "rpi, rotations off", "rpi, early off", "rpi, late off", "rpi, early off, late shuffled"]
    for name in cells:
        for metric in ("probe_accuracy", "selectivity"):
            for target in ("row", "col"):
                for weights in ("trained", "untrained"):
                    assert at(table, metric=metric, intervention=name, target=target, weights=weights)["layer"].tolist() == [0, 1, 2]
        for metric in ("rho", "rho_r", "rho_c"): assert len(at(table, metric=metric, intervention=name, weights="trained", target=None)) == 3
    top1 = at(table, metric="top1")["intervention"]
    assert {"none", "rows masked", "columns masked", "sham", "rotations off", "early off", "late off"} <= set(top1)
    for half in (None, "a", "b"): assert len(at(table, metric="axis_loss", intervention="rpi, head rotations off", half=half)) == 4
    for name in ("late heads off", "early off, late heads off"):
        assert len(at(table, metric="head_lead", intervention=name, half="b")) == 1
        assert len(at(table, metric="head_cost", intervention=name, half="b")) == 2
    assert set(at(table, metric="retention", intervention="rpi, early off", weights="trained")["target"]) == {"row", "col", "rho"}
    assert set(at(table, metric="border_selectivity", intervention="rpi, prefix unread")["border"]) == {0, 1, 2, 3}
    assert set(table.loc[table["intervention"] == "rpi, early off", "window"].dropna()) == {"0-0"}


def test_numbers_agree_with_the_library_called_directly(measured, position_runs):
    table = measured("rope")
    subject = open_subject(configure(Position, run=str(position_runs("rope")), **QUICK))
    x, y = next(iter(subject.batches(40)))
    for name, mask in {"none": None, "rows masked": dict(axis="rows"), "early off": dict(axis="all", blocks=0)}.items():
        with torch.no_grad():
            if mask is None: right = subject.model(x).argmax(1) == y
            else:
                with rotary_mask(subject.model, **mask): right = subject.model(x).argmax(1) == y
        assert at(table, metric="top1", intervention=name)["value"].item() == pytest.approx(right.double().mean().item(), abs=1e-6)
    sham = np.mean([at(table, metric="selectivity", intervention=f"rpi, sham {i + 1}", target="row", weights="trained", layer=2)["value"].item()
                    for i in range(len(balanced_shams(subject.model, 4)))])
    assert at(table, metric="selectivity", intervention="rpi, sham", target="row", weights="trained", layer=2)["value"].item() == pytest.approx(sham, abs=1e-6)
    row, col = (at(table, metric="head_loss", intervention="rpi, head rotations off", target=t).set_index(["layer", "head"])["value"] for t in ("row", "col"))
    axis = at(table, metric="axis_loss", intervention="rpi, head rotations off", half=None).set_index(["layer", "head"])["value"]
    assert np.allclose((row - col) - (row - col).mean(), axis.reindex(row.index), atol=1e-6)


def test_what_symmetry_forces(measured):
    "The masked axis is lost, everything is lost without rotations, and nothing is at layer 0; late off leaves the window alone."
    table = measured("rope")
    pick = at(table, metric="rho", target=None, weights="trained").set_index(["intervention", "layer"])["value"]
    assert pick["rpi, late off", 1] == pick["rpi", 1] and pick["rpi, early off", 1] == pick["rpi, rotations off", 1]
    assert len({pick[name, 0] for name in pick.index.levels[0]}) == 1
    beta = at(table, metric="beta_r", target=None, weights="trained", intervention="rpi, rows masked")
    assert (beta["value"].abs() < 0.05).all()


@pytest.mark.parametrize("pe", ["ape", MIXED])
def test_what_does_not_apply_says_so(measured, pe):
    table = measured(pe)
    refused = table[table["note"].fillna("").str.startswith("not applicable")]
    assert len(refused) and refused["value"].isna().all()
    assert set(at(table, metric="selectivity", intervention="rpi", target="row")["weights"]) == {"trained", "untrained"}
    if pe == "ape":
        assert {"rpi, sham", "rpi, rotations off"} == set(refused["intervention"])
        assert not set(table["metric"]) & {"axis_loss", "head_lead", "retention"} and set(at(table, metric="top1")["intervention"]) == {"none"}
    else:
        assert set(refused["intervention"]) == {"rpi, sham"}
        assert {"axis_loss", "head_lead", "retention"} <= set(table["metric"]) and len(at(table, metric="top1", intervention="rows masked")) == 1
    assert len(at(table, metric="top1_loss", intervention="head output off")) == 4
    for draw in (dissociation, rebuilding_curves, head_heatmaps, head_costs, leakage): assert draw(table).axes


def test_the_saved_table_is_read_again_whatever_the_batch_size(measured, position_runs, run_notebook):
    measured("ape")
    path = next(position_runs("ape").glob("position*")) / "table.csv"
    before = path.stat().st_mtime_ns
    nb = run_notebook("position", run=str(position_runs("ape")), batch_size=13, progress=False, **QUICK)
    assert path.stat().st_mtime_ns == before
    assert any("complete already" in o.get("text", "") for c in nb.cells for o in c.get("outputs", []))
    assert sum("image/png" in o.get("data", {}) for c in nb.cells for o in c.get("outputs", [])) >= 7


def test_parameters_out_of_range_are_refused():
    for name, value in dict(shams=1, controls=0, tokens=1, accuracy_images=1, window_first=-1).items():
        with pytest.raises(ConfigError, match=f"{name} = {value} is not allowed"): configure(Position, **{name: value})


@pytest.mark.slow
def test_a_window_outside_the_model_stops_at_once(position_runs, run_notebook):
    with pytest.raises(PapermillExecutionError) as error:
        run_notebook("position", run=str(position_runs("rope")), window_first=1, window_end=2, images=60, progress=False)
    assert error.value.ename == "ValueError" and "allowed: 0 <= first < end <= 1" in error.value.evalue


@pytest.mark.slow
def test_a_foreign_model(tmp_path, run_notebook):
    run_notebook("position", model="eva02_tiny_patch14_224", weights="random", data=photos(tmp_path / "photos", 3, 14), runs_dir=str(tmp_path / "runs"),
                 images=24, tokens=16, controls=1, shams=2, resamples=100, progress=False)  # fmt: skip
    table = read_table(next((tmp_path / "runs").glob("timm/*/position*")))
    assert set(at(table, metric="axis_loss", half=None, intervention="rpi, head rotations off")["layer"]) == set(range(12))
    assert "top1" in set(table["metric"]) and at(table, metric="top1")["note"].str.contains("not those of the images").all()
    assert isinstance(table, pd.DataFrame) and (table["condition"] == "eva02_tiny_patch14_224").all()
