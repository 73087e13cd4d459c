"Rotary masks against exact symmetries and against models that never had rotations, for every rotary class of timm's."

from contextlib import contextmanager, nullcontext
from itertools import combinations

import numpy as np
import pytest
import timm
import torch
from conftest import shake
from timm.layers import apply_rot_embed_cat
from timm.models.eva import Eva

from vitposnb.config import configure
from vitposnb.intervention import replaced
from vitposnb.model import build_model, describe, taps
from vitposnb.permutation import RandomOrders, permutation
from vitposnb.rotary import balanced_shams, masked_planes, model_planes, rotary_mask, rotary_table

OURS = ["rope", "rope-dinov3", "rope-mixed", "rope-ape"]
FOREIGN = {
    "vit_small_patch16_rope_224": 48,
    "vit_small_patch16_rope_ape_224": 48,
    "vit_small_patch16_rope_mixed_224": 48,
    "vit_medium_patch16_rope_reg1_gap_256": 48,
    "vit_small_patch16_dinov3": 48,
    "eva02_tiny_patch14_224": 42,
}
ALL = [*OURS, *FOREIGN]
BLIND = 1e-5


def model_of(name):
    torch.manual_seed(0)
    return shake(build_model(configure(pe=name)) if name in OURS else timm.create_model(name, depth=2, img_size=FOREIGN[name], num_classes=5))


def oblong(**kw):
    "A grid of 7 x 28."
    torch.manual_seed(0)
    options = dict(img_size=(28, 112), patch_size=4, in_chans=1, num_classes=5, embed_dim=64, depth=2, num_heads=4, attn_type="rope",
                   use_rot_pos_emb=True, use_abs_pos_emb=False, rope_temperature=100.0, no_embed_class=True, global_pool="token")
    return shake(Eva(**{**options, **kw}))


def images(model, n=3):
    info = describe(model)
    return torch.randn(n, info.in_chans, *info.img_size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model, x=None):
    return model(images(model) if x is None else x)


@contextmanager
def unfused(model):
    for block in model.blocks: block.attn.fused_attn = False
    try: yield
    finally:
        for block in model.blocks: block.attn.fused_attn = True


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("how", ["fused", "unfused", "bf16"])
def test_all_masked_is_the_model_without_rotations_bit_for_bit(name, how):
    model = model_of(name)
    context = unfused(model) if how == "unfused" else torch.autocast("cpu", torch.bfloat16) if how == "bf16" else nullcontext()
    with context:
        before = logits(model)
        with rotary_mask(model, "all"): masked = logits(model)
        with rotary_mask(model, "rows"), rotary_mask(model, "columns"): twice = logits(model)
        after = logits(model)
        model.rope = None
        bare = logits(model)
    assert torch.equal(masked, bare) and torch.equal(twice, bare)
    assert torch.equal(after, before) and not torch.equal(before, bare)


@pytest.mark.parametrize("name", [n for n in ALL if "ape" not in n and "eva02" not in n])
@pytest.mark.parametrize("axis, blind, seen", [("rows", "within-column", "within-row"), ("columns", "within-row", "within-column")])
def test_a_masked_axis_cannot_be_seen(name, axis, blind, seen):
    model = model_of(name)
    assert describe(model).num_prefix >= 1

    def moved(kind):
        with permutation(model, RandomOrders(describe(model).grid, seed=3, kind=kind)): return logits(model)

    with rotary_mask(model, axis): plain, not_seen, is_seen = logits(model), moved(blind), moved(seen)
    size = plain.abs().max()
    assert (not_seen - plain).abs().max() < BLIND * size
    assert (is_seen - plain).abs().max() > 100 * BLIND * size
    assert (moved(blind) - logits(model)).abs().max() > 100 * BLIND * size


def test_rows_of_an_oblong_grid():
    model = oblong()
    assert describe(model).grid == (7, 28)
    for axis, blind, seen in (("rows", "within-column", "within-row"), ("columns", "within-row", "within-column")):
        with rotary_mask(model, axis):
            plain = logits(model)
            for kind, sees in ((blind, False), (seen, True)):
                with permutation(model, RandomOrders((7, 28), kind=kind)):
                    assert ((logits(model) - plain).abs().max() > 1e-4 * plain.abs().max()) == sees
    square = oblong(img_size=56)
    assert rotary_table(model).shape == rotary_table(square).shape and not torch.equal(rotary_table(model), rotary_table(square))


def test_a_masked_axis_must_be_masked_everywhere():
    "One unmasked block, or head, and rows can be seen again."
    model = model_of("rope")
    for mask in (dict(blocks=[0, 1, 2]), dict(heads=[0, 1, 3])):
        with rotary_mask(model, "rows", **mask):
            plain = logits(model)
            with permutation(model, RandomOrders((7, 7), kind="within-column")): assert (logits(model) - plain).abs().max() > 1e-3


def table_seen(model, block=0):
    seen = {}
    handle = model.blocks[block].attn.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
    logits(model)
    handle.remove()
    return seen["rope"]


@pytest.mark.parametrize("name", ["rope", "rope-dinov3", "rope-mixed"])
@pytest.mark.parametrize("axis", [None, "rows", "columns"])
def test_logits_depend_on_displacement_along_what_is_left(name, axis):
    model = model_of(name)
    with rotary_mask(model, axis) if axis else nullcontext(): rope = table_seen(model).double()
    q, k = torch.randn(2, 1, 4, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    turned = [apply_rot_embed_cat(t.expand(1, 4, 49, 16), rope, half=name == "rope-dinov3")[0] for t in (q, k)]
    scores = (turned[0] @ turned[1].mT).reshape(4, 7, 7, 7, 7)
    r, c = np.indices((7, 7))
    dr, dc = (r[:, :, None, None] - r, c[:, :, None, None] - c)
    groups = {}
    for i in np.ndindex(7, 7, 7, 7): groups.setdefault((0 if axis == "rows" else dr[i], 0 if axis == "columns" else dc[i]), []).append(scores[(slice(None), *i)])
    means = torch.stack([torch.stack(g).mean(0) for g in groups.values()])
    assert max((torch.stack(g) - torch.stack(g).mean(0)).abs().max() for g in groups.values()) < 1e-5
    assert len(groups) == {None: 169}.get(axis, 13) and means.std(0).min() > 1e-2


def shifted(model, rows, columns):
    "The table of the same grid with all coordinates shifted."
    table = rotary_table(model)
    sin, cos = table.double().reshape(*describe(model).grid, -1).chunk(2, -1)
    turn = torch.complex(cos, sin)
    step = (turn[1, 0] / turn[0, 0]) ** rows * (turn[0, 1] / turn[0, 0]) ** columns
    turn = turn * step
    return replaced([(model.rope, "pos_embed", torch.cat([turn.imag, turn.real], -1).flatten(0, 1).to(table))])


def test_the_class_token_is_the_only_anchor():
    anchored, free = oblong(), oblong(class_token=False, global_pool="avg")
    plain = {m: logits(m) for m in (anchored, free)}
    size = {m: p.abs().max() for m, p in plain.items()}
    with shifted(free, 2, 3): assert (logits(free) - plain[free]).abs().max() < 1e-5 * size[free]
    with shifted(anchored, 0, 0): assert (logits(anchored) - plain[anchored]).abs().max() < 1e-5 * size[anchored]
    with rotary_mask(anchored, "rows"): blind = logits(anchored)
    with shifted(anchored, 2, 0):
        assert (logits(anchored) - plain[anchored]).abs().max() > 1e-3 * size[anchored]
        with rotary_mask(anchored, "rows"): assert (logits(anchored) - blind).abs().max() < 1e-5 * size[anchored]


def test_transposing_tokens_and_table_together_changes_nothing():
    model = model_of("rope")
    order = torch.arange(49).reshape(7, 7).T.flatten()
    swapped = [(model.rope, "pos_embed", rotary_table(model)[order])]
    plain = logits(model)
    with permutation(model, order), replaced(swapped): assert (logits(model) - plain).abs().max() < 1e-5 * plain.abs().max()
    with permutation(model, order): assert (logits(model) - plain).abs().max() > 1e-3
    with rotary_mask(model, "columns"): columns = logits(model)
    with permutation(model, order), replaced(swapped), rotary_mask(model, "rows"): assert (logits(model) - columns).abs().max() < 1e-5 * plain.abs().max()


@pytest.mark.parametrize("name", ["rope", "rope-dinov3", "rope-mixed"])
def test_a_shuffle_is_a_permutation_of_the_contents(name):
    "Without other positions, tokens with the angles of others are tokens in other places."
    model = model_of(name)
    with rotary_mask(model, "all", kind="shuffle", seed=5): shuffled, table = logits(model), table_seen(model)
    own = table_seen(model)
    order = torch.cdist(table.reshape(-1, *table.shape[-2:])[0].double(), own.reshape(-1, *own.shape[-2:])[0].double()).argmin(1)
    assert sorted(order.tolist()) == list(range(49)) and torch.equal(table, own[..., order, :])
    with permutation(model, order.argsort()): moved = logits(model)
    assert (shuffled - moved).abs().max() < 1e-4 * moved.abs().max() and (shuffled - logits(model)).abs().max() > 1e-2
    with rotary_mask(model, "all", kind="shuffle", seed=6): assert not torch.equal(logits(model), shuffled)


@pytest.mark.parametrize("name", ["rope", "rope-dinov3", "rope-mixed", "vit_small_patch16_dinov3"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("axis", ["rows", "all"])
def test_a_mask_of_one_head_changes_that_head_alone(name, fused, axis):
    model = model_of(name)
    heads, kept = describe(model).num_heads, []
    handle = model.blocks[1].attn.proj.register_forward_pre_hook(lambda m, a: kept.append(a[0].unflatten(-1, (heads, -1))))
    with nullcontext() if fused else unfused(model):
        logits(model)
        with rotary_mask(model, axis, blocks=1, heads=2): logits(model)
        with rotary_mask(model, axis, blocks=1): logits(model)
    handle.remove()
    same = [torch.equal(kept[0][..., h, :], kept[1][..., h, :]) for h in range(heads)]
    assert same == [h != 2 for h in range(heads)]
    assert (kept[1][..., 2, :] - kept[2][..., 2, :]).abs().max() < 1e-6 * kept[0].abs().max()


@pytest.mark.parametrize("name", ["rope", "rope-mixed", "vit_small_patch16_dinov3"])
def test_everything_returns_after_an_exception(name):
    model = model_of(name)
    before, parts = logits(model), {n: p for n, p in [*model.named_parameters(), *model.named_buffers()]}
    with pytest.raises(RuntimeError, match="lost"), rotary_mask(model, "rows", blocks=1, heads=0), rotary_mask(model, planes=[1, 2]):
        raise RuntimeError("lost")
    assert torch.equal(logits(model), before)
    assert all(p is parts[n] for n, p in [*model.named_parameters(), *model.named_buffers()])
    assert all(not b.attn._forward_pre_hooks for b in model.blocks)


def test_masks_and_permutations_commute():
    model, order = model_of("rope"), torch.randperm(49, generator=torch.Generator().manual_seed(0))
    with rotary_mask(model, "rows"), permutation(model, order): a = logits(model)
    with permutation(model, order), rotary_mask(model, "rows"): b = logits(model)
    with rotary_mask(model, planes=masked_planes(model, "rows")), permutation(model, order): c = logits(model)
    assert torch.equal(a, b) and torch.equal(a, c) and not torch.equal(a, logits(model))


def test_an_early_window_has_no_position_inside():
    "Up to the window's end the stream is that of the model without rotations, bit for bit, so nothing can be decoded there."
    model = model_of("rope")
    with torch.no_grad(), permutation(model, RandomOrders((7, 7))), rotary_mask(model, "all", blocks=[0, 1]), taps(model) as inside: model(images(model))
    model.rope = None
    with torch.no_grad(), permutation(model, RandomOrders((7, 7))), taps(model) as bare: model(images(model))
    assert [torch.equal(inside.raw[i], bare.raw[i]) for i in range(5)] == [True, True, True, False, False]


@pytest.mark.parametrize("name, frequencies", [("rope", 4), ("rope-dinov3", 4), ("vit_small_patch16_rope_224", 16), ("vit_medium_patch16_rope_reg1_gap_256", 16)])
def test_shams_are_balanced_and_matched(name, frequencies):
    model = model_of(name)
    planes = model_planes(model).set_index("plane")
    shams = balanced_shams(model, limit=12)
    assert len(shams) == (6 if frequencies == 4 else 12) and len({tuple(s) for s in shams}) == len(shams)
    times = np.zeros(len(planes))
    for sham in shams:
        part = planes.loc[sham]
        assert (part["axis"] == "row").sum() == (part["axis"] == "column").sum() == frequencies / 2
        assert part["wavelength"].round(3).nunique() == frequencies == len(sham)
        times[sham] += 1
    assert (times == len(shams) / 2).all()


def test_all_shams_are_there():
    "Against plain enumeration of all sets of four planes."
    model = model_of("rope")
    planes = model_planes(model)
    wave, row = planes["wavelength"].round(2).to_numpy(), (planes["axis"] == "row").to_numpy()
    naive = {s for s in combinations(range(8), 4) if len(set(wave[list(s)])) == 4 and row[list(s)].sum() == 2}
    assert {tuple(int(i) for i in s) for s in balanced_shams(model)} == naive


def test_what_does_not_apply_is_refused():
    for pe in ("none", "ape", "sincos"):
        model = build_model(configure(pe=pe))
        with pytest.raises(TypeError, match="not applicable"), rotary_mask(model, "rows"): pass
        with pytest.raises(TypeError, match="not applicable"): balanced_shams(model)
    rope, mixed = model_of("rope"), model_of("rope-mixed")
    wrong = {
        "block 4 is outside the model; allowed: 0 to 3": dict(axis="rows", blocks=4),
        "block -1 is outside": dict(axis="rows", blocks=[-1]),
        "head 7 is outside the model; allowed: 0 to 3": dict(axis="rows", heads=[0, 7]),
        "plane 8 is outside the model; allowed: 0 to 7": dict(planes=[8]),
        "no plane is chosen": dict(planes=[]),
        "no head is chosen": dict(axis="all", heads=[]),
        "axis = 'x' is not known; allowed: rows, columns, all": dict(axis="x"),
        "kind = 'zero' is not known": dict(axis="all", kind="zero"),
        "either an axis": dict(),
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message), rotary_mask(rope, **given): pass
    with pytest.raises(ValueError, match="not applicable to mixed planes"), rotary_mask(mixed, "rows", kind="shuffle"): pass
    with pytest.raises(ValueError, match="not axis-pure"): balanced_shams(mixed)


def test_shared_keys_cannot_be_masked_by_head():
    model = oblong(num_kv_heads=2, qkv_fused=False)
    with pytest.raises(TypeError, match="share their keys"), rotary_mask(model, "rows", heads=1): pass
    plain = logits(model)
    with rotary_mask(model, "rows"): assert not torch.equal(logits(model), plain)


def test_dynamic_sizes_have_a_table_too():
    model = timm.create_model("vit_small_patch16_rope_224", depth=2, img_size=48, num_classes=5, dynamic_img_size=True).eval()
    assert sorted(set(model_planes(model)["axis"])) == ["column", "row"]
    with rotary_mask(model, "rows"):
        plain = logits(model)
        with permutation(model, RandomOrders((3, 3), kind="within-column")): assert (logits(model) - plain).abs().max() < 1e-5
    with rotary_mask(model, "all", kind="shuffle"), pytest.raises(ValueError, match="does not fit a table of 16"): logits(model, torch.randn(1, 3, 64, 64))
