"Probes: planted codes, exact controls, scikit-learn as the reference, and what must read nothing."

import numpy as np
import pytest
import torch

from vitposnb.activations import Activations, collect, image_split
from vitposnb.analysis import open_subject
from vitposnb.config import Geometry, configure, project_root
from vitposnb.model import build_model
from vitposnb.permutation import RandomOrders
from vitposnb.probe import fit_probes, probe_table
from vitposnb.selectivity import border_distance, border_rows, image_scores, latin_labeling


def planted(code, n=60, noise=0.0, grid=(7, 7), D=24, seed=0, layers=("a",)):
    "Tokens that hold `code` (N, k), rotated into D dimensions, plus noise."
    rng = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(D, D, generator=rng))[0]
    x = torch.zeros(n, len(code), D)
    x[..., : code.shape[1]] = code
    x = x @ turn + noise * torch.randn(n, len(code), D, generator=rng)
    return Activations(x.expand(len(layers), -1, -1, -1), torch.arange(len(code)).repeat(n, 1), grid, list(layers))


def onehot(labels, classes): return torch.nn.functional.one_hot(torch.as_tensor(labels), classes).float()


SLOT = torch.arange(49)


@pytest.fixture(scope="module")
def fitted():
    "Noisy rows, clean noise: what most tests look at."
    acts = planted(onehot(SLOT // 7, 7), n=100, noise=0.45, seed=1)
    return acts, fit_probes(acts)


@pytest.fixture(scope="module")
def real(own_cache):
    "600 images of committed runs under RPI: rope trained, rope untrained, none trained."
    found = {}
    for name in ("rope-s0", "none-s0"):
        subject = open_subject(Geometry(run=str(project_root() / "runs/default" / name), images=600, progress=False))
        for weights, net in (("trained", subject.model), ("untrained", subject.twin)):
            found[name, weights] = collect(net, subject.batches(600), RandomOrders(subject.vit.grid, seed=0))
    return found


@pytest.mark.parametrize("grid", [(7, 7), (8, 8), (7, 28), (28, 7), (7, 10), (5, 3)])
def test_latin_labelings_are_balanced_as_far_as_possible(grid):
    for labels in set(grid):
        square = latin_labeling(grid, labels, seed=3).reshape(grid)
        for lines in (square, square.T):
            for line in lines:
                counts = np.bincount(line, minlength=labels)
                assert counts.max() - counts.min() <= 1
        assert np.ptp(np.bincount(square.flatten(), minlength=labels)) == 0


def test_latin_labelings_differ_by_seed_and_are_the_same_again():
    drawn = [latin_labeling((7, 7), 7, seed) for seed in range(5)]
    assert len({d.tobytes() for d in drawn}) == 5
    np.testing.assert_array_equal(drawn[2], latin_labeling((7, 7), 7, 2))


def test_a_row_code_reads_rows_fully_columns_and_controls_at_chance_exactly():
    acts = planted(onehot(SLOT // 7, 7), layers=("a", "b"))
    hits = fit_probes(acts).hits(acts)
    scores = image_scores(hits, (7, 7))
    np.testing.assert_array_equal(scores["probe_accuracy", "row"], 1.0)
    for name, h in hits.items():
        if name == "col" or name.startswith("latin"): np.testing.assert_allclose(h.double().mean(2), 1 / 7, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(scores["selectivity", "row"], 6 / 7, atol=1e-9)
    np.testing.assert_allclose(scores["selectivity", "col"], 0, atol=1e-9)
    np.testing.assert_allclose(hits["index"].double().mean(2), 1 / 7, atol=1e-12)


def test_a_random_labeling_would_not_have_been_a_control():
    "Science of the controls: the best row-only guess of a random balanced labeling is far above 1/7."
    rng, best = np.random.default_rng(0), []
    for _ in range(200):
        labels = rng.permutation(np.arange(49) % 7).reshape(7, 7)
        best.append(sum(np.bincount(row).max() for row in labels) / 49)
    assert np.mean(best) > 0.3


def test_noisy_rows_keep_columns_and_controls_near_chance(fitted):
    acts, probes = fitted
    table = probe_table(probes, acts).set_index(["metric", "target"])
    assert table.loc[("probe_accuracy", "row"), "value"].item() > 0.6
    for key in (("probe_accuracy", "col"), ("control_accuracy", "row")): assert abs(table.loc[key, "value"].item() - 1 / 7) < 0.04
    low, high = table.loc[("selectivity", "col"), ["low", "high"]].to_numpy().ravel()
    assert low < 0 < high


def test_rows_and_columns_added_leave_the_controls_at_chance():
    "No sum of a row part and a column part can beat the uniform guess on a Latin square."
    acts = planted(torch.cat([onehot(SLOT // 7, 7), onehot(SLOT % 7, 7)], 1), n=100, noise=0.2)
    scores = {k: v.mean() for k, v in image_scores(fit_probes(acts).hits(acts), (7, 7)).items()}
    assert scores["probe_accuracy", "row"] > 0.95 and scores["probe_accuracy", "col"] > 0.95
    assert abs(scores["control_accuracy", "row"] - 1 / 7) < 0.03


def test_a_slot_code_without_geometry_has_no_selectivity():
    acts = planted(torch.randn(49, 24, generator=torch.Generator().manual_seed(2)) * 2, n=100, noise=0.3, D=64)
    scores = {k: v.mean() for k, v in image_scores(fit_probes(acts, ("row", "col")).hits(acts), (7, 7)).items()}
    assert scores["probe_accuracy", "row"] > 0.6 and abs(scores["selectivity", "row"]) < 0.1


def test_rectangular_grid():
    slot = torch.arange(7 * 28)
    acts = planted(onehot(slot // 28, 7), n=30, grid=(7, 28))
    scores = image_scores(fit_probes(acts, ("row", "col")).hits(acts), (7, 28))
    np.testing.assert_allclose(scores["selectivity", "row"], 6 / 7, atol=1e-9)
    np.testing.assert_allclose(scores["probe_accuracy", "col"], 1 / 28, atol=1e-9)
    np.testing.assert_allclose(scores["control_accuracy", "col"], 1 / 28, atol=1e-9)


def standardised(acts, split):
    x = acts.x.numpy().astype(float)
    train = x[:, split["train"]]
    return (x - train.mean((1, 2), keepdims=True)) / train.std((1, 2), keepdims=True)


@pytest.mark.parametrize("target", ["row", "index"])
def test_as_good_as_scikit_learn(real, target):
    from sklearn.linear_model import LogisticRegression

    acts = real["rope-s0", "trained"].part(torch.arange(300), [3])
    probes = fit_probes(acts)
    x, labels = standardised(acts, probes.split)[0], np.arange(49) // 7 if target == "row" else np.arange(49)
    flat = {k: x[v].reshape(-1, x.shape[2]) for k, v in probes.split.items()}
    reference = LogisticRegression(max_iter=1000, C=10.0).fit(flat["train"], np.tile(labels, len(probes.split["train"])))
    theirs = reference.score(flat["test"], np.tile(labels, len(probes.split["test"])))
    ours = probes.hits(acts)[target].double().mean().item()
    chance = 1 / (labels.max() + 1)
    assert theirs > 2 * chance and abs(ours - theirs) < 0.02


def test_ridge_is_the_closed_form(real):
    "The start of every probe is one-hot ridge regression, written out with numpy; the softmax probe stays close to it."
    acts = real["rope-s0", "trained"].part(torch.arange(300), [3])
    probes = fit_probes(acts, ("row",), controls=0)
    decay = probes.chosen["decay"].item()
    x, y = standardised(acts, probes.split)[0], np.eye(7)[np.arange(49) // 7]
    flat = x[probes.split["train"]].reshape(-1, x.shape[2])
    w = np.linalg.solve(flat.T @ flat / len(flat) + decay * np.eye(len(flat.T)), flat.T @ np.tile(y, (len(probes.split["train"]), 1)) / len(flat))
    hits = (x[probes.split["test"]] @ w).argmax(-1) == np.arange(49) // 7
    ours = probes.hits(acts, kind="ridge")["row"][0].numpy()
    assert (hits == ours).mean() > 0.999
    assert abs(probes.hits(acts)["row"].double().mean().item() - hits.mean()) < 0.05


def test_none_is_at_chance_and_rope_is_not(real):
    "`none` is equivariant, trained or not; rotations leave a trace in an untrained network too, but a small one."
    tables = {key: probe_table(fit_probes(acts, ("row", "col")), acts).query("metric == 'selectivity'") for key, acts in real.items()}
    for weights in ("trained", "untrained"):
        part = tables["none-s0", weights]
        assert (part["value"].abs() < part["high"] - part["low"]).all() and ((part["low"] > 0) | (part["high"] < 0)).sum() <= 2
    trained, twin = (tables["rope-s0", weights].query("layer >= 1") for weights in ("trained", "untrained"))
    assert (trained["low"] > 0).all() and (trained["low"].to_numpy() > twin["high"].to_numpy()).all()
    for weights in ("trained", "untrained"): assert (tables["rope-s0", weights].query("layer == 0")["value"].abs() < 0.02).all()


def test_images_are_in_one_part_only():
    parts = image_split(101, seed=5)
    everything = torch.cat(list(parts.values()))
    assert len(everything) == 101 == everything.unique().numel()
    assert [len(parts[k]) for k in ("train", "validation", "test")] == [61, 10, 30]
    with pytest.raises(ValueError, match="at least 20"): image_split(10)


def test_an_image_that_gives_away_its_labels_does_not_help():
    "Tokens that hold only their image and a label drawn per image: memorising training images reads nothing in others."
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(100, 49, 40, generator=rng) + 3 * torch.randn(100, 1, 40, generator=rng)
    acts = Activations(x[None], SLOT.repeat(100, 1), (7, 7), [0])
    assert abs(fit_probes(acts, ("row",)).hits(acts)["row"].double().mean().item() - 1 / 7) < 0.03


def test_fit_never_looks_at_test_images(fitted):
    acts, probes = fitted
    spoiled = Activations(acts.x.clone(), acts.slots, acts.grid, acts.layers)
    spoiled.x[:, probes.split["test"]] = 0.0
    again = fit_probes(spoiled)
    assert all(torch.equal(a.w, b.w) for a, b in zip(probes.softmax, again.softmax, strict=True))


def test_errors(fitted):
    acts, probes = fitted
    nan = Activations(acts.x.clone(), acts.slots, acts.grid, acts.layers)
    nan.x[0, probes.split["train"][0], 3, 2] = float("nan")
    with pytest.raises(ValueError, match="layer 'a' holds NaN"): fit_probes(nan)
    with pytest.raises(ValueError, match="layer 'a' is constant"):
        fit_probes(Activations(torch.full_like(acts.x, 3.7), acts.slots, acts.grid, acts.layers))
    with pytest.raises(ValueError, match="allowed: row, col, index"): fit_probes(acts, ("diagonal",))
    with pytest.raises(ValueError, match="layer 'z' was not collected; allowed: a"): acts.part(torch.arange(2), ["z"])
    with pytest.raises(ValueError, match="layer 'z' has no probe; allowed: a"): probes.hits(Activations(acts.x, acts.slots, acts.grid, ["z"]))
    with pytest.raises(ValueError, match="has no probe; allowed: row, col, index"): probes.predict(acts.x[0], "a", "rows")
    model = build_model(configure(preset="smoke"))
    with pytest.raises(ValueError, match="outside the model"): collect(model, [], layers=[99])
    with pytest.raises(ValueError, match="allowed: raw, normed"): collect(model, [], tap="middle")


def test_a_constant_feature_and_a_doubled_one_do_no_harm(fitted):
    acts, probes = fitted
    x = torch.cat([acts.x, torch.full_like(acts.x[..., :1], 5.0), acts.x[..., :1]], -1)
    more = fit_probes(Activations(x, acts.slots, acts.grid, acts.layers)).hits(Activations(x, acts.slots, acts.grid, acts.layers))
    assert abs(more["row"].double().mean() - probes.hits(acts)["row"].double().mean()) < 0.01


def test_deterministic_and_each_layer_on_its_own(fitted):
    acts, probes = fitted
    again = fit_probes(acts)
    assert all(torch.equal(a.w, b.w) and torch.equal(a.b, b.b) for a, b in zip(probes.softmax, again.softmax, strict=True))
    other = planted(onehot(SLOT % 7, 7), n=100, noise=0.45, seed=4)
    pair = Activations(torch.cat([acts.x, other.x]), acts.slots, acts.grid, ["a", "b"])
    both = fit_probes(pair)
    assert (both.hits(pair)["row"][0] == probes.hits(acts)["row"][0]).double().mean() > 0.999
    assert both.hits(pair)["col"][1].double().mean() > 0.6
    alone = both.hits(Activations(other.x, other.slots, other.grid, ["b"]))
    assert torch.equal(alone["col"][0], both.hits(pair)["col"][1])


def test_batch_size_does_not_matter(smoke):
    model = build_model(configure(preset="smoke", pe="rope")).eval()
    images = torch.randn(30, 1, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(0))
    grid = model.patch_embed.grid_size
    whole, parts = (collect(model, images.split(size), RandomOrders(grid, 0), tokens=5) for size in (30, 7))
    assert torch.equal(whole.slots, parts.slots)
    torch.testing.assert_close(whole.x, parts.x, atol=1e-5, rtol=1e-5)
    a, b = (fit_probes(acts, ("row",)).hits(acts)["row"].double().mean() for acts in (whole, parts))
    assert abs(a - b) < 0.02


def test_frozen_probes_follow_an_edit(fitted):
    acts, probes = fitted
    mean = acts.x[0].mean(0)
    edited = acts.x[0] - mean + mean.roll(7, 0)
    donor = ((SLOT // 7) - 1) % 7
    assert (probes.predict(edited, "a", "row") == donor).double().mean() > 0.6
    assert torch.equal(probes.predict(acts.x[0][probes.split["test"]], "a", "row") == SLOT // 7, probes.hits(acts)["row"][0])


def rings(acts, probes, metric, target="row", **kwargs):
    rows = border_rows(probes.decoded(acts), acts.slots[probes.split["test"]], (7, 7), acts.layers, 200, **kwargs)
    return [r for r in rows if r["metric"] == metric and r["target"] == target]


def test_border_rings_add_up(fitted):
    acts, probes = fitted
    rows, sizes = rings(acts, probes, "border_selectivity"), torch.bincount(border_distance((7, 7))).tolist()
    whole = image_scores(probes.hits(acts), (7, 7))["selectivity", "row"].mean()
    assert [r["border"] for r in rows] == [0, 1, 2, 3] and sizes == [24, 16, 8, 1]
    assert sum(r["value"] * s for r, s in zip(rows, sizes, strict=True)) / 49 == pytest.approx(whole, abs=1e-9)


def test_leak_from_the_border_shows_at_the_border():
    "A code that marks the outermost cells only: rows are read there and hardly anywhere else."
    edge = border_distance((7, 7)) == 0
    acts = planted(onehot(SLOT // 7, 7) * edge[:, None], n=100, noise=0.1)
    value = {r["border"]: r["value"] for r in rings(acts, fit_probes(acts, ("row", "col")), "border_excess")}
    assert value[0] > 0.7 and max(abs(value[1]), abs(value[2])) < 0.2


def test_no_ring_has_anything_where_nothing_is_known(real):
    "Also for a probe that prefers a label, which plain accuracy by ring rewards at the border."
    for key in (("none-s0", "trained"), ("none-s0", "untrained")):
        acts = real[key].part(torch.arange(600), [4])
        for r in rings(acts, fit_probes(acts, ("row", "col")), "border_excess"): assert abs(r["value"]) < 0.02 + (r["high"] - r["low"]), (key, r)
