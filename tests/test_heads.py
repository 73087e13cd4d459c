"Heads, lines of attention and sweeps against arithmetic done by hand and against full passes."

from contextlib import nullcontext

import pytest
import timm
import torch
from conftest import shake

from vitposnb.config import configure
from vitposnb.heads import attention_maps, blocked_attention, head_changes, recorded, resumed, sweep, token_group, without_heads
from vitposnb.model import build_model, describe, taps
from vitposnb.permutation import RandomOrders, permutation
from vitposnb.rotary import rotary_mask

OURS = ["rope", "rope-mixed", "rope-dinov3", "ape", "none"]
FOREIGN = {"vit_tiny_patch16_224": 32, "vit_small_patch16_rope_224": 48, "vit_small_patch16_dinov3": 48, "eva02_tiny_patch14_224": 42,
           "vit_medium_patch16_rope_reg1_gap_256": 48, "deit_tiny_distilled_patch16_224": 32}
ALL = [*OURS, *FOREIGN]


def model_of(name):
    torch.manual_seed(0)
    return shake(build_model(configure(pe=name)) if name in OURS else timm.create_model(name, depth=3, img_size=FOREIGN[name], num_classes=5))


def images(model, n=2):
    info = describe(model)
    return torch.randn(n, info.in_chans, *info.img_size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return model(images(model))


@torch.no_grad()
def written(model, block, *changes):
    "What a block's attention adds, and what its projection received, on the input that the intact model gives it."
    past = recorded(model, images(model))
    kept = {}
    handles = [model.blocks[block].attn.register_forward_hook(lambda m, a, out: kept.update(out=out)),
               model.blocks[block].attn.proj.register_forward_pre_hook(lambda m, a: kept.update(heads=a[0]))]
    for c in changes: c.__enter__()
    resumed(model, past, block)
    for c in changes: c.__exit__(None, None, None)
    for h in handles: h.remove()
    return kept["out"], kept["heads"]


@pytest.mark.parametrize("name", ALL)
def test_heads_add_up_to_the_attention(name):
    model, block = model_of(name), 1
    heads, bias = describe(model).num_heads, model.blocks[1].attn.proj.bias
    whole, _ = written(model, block)
    silent, _ = written(model, block, without_heads(model, blocks=block))
    assert torch.equal(silent, bias.expand_as(silent))
    alone = [written(model, block, without_heads(model, [h for h in range(heads) if h != k], block))[0] - bias for k in range(heads)]
    assert (sum(alone) + bias - whole).abs().max() < 1e-5 * whole.abs().max()
    assert min(part.abs().max() for part in alone) > 1e-4 * whole.abs().max()


@pytest.mark.parametrize("name", ["rope", "vit_tiny_patch16_224"])
def test_silent_heads_return(name):
    model, before = model_of(name), logits(model_of(name))
    with pytest.raises(RuntimeError, match="lost"), without_heads(model, 0), blocked_attention(model, "class", "patches"), attention_maps(model):
        raise RuntimeError("lost")
    assert torch.equal(logits(model), before) and all(b.attn.fused_attn for b in model.blocks)
    with without_heads(model, 0): assert not torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["rope", "rope-mixed", "ape", "vit_tiny_patch16_224", "vit_small_patch16_dinov3", "eva02_tiny_patch14_224"])
def test_maps_are_softmax_of_scores(name):
    "Against scores written out by hand where nothing is turned, and against the output where it is."
    model = model_of(name)
    with torch.no_grad(), attention_maps(model) as maps, taps(model) as t: model(images(model))
    assert sorted(maps) == list(range(describe(model).depth))
    if name in ("ape", "vit_tiny_patch16_224"):
        attn, K = model.blocks[1].attn, describe(model).num_heads
        with torch.no_grad(): q, k, _ = attn.qkv(t.normed[1]).unflatten(-1, (3, K, -1)).permute(2, 0, 3, 1, 4)
        assert torch.allclose(maps[1], (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), atol=1e-6)
    assert all(torch.allclose(m.sum(-1), torch.ones(()), atol=1e-5) for m in maps.values())


@pytest.mark.parametrize("name", ["rope", "rope-mixed", "ape", "vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("readers, read", [("class", "patches"), ("patches", "class"), ("patches", "prefix"), ("prefix", "patches")])
def test_a_cut_line_is_a_zero_that_the_softmax_never_saw(name, fused, readers, read):
    model = model_of(name)
    P = describe(model).num_prefix
    with torch.no_grad(), attention_maps(model) as maps: model(images(model))
    place = {"class": slice(0, 1), "prefix": slice(0, P), "patches": slice(P, None)}
    map_ = maps[1].clone()
    map_[:, 2, place[readers], place[read]] = 0
    expected = map_ / map_.sum(-1, keepdim=True)
    with nullcontext() if fused else attention_maps(model) as seen:
        value = values(model, 1)
        _, heads = written(model, 1, blocked_attention(model, readers, read, blocks=1, heads=2))
        _, intact = written(model, 1)
        if not fused: written(model, 1, blocked_attention(model, readers, read, blocks=1, heads=2))
    own = (expected @ value).transpose(1, 2)
    assert torch.allclose(heads.unflatten(-1, own.shape[-2:]), own, atol=1e-5 * own.abs().max().item())
    K = describe(model).num_heads
    same = (heads.unflatten(-1, (K, -1)) - intact.unflatten(-1, (K, -1))).abs().amax((0, 1, 3)) < 1e-6 * intact.abs().max()
    assert same.tolist() == [k != 2 for k in range(K)]
    if not fused: assert torch.allclose(seen[1], expected, atol=1e-6)


@torch.no_grad()
def values(model, block):
    attn, K = model.blocks[block].attn, describe(model).num_heads
    with taps(model) as t: model(images(model))
    x = t.normed[block]
    v = attn.v_proj(x) if getattr(attn, "v_proj", None) is not None else torch.nn.functional.linear(x, attn.qkv.weight, bias_of(attn)).chunk(3, -1)[2]
    return v.unflatten(-1, (K, -1)).transpose(1, 2)


def bias_of(attn):
    return attn.qkv.bias if getattr(attn, "q_bias", None) is None else torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])


def test_cuts_compose_and_never_leave_a_token_blind():
    model = model_of("rope")
    with blocked_attention(model, "class", "patches", blocks=3), blocked_attention(model, "patches", "class", blocks=3): both = logits(model)
    with blocked_attention(model, "patches", "class", blocks=3), blocked_attention(model, "class", "patches", blocks=3): assert torch.equal(logits(model), both)
    with pytest.raises(ValueError, match="nothing left to look at"), blocked_attention(model, "class", "patches"), blocked_attention(model, "class", "class"):
        logits(model)
    own = torch.zeros(50, 50)
    own[:, 40:] = -torch.inf
    with torch.no_grad(), attention_maps(model) as maps, blocked_attention(model, "patches", "class"): model(images(model), attn_mask=own)
    assert (maps[0][..., 40:] == 0).all() and (maps[0][..., 1:, 0] == 0).all() and (maps[0][..., 0, 0] > 0).all()


def test_groups_of_tokens():
    dino, rope = model_of("vit_small_patch16_dinov3"), model_of("rope")
    assert [token_group(dino, g) for g in ("class", "registers", "prefix")] == [slice(0, 1), slice(1, 5), slice(0, 5)]
    with pytest.raises(ValueError, match="1 class and 0 register tokens"): token_group(rope, "registers")
    with pytest.raises(ValueError, match="allowed: class, registers, prefix, patches, all"): token_group(rope, "cls")
    with pytest.raises(ValueError, match="head 4 is outside the model; allowed: 0 to 3"), without_heads(rope, 4): pass
    with pytest.raises(ValueError, match="block 9 is outside the model; allowed: 0 to 3"), attention_maps(rope, 9): pass
    with pytest.raises(ValueError, match="allowed: rotations, output"): head_changes(rope, "all")
    with pytest.raises(TypeError, match="not applicable"): head_changes(model_of("ape"))


TURNING = [n for n in ALL if n not in ("ape", "none", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224")]


@pytest.mark.parametrize("name, part", [*((n, "rotations") for n in TURNING), *((n, "output") for n in ALL)])
def test_a_sweep_is_a_full_pass_for_each_change(name, part):
    model = model_of(name)
    x, changes = images(model), head_changes(model, part) | {("all", 0): (1, lambda: without_heads(model, 0, [1, 2]))}
    with torch.inference_mode(), permutation(model, RandomOrders(describe(model).grid, seed=4)), taps(model) as t:
        swept = {n: (out, {i: r.clone() for i, r in t.raw.items()}, {i: r.clone() for i, r in t.normed.items()}) for n, out in sweep(model, x, changes)}
    assert set(swept) == {"intact", *changes}
    with torch.inference_mode(), taps(model) as t:
        for name_, (out, raw, normed) in swept.items():
            change = changes[name_][1]() if name_ in changes else nullcontext()
            with permutation(model, RandomOrders(describe(model).grid, seed=4)), change: assert torch.equal(model(x), out)
            assert all(torch.equal(t.raw[i], raw[i]) and torch.equal(t.normed[i], normed[i]) for i in t.raw)


def test_the_cost_of_a_sweep_in_blocks():
    model, ran = model_of("rope"), []
    handles = [b.register_forward_hook(lambda *a: ran.append(1)) for b in model.blocks]
    with torch.inference_mode(): list(sweep(model, images(model), head_changes(model)))
    for h in handles: h.remove()
    L, K = 4, 4
    assert len(ran) == L + K * L * (L + 1) // 2


def test_together_is_all_blocks_at_once():
    model = model_of("rope")
    changes = head_changes(model, blocks=[2, 3], together=True)
    assert list(changes) == [(2, k) for k in range(4)] and {first for first, _ in changes.values()} == {2}
    with torch.inference_mode():
        swept = dict(sweep(model, images(model), changes))
        with rotary_mask(model, "all", blocks=2, heads=1), rotary_mask(model, "all", blocks=3, heads=1): assert torch.equal(swept[2, 1], model(images(model)))


def test_what_cannot_be_resumed_is_refused():
    model = model_of("rope").train()
    model.head_drop = torch.nn.Dropout(0.5)
    with pytest.raises(TypeError, match="cannot be resumed"): recorded(model, images(model))
