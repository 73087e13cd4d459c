"Positional latents: the level of the test, planted features, purity of known shapes, false discovery, matching."

import numpy as np
import pytest
import torch
from scipy import stats

from vitposnb.latents import AXES, Latents, adjusted, axis_test, distinct, explained, mass_share, matched, positional, purity

GRIDS = [(7, 7), (4, 9)]


def counted(z, grid):
    seen = Latents(grid)
    for part in z.split(64): seen.update(part)
    return seen


def sparse(n, grid, W, seed, rate=0.1):
    g = torch.Generator().manual_seed(seed)
    N = grid[0] * grid[1]
    return torch.rand(n, N, W, generator=g) * (torch.rand(n, N, W, generator=g) < rate)


def places(grid):
    slot = torch.arange(grid[0] * grid[1])
    return slot // grid[1], slot % grid[1]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_the_test_holds_its_level_under_real_permutations_within_images(grid, rate):
    "200 permutations of codes that do depend on the place before they are permuted, sparse and dense, of few and many images."
    row, col = places(grid)
    z = sparse(60, grid, 6, 3, rate) * (1 + row + (col == 1))[:, None].float()
    generator, p = torch.Generator().manual_seed(0), []
    for _ in range(200):
        order = torch.rand(60, len(row), generator=generator).argsort(1)
        seen = counted(z.gather(1, order[..., None].expand_as(z)), grid)
        p += [axis_test(seen, axis)[1] for axis in AXES]
    assert 0.03 < (np.concatenate(p) < 0.05).mean() < 0.07
    assert (np.concatenate([axis_test(counted(z, grid), axis)[1] for axis in AXES]) < 1e-3).mean() >= 0.5 or rate < 0.1


@pytest.mark.parametrize("grid", GRIDS)
def test_planted_features_are_found_and_nothing_else(grid):
    row, col = places(grid)
    bands = torch.cat([*((row == r)[:, None] for r in range(grid[0])), *((col == c)[:, None] for c in range(grid[1]))], 1).float()
    z = torch.cat([sparse(300, grid, bands.shape[1], 1, 0.7) * bands + 0.2 * sparse(300, grid, bands.shape[1], 2, 0.02), sparse(300, grid, 100, 4)], 2)
    table = positional(counted(z, grid))
    assert (table["axis"][:grid[0]] == "row").all() and (table["axis"][grid[0]:sum(grid)] == "col").all()
    assert (table["axis"][sum(grid):] != "").mean() <= 0.05
    assert table["purity_row"][:grid[0]].min() > 0.9 and table["purity_col"][grid[0]:sum(grid)].min() > 0.9


@pytest.mark.parametrize("grid", GRIDS)
def test_purity_of_known_shapes(grid):
    row, col = places(grid)
    shapes = torch.stack([row == 1, col == 2, (row == 1) & (col == 2), row >= 0], 1).float()
    seen = counted(shapes.expand(10, -1, -1), grid)
    assert purity(seen, "row") == pytest.approx([1, 1 / grid[1], 1 / grid[1], 1]) and purity(seen, "col") == pytest.approx([1 / grid[0], 1, 1 / grid[0], 1])
    assert explained(seen, "row")[:3] == pytest.approx([1, 0, (1 / grid[1] - 1 / len(row)) / (1 - 1 / len(row))]) and np.isnan(explained(seen, "row")[3])


def test_rare_and_silent_latents_are_not_judged():
    z = torch.zeros(100, 49, 3)
    z[:49, 0, 0] = 1
    z[:, :7, 1] = 1
    table = positional(counted(z, (7, 7)))
    assert list(table["axis"]) == ["", "row", ""] and table["q_row"].isna().tolist() == [True, False, True]


def test_batches_do_not_matter_and_wrong_codes_are_refused():
    z = sparse(101, (7, 7), 5, 9)
    a, b = Latents((7, 7)), counted(z, (7, 7))
    for part in z.split([1, 40, 60]): a.update(part)
    assert np.allclose(purity(a, "row"), purity(b, "row")) and np.allclose(axis_test(a, "col")[0], axis_test(b, "col")[0])
    with pytest.raises(ValueError, match="allowed: .B, 49, W."): Latents((7, 7)).update(z[:, :48])
    with pytest.raises(ValueError, match="NaN"): Latents((7, 7)).update(z * float("nan"))
    with pytest.raises(ValueError, match="allowed: at least 2"): axis_test(counted(z, (1, 49)), "row")


def test_adjusted_is_benjamini_hochberg_without_the_missing():
    p = np.array([[0.001, np.nan, 0.04], [0.03, 0.9, 0.2]])
    assert np.allclose(adjusted(p)[np.isfinite(p)], stats.false_discovery_control(p[np.isfinite(p)])) and np.isnan(adjusted(p)[0, 1])
    assert np.isnan(adjusted(np.full(3, np.nan))).all()


def test_mass_share_and_its_interval():
    z = torch.ones(400, 49, 4) * torch.rand(400, 1, 1, generator=torch.Generator().manual_seed(2))
    z[..., 0] *= 3
    assert mass_share(counted(z, (7, 7)), np.array([True, False, False, False]), 200) == pytest.approx((0.5, 0.5, 0.5))
    assert mass_share(counted(z, (7, 7)), np.zeros(4, bool), 200) == (0, 0, 0)
    low, high = mass_share(counted(sparse(400, (7, 7), 4, 1), (7, 7)), np.array([True, False, False, False]), 500)[1:]
    assert 0.2 < low < 0.25 < high < 0.3


def test_matching_finds_a_permuted_dictionary_and_distinct_drops_copies():
    g = torch.Generator().manual_seed(0)
    a, order = torch.randn(40, 16, generator=g), torch.randperm(40, generator=g)
    partner, cosine = matched(a, a[order] + 0.01 * torch.randn(40, 16, generator=g))
    assert (order.numpy()[partner] == np.arange(40)).all() and cosine.min() > 0.99
    partner, cosine = matched(a, a[order[:30]])
    assert (partner < 0).sum() == 10 == np.isnan(cosine).sum()
    assert list(distinct(torch.cat([a[:3], 2 * a[:3]]), np.arange(6)[::-1])) == [5, 4, 3] and len(distinct(a, np.array([], int))) == 0
