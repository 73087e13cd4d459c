"The robustness notebook end to end, and one model in many states: the ends are exact, nothing is silent, everything comes back."

import ast
import dataclasses
import shutil
from contextlib import nullcontext

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, read_json
from papermill.exceptions import PapermillExecutionError

from vitposnb.analysis import read_table
from vitposnb.config import ConfigError, Robustness, configure
from vitposnb.corruption import Corruption, corrupt, primary_families, severity_grid
from vitposnb.data import eval_batches
from vitposnb.fragility import correct_by_state
from vitposnb.intervention import ALPHAS, content_noise, scaled_positions
from vitposnb.matched import matched_runs, run_points
from vitposnb.model import build_model
from vitposnb.runs import checkpoint_files, load_model, verify
from vitposnb.training import checkpoint_dir, predict, score, train
from vitposnb.variants import matched_noise, other_weights, positions_left, retrain_command, same_weights, usable_checkpoints

QUICK = dict(images=60, sweep_images=40, resamples=100, progress=False)
GRID = severity_grid(list(primary_families(28).values()))


def trained(smoke, folder, **fields):
    return train(configure(preset="smoke", progress=False, runs_dir=str(folder), **fields), smoke)


def checkpoints_of(run):
    return checkpoint_dir(read_json(run / "manifest.json")["identity"])


@pytest.fixture(scope="module")
def ape_run(smoke, tmp_path_factory):
    return trained(smoke, tmp_path_factory.mktemp("runs"), pe="ape", ape_init=1.0, epochs=3, checkpoints=3, lr=0.004)


@pytest.fixture(scope="module")
def none_run(smoke, tmp_path_factory):
    "A run whose checkpoints have gone."
    run = trained(smoke, tmp_path_factory.mktemp("runs"), pe="none", seed=1)
    shutil.rmtree(checkpoints_of(run))
    return run


@pytest.fixture(scope="module")
def table(ape_run):
    "The notebook on the ape run, through papermill."
    import papermill

    papermill.execute_notebook(ROOT / "nbs/robustness.ipynb", ape_run.parent / "out.ipynb", dict(run=str(ape_run), **QUICK), progress_bar=False, cwd=ROOT)
    folder = next(ape_run.glob("robustness*"))
    assert verify(folder) and {"table.csv", *(f"{n}.{e}" for n in ("severity", "alpha", "training") for e in ("svg", "png"))} <= {p.name for p in folder.iterdir()}
    return read_table(folder)


def right(model, x, y, smoke):
    return score(*predict(model, eval_batches(x, y, smoke, configure(preset="smoke"), "cpu")))["top1"]


def value(table, **where):
    rows = table[(table[list(where)] == pd.Series(where)).all(axis=1)]
    assert len(rows) == 1, (where, len(rows))
    return rows["value"].item()


def test_clean_and_severities_are_plain_evaluations(table, ape_run, smoke):
    model, (x, y) = load_model(ape_run)[0], (np.array(smoke.x_test[:60]), smoke.y_test[:60])
    base = table[(table["intervention"] == "none") & (table["weights"] == "trained")]
    assert value(base, metric="accuracy", family="clean", severity=0) == pytest.approx(right(model, x, y, smoke), abs=1e-6)
    for family in ("jpeg-small", "blur-small"):
        for severity in (1, 5):
            shifted = corrupt(torch.from_numpy(x), Corruption(family, severity)).numpy()
            assert value(base, metric="accuracy", family=family, severity=severity) == pytest.approx(right(model, shifted, y, smoke), abs=1e-6)
    points = base[base["severity"].isna() & base["amount"].notna() & (base["metric"] == "accuracy")]
    assert list(points["family"]) == ["jpeg", "blur"] and points["primary"].isna().all() and points["quality"].iloc[0] == 5
    assert points["sigma_effective"].iloc[1] == pytest.approx(1.3345, abs=1e-4)


def test_the_ends_of_the_sweep_are_exact(table, ape_run, smoke):
    "alpha 1: the model as it is; alpha 0: the model without positions, the same weights."
    model, cfg, _ = load_model(ape_run)
    none = build_model(configure(preset="smoke", pe="none"))
    none.load_state_dict({k: v for k, v in model.state_dict().items() if k != "pos_embed"})
    x, y = np.array(smoke.x_test[:40]), smoke.y_test[:40]
    sweep = table[table["intervention"] == "alpha"]
    assert set(sweep["alpha"]) == set(ALPHAS) and set(sweep["positions"]) == {"additive"}
    for alpha, net in ((1.0, model), (0.0, none)):
        assert value(sweep, metric="accuracy", family="clean", alpha=alpha) == pytest.approx(right(net, x, y, smoke), abs=1e-6)
        curve = [right(net, x, y, smoke)] + [right(net, corrupt(torch.from_numpy(x), Corruption("jpeg-small", s)).numpy(), y, smoke) for s in range(1, 6)]
        assert value(sweep, metric="accuracy_area", family="jpeg-small", alpha=alpha) == pytest.approx(np.trapezoid(curve) / 5, abs=1e-6)
        batches = eval_batches(x, y, smoke, configure(preset="smoke"), "cpu")
        for row in positions_left(lambda net=net: nullcontext(net), batches, 100).itertuples():
            assert value(sweep, metric=row.metric, alpha=alpha) == pytest.approx(row.value, abs=1e-6)


def test_every_row_that_a_claim_reads_is_there_once(table):
    keys = ["intervention", "weights", "metric", "primary", "family", "severity", "quality", "sigma", "kernel", "alpha", "epoch"]
    assert not table.duplicated(keys).any()
    assert ((table["low"] <= table["value"]) & (table["value"] <= table["high"]) | table["value"].isna()).all()
    assert table.loc[table["value"].isna(), "note"].notna().all() and table.loc[table["value"].notna(), "n"].notna().all()
    for kind in ("jpeg", "blur"):
        for where in (dict(intervention="none", weights="trained"), *(dict(intervention="alpha", alpha=a) for a in (1.0, 0.4, 0.1)),
                      *(dict(intervention="checkpoint", epoch=e) for e in (1, 2, 3))):
            assert 0 <= value(table, metric="accuracy_area", primary=kind, **where) <= 1
            value(table, metric="fragility_area", primary=kind, **where)
    assert {0.7, 0.4, 0.1} == set(table.loc[table["intervention"] == "content noise", "alpha"])


def test_the_last_epoch_is_the_model_and_the_earlier_ones_are_their_files(table, ape_run, smoke):
    model, x, y = load_model(ape_run)[0], np.array(smoke.x_test[:40]), smoke.y_test[:40]
    rows = table[table["intervention"] == "checkpoint"]
    for epoch, file in checkpoint_files(checkpoints_of(ape_run)).items():
        with other_weights(model, file):
            assert value(rows, metric="accuracy", epoch=epoch, family="clean") == pytest.approx(right(model, x, y, smoke), abs=1e-6)
    assert value(rows, metric="accuracy", epoch=3, family="clean") == value(table, intervention="alpha", metric="accuracy", alpha=1.0, family="clean")
    assert len(run_points(table)["smoke/" + ape_run.name][0]) == 3 and len(matched_runs(table)) == 1


def test_resuming_changes_nothing(table, ape_run, run_notebook):
    folder = next(ape_run.glob("robustness*"))
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    again = run_notebook("robustness", run=str(ape_run), **{**QUICK, "batch_size": 17})
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    assert any("complete already" in o.get("text", "") for c in again.cells for o in c.get("outputs", []))
    assert sum("image/png" in o.get("data", {}) for c in again.cells for o in c.get("outputs", [])) == 4


def test_a_run_without_positions_and_without_checkpoints(none_run, run_notebook):
    nb = run_notebook("robustness", run=str(none_run), families="primary", **QUICK)
    table = read_table(next(none_run.glob("robustness*")))
    row = table[table["intervention"] == "alpha"]
    assert len(row) == 1 and row["value"].isna().all() and "not applicable: scaling positions is not applicable: the model has none" in row["note"].item()
    row = table[table["intervention"] == "checkpoint"]
    assert len(row) == 1 and row["note"].item().startswith("not available") and row["note"].item().endswith("-p runs_dir runs/again")
    assert "-p preset smoke -p pe none -p seed 1 " in row["note"].item()
    assert set(table.loc[table["intervention"] == "none", "family"]) == {"clean", "jpeg-small", "blur-small", "jpeg", "blur"}
    twin = table[(table["weights"] == "untrained") & table["metric"].str.startswith("fragility")]
    assert len(twin) == 4 and twin["value"].isna().all() and twin["note"].str.startswith("undefined").all()
    assert not [o for c in nb.cells for o in c.get("outputs", []) if o.output_type == "error"]


@pytest.mark.slow
def test_a_foreign_model_with_the_classes_of_the_images(tmp_path, run_notebook):
    rng = np.random.default_rng(0)
    arrays = {f"x_{s}": rng.integers(0, 255, (n, 8, 8, 3), dtype=np.uint8) for s, n in (("train", 1001), ("test", 6))}
    np.savez(tmp_path / "photos.npz", **arrays, y_train=np.arange(1001) % 1000, y_test=np.arange(6))
    run_notebook("robustness", model="test_vit", weights="random", data=str(tmp_path / "photos.npz"), runs_dir=str(tmp_path / "runs"),
                 families="primary", images=4, sweep_images=3, resamples=100)  # fmt: skip
    table = read_table(next((tmp_path / "runs").glob("timm/*/robustness*")))
    assert set(table["primary"].dropna()) == {"jpeg", "blur"} and {"jpeg", "blur"} <= set(table["family"]) and "jpeg-small" not in set(table["family"])
    assert set(table.loc[table["intervention"] == "alpha", "alpha"]) == set(ALPHAS)
    assert table.loc[table["intervention"] == "checkpoint", "note"].item() == "not available: a foreign model comes without checkpoints"


@pytest.mark.slow
def test_images_of_other_classes_are_refused_at_the_first_cell(tmp_path, run_notebook):
    rng = np.random.default_rng(0)
    arrays = {f"x_{s}": rng.integers(0, 255, (12, 8, 8, 3), dtype=np.uint8) for s in ("train", "test")}
    np.savez(tmp_path / "photos.npz", **arrays, y_train=np.arange(12) % 3, y_test=np.arange(12) % 3)
    with pytest.raises(PapermillExecutionError) as error:
        run_notebook("robustness", model="test_vit", weights="random", data=str(tmp_path / "photos.npz"), images=4, runs_dir=str(tmp_path))
    assert error.value.ename == "ConfigError" and error.value.exec_count <= 3
    assert "has 1000 classes and the images of photos.npz 3" in error.value.evalue and "allowed" in error.value.evalue


WRONG = [
    (dict(sweep_image=3), "did you mean 'sweep_images'?"), (dict(families="jpeg"), "families = 'jpeg' is not allowed; allowed: all, primary"),
    (dict(sweep="maybe"), "sweep = 'maybe' is not allowed; allowed: true or false"), (dict(images=1), "images = 1 is not allowed"),
    (dict(resamples=10), "resamples = 10 is not allowed"), (dict(run="runs/default/ap-s0"), "is not a finished run folder"),
]


@pytest.mark.parametrize("given, message", WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_parameters_are_refused_in_one_line(given, message):
    with pytest.raises(ConfigError) as error:
        configure(Robustness, **given)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_wrong_parameters_stop_the_notebook_at_its_first_cell(run_notebook):
    with pytest.raises(PapermillExecutionError) as error:
        run_notebook("robustness", families="jpg")
    assert error.value.ename == "ConfigError" and error.value.exec_count <= 3


def test_the_notebook_offers_every_field_and_reads_the_ape_run():
    cell = next(c for c in nbformat.read(ROOT / "nbs/robustness.ipynb", 4).cells if "parameters" in c.metadata.get("tags", []))
    assert {n.target.id for n in ast.parse(cell.source).body} == {f.name for f in dataclasses.fields(Robustness)}
    assert configure(Robustness).run == "runs/default/ape-s0"


def test_a_state_never_leaks_into_the_next(ape_run, smoke):
    "Whatever the order of the states, each sees its own model, and the model comes back to the bit."
    model = load_model(ape_run)[0]
    own = {k: v.clone() for k, v in model.state_dict().items()}
    states = {"half": lambda: scaled_positions(model, 0.5), "noise": lambda: content_noise(model, 0.5), "plain": lambda: scaled_positions(model, 1.0),
              "young": lambda: other_weights(model, checkpoint_files(checkpoints_of(ape_run))[1])}
    data = smoke.x_test[:50], smoke.y_test[:50], smoke.mean, smoke.std, GRID[::3]
    forwards, backwards = correct_by_state(states, *data), correct_by_state(dict(reversed(states.items())), *data, batch_size=50)
    assert all((forwards[name] == backwards[name]).all() for name in states)
    assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())
    with pytest.raises(RuntimeError, match="boom"):
        with other_weights(model, checkpoint_files(checkpoints_of(ape_run))[1]):
            raise RuntimeError("boom")
    assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())


def test_the_control_has_the_accuracy_it_says(ape_run, smoke):
    model, cfg = load_model(ape_run)[0], configure(preset="smoke")
    clean = list(eval_batches(smoke.x_test[:200], smoke.y_test[:200], smoke, cfg, "cpu", 64))
    intact = score(*predict(model, clean))["top1"]
    found = matched_noise(model, clean, {0.4: 0.8 * intact, 0.1: 1.0})
    with content_noise(model, found[0.4]["scale"]):
        assert score(*predict(model, clean))["top1"] == found[0.4]["accuracy"]
    assert abs(found[0.4]["accuracy"] - 0.8 * intact) <= 0.01 and found[0.1]["note"].startswith("not available: target = 1.0000 is above")


def test_structure_goes_with_the_table(ape_run, smoke):
    model, cfg = load_model(ape_run)[0], configure(preset="smoke")
    batches = list(eval_batches(smoke.x_test[:100], smoke.y_test[:100], smoke, cfg, "cpu", 33))
    one, again, off = (positions_left(lambda a=a: scaled_positions(model, a), batches, 200).set_index("metric") for a in (1.0, 1.0, 0.0))
    pd.testing.assert_frame_equal(one, again)
    assert (one["value"] - off["value"]).abs().min() > 1e-4


def test_checkpoints_of_another_training_are_not_taken(ape_run, tmp_path):
    model, cfg, _ = load_model(ape_run)
    files = checkpoint_files(checkpoints_of(ape_run))
    assert set(usable_checkpoints(model, cfg, files)[0]) == {1, 2} and same_weights(model, files[3])
    mixed = {1: files[1], 3: files[2]}
    assert usable_checkpoints(model, cfg, mixed) == ({}, usable_checkpoints(model, cfg, mixed)[1]) and "another training" in usable_checkpoints(model, cfg, mixed)[1]


def test_the_command_for_missing_checkpoints_makes_the_same_run():
    cfg = configure(preset="smoke", pe="sincos-rpt", seed=2, epochs=3)
    words = retrain_command(cfg).split(" -p ")[1:]
    given = {k: ast.literal_eval(v) if v[0].isdigit() else v for k, v in (w.split(" ") for w in words)}
    assert dataclasses.replace(configure(**given), runs_dir=cfg.runs_dir) == cfg
