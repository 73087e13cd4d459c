"Edits of latents: empty ones are exact, planted row latents move the row alone, controls are matched, the model comes back."

import numpy as np
import pandas as pd
import pytest
import torch

from vitposnb.config import configure
from vitposnb.data import eval_batches
from vitposnb.edits import KINDS, Edit, Subspace, edited, embedding_answers, matched_random, other_patches, positional_subspace
from vitposnb.latents import Latents, positional
from vitposnb.model import build_model, taps
from vitposnb.permutation import RandomOrders, permutation
from vitposnb.sae import SAE, activations, train_saes

GRID = (7, 7)
SLOT = torch.arange(49)


@pytest.fixture(scope="module")
def model(smoke):
    return build_model(configure(preset="smoke", pe="ape", ape_init=1.0)).eval()


@pytest.fixture(scope="module")
def batches(smoke):
    return list(eval_batches(smoke.x_test[:60], smoke.y_test[:60], smoke, configure(preset="smoke"), "cpu", 20))


@pytest.fixture(scope="module")
def sae(model, batches):
    return train_saes([SAE(32, 160, 3)], lambda e: activations(model, batches, 1), tokens=30_000, progress=False)[0]


@torch.no_grad()
def answers(model, batches, edit=None, layer=1):
    if edit is None: return torch.cat([model(x) for x, _ in batches])
    with edited(model, layer, edit): return torch.cat([model(x) for x, _ in batches])


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_edit_with_the_error_added_back_changes_nothing(model, batches, sae, kind):
    none, donors, means = torch.zeros(160, dtype=torch.bool), other_patches(60, GRID), torch.rand(160)
    intact = answers(model, batches)
    assert (answers(model, batches, Edit(sae, kind, none, donors, means)) - intact).abs().max() <= 1e-5
    empty = Subspace(torch.zeros(32), torch.zeros(0, 32))
    assert (answers(model, batches, Edit(empty, kind, torch.zeros(0, dtype=torch.bool), donors, torch.zeros(0))) - intact).abs().max() <= 1e-5
    full = answers(model, batches, Edit(sae, kind, ~none, donors, means))
    assert (full - intact).abs().max() > 1e-3 and torch.equal(answers(model, batches), intact)


def test_the_batch_size_does_not_matter_and_an_error_inside_leaves_the_model_whole(model, batches, sae, smoke):
    few = list(eval_batches(smoke.x_test[:60], smoke.y_test[:60], smoke, configure(preset="smoke"), "cpu", 6))
    own = torch.rand(60, 160, generator=torch.Generator().manual_seed(0)) < 0.3
    for kind in ("same patch", "other patch"):
        edit = Edit(sae, kind, own, other_patches(60, GRID))
        assert torch.allclose(answers(model, batches, edit), answers(model, few, edit), rtol=0, atol=1e-5)
    intact = answers(model, batches)
    with pytest.raises(RuntimeError), edited(model, 1, Edit(sae, "zero", own)): raise RuntimeError
    assert torch.equal(answers(model, batches), intact)


def test_edits_do_what_their_names_say(sae):
    x = 5 * torch.randn(4, 49, 32, generator=torch.Generator().manual_seed(3)) + 1
    donors, means = other_patches(4, GRID, 1), torch.rand(160)
    with torch.no_grad(): z = sae.encode(x)
    wanted = {"zero": torch.zeros_like(z), "mean": means.expand_as(z), "same patch": z[[1, 0, 3, 2]], "other patch": torch.stack([z[i, donors[i]] for i in range(4)])}
    mask = torch.zeros(160, dtype=torch.bool)
    mask[::2] = True
    for kind, new in wanted.items():
        with torch.no_grad():
            mixed = torch.where(mask, new, z)
            assert torch.allclose(Edit(sae, kind, mask, donors, means, error=False)(x), sae.decode(mixed), rtol=0, atol=1e-4)
            assert torch.allclose(Edit(sae, kind, mask, donors, means)(x), x - sae.decode(z) + sae.decode(mixed), rtol=0, atol=1e-4)
    odd = Edit(sae, "same patch", mask).replacement(z[:3])
    assert torch.equal(odd, z[[1, 0, 1]])
    with pytest.raises(ValueError, match="another image"): Edit(sae, "same patch", mask).replacement(z[:1])


def test_wrong_edits_are_refused(model, sae):
    mask = torch.ones(160, dtype=torch.bool)
    for bad, text in ((dict(kind="swap"), "allowed: zero, mean"), (dict(kind="other patch"), "needs donors"), (dict(kind="mean"), "needs means")):
        with pytest.raises(ValueError, match=text): Edit(sae, latents=mask, **bad)
    with pytest.raises(ValueError, match="layer 3 is outside the model; allowed: 0 to 2"): edited(model, 3, Edit(sae, "zero", mask)).__enter__()
    with pytest.raises(ValueError, match="single row or column"): other_patches(3, (1, 9))


@pytest.mark.parametrize("grid", [GRID, (2, 5)])
def test_donors_differ_in_both_axes_and_are_uniform(grid):
    donors, slot = other_patches(4000, grid), torch.arange(grid[0] * grid[1])
    assert (donors // grid[1] != slot // grid[1]).all() and (donors % grid[1] != slot % grid[1]).all()
    counts = torch.bincount(donors[:, 3], minlength=len(slot)).double()
    allowed = (slot // grid[1] != 3 // grid[1]) & (slot % grid[1] != 3 % grid[1])
    expected = 4000 / allowed.sum()
    assert (counts[~allowed] == 0).all() and ((counts[allowed] - expected).abs() < 5 * expected.sqrt()).all()
    assert torch.equal(donors[:10], other_patches(10, grid))


def test_planted_row_latents_move_the_decoded_row_and_leave_the_column():
    "A stream with a direction for every row and every column, among content: found, edited, decoded by ridge regression on the intact stream."
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(32, 32, generator=g))[0]

    def images(n, seed):
        h = torch.Generator().manual_seed(seed)
        content = (torch.rand(n, 49, 18, generator=h) < 0.06) * (0.5 + torch.rand(n, 49, 18, generator=h)) @ basis[14:]
        return 2 * basis[SLOT // 7] + 2 * basis[7 + SLOT % 7] + content

    sae, = train_saes([SAE(32, 64, 4)], lambda e: [images(400, e)], tokens=400_000, lr=4e-3, progress=False)
    seen, x, fit = Latents(GRID), images(300, 10_001), images(300, 10_002).flatten(0, 1)
    with torch.no_grad(): seen.update(sae.encode(images(300, 10_000)))
    table, one = positional(seen), torch.cat([fit, torch.ones(len(fit), 1)], 1)
    rows, cols = (table["axis"] == "row").to_numpy(), (table["axis"] == "col").to_numpy()
    assert rows.sum() >= 7 and cols.sum() >= 7
    assert np.average(table.loc[rows, "purity_row"], weights=table.loc[rows, "mass"]) > 0.9

    def decoder(label): return torch.linalg.solve(one.T @ one + torch.eye(33), one.T @ torch.nn.functional.one_hot(label.repeat(300), 7).float())

    def read(tokens, w): return (torch.cat([tokens, torch.ones(*tokens.shape[:2], 1)], 2) @ w).argmax(2)

    row_of, col_of, donors = decoder(SLOT // 7), decoder(SLOT % 7), other_patches(300, GRID)
    with torch.no_grad():
        moved = Edit(sae, "other patch", torch.tensor(rows), donors)(x)
        random = Edit(sae, "other patch", matched_random(table, rows, 300), donors)(x)
    assert (read(x, row_of) == SLOT // 7).float().mean() > 0.99
    assert (read(moved, row_of) == donors // 7).float().mean() > 0.9 and (read(moved, col_of) == SLOT % 7).float().mean() > 0.98
    assert (read(random, row_of) == donors // 7).float().mean() < 0.3


def test_matched_random_draws_are_near_in_rate_and_mass_and_never_selective():
    rng = np.random.default_rng(0)
    table = pd.DataFrame(dict(rate=10 ** rng.uniform(-4, -1, 300)))
    table = table.assign(mass=table["rate"] * 10, firings=(table["rate"] * 1e5).round())
    chosen = np.zeros(300, bool)
    chosen[table["rate"].nlargest(20).index[::2]] = True
    sets = matched_random(table, chosen, 100)
    assert (sets.sum(1) == 10).all() and not sets[:, chosen].any() and len({tuple(s.tolist()) for s in sets}) > 50
    rate = table["rate"].to_numpy()
    assert abs(np.log(np.mean([rate[s].mean() for s in sets.numpy()]) / rate[chosen].mean())) < 0.4 < np.log(rate[chosen].mean() / rate[~chosen].mean())
    assert (matched_random(table, ~chosen, 3).sum(1) == 10).all() and not matched_random(table, np.zeros(300, bool), 3).any()


def test_the_positional_subspace_is_that_of_the_means():
    means = torch.randn(49, 32, generator=torch.Generator().manual_seed(0))
    whole = positional_subspace(means, 48, GRID)
    assert torch.allclose(whole.decode(whole.encode(means)), means, atol=1e-4)
    few = positional_subspace(means, 5, GRID)
    u, s, _ = torch.linalg.svd(means - means.mean(0))
    left = (means - few.decode(few.encode(means))).square().sum()
    assert left.item() == pytest.approx(s[5:].square().sum().item(), rel=1e-3)
    assert len(positional_subspace(means, 20, GRID, "row").basis) == 6 and len(positional_subspace(means, 0, GRID).basis) == 0


def test_a_permuted_table_is_a_permuted_image(model, batches, smoke):
    "Exact for a class token without a place: permuting the slots of the table is permuting the contents the other way."
    found = embedding_answers(model, batches, "permuted", seed=4)
    orders, out = RandomOrders(GRID, 4), []
    for x, _ in batches:
        with torch.no_grad(), permutation(model, orders(len(x)).argsort(1)): out.append(model(x))
    assert torch.allclose(found, torch.cat(out), rtol=0, atol=1e-4) and (found - answers(model, batches)).abs().max() > 1e-3
    bare = build_model(configure(preset="smoke", pe="none")).eval()
    bare.load_state_dict({k: v for k, v in model.state_dict().items() if k != "pos_embed"}, strict=True)
    assert torch.allclose(embedding_answers(model, batches, "zeroed"), answers(bare, batches), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="not applicable"): embedding_answers(bare, batches, "zeroed")
    with pytest.raises(ValueError, match="allowed: permuted, zeroed"): embedding_answers(model, batches, "halved")


def test_taps_opened_inside_see_the_edit(model, batches, sae):
    x = batches[0][0]
    edit = Edit(sae, "zero", torch.ones(160, dtype=torch.bool))
    with torch.no_grad(), edited(model, 1, edit), taps(model, [1]) as t: model(x)
    with torch.no_grad(): own = next(activations(model, [x], 1))
    edit.seen = 0
    with torch.no_grad(): assert torch.allclose(t.patches(1, "raw"), edit(own), rtol=0, atol=1e-6)
