"The geometry measures on real models: exact values, batch sizes, foreign grids, and the notebook end to end."

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, photos
from papermill.exceptions import PapermillExecutionError
from timm.models.eva import Eva

from vitposnb.analysis import open_subject, read_table
from vitposnb.config import ConfigError, Geometry, configure
from vitposnb.data import eval_batches
from vitposnb.intervention import random_attention, without
from vitposnb.model import build_model, describe, taps
from vitposnb.permutation import RandomOrders, permutation
from vitposnb.runs import RunError, verify
from vitposnb.ssdc import SSDC, similarity
from vitposnb.training import train
from vitposnb.variance import PositionalVariance


@pytest.fixture(scope="session")
def ape_run(smoke, tmp_path_factory):
    return train(configure(preset="smoke", pe="ape", ape_init=1.0, progress=False, runs_dir=str(tmp_path_factory.mktemp("runs"))), smoke)


def batches(smoke, n, size):
    return eval_batches(smoke.x_test[:n], smoke.y_test[:n], smoke, configure(preset="smoke"), torch.device("cpu"), size)


@torch.inference_mode()
def measured(model, smoke, n=100, size=33, rpi=True, bf16=False):
    info = describe(model)
    ssdc = SSDC(info.grid, info.depth + 1)
    variance = [PositionalVariance(info.grid, info.embed_dim) for _ in range(info.depth + 1)]
    with taps(model.eval()) as t, permutation(model, RandomOrders(info.grid, 5) if rpi else torch.arange(49)):
        for x, _ in batches(smoke, n, size):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                model(x)
            for layer, v in enumerate(variance):
                ssdc.update(layer, t.patches(layer))
                v.update(t.patches(layer, "raw"))
    return ssdc, variance


@pytest.mark.parametrize("bf16", [False, True])
def test_variance_of_an_added_table_is_exact_at_layer_0(smoke, bf16):
    "Raw layer 0 of ape under RPI: V_pos is the variance of the table; none and rope have 0."
    model = build_model(configure(preset="smoke", pe="ape", ape_init=1.0))
    _, variance = measured(model, smoke, n=256, bf16=bf16)
    row = variance[0].result().set_index("metric").loc["V_pos"]
    table = model.pos_embed[0].detach().double()
    exact = (table - table.mean(0)).square().sum(1).mean().item()
    assert row.low <= exact <= row.high and row.value == pytest.approx(exact, rel=0.02)
    for pe in ("none", "rope"):
        _, variance = measured(build_model(configure(preset="smoke", pe=pe)), smoke, n=256, bf16=bf16)
        row = variance[0].result().set_index("metric").loc["V_pos"]
        assert row.low <= 0 <= row.high


@pytest.mark.parametrize("bf16", [False, True])
def test_none_has_no_structure_under_rpi_and_an_untrained_table_of_waves_has(smoke, bf16):
    for pe, structured in (("none", False), ("sincos", True)):
        ssdc, _ = measured(build_model(configure(preset="smoke", pe=pe)), smoke, n=256, bf16=bf16)
        rho = ssdc.result(500, 199).query("metric == 'rho' and layer >= 1")
        if structured:
            assert (rho["low"] > 0).all() and (rho["z"] > 3).all()
        else:
            assert (rho["low"] <= 0).all() and (rho["high"] >= 0).all()


def test_batch_size_never_changes_the_answer(smoke):
    model = build_model(configure(preset="smoke", pe="ape", ape_init=1.0))
    (a, va), (b, vb) = (measured(model, smoke, size=size) for size in (100, 7))
    assert np.allclose(a.per_image(), b.per_image(), rtol=0, atol=1e-6)
    x, y = a.result(200, 99), b.result(200, 99)
    assert np.allclose(x["value"], y["value"], rtol=0, atol=1e-6) and np.allclose(x["low"], y["low"], rtol=0, atol=1e-6)
    for u, v in zip(va, vb, strict=True):
        u, v = u.result(), v.result()
        assert np.allclose(u["value"], v["value"], rtol=1e-5, atol=1e-6) and np.allclose(u["low"], v["low"], rtol=1e-5, atol=1e-6)


def test_batch_size_does_not_change_random_attention(smoke):
    model = build_model(configure(preset="smoke", pe="ape", ape_init=1.0)).eval()
    streams = []
    for size in (60, 13):
        with torch.inference_mode(), taps(model) as t, random_attention(model, 0, seed=3):
            streams.append(torch.cat([(model(x), t.raw[1])[1] for x, _ in batches(smoke, 60, size)]))
    assert torch.allclose(*streams, rtol=0, atol=1e-6)


@pytest.mark.parametrize("class_token, registers", [(False, 0), (True, 4)])
def test_a_grid_of_7_by_28_with_0_and_5_prefix_tokens(class_token, registers):
    model = Eva(img_size=(28, 112), patch_size=4, in_chans=1, num_classes=3, embed_dim=32, depth=2, num_heads=2, attn_type="rope",
                use_abs_pos_emb=False, use_rot_pos_emb=True, class_token=class_token, num_reg_tokens=registers, no_embed_class=True)  # fmt: skip
    info = describe(model.eval())
    assert info.grid == (7, 28) and info.num_prefix == (5 if registers else 0)
    for n in (3, 1):
        ssdc = SSDC(info.grid, 3)
        with torch.inference_mode(), taps(model) as t, permutation(model, RandomOrders(info.grid)):
            model(torch.randn(n, 1, 28, 112))
            for layer in range(3):
                ssdc.update(layer, t.patches(layer))
        values = ssdc.per_image()
        assert values.shape == (n, 3, 5) and np.isfinite(values).all()


def test_rpi_follows_the_similarity_of_the_slots(smoke):
    "With a table that drowns the image, similarity under RPI is that of the table, whatever the content."
    model = build_model(configure(preset="smoke", pe="ape", ape_init=100.0)).eval()
    x, _ = next(batches(smoke, 4, 4))
    with torch.inference_mode(), taps(model) as t, permutation(model, RandomOrders((7, 7), 1)):
        model(x)
        seen = similarity(t.patches(0, "raw"))
    table = similarity(model.pos_embed)
    assert (seen - table).abs().max() < 0.05


def test_taking_out_both_sublayers_leaves_the_stream_untouched(smoke):
    model = build_model(configure(preset="smoke", pe="rope")).eval()
    x, _ = next(batches(smoke, 4, 4))
    with torch.inference_mode(), taps(model) as t:
        before = model(x)
        with without(model, 0, "attn"), without(model, 0, "mlp"):
            model(x)
            assert torch.equal(t.raw[0], t.raw[1])
        with random_attention(model, 0, seed=1):
            a = model(x)
        with random_attention(model, 0, seed=1):
            assert torch.equal(a, model(x)) and not torch.equal(a, before)
        assert torch.equal(model(x), before)
    with pytest.raises(ValueError, match="allowed: 0 to 1"):
        without(model, 2, "attn").__enter__()
    with pytest.raises(ValueError, match="allowed: attn, mlp"):
        without(model, 0, "norm").__enter__()


QUICK = dict(images=60, permutations=2, permutation_images=20, relabelings=99, resamples=100)


def test_the_notebook_measures_a_run_and_reads_it_again(ape_run, run_notebook, capsys):
    nb = run_notebook("geometry", run=str(ape_run), **QUICK)
    folder = next(ape_run.glob("geometry*"))
    assert verify(folder) and {"table.csv", "ssdc.svg", "ssdc.png"} <= {p.name for p in folder.iterdir()}
    table = read_table(folder)
    assert set(table["weights"]) == {"trained", "untrained"} and set(table["layer"].dropna()) == {0, 1, 2}
    assert {"rho", "beta_r", "V_pos", "share_pos", "averaged_rho", "delta_rho", "top1"} <= set(table["metric"])
    assert (table["run"] == "smoke/ape-s0+ape_init=1.0").all()
    rho = table.query("metric == 'rho'")
    assert ((rho["low"] <= rho["value"]) & (rho["value"] <= rho["high"])).all()
    exact = build_model(configure(preset="smoke", pe="ape", ape_init=1.0)).pos_embed[0].detach().double()
    v = table.query("metric == 'V_pos' and layer == 0 and weights == 'untrained'").iloc[0]
    assert v["low"] <= (exact - exact.mean(0)).square().sum(1).mean().item() <= v["high"]
    assert sum("image/png" in o.get("data", {}) for c in nb.cells for o in c.get("outputs", [])) >= 6
    before = (folder / "table.csv").stat().st_mtime_ns
    again = run_notebook("geometry", run=str(ape_run), **{**QUICK, "batch_size": 13})
    assert (folder / "table.csv").stat().st_mtime_ns == before
    assert any("complete already" in o.get("text", "") for c in again.cells for o in c.get("outputs", []))
    assert verify(ape_run, weights=True)


def test_the_notebook_measures_a_foreign_model(tmp_path, run_notebook):
    run_notebook("geometry", model="eva02_tiny_patch14_224", weights="random", data=photos(tmp_path / "photos", 3, 6), runs_dir=str(tmp_path / "runs"),
                 images=4, permutations=0, relabelings=19, resamples=100)  # fmt: skip
    table = read_table(next((tmp_path / "runs").glob("timm/*/geometry*")))
    assert set(table["layer"].dropna()) == set(range(13)) and "top1" not in set(table["metric"])
    assert (table["condition"] == "eva02_tiny_patch14_224").all()
    refused = table[table["intervention"] == "rpi, block 0 random attention"]
    assert len(refused) and refused["value"].isna().all() and refused["note"].str.contains("cannot be reached").all()


WRONG = [
    (dict(run="runs/default/rop-s0"), "run = 'runs/default/rop-s0' is not a finished run folder"),
    (dict(model="vit_tiny_patch16_224"), "allowed is one of a run folder and a timm model's name"),
    (dict(weights="pretrain"), "weights = 'pretrain' is not allowed"),
    (dict(run="", model="vit_tiny_patch16_224"), "data is needed with model"),
    (dict(run="", model="vit_tiny_patch16_224", data="nowhere"), "data = 'nowhere'"),
    (dict(images="1"), "images = 1 is not allowed; allowed: a whole number from 2"),
    (dict(imags="10"), "imags is not a parameter (did you mean 'images'?)"),
    (dict(relabelings="0"), "relabelings = 0 is not allowed"),
]


@pytest.mark.parametrize("raw, message", WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_parameters_are_refused_in_one_line(raw, message, ape_run):
    from papermill.cli import _resolve_type

    with pytest.raises(ConfigError) as error:
        configure(Geometry, **{"run": str(ape_run), **{k: _resolve_type(v) for k, v in raw.items()}})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_run_stops_the_notebook_at_its_first_cell(run_notebook):
    with pytest.raises(PapermillExecutionError) as error:
        run_notebook("geometry", run="runs/default/rop-s0")
    assert error.value.ename == "ConfigError" and error.value.exec_count <= 3


def test_a_damaged_analysis_is_named_and_not_overwritten(ape_run, smoke):
    from vitposnb.analysis import saved_table

    cfg = configure(Geometry, run=str(ape_run), images=50)
    subject = open_subject(cfg)
    table = pd.DataFrame([dict(run="r", metric="rho", value=0.5, low=0.4, high=0.6, n=50)])
    saved_table(subject, "geometry", cfg, lambda: table)
    path = ape_run / "geometry+images=50" / "table.csv"
    path.write_text(path.read_text().replace("0.5", "0.9"))
    with pytest.raises(RunError, match="table.csv differs from its manifest"):
        saved_table(subject, "geometry", cfg, lambda: table)
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()


@pytest.mark.parametrize("name, why", [("vit_tny_patch16_224", "did you mean 'vit_tiny_patch16_224'"), ("resnet18", "is not a ViT")])
def test_a_wrong_timm_name_is_one_line(name, why, tmp_path):
    from PIL import Image

    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "1.png")
    with pytest.raises(ConfigError) as error:
        open_subject(configure(Geometry, model=name, weights="random", data=str(tmp_path / "photos")))
    assert why in str(error.value) and "\n" not in str(error.value)


def test_an_analysis_refuses_images_the_run_was_not_trained_on(ape_run, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"x_{s}": rng.integers(0, 255, (600, 28, 28), dtype=np.uint8) for s in ("train", "test")}
    arrays |= {f"y_{s}": np.arange(600) % 10 for s in ("train", "test")}
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(ConfigError, match="holds other images"):
        open_subject(configure(Geometry, run=str(ape_run), data=str(tmp_path / "other.npz")))


def test_geometry_notebook_offers_every_field():
    import ast
    import dataclasses

    import nbformat

    cell = next(c for c in nbformat.read(ROOT / "nbs/geometry.ipynb", 4).cells if "parameters" in c.metadata.get("tags", []))
    assert {n.target.id for n in ast.parse(cell.source).body} == {f.name for f in dataclasses.fields(Geometry)}
