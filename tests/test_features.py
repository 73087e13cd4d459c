"features.ipynb end to end: its table holds what claims read, says what does not apply, and reads the same again."

import ast
import dataclasses
import shutil
from functools import cache

import nbformat
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, analysed, at, photos
from papermill.exceptions import PapermillExecutionError

from vitposnb.analysis import read_table
from vitposnb.config import ConfigError, Features, configure
from vitposnb.features_figures import costs_figure, follows_figure, mass_figure
from vitposnb.training import train

QUICK = dict(layer=1, images=60, sae_tokens=30_000, sae_seeds=2, null_draws=5, resamples=100)
READ = ["metric", "intervention", "layer", "weights", "axis", "latents", "error", "target", "sae_seed"]


@pytest.fixture(scope="session")
def features_runs(smoke, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    return lambda pe: train(configure(preset="smoke", pe=pe, ape_init=1.0, progress=False, runs_dir=folder), smoke)


@pytest.fixture(scope="session")
def measured(features_runs, tmp_path_factory):
    return cache(lambda pe: analysed("features", features_runs(pe), tmp_path_factory.mktemp("out") / f"{pe}.ipynb", **QUICK))


@pytest.mark.parametrize("pe", ["ape", "none", pytest.param("rope", marks=pytest.mark.slow)])
def test_rows_are_named_once_and_hold_what_claims_read(measured, pe):
    table = measured(pe)
    assert not table.duplicated(READ).any()
    known = table[table["value"].notna()]
    assert not (known["low"] > known["high"]).any() and table.loc[table["value"].isna(), "note"].notna().all()
    for weights in ("trained", "untrained"):
        for axis in ("row", "col", "both"):
            share = at(table, metric="mass", intervention="rpi", latents="selective", axis=axis, weights=weights)
            assert len(share) == 1 and 0 <= share["low"].item() <= share["value"].item() <= share["high"].item() <= 1
    for target in ("row", "col"): assert len(at(table, metric="keeps", intervention="rpi", target=target)) == 1
    for edit in ("rows only", "columns only"):
        for latents in ("selective", "random", "pca"):
            rows = at(table, metric="follows", intervention=f"rpi, other patch, {edit}", latents=latents, error="kept", weights="trained")
            assert sorted(rows["target"]) == ["col", "row"]
    assert len(at(table, metric="splice_loss", intervention="splice", weights="trained")) == 1
    for latents in ("selective", "random"):
        for edit in ("other patch", "same patch"): assert len(at(table, metric="top1", intervention=edit, latents=latents, error="kept")) == 1


def test_the_gate_decides_whether_edits_are_measured(measured):
    table = measured("ape")
    loss, edits = at(table, metric="splice_loss")["value"].item(), at(table, metric="top1", intervention="other patch")
    if loss > 0.02: assert edits["value"].isna().all() and edits["note"].str.contains("gate closed").all()
    else: assert edits["value"].notna().all()
    whole = at(table, metric="top1", intervention="splice", error="kept")["value"].item()
    assert whole == at(table, metric="top1", intervention="none")["value"].item()


def test_a_model_without_positions_has_no_positional_latents_and_no_table_to_edit(measured):
    table = measured("none")
    assert at(table, metric="mass", weights="trained", axis="both")["value"].item() < 0.1
    embedding = table[table["intervention"].isin(["embedding permuted", "embedding zeroed"])]
    assert len(embedding) == 2 and embedding["value"].isna().all() and embedding["note"].str.contains("not applicable").all()
    assert abs(at(table, metric="keeps", intervention="rpi", target="row")["value"].item() - 1 / 7) < 0.08


def test_figures_are_drawn_from_the_table_or_say_why_not(measured):
    for pe in ("ape", "none"):
        for figure in (mass_figure, follows_figure, costs_figure): assert figure(measured(pe)).axes
    empty = pd.DataFrame(columns=["metric", "intervention", "value", "run"])
    for figure in (mass_figure, follows_figure, costs_figure): assert "in this table" in figure(empty).axes[0].texts[0].get_text()


@pytest.mark.slow
def test_read_again_and_measured_again_give_the_same_table(features_runs, measured, run_notebook):
    before, run = measured("ape"), features_runs("ape")
    folder = next(run.glob("features*"))
    nb = run_notebook("features", run=str(run), progress=False, **QUICK)
    assert any("complete already" in o.get("text", "") for c in nb.cells for o in c.get("outputs", []))
    shutil.rmtree(folder)
    run_notebook("features", run=str(run), progress=False, batch_size=37, **QUICK)
    after = read_table(folder)
    assert (after[READ].astype(str) == before[READ].astype(str)).all().all()
    exact = ["fvu", "mass", "top1"]
    assert np.allclose(after.loc[after["metric"].isin(exact), "value"], before.loc[before["metric"].isin(exact), "value"], rtol=0, atol=2e-2, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("few", [True, False])
def test_a_foreign_model_without_labels_says_what_needs_a_head(tmp_path, run_notebook, few):
    run_notebook("features", model="vit_tiny_patch16_224", weights="random", data=photos(tmp_path / "photos", 6, 6 if few else 20), runs_dir=str(tmp_path / "runs"), progress=False,
                 **{**QUICK, "images": 6 if few else 10, "sae_tokens": 5000, "sae_seeds": 1})  # fmt: skip
    table = read_table(next((tmp_path / "runs").glob("timm/*/features*")))
    top1 = at(table, metric="top1")
    assert len(top1) and top1["value"].isna().all() and top1["note"].str.contains("needs a head").all()
    assert at(table, metric="mass", axis="both", weights="trained")["value"].notna().all() and table["held_out"].all()
    follows = at(table, metric="follows")
    assert follows["note"].str.contains("at least 20 images").all() if few else follows["value"].notna().all()


@pytest.mark.parametrize("wrong, text", [(dict(layer=2), "layer = 2 is outside the model; allowed: 0 to 1"), (dict(layer=1, k=500), "k = 500 is more than the 160 latents")])
def test_a_layer_or_k_that_cannot_be_stops_the_notebook_before_any_work(features_runs, run_notebook, wrong, text):
    with pytest.raises(PapermillExecutionError) as error: run_notebook("features", run=str(features_runs("ape")), images=60, **wrong)
    assert error.value.ename == "ConfigError" and text in error.value.evalue and error.value.exec_count <= 4


def test_wrong_values_are_refused_and_the_usual_run_is_ape(features_runs):
    run = str(features_runs("ape"))
    for wrong, text in ((dict(sae="relu"), "allowed: topk, batchtopk"), (dict(layer=-1), "allowed: a whole number from 0"), (dict(sae_seeds=0), "from 1")):
        with pytest.raises(ConfigError, match=text): configure(Features, run=run, **wrong)
    assert Features.usual_run == "runs/default/ape-s0"


def test_features_notebook_offers_every_field():
    cell = next(c for c in nbformat.read(ROOT / "nbs/features.ipynb", 4).cells if "parameters" in c.metadata.get("tags", []))
    assert {n.target.id for n in ast.parse(cell.source).body} == {f.name for f in dataclasses.fields(Features)}
