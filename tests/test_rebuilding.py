"Windows, retention and the heads that rebuild, against naive loops, planted answers and exact cells."

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from vitposnb.config import configure
from vitposnb.heads import head_changes
from vitposnb.model import build_model, describe, taps
from vitposnb.permutation import RandomOrders, permutation
from vitposnb.rebuilding import axis_selectivity, check_window, correct, halves, head_lead, losses, per_image, retention, window_cells
from vitposnb.rotary import rotary_mask
from vitposnb.ssdc import similarity, ssdc
from vitposnb.stats import simultaneous


@pytest.fixture(scope="module")
def model():
    model = build_model(configure(pe="rope"))
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()): p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    return model.eval()


def batches(size=6, n=12):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 1, 28, 28, generator=generator), torch.randint(10, (n,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


def structure(residuals, logits, y):
    rho = np.stack([ssdc(similarity(residuals.patches(layer)), (7, 7)) for layer in residuals.normed], 1)
    return np.concatenate([rho, np.broadcast_to(logits.numpy()[:, None, :3], (*rho.shape[:2], 3))], -1)


@pytest.mark.parametrize("axis", ["all", "rows", "columns"])
@pytest.mark.parametrize("window", [None, (0, 1), (1, 3), (0, 3)])
def test_cells_are_the_masks_they_say(model, window, axis):
    early, late = check_window(model, window)
    cells, x = window_cells(model, window, axis, seed=7), batches()[0][0]
    by_hand = {"rotations off": [dict(blocks=[*early, *late])], "early off": [dict(blocks=early)], "late off": [dict(blocks=late)],
               "early off, late shuffled": [dict(blocks=early), dict(blocks=late, kind="shuffle", seed=7)]}
    for name, masks in by_hand.items():
        with torch.no_grad():
            with cells[name][1](): found = model(x)
            with rotary_mask(model, axis, **masks[0]), rotary_mask(model, axis, **masks[1]) if len(masks) > 1 else nullcontext(): expected = model(x)
            assert torch.equal(found, expected) and not torch.equal(found, model(x))


def test_all_off_is_the_model_without_rotations(model):
    bare, x = build_model(configure(pe="none")).eval(), batches()[0][0]
    bare.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad(), window_cells(model)["rotations off"][1](): assert torch.equal(model(x), bare(x))


def test_windows_outside_the_model_are_refused(model):
    for window in ((-1, 2), (2, 1), (0, 4), (1, 1)):
        with pytest.raises(ValueError, match=r"allowed: 0 <= first < end <= 3"): window_cells(model, window)
    with pytest.raises(ValueError, match="allowed: rows, columns, all"), window_cells(model, axis="row")["early off"][1](): pass
    with pytest.raises(TypeError, match="not applicable"): window_cells(build_model(configure(pe="sincos")))


def test_image_by_image_equals_full_passes(model):
    "Whatever the batch size, with the same fresh permutation of each image under every change."
    changes = window_cells(model) | head_changes(model)
    found = per_image(model, batches(), changes, structure, orders=RandomOrders((7, 7), seed=3))
    again = per_image(model, batches(5), changes, structure, orders=RandomOrders((7, 7), seed=3))
    for name, values in found.items():
        naive = []
        orders = RandomOrders((7, 7), seed=3)
        with torch.no_grad(), taps(model) as t, permutation(model, orders), changes[name][1]() if name in changes else nullcontext():
            for x, y in batches(): naive.append(structure(t, model(x), y))
        assert np.array_equal(values, np.concatenate(naive), equal_nan=True)
        assert np.nanmax(np.abs(values - again[name])) < 1e-4


def test_accuracy_image_by_image(model):
    found = per_image(model, batches(), {}, correct, [4])["intact"]
    with torch.no_grad(): naive = [float(model(x[None]).argmax() == y) for bx, by in batches() for x, y in zip(bx, by, strict=True)]
    assert found.tolist() == naive


def test_retention_and_its_rule():
    rng = np.random.default_rng(0)
    off, on, value = rng.normal(0, 1, (3, 300)) + np.array([[0], [1], [0.5]])
    found = retention(value, off, on)
    assert found["value"] == pytest.approx((value.mean() - off.mean()) / (on.mean() - off.mean())) and found["low"] < found["value"] < found["high"]
    assert found["n"] == 300 and found["note"] == ""
    for shift, defined in ((2.9, False), (3.1, True)):
        span = on - off
        span = span - span.mean() + shift * span.std(ddof=1) / np.sqrt(300)
        result = retention(value, off, off + span)
        assert np.isfinite(result["value"]) == defined == (not result["note"])
    value[3] = np.nan
    assert retention(value, off, on)["n"] == 299
    assert retention(value[:1], off[:1], on[:1])["note"].startswith("undefined: fewer")
    assert retention(on, on, off)["note"].startswith("undefined: baseline minus all off is -")


def test_retention_covers():
    "90 to 99.5 % of 200 intervals hold the true .5."
    rng, hits = np.random.default_rng(1), 0
    for i in range(200):
        base = rng.normal(0, 1, 200)
        found = retention(base + rng.normal(0.5, 1, 200), base + rng.normal(0, 1, 200), base + rng.normal(1, 1, 200), n_boot=300, seed=i)
        hits += found["low"] < 0.5 < found["high"]
    assert 180 <= hits <= 199


def test_losses_keep_their_names():
    found = {"intact": np.full((5, 2), 3.0), (1, 0): np.full((5, 2), 1.0), (0, 1): np.full((5, 2), 2.0)}
    names, lost = losses(found)
    assert names == [(0, 1), (1, 0)] and lost.shape == (5, 2, 2) and lost[:, 0].mean() == 1 and lost[:, 1].mean() == 2


def test_axis_selectivity_finds_the_planted_heads_and_no_other():
    rng = np.random.default_rng(2)
    row, column = rng.normal(0, 0.3, (2, 400, 16))
    row[:, 3] += 0.2
    column[:, 9] += 0.2
    both = rng.normal(0.5, 0.3, (400, 1))
    found = axis_selectivity(row + both, column + both)
    assert np.flatnonzero(found["low"] > 0).tolist() == [3] and np.flatnonzero(found["high"] < 0).tolist() == [9]
    difference = row - column
    expected = simultaneous(difference - difference.mean(1, keepdims=True))
    assert np.allclose(found["low"], expected["low"]) and abs(found["value"].sum()) < 1e-9


def test_axis_selectivity_is_rarely_fooled():
    "Among 16 heads that are all alike, at most one experiment in ten names any (nominal: one in twenty)."
    rng = np.random.default_rng(3)
    named = [axis_selectivity(*rng.normal(0, 1, (2, 200, 16)), n_boot=300, seed=i) for i in range(100)]
    assert sum((f["low"] > 0).any() or (f["high"] < 0).any() for f in named) <= 12


def test_head_lead_redoes_the_maximum():
    rng = np.random.default_rng(4)
    importance, cost = rng.random((200, 4)) + np.array([0, 0.5, 0, 0]), rng.random((300, 4)) + np.array([0.1, 0.3, 0, 0])
    found = head_lead(importance, cost)
    assert found["head"] == 1 and found["rival"] == 0 and found["n"] == 300
    mean = cost.mean(0)
    assert found["value"] == pytest.approx(mean[1] - max(mean[0], mean[2], mean[3]))
    draws = np.array([c[1] - max(c[0], c[2], c[3]) for c in (cost[rng.integers(0, 300, 300)].mean(0) for _ in range(2000))])
    assert np.allclose([found["low"], found["high"]], np.quantile(draws, [0.025, 0.975]), atol=0.01)


def test_a_head_chosen_elsewhere_is_not_flattered():
    "All heads alike: chosen and measured on one half it would lead, chosen on the other it does not."
    rng, same, other = np.random.default_rng(5), [], []
    for _ in range(100):
        a, b = rng.random((2, 100, 8))
        same.append(head_lead(b, b, n_boot=50)["value"])
        other.append(head_lead(a, b, n_boot=50)["value"])
    assert min(same) > 0 > np.mean(other)
    with pytest.raises(ValueError, match="at least 2 heads"): head_lead(a[:, :1], b[:, :1])


def test_halves_share_nothing():
    a, b = halves(11)
    assert sorted([*a, *b]) == list(range(11)) and not set(a) & set(b)


def test_the_late_window_alone_leaves_the_early_stream(model):
    found = per_image(model, batches(), window_cells(model, (0, 3)), structure, orders=RandomOrders((7, 7)))
    assert np.array_equal(found["late off"][:, :4, :5], found["intact"][:, :4, :5])
    assert np.array_equal(found["early off"][:, :4, :5], found["rotations off"][:, :4, :5])
    assert not np.array_equal(found["late off"][:, 4], found["intact"][:, 4]) and describe(model).depth == 4
