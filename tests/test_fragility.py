"Fragility on planted tables, and the evaluation that makes the tables."
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitposnb.config import configure
from vitposnb.corruption import PAPER_A, Corruption, corrupt, severity_grid
from vitposnb.data import eval_batches, normalise
from vitposnb.fragility import area, correct_table, corrupted_batches, corruption_errors, fragility_draws, fragility_table, measures, undefined
from vitposnb.model import build_model
from vitposnb.training import predict

GRID = severity_grid(["jpeg", "blur-small"])


def planted(accuracies, n=1000):
    "(n, V) bool: the first images are the correct ones, so that the accuracies are exact."
    return np.arange(n)[:, None] < np.round(np.array(accuracies) * n)[None]


def value(table, metric, **where):
    rows = table[(table["metric"] == metric)]
    for column, wanted in where.items(): rows = rows[rows[column] == wanted]
    return rows["value"].item()


def test_fragility_by_hand():
    correct = planted([0.8, 0.8, 0.7, 0.6, 0.4, 0.1, *[0.9] * 5])
    table = fragility_table(correct, GRID, 10, (28, 28), n_boot=100)
    assert value(table, "fragility", family="jpeg", severity=3) == pytest.approx(0.25)
    assert value(table, "fragility_corrected", family="jpeg", severity=3) == pytest.approx(1 - 0.5 / 0.7)
    assert value(table, "fragility", family="blur-small", severity=1) == pytest.approx(-0.125), "never clipped"
    assert value(table, "fragility_corrected", family="jpeg", severity=5) == pytest.approx(1)
    assert value(table, "fragility_area", family="jpeg") == pytest.approx((0 + 0.125 + 0.25 + 0.5 + 0.875 / 2) / 5)
    assert value(table, "accuracy_area", family="jpeg") == pytest.approx((0.4 + 0.8 + 0.7 + 0.6 + 0.4 + 0.05) / 5)
    assert value(table, "accuracy", family="clean") == pytest.approx(0.8)
    assert table["value"].dtype == table["low"].dtype == float
    assert (table["low"] <= table["value"] + 1e-9).all() and (table["value"] <= table["high"] + 1e-9).all()
    areas = table[table["metric"].str.endswith("_area")]
    assert areas["note"].str.contains("trapezoid over the severity index").all() and areas["severity"].isna().all()


def test_the_columns_are_those_of_the_tidy_table():
    table = fragility_table(planted([0.8, 0.5, 0.6, 0.7]), [*PAPER_A.values(), Corruption("noise", 2)], 10, (28, 28), n_boot=20)
    assert list(table)[:5] == ["metric", "value", "low", "high", "n"]
    assert {"family", "severity", "scale", "quality", "sigma", "sigma_effective", "codec", "order", "note"} <= set(table)
    assert not table["metric"].str.endswith("_area").any(), "no family has all severities"
    blur = table[table["sigma"] == 2.5]
    assert np.allclose(blur["sigma_effective"], 1.33452, atol=1e-4) and (table.loc[table["quality"] == 5, "codec"].str.contains("Pillow")).all()


@given(st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_area_is_the_trapezoid(v):
    assert area(np.array(v[0]), np.array(v[1:])) == pytest.approx(np.trapezoid(v) / 5)


@pytest.mark.parametrize(("accuracy", "n", "gone"), [(0.14, 1000, True), (0.16, 1000, True), (0.18, 1000, False), (0.18, 200, True), (0.0, 50, True)])
def test_undefined_near_chance(accuracy, n, gone):
    correct = planted([accuracy, accuracy / 2], n)
    assert bool(undefined(correct, 10)) == gone
    table = fragility_table(correct, [Corruption("jpeg", 1)], 10, (28, 28), n_boot=50)
    fragile = table[table["metric"] != "accuracy"]
    assert fragile[["value", "low", "high"]].isna().all(axis=None) == gone and fragile["note"].str.startswith("undefined").all() == gone
    assert table.loc[table["metric"] == "accuracy", "value"].notna().all()


def test_draws_are_paired():
    rng = np.random.default_rng(0)
    clean = rng.random(500) < 0.8
    same = np.stack([clean, clean], 1)
    one = [Corruption("jpeg", 1)]
    assert (fragility_draws(same, one, 10, 200)["fragility", 0] == 0).all(), "no loss in any resample"
    other = np.stack([clean, clean & (rng.random(500) < 0.7)], 1)
    a, b = (fragility_draws(t, one, 10, 200)["fragility", 0] for t in (other, other.copy()))
    assert (a == b).all() and a.std() > 0, "two models on the same images share the resamples"
    swapped = fragility_draws(other[:, ::-1], [*one], 10, 200)["fragility", 0]
    assert (swapped < 0).all()


def test_measures_take_any_leading_shape():
    accuracy = np.random.default_rng(0).uniform(0.3, 0.9, (4, 3, 11))
    many = measures(accuracy, GRID, 10)
    assert many["fragility_area", "jpeg"].shape == (4, 3)
    assert many["fragility_area", "jpeg"][1, 2] == pytest.approx(measures(accuracy[1, 2], GRID, 10)["fragility_area", "jpeg"])


def test_wrong_shapes_are_refused():
    for call in (lambda: fragility_table(planted([0.8] * 3), GRID, 10, (28, 28)), lambda: fragility_draws(np.ones(5), [], 10),
                 lambda: corruption_errors(planted([0.8] * 11), planted([0.8] * 11, 500), GRID)):
        with pytest.raises(ValueError, match="allowed"): call()


def test_corruption_errors_by_hand():
    model, reference = planted([0.8, *[0.6] * 5, *[0.7] * 5]), planted([0.9, *[0.5] * 5, *[0.9] * 5])
    table = corruption_errors(model, reference, GRID, 200)
    assert value(table, "corruption_error", family="jpeg") == pytest.approx(0.4 / 0.5)
    assert value(table, "relative_corruption_error", family="jpeg") == pytest.approx(0.2 / 0.4)
    assert value(table, "corruption_error", family="blur-small") == pytest.approx(3)
    lost = table[(table["metric"] == "relative_corruption_error") & (table["family"] == "blur-small")].iloc[0]
    assert np.isnan([lost["value"], lost["low"], lost["high"]]).all() and "loss may be 0" in lost["note"]


@pytest.fixture(scope="module")
def tiny(smoke):
    cfg = configure(preset="smoke", pe="rope")
    torch.manual_seed(0)
    model = build_model(cfg).eval()
    with torch.no_grad():
        for p in model.parameters(): p.add_(0.05 * torch.randn_like(p))
    return model, cfg, smoke


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_clean_and_severity_0_equal_plain_evaluation(tiny, precision):
    model, cfg, images = tiny
    x, y = images.x_test[:101], images.y_test[:101]
    logits, labels = predict(model, eval_batches(x, y, images, cfg, "cpu", 25), precision)
    table = correct_table(model, x, y, images.mean, images.std, [Corruption("jpeg", 0), Corruption("noise", 0)], batch_size=25, precision=precision)
    assert table.dtype == bool and table.shape == (101, 3)
    assert (table == (logits.argmax(1) == labels).numpy()[:, None]).all()


def test_batches_are_those_of_plain_evaluation_bit_for_bit(tiny):
    _, cfg, images = tiny
    x, y = images.x_test[:30], images.y_test[:30]
    plain = eval_batches(x, y, images, cfg, "cpu", 7)
    for (a, ya), (b, yb) in zip(plain, corrupted_batches(x, y, images.mean, images.std, [Corruption("blur", 0)], batch_size=7), strict=True):
        assert torch.equal(a, b) and torch.equal(ya, yb)


def test_versions_come_in_order_whatever_batch_size_and_workers(tiny):
    _, _, images = tiny
    x, y = images.x_test[:11], images.y_test[:11]
    grid = [None, *severity_grid(["jpeg", "noise", "shuffle", "occlusion", "blur-small"], 28)[::2]]
    whole = torch.from_numpy(np.array(x))
    expected = torch.cat([normalise(whole if c is None else corrupt(whole, c).clone(), images.mean, images.std) for c in grid])
    for batch_size, workers in ((1, 3), (4, 1), (11, 2), (50, 4)):
        made = list(corrupted_batches(x, y, images.mean, images.std, grid, batch_size=batch_size, workers=workers))
        assert torch.equal(torch.cat([a for a, _ in made]), expected)
        assert torch.equal(torch.cat([b for _, b in made]), torch.from_numpy(np.array(y)).repeat(len(grid)))


def test_crop_comes_first(tiny):
    _, _, images = tiny
    x, y = images.x_test[:4], images.y_test[:4]
    made, _ = next(corrupted_batches(x, y, images.mean, images.std, [PAPER_A["jpeg-5"]], size=20))
    cropped = torch.from_numpy(np.array(x))[:, 4:24, 4:24]
    assert torch.equal(made, normalise(corrupt(cropped, PAPER_A["jpeg-5"]), images.mean, images.std))


def test_an_error_in_a_thread_reaches_the_caller(tiny):
    model, _, images = tiny
    with pytest.raises(ValueError, match="larger than the image"):
        correct_table(model, images.x_test[:4], images.y_test[:4], images.mean, images.std, [Corruption("blur", 5)])


def test_shuffled_cells_are_patches_that_a_model_without_positions_cannot_order(tiny):
    _, _, images = tiny
    model = build_model(configure(preset="smoke", pe="none")).eval()
    x, y = images.x_test[:20], images.y_test[:20]
    clean, shuffled = (torch.cat([model(a) for a, _ in corrupted_batches(x, y, images.mean, images.std, [c])]) for c in (None, Corruption("shuffle", 5)))
    assert torch.allclose(clean, shuffled, atol=1e-5)
    assert isinstance(fragility_table(planted([0.5, 0.5]), [Corruption("shuffle", 5)], 10, (28, 28), n_boot=10), pd.DataFrame)
