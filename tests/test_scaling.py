"Scaling positions, and the noise that is its control: the ends are exact, nothing is silent, everything comes back."

import math

import numpy as np
import pytest
import timm
import torch
from conftest import shake

from vitposnb.config import configure
from vitposnb.intervention import ALPHAS, content_noise, match_content_noise, scaled_positions
from vitposnb.model import build_model, describe, taps
from vitposnb.permutation import RandomOrders, permutation

OURS = ["ape", "sincos", "rope", "ape-frozen", "rope-mixed", "rope-dinov3", "rope-ape"]
FOREIGN = {
    "vit_tiny_patch16_224": 32,
    "deit_tiny_distilled_patch16_224": 32,
    "deit3_small_patch16_224": 32,
    "vit_small_patch16_rope_224": 48,
    "vit_small_patch16_rope_ape_224": 48,
    "vit_small_patch16_rope_mixed_224": 48,
    "vit_medium_patch16_rope_reg1_gap_256": 48,
    "vit_small_patch16_dinov3": 48,
    "eva02_tiny_patch14_224": 42,
}


def ours(pe, **kw):
    return shake(build_model(configure(pe=pe, **kw)))


def foreign(name, **kw):
    torch.manual_seed(0)
    return shake(timm.create_model(name, **{"depth": 2, "img_size": FOREIGN[name], "num_classes": 5, **kw}))


def without_positions(model):
    "The same model with its positions taken out by hand."
    model.rope = None
    if model.pos_embed is not None:
        model.pos_embed.data = torch.zeros_like(model.pos_embed)
    return model


def images(model, n=3):
    info = describe(model)
    return torch.randn(n, info.in_chans, *info.img_size, generator=torch.Generator().manual_seed(0))


def state(model):
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: (v.data_ptr(), v.clone()) for k, v in own.items()}


def unchanged(model, before):
    after = state(model)
    return set(after) == set(before) and all(after[k][0] == before[k][0] and torch.equal(after[k][1], before[k][1]) for k in before)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("pe", OURS)
def test_the_ends_are_exact_for_our_models(pe, bf16):
    model, none = ours(pe), ours("none")
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in none.state_dict().items())
    x, before = images(model), state(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        plain = model(x)
        with scaled_positions(model, 1):
            assert torch.equal(model(x), plain)
        with scaled_positions(model, 0):
            assert torch.equal(model(x), none(x)) and not torch.equal(none(x), plain)
        with scaled_positions(model, 0.5):
            assert not torch.equal(model(x), plain) and not torch.equal(model(x), none(x))
        assert torch.equal(model(x), plain)
    assert unchanged(model, before)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_the_ends_are_exact_for_timm_models(name, bf16):
    model, bare = foreign(name), without_positions(foreign(name))
    x, before = images(model), state(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        plain, none = model(x), bare(x)
        with scaled_positions(model, 1.0):
            assert torch.equal(model(x), plain)
        with scaled_positions(model, 0.0):
            assert torch.equal(model(x), none) and not torch.equal(none, plain)
        with scaled_positions(model, 0.6):
            assert not torch.equal(model(x), plain) and not torch.equal(model(x), none)
        assert torch.equal(model(x), plain)
    assert unchanged(model, before)


@pytest.mark.parametrize("name, prefix", [("vit_tiny_patch16_224", 1), ("deit_tiny_distilled_patch16_224", 2)])
def test_slots_of_prefix_tokens_are_scaled_too(name, prefix):
    model = foreign(name)
    x, table = images(model), model.pos_embed.detach().clone()
    assert table.shape[1] == prefix + 4
    with torch.no_grad(), taps(model, [0]) as t:
        model(x)
        plain = t.raw[0]
        with scaled_positions(model, 0.25):
            model(x)
    assert torch.allclose(plain - t.raw[0], (0.75 * table).expand_as(plain), atol=1e-6)


@pytest.mark.parametrize("alpha", [2**-0.5, 2**0.5])
@pytest.mark.parametrize("make", [lambda: ours("rope", rope_temperature=3.0), lambda: ours("rope-dinov3"), lambda: ours("rope-mixed"),
                                  lambda: foreign("vit_small_patch16_rope_224"), lambda: foreign("vit_medium_patch16_rope_reg1_gap_256"),
                                  lambda: foreign("eva02_tiny_patch14_224"), lambda: foreign("vit_small_patch16_dinov3")])  # fmt: skip
def test_angles_are_scaled_not_wrapped(make, alpha):
    "A table of alpha times the angle: turning by alpha and by 1 - alpha is turning by 1, also beyond half a turn."
    model = make()
    shape = model.patch_embed.grid_size

    def turn(a):
        with torch.no_grad(), scaled_positions(model, a):
            embed = model.rope.get_embed(shape=shape) if getattr(model.rope, "feat_shape", None) is None else model.rope.get_embed()
        sin, cos = embed.double().chunk(2, -1)
        return torch.complex(cos, sin)

    whole, part, rest = turn(1.0), turn(alpha), turn(abs(1 - alpha))
    rest = rest if alpha < 1 else rest.conj()
    assert torch.allclose(part * rest, whole, atol=1e-4)
    assert (part - whole).abs().max() > 1e-3
    angle = 1024 * turn(1 / 1024).angle()
    clear = (angle.abs() - math.pi).abs() > 0.02
    wrapped = torch.polar(torch.ones_like(angle), alpha * whole.angle())
    assert torch.equal(((wrapped - part).abs() > 2e-3)[clear], (angle.abs() > math.pi)[clear])


def test_a_dynamic_model_is_scaled_at_every_size():
    model = foreign("vit_small_patch16_rope_224", dynamic_img_size=True)
    bare = without_positions(foreign("vit_small_patch16_rope_224", dynamic_img_size=True))
    for side in ((48, 48), (32, 64)):
        x = torch.randn(2, 3, *side)
        with torch.no_grad():
            plain = model(x)
            with scaled_positions(model, 1.0):
                assert torch.equal(model(x), plain)
            with scaled_positions(model, 0.0):
                assert torch.equal(model(x), bare(x)) and not torch.equal(plain, bare(x))


def test_which_kind_is_scaled():
    model, rope, ape = ours("rope-ape"), ours("rope"), ours("ape")
    with torch.no_grad():
        ape.pos_embed.copy_(model.pos_embed)
        x = images(model)
        with scaled_positions(model, 0.0, "additive"):
            assert torch.equal(model(x), rope(x))
        with scaled_positions(model, 0.0, "rotary"):
            assert torch.equal(model(x), ape(x))
        with scaled_positions(model, 0.5, "rotary"), scaled_positions(model, 0.5, "additive"):
            apart = model(x)
        with scaled_positions(model, 0.5):
            assert torch.equal(model(x), apart)


def test_scales_multiply_when_nested():
    for pe in ("ape", "rope", "rope-dinov3", "rope-mixed"):
        model = ours(pe)
        x, before = images(model), state(model)
        with torch.no_grad():
            with scaled_positions(model, 0.5), scaled_positions(model, 0.5):
                twice = model(x)
            with scaled_positions(model, 0.25):
                assert torch.allclose(model(x), twice, atol=1e-5)
        assert unchanged(model, before)


@pytest.mark.parametrize("pe", ["ape", "rope", "rope-dinov3"])
def test_restored_after_an_exception_and_in_any_order(pe):
    model = ours(pe)
    x, before = images(model), state(model)
    with torch.no_grad():
        plain = model(x)
        with pytest.raises(RuntimeError, match="boom"):
            with scaled_positions(model, 0.3), content_noise(model, 1.0), permutation(model, RandomOrders((7, 7))), taps(model):
                model(x)
                raise RuntimeError("boom")
        assert torch.equal(model(x), plain) and unchanged(model, before)
        with scaled_positions(model, 0.3), permutation(model, RandomOrders((7, 7))), taps(model) as t:
            first = model(x)
        with permutation(model, RandomOrders((7, 7))), taps(model) as u, scaled_positions(model, 0.3):
            assert torch.equal(model(x), first)
        assert all(torch.equal(t.raw[l], u.raw[l]) for l in range(5))
        assert torch.equal(model(x), plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_works_in_inference_mode_and_the_model_can_be_trained_afterwards():
    for pe in ("ape", "rope", "rope-mixed"):
        model = ours(pe)
        x = images(model)
        with torch.inference_mode(), scaled_positions(model, 0.5):
            model(x)
        model(x).sum().backward()
        assert model.blocks[0].attn.qkv.weight.grad.abs().sum() > 0


def test_not_applicable_is_an_error():
    with pytest.raises(ValueError, match="scaling positions is not applicable: the model has none"):
        with scaled_positions(ours("none"), 1.0):
            pass
    for pe, which in (("ape", "rotary"), ("rope", "additive")):
        with pytest.raises(ValueError, match=f"scaling {which} positions is not applicable"):
            with scaled_positions(ours(pe), 0.5, which):
                pass
    with pytest.raises(ValueError, match="allowed: both, additive, rotary"):
        with scaled_positions(ours("ape"), 0.5, "table"):
            pass
    with pytest.raises(TypeError, match="relative position biases"):
        with scaled_positions(timm.create_model("beit_base_patch16_224", depth=1, img_size=32, embed_dim=48, num_heads=4), 0.5):
            pass


@pytest.mark.parametrize("alpha", [-0.1, math.nan, math.inf, -math.inf])
def test_alpha_out_of_range(alpha):
    with pytest.raises(ValueError, match="allowed: a finite number, 0 or more"):
        with scaled_positions(ours("ape"), alpha):
            pass
    with pytest.raises(ValueError, match="allowed: a finite number, 0 or more"):
        with content_noise(ours("ape"), alpha):
            pass


def test_a_table_of_unknown_angles_is_refused_and_left_alone():
    model = ours("rope")
    model.rope.pos_embed = model.rope.pos_embed[torch.randperm(49)]
    before = state(model)
    with pytest.raises(ValueError, match="its angles are unknown"):
        with scaled_positions(model, 0.5):
            pass
    assert unchanged(model, before)
    model = ours("rope")
    model.rope.__class__ = type("RotaryEmbeddingNew", (type(model.rope),), {})
    with pytest.raises(TypeError, match="RotaryEmbeddingNew are not known"):
        with scaled_positions(model, 0.5):
            pass


def test_a_wrapped_table_sees_the_scale_from_within():
    "A mask on `get_embed` composes with scaling in both orders."
    model, x = ours("rope"), None
    x, inner = images(model), model.rope.get_embed

    def masked(*args, **kwargs):
        table = inner(*args, **kwargs).clone()
        table[:, :8], table[:, 16:24] = 0, 1
        return table

    model.rope.get_embed = masked
    with torch.no_grad():
        plain = model(x)
        with scaled_positions(model, 1.0):
            assert torch.equal(model(x), plain)
        with scaled_positions(model, 0.5):
            assert not torch.equal(model(x), plain)
            assert (model.rope.get_embed()[:, :8] == 0).all()


def test_the_grid_of_alpha():
    assert ALPHAS == (1.5, *(round(1 - i / 10, 1) for i in range(11)))


def test_content_noise_is_per_image_seeded_and_gone_afterwards():
    for model in (ours("ape"), foreign("vit_small_patch16_dinov3")):
        x = images(model, 6)
        with torch.no_grad():
            plain = model(x)

            def run(batches, scale=0.5, seed=0, model=model):
                with content_noise(model, scale, seed), taps(model, [0]) as t:
                    return torch.cat([(model(b), t.patches(0, "raw"))[1] for b in batches])

            whole = run([x])
            assert torch.equal(whole, run(x.split(4))) and not torch.equal(whole, run([x], seed=1))
            clean = run([x], 0.0)
            with taps(model, [0]) as t:
                model(x)
                assert torch.equal(clean, t.patches(0, "raw"))
            content = model.patch_embed(x).flatten(1, -2)
            for scale in (0.5, 2.0):
                noise = run([x], scale) - clean
                ratio = (noise.pow(2).mean((1, 2)) / content.pow(2).mean((1, 2))).sqrt() / scale
                assert torch.allclose(ratio, torch.ones(6), atol=0.06), ratio
            assert abs((noise.flatten() ** 4).mean() / (noise**2).mean() ** 2 - 3) < 0.6
            assert torch.equal(model(x), plain)


def test_matching_finds_the_planted_scale():
    for scale in (0.01, 0.3, 1.7, 20.0):
        curve = lambda s: 0.1 + 0.75 / (1 + s)
        found = match_content_noise(curve, curve(scale), tolerance=1e-4)
        assert abs(found["accuracy"] - curve(scale)) <= 1e-4 and found["scale"] == pytest.approx(scale, rel=0.02)
    assert match_content_noise(lambda s: 0.8 - 0.1 * s, 0.801) == dict(scale=0.0, accuracy=0.8, evaluations=1)


def test_matching_on_a_noisy_staircase_and_where_it_cannot():
    "1,000 images of the same draws: the accuracy is a staircase."
    margin = np.sort(np.random.default_rng(0).gamma(2.0, size=1000))
    found = match_content_noise(lambda s: float((margin > s).mean()), 0.6)
    assert abs(found["accuracy"] - 0.6) <= 0.002 and found["evaluations"] < 20
    with pytest.raises(ValueError, match="is above the clean accuracy without noise"):
        match_content_noise(lambda s: 0.5, 0.9)
    with pytest.raises(ValueError, match="out of reach"):
        match_content_noise(lambda s: 0.3 + 0.5 * math.exp(-s), 0.2)
    with pytest.raises(ValueError, match="not reached within"):
        match_content_noise(lambda s: 0.8 if s < 1.3 else 0.2, 0.5)
    with pytest.raises(ValueError, match="allowed: an accuracy"):
        match_content_noise(lambda s: 0.8, math.nan)
