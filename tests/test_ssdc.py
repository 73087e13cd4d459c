"SSDC, its ranks and the positional variance: oracles, edge cases and what must never matter."
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from vitposnb.ranks import _midranks_torch, midranks
from vitposnb.ssdc import RHOS, SSDC, grid_distance, mantel, pairs, similarity, ssdc, target_ranks
from vitposnb.ssdc_averaged import AveragedSSDC
from vitposnb.variance import PositionalVariance


def tokens(B, N, D=8, seed=0, dtype=torch.float32, ties=True):
    "Random tokens of which some are exact copies of one background token."
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, N, D, generator=g)
    if ties: x[torch.rand(B, N, generator=g) < 0.5] = torch.randn(D, generator=g)
    return x.to(dtype)


def by_hand(x, grid, metric="manhattan"):
    "Spearman of one image with scipy, from numpy alone."
    x = x.double().numpy()
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    i, j = np.triu_indices(grid[0] * grid[1], 1)
    r, c = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    dr, dc = abs(r[i] - r[j]), abs(c[i] - c[j])
    D = dict(manhattan=dr + dc, euclidean=np.hypot(dr, dc), row=dr, col=dc)[metric]
    return spearmanr(np.round((x @ x.T)[i, j], 6), -D).statistic


@pytest.mark.parametrize("grid", [(7, 7), (8, 8), (14, 14), (7, 28), (2, 5)])
@pytest.mark.parametrize("metric", ["manhattan", "euclidean"])
def test_equals_scipy_with_ties(grid, metric):
    x = tokens(3, grid[0] * grid[1])
    got = ssdc(similarity(x), grid, metric)
    assert np.allclose(got[:, 0], [by_hand(v, grid, metric) for v in x], atol=1e-6)
    assert np.allclose(got[:, 1:3], [[by_hand(v, grid, m) for m in ("row", "col")] for v in x], atol=1e-6)


@pytest.mark.parametrize("grid,axis,manhattan,euclidean", [
    ((14, 14), "row", .6871, .6532), ((7, 7), "row", .677, .644), ((8, 8), "row", .680, .647),
    ((7, 28), "row", .235, .116), ((7, 28), "col", .964, .983)])
def test_one_axis(grid, axis, manhattan, euclidean):
    S = torch.from_numpy(-grid_distance(grid, axis))[None]
    assert ssdc(S, grid)[0, 0] == pytest.approx(manhattan, abs=6e-4)
    assert ssdc(S, grid, "euclidean")[0, 0] == pytest.approx(euclidean, abs=6e-4)
    assert ssdc(S, grid)[0, 3:] == pytest.approx([float(axis == "row"), float(axis == "col")], abs=1e-12)


def test_k_of_the_axes():
    for grid, k in {(7, 7): -.0485, (14, 14): -.0135}.items():
        z = target_ranks(grid)
        assert float((z[:, 1] * z[:, 2]).mean()) == pytest.approx(k, abs=6e-5)


def test_same_number_of_tokens_different_grid():
    x = tokens(2, 196)
    assert not np.allclose(ssdc(similarity(x), (7, 28)), ssdc(similarity(x), (14, 14)), atol=1e-3)


@pytest.mark.parametrize("grid", [(2, 2), (2, 3), (3, 2)])
def test_expectation_over_all_permutations_is_zero(grid):
    N = grid[0] * grid[1]
    S = similarity(tokens(1, N, ties=False))[0]
    every = torch.stack([S[list(p)][:, list(p)] for p in permutations(range(N))])
    assert np.abs(ssdc(every, grid).mean(0)).max() < 1e-12


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), power=st.floats(0.2, 5), offset=st.floats(-3, 3))
def test_rank_invariance(seed, power, offset):
    "A strictly monotone map of the similarities changes nothing."
    S = torch.rand(1, 12, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    S = torch.round((S + S.mT) * 50) / 100
    assert np.allclose(ssdc(S, (3, 4)), ssdc(S**power * 100 + offset, (3, 4)), atol=1e-9, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 5), cols=st.integers(2, 5))
def test_transposing_the_grid_swaps_the_axes(seed, rows, cols):
    x = tokens(2, rows * cols, seed=seed)
    turned = x.reshape(2, rows, cols, -1).transpose(1, 2).reshape(2, rows * cols, -1)
    assert np.allclose(ssdc(similarity(turned), (cols, rows)), ssdc(similarity(x), (rows, cols))[:, [0, 2, 1, 4, 3]], atol=1e-9, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 1e3))
def test_length_of_a_token_does_not_matter(seed, scale):
    x = tokens(1, 9, seed=seed).double()
    y = x * (torch.rand(1, 9, 1, generator=torch.Generator().manual_seed(seed)) + 0.1) * scale
    assert (similarity(x) - similarity(y)).abs().max() < 2e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=60))
def test_midranks_against_scipy(values):
    from scipy.stats import rankdata
    v = np.array(values, float)
    expected = rankdata(v)
    expected = (expected - expected.mean()) / (expected.std() or 1)
    for f in (lambda t: midranks(t), lambda t: _midranks_torch(t, 1e-6)):
        assert np.allclose(f(torch.from_numpy(v)[None])[0].numpy(), expected, atol=1e-9)


def test_midranks_refuse_what_they_cannot_rank():
    for bad in (torch.nan, torch.inf, -torch.inf, 1e30):
        with pytest.raises(ValueError, match="cannot be ranked"): midranks(torch.tensor([[0.0, bad, 1.0]]))


def run(batch_size, x, grid, **kwargs):
    measure = SSDC(grid, 2, **kwargs)
    for batch in x.split(batch_size):
        measure.update(0, batch)
        measure.update(1, batch.flip(1))
    return measure


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 50])
def test_batch_size_and_short_last_batch(batch_size):
    x = tokens(10, 28)
    a, b = run(10, x, (4, 7)), run(batch_size, x, (4, 7))
    assert np.allclose(a.per_image(), b.per_image(), atol=1e-9) and torch.allclose(a.mean_ranks(), b.mean_ranks(), atol=1e-9)
    a, b = a.result(n_boot=100, n_null=99), b.result(n_boot=100, n_null=99)
    for column in ("value", "low", "high", "null_sd", "z", "p"): assert np.allclose(a[column], b[column], atol=1e-6, equal_nan=True)


def test_result_is_reproducible_and_seeded():
    measure = run(5, tokens(10, 16), (4, 4))
    assert measure.result(200, 99, seed=1).equals(measure.result(200, 99, seed=1))
    assert not measure.result(200, 99, seed=1).equals(measure.result(200, 99, seed=2))


def test_rho_is_mean_of_images_and_statistic_of_mean_ranks():
    measure = run(4, tokens(9, 16), (4, 4))
    z, R = target_ranks((4, 4))[:, 0], measure.mean_ranks()
    assert np.allclose(measure.per_image()[..., 0].mean(0), (R @ z / len(z)).numpy(), atol=1e-12)
    table = measure.result(100, 99)
    assert list(table.metric[:5]) == list(RHOS) and list(table.metric[-3:]) == ["delta_rho", "mean_rho", "max_rho"]
    rho = table[table.metric == "rho"].value.to_numpy()
    assert table.value.to_numpy()[-3:] == pytest.approx([rho[1] - rho[0], rho[1], rho.max()])


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_prefix_tokens_are_left_out(prefix):
    x = tokens(6, 16)
    padded = torch.cat([torch.randn(6, prefix, 8) * 100, x], 1)
    assert np.allclose(run(4, padded, (4, 4), num_prefix=prefix).per_image()[:, 0], run(4, x, (4, 4)).per_image()[:, 0], atol=1e-12)
    assert torch.equal(similarity(padded, prefix), similarity(x))


def test_one_image():
    table = run(1, tokens(1, 16), (4, 4)).result(100, 99)
    assert table.value.notna().all() and (table.n == 1).all()
    assert table.low.isna().all() and table.note[0] == "no interval from a single image"


def test_bf16_input_is_measured_as_given():
    x = tokens(4, 16, dtype=torch.bfloat16)
    assert np.array_equal(run(4, x, (4, 4)).per_image(), run(4, x.float(), (4, 4)).per_image())


def test_centring_removes_a_common_token():
    x = tokens(3, 16, ties=False)
    assert np.allclose(run(3, x + 5, (4, 4), centre=True).per_image(), run(3, x, (4, 4), centre=True).per_image(), atol=1e-3)
    assert not np.allclose(run(3, x + 5, (4, 4)).per_image(), run(3, x, (4, 4)).per_image(), atol=1e-2)


def test_constant_images_are_left_out_and_named():
    x = tokens(8, 16)
    mixed = torch.cat([x, torch.ones(2, 16, 8), torch.zeros(1, 16, 8)])
    measure, plain = SSDC((4, 4), 1), SSDC((4, 4), 1)
    measure.update(0, mixed)
    plain.update(0, x)
    a, b = measure.result(100, 99), plain.result(100, 99)
    assert np.allclose(a.value, b.value) and np.allclose(a.z, b.z, equal_nan=True) and (a.n == 8).all()
    assert a.note.str.contains("3 of 11 images").all()
    only = SSDC((4, 4), 2)
    for layer in (0, 1): only.update(layer, torch.ones(2, 16, 8))
    assert only.result(50, 99).value.isna().all() and only.result(50, 99).note[0].startswith("undefined")


def test_wrong_input_is_refused():
    measure = SSDC((4, 4), 2)
    bad = tokens(2, 16)
    bad[1, 3, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"): measure.update(0, bad)
    with pytest.raises(ValueError, match="allowed: \\(B, 0 \\+ 16, D\\)"): measure.update(0, tokens(2, 17))
    with pytest.raises(ValueError, match="unknown"): measure.update(7, tokens(2, 16))
    measure.update(0, tokens(2, 16))
    with pytest.raises(ValueError, match="different numbers of images"): measure.result()
    with pytest.raises(ValueError, match="at least 2"): SSDC((1, 9), 1)
    with pytest.raises(ValueError, match="allowed: manhattan"): grid_distance((3, 3), "taxi")


def test_an_image_costs_three_numbers_of_memory_and_nothing_else_grows():
    measure = SSDC((4, 4), 1)
    for seed in range(40): measure.update(0, tokens(5, 16, seed=seed))
    kept = sum(v.nbytes for v in measure.images[0])
    assert measure.sums.numel() == 120 and kept == 200 * 3 * 8


def test_mantel_null_is_the_definition():
    S = similarity(tokens(1, 9, ties=False))[0]
    i, j = pairs((3, 3))
    R = midranks(S[None, i, j])
    null = mantel(R, (3, 3), 2000, seed=3)
    rng, relabelled = np.random.default_rng(0), []
    for _ in range(2000):
        p = rng.permutation(9)
        relabelled.append(S[p][:, p])
    again = ssdc(torch.stack(relabelled), (3, 3))[:, 0]
    assert null["null_sd"][0] == pytest.approx(again.std(), rel=0.1) and abs(null["null"].mean()) < 0.02
    assert null["rho"][0] == pytest.approx(ssdc(S[None], (3, 3))[0, 0], abs=1e-12)
    assert np.array_equal(mantel(R, (3, 3), 50, seed=3)["null"], mantel(R, (3, 3), 50, seed=3)["null"])
    assert np.allclose(mantel(torch.cat([R, -R]), (3, 3), 50, seed=3)["null"][:, 1], -mantel(R, (3, 3), 50, seed=3)["null"][:, 0])


def test_mantel_p_is_uniform_without_structure():
    i, j = pairs((4, 4))
    p = [mantel(midranks(similarity(tokens(1, 16, seed=s, ties=False))[:, i, j]), (4, 4), 99, seed=s)["p"][0] for s in range(300)]
    assert np.mean(np.array(p) <= 0.05) < 0.1 and abs(np.mean(p) - 0.5) < 0.06


def averaged(batch_size, x, keys=1, **kwargs):
    measure = AveragedSSDC((4, 4), 1, **kwargs)
    for key in range(keys):
        for batch in x[key::keys].split(batch_size): measure.update(0, batch, key)
    return measure.result(99)


def test_averaged_is_spearman_of_the_mean():
    x = tokens(10, 16)
    i, j = pairs((4, 4))
    mean = np.round(similarity(x).mean(0).numpy(), 6)[i, j]
    assert averaged(3, x).value[0] == pytest.approx(spearmanr(mean, -grid_distance((4, 4))[i, j]).statistic, abs=1e-9)


@pytest.mark.parametrize("batch_size", [1, 7, 50])
def test_averaged_groups_do_not_depend_on_the_batch(batch_size):
    x = tokens(50, 16)
    a, b = averaged(50, x, keys=2), averaged(batch_size, x, keys=2)
    for column in ("value", "low", "high", "sd", "z"): assert np.allclose(a[column], b[column], atol=1e-6, equal_nan=True)
    assert (a.permutations == 2).all() and (a.n == 50).all()


def test_averaged_edge_cases():
    one = averaged(1, tokens(1, 16))
    assert one.value.notna().all() and one.low.isna().all()
    constant = averaged(5, torch.ones(5, 16, 8))
    assert constant.value.isna().all() and constant.note.str.startswith("undefined").all()
    with pytest.raises(ValueError, match="seen no images"): AveragedSSDC((4, 4), 1).result()


def variance(x, batch_size=16, grid=(4, 4), **kwargs):
    measure = PositionalVariance(grid, x.shape[-1], **kwargs)
    for batch in x.split(batch_size): measure.update(batch)
    return measure.result().set_index("metric")


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_variance_does_not_depend_on_the_batch(batch_size):
    x = tokens(64, 16)
    assert np.allclose(variance(x).iloc[:, :3].astype(float), variance(x, batch_size).iloc[:, :3].astype(float), atol=1e-9)


def test_variance_survives_a_large_mean():
    x = tokens(64, 16, dtype=torch.float64)
    assert np.allclose(variance(x).value, variance(x + 1000).value, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 21])
def test_variance_of_few_images(n):
    table = variance(tokens(n, 16))
    assert table.value["V_pos":"share_pos"].notna().all() == (n > 1)
    assert (table.note[table.value.isna() | table.low.isna()] != "").all()
    assert table.low["V_pos":"share_pos"].notna().all() == (n > 2)


def test_variance_bf16_prefix_and_nan():
    x = tokens(20, 16, dtype=torch.bfloat16)
    padded = torch.cat([torch.full((20, 5, 8), 9.0, dtype=torch.bfloat16), x], 1)
    assert np.allclose(variance(padded, num_prefix=5).value, variance(x.double()).value, atol=1e-12)
    with pytest.raises(ValueError, match="NaN"): variance(torch.full((2, 16, 8), torch.nan))
    with pytest.raises(ValueError, match="allowed: \\(B, 0 \\+ 16, 8\\)"): PositionalVariance((4, 4), 8).update(tokens(2, 17))


def test_batch_unit_with_batches_of_one_is_the_image_unit():
    x = tokens(40, 16)
    assert np.allclose(variance(x, 1, unit="batch").value, variance(x).value, atol=1e-9)


def test_batch_unit_with_a_short_last_batch():
    x = tokens(45, 16)
    table = variance(x, 10, unit="batch")
    assert table.value["V_pos":"share_pos"].notna().all() and table.n.iloc[0] == 45
    assert np.allclose(table.value[["V_int", "V_img"]], variance(x).value[["V_int", "V_img"]], atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("n", [100, 1000])
def test_variance_coverage(strength, n):
    "The jackknife interval holds a planted V_pos at its nominal rate, and the estimate is unbiased."
    g, N, D, hits, errors = torch.Generator().manual_seed(n), 12, 6, [], []
    for _ in range(400 if n == 100 else 200):
        E = strength * torch.randn(N, D, generator=g, dtype=torch.float64)
        content = torch.randn(n, N, D, generator=g, dtype=torch.float64) + torch.randn(n, 1, D, generator=g, dtype=torch.float64)
        row, truth = variance(content + E, n, (3, 4)).loc["V_pos"], float((E - E.mean(0)).square().sum(1).mean())
        hits.append(row.low <= truth <= row.high)
        errors.append(row.value - truth)
    assert np.mean(hits) > 0.95 - 3 * (0.05 * 0.95 / len(hits)) ** 0.5
    assert abs(np.mean(errors)) < 4 * np.std(errors) / len(errors) ** 0.5


@pytest.mark.slow
def test_rho_interval_coverage():
    "The image bootstrap of rho holds the truth 0 of shuffled tokens at its nominal rate."
    hits = []
    for seed in range(400):
        measure = SSDC((4, 4), 1)
        measure.update(0, tokens(100, 16, seed=seed))
        row = measure.result(500, 9, seed).iloc[0]
        hits.append(row.low <= 0 <= row.high)
    assert 0.95 - 3 * 0.011 < np.mean(hits) < 0.98
