"The exact oracles: what must hold for the encodings whatever the weights are."

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.eva import Eva

from vitposnb.config import CONDITIONS, configure
from vitposnb.model import build_model, describe, taps
from vitposnb.pe import axis_planes, rotary_planes
from vitposnb.permutation import RandomOrders, permutation, permute_tokens, random_orders
from vitposnb.training import make_optimizer

BASES = ["none", "ape", "sincos", "rope", "ape-frozen", "rope-mixed", "rope-dinov3", "rope-ape"]


def model_of(pe, **kw):
    "A model whose weights are far from their start, so that no symmetry holds by smallness."
    model = build_model(configure(pe=pe, **kw)).eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return model


def images(n=4, side=28, seed=0):
    return torch.randn(n, 1, side, side, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions_share_every_weight_at_step_0(condition):
    base, model = build_model(configure(pe="none", seed=3)).state_dict(), build_model(configure(pe=condition, seed=3)).state_dict()
    assert all(torch.equal(v, model[k]) for k, v in base.items())
    assert set(model) - set(base) <= {"pos_embed", "rope.freqs", "patch_embed.order"}


def test_seeds_differ_and_building_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    a, b = build_model(configure(seed=0)), build_model(configure(seed=1))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(a.blocks[0].attn.qkv.weight, b.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("init", [0.02, 1.0])
def test_ape_init_is_the_scale_of_the_table(init):
    table = build_model(configure(pe="ape", ape_init=init)).pos_embed
    assert table.std().item() == pytest.approx(init, rel=0.05) and table.requires_grad
    assert not build_model(configure(pe="ape-frozen", ape_init=init)).pos_embed.requires_grad
    assert torch.equal(build_model(configure(pe="ape-frozen", ape_init=init)).pos_embed, table)


@pytest.mark.parametrize("bf16, tolerance", [(False, 1e-5), (True, 0.05)])
def test_none_does_not_see_the_order_and_the_others_do(bf16, tolerance):
    "Under bf16 autocast the sums are rounded, so the same theorem holds to a hundredth of the logits' spread."
    for pe in BASES:
        model, x = model_of(pe), images()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            plain = model(x).float()
            with permutation(model, RandomOrders((7, 7), seed=1)):
                moved = model(x).float()
        change = ((moved - plain).abs().max() / (plain.std() if bf16 else 1)).item()
        assert (change < tolerance) if pe == "none" else (change > 2 * tolerance), (pe, change)


@pytest.mark.parametrize("bf16, tolerance", [(False, 1e-5), (True, 0.03)])
def test_none_carries_its_similarity_along_image_by_image(bf16, tolerance):
    model, x = model_of("none"), images()
    order = random_orders(4, (7, 7), torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16), taps(model) as t:
        model(x)
        plain = {l: F.normalize(t.patches(l).double(), dim=-1) for l in t.raw}
        with permutation(model, order):
            model(x)
        for l, tokens in plain.items():
            moved = F.normalize(t.patches(l).double(), dim=-1)
            s = tokens @ tokens.transpose(1, 2)
            expected = torch.stack([a[o][:, o] for a, o in zip(s, order, strict=True)])
            assert torch.allclose(moved @ moved.transpose(1, 2), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("pe", ["ape", "sincos", "rope", "rope-dinov3"])
def test_tokens_and_slots_permuted_together_change_nothing(pe):
    model, x = model_of(pe), images()
    order = torch.randperm(49, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        plain = model(x)
        if model.pos_embed is not None:
            model.pos_embed.copy_(model.pos_embed[:, order])
        else:
            table = model.rope.get_embed()
            model.rope.get_embed = lambda: table[order]
        with permutation(model, order):
            assert torch.allclose(model(x), plain, atol=2e-5)


def test_rotary_logits_depend_on_displacement_and_the_class_token_is_an_anchor():
    def build(class_token):
        torch.manual_seed(0)
        return Eva(img_size=28, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=3, num_heads=4, attn_type="rope",
                   use_abs_pos_emb=False, use_rot_pos_emb=True, rope_temperature=100.0, class_token=class_token, no_embed_class=True,
                   global_pool="avg", head_init_scale=1.0).eval()  # fmt: skip

    for class_token, moves in ((False, False), (True, True)):
        model, x = build(class_token), images()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
            plain = model(x)
            grid = model.rope.get_embed().reshape(7, 7, 2, 16)
            assert grid.shape[0] == 7
            shifted = timm.layers.create_rope_embed("cat", dim=64, num_heads=4, feat_shape=(12, 13), in_pixels=False, temperature=100.0)
            model.rope.pos_embed = shifted.get_embed().reshape(12, 13, -1)[5:, 6:].reshape(49, -1)
            change = (model(x) - plain).abs().max().item()
        assert (change > 1e-4) if moves else (change < 1e-5), change


def test_transposing_the_token_grid_is_transposing_the_rotary_table():
    model, x = model_of("rope"), images()
    order = torch.arange(49).reshape(7, 7).T.flatten()
    with torch.no_grad():
        with permutation(model, order):
            moved = model(x)
        model.rope.pos_embed = model.rope.pos_embed[order]
        assert torch.allclose(model(x), moved, atol=2e-5)
        swapped = rotary_planes(model.rope.pos_embed, (7, 7))
    assert axis_planes(swapped, "row").tolist() == [4, 5, 6, 7]


def test_ape_under_a_fixed_permutation_is_a_relabelled_ape():
    "60 optimizer steps on the permuted images equal 60 steps with a permuted table."
    cfg = configure(pe="ape", epochs=1, warmup_epochs=0)
    fixed, plain = build_model(configure(pe="ape", permute="fixed")), build_model(cfg)
    order = fixed.patch_embed.order
    with torch.no_grad():
        plain.pos_embed.copy_(plain.pos_embed[:, order.argsort()])
    for model in (fixed, plain):
        optimizer = make_optimizer(model, cfg)
        for step in range(60):
            x, y = images(16, seed=step), torch.arange(16) % 10
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert torch.allclose(fixed.pos_embed, plain.pos_embed[:, order], atol=2e-5)
    assert torch.allclose(fixed.eval()(images(seed=99)), plain.eval()(images(seed=99)), atol=2e-5)
    assert (fixed.pos_embed - build_model(cfg).pos_embed).abs().max() > 1e-2


def test_fixed_conditions_keep_their_permutation_in_evaluation_and_in_the_weights():
    cfg = configure(pe="rope", permute="fixed", seed=5)
    model = build_model(cfg).eval()
    order = model.state_dict()["patch_embed.order"]
    assert order.sort().values.tolist() == list(range(49)) and order.tolist() != list(range(49))
    free, x = build_model(configure(pe="rope", seed=5)).eval(), images()
    with torch.no_grad():
        with permutation(free, order):
            assert torch.equal(free(x), model(x))
        assert not torch.equal(free(x), model(x))


def test_same_token_count_of_another_shape_has_another_table():
    tall, wide = (timm.layers.create_rope_embed("cat", dim=64, num_heads=4, feat_shape=s, in_pixels=False) for s in ((7, 28), (14, 14)))
    assert tall.get_embed().shape == wide.get_embed().shape and not torch.equal(tall.get_embed(), wide.get_embed())
    with pytest.raises(ValueError, match="does not fit a grid"):
        rotary_planes(tall.get_embed(), (7, 7))
    with pytest.raises(ValueError, match="not axis-pure"):
        axis_planes(rotary_planes(tall.get_embed(), (14, 14)), "row")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_small_patch16_rope_224", "deit_tiny_distilled_patch16_224"])
def test_taps_equal_timms_intermediates_and_leave_no_trace(name):
    model = timm.create_model(name, img_size=56 if "dinov2" in name else 64, num_classes=5, depth=3).eval()
    info = describe(model)
    x = torch.randn(2, 3, *info.img_size)
    with torch.no_grad():
        plain = model(x)
        with taps(model) as t:
            assert torch.equal(model(x), plain)
        theirs = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
        for i, h in enumerate(theirs):
            assert torch.equal(t.patches(i + 1, "raw"), h)
        assert sorted(t.raw) == sorted(t.normed) == [0, 1, 2, 3]
        assert t.raw[0].shape[1] == info.num_prefix + np.prod(info.grid)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_interventions_end_with_their_block_also_after_an_exception():
    model, x = model_of("rope"), images()
    with torch.no_grad():
        plain = model(x)
        with pytest.raises(RuntimeError, match="boom"):
            with permutation(model, RandomOrders((7, 7))), taps(model):
                model(x)
                raise RuntimeError("boom")
        assert torch.equal(model(x), plain)


def test_random_orders_do_not_depend_on_the_batch_size():
    whole = RandomOrders((7, 7), seed=4)(30)
    parts = RandomOrders((7, 7), seed=4)
    assert torch.equal(whole, torch.cat([parts(n) for n in (7, 1, 13, 9)]))


def test_permute_tokens_against_a_naive_loop():
    x, orders = torch.randn(3, 6, 2), random_orders(3, (2, 3), torch.Generator().manual_seed(0))
    expected = torch.stack([torch.stack([x[b, orders[b, i]] for i in range(6)]) for b in range(3)])
    assert torch.equal(permute_tokens(x, orders), expected)
    assert torch.equal(permute_tokens(x.reshape(3, 2, 3, 2), orders).reshape(3, 6, 2), expected)
