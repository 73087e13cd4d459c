"Every family of timm's that the docs list: untouched, tapped, permuted, scaled, and left as it was."

from contextlib import ExitStack

import pytest
import torch

from vitposnb.families import FAMILIES, applies, family_table, small
from vitposnb.intervention import scaled_positions
from vitposnb.model import describe, taps
from vitposnb.permutation import permutation
from vitposnb.weights import resize_input


def inputs(model, n=2):
    info = describe(model)
    return torch.randn(n, info.in_chans, *info.img_size, generator=torch.Generator().manual_seed(1))


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_our_forward_without_intervention_is_timms_own(family):
    "Taps open, the identity as permutation, every position scaled by 1: the same answer, and nothing stays behind."
    model, other = small(family), small(family)
    x, info = inputs(model), describe(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = hooks(model)
    with torch.no_grad():
        plain = other(x)
        with ExitStack() as stack:
            tap = stack.enter_context(taps(model))
            stack.enter_context(permutation(model, torch.arange(info.grid[0] * info.grid[1])))
            if (info.additive or info.rotary) and family != "BEiT": stack.enter_context(scaled_positions(model, 1.0))
            assert torch.allclose(model(x), plain, rtol=0, atol=1e-5)
            theirs = other.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
            for i, hidden in enumerate(theirs): assert torch.allclose(tap.patches(i + 1, "raw"), hidden, rtol=0, atol=1e-5)
            final = other.forward_intermediates(x, output_fmt="NLC", intermediates_only=True, norm=True)[-1]
            if not isinstance(other.norm, torch.nn.Identity): assert torch.allclose(tap.patches(info.depth), final, rtol=0, atol=1e-5)
        assert torch.equal(model(x), plain)
    assert hooks(model) == before and all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_order_of_patches_is_noticed_and_forgotten_even_after_an_error(family):
    model = small(family)
    x, info = inputs(model), describe(model)
    with torch.no_grad():
        plain = model.forward_features(x)
        with pytest.raises(RuntimeError, match="on purpose"), permutation(model, torch.arange(info.grid[0] * info.grid[1]).flip(0)):
            assert not torch.allclose(model.forward_features(x), plain, atol=1e-4)
            raise RuntimeError("on purpose")
        assert torch.equal(model.forward_features(x), plain)


EXPECTED = {  # prefix, table, rotation, masks per axis
    "ViT": (1, "yes", "no", False), "ViT, no class token": (0, "yes", "no", False), "DeiT, distilled": (2, "yes", "no", False),
    "DINOv2, registers": (5, "yes", "no", False), "EVA-02": (1, "yes", "yes", True), "RoPE": (1, "no", "yes", True),
    "RoPE, registers": (1, "no", "yes", True), "RoPE, mixed": (1, "no", "yes", False), "DINOv3": (5, "no", "yes", True),
}  # fmt: skip


def test_the_table_of_the_docs_says_what_is_known_of_these_models():
    table = family_table().set_index("family")
    assert list(table.index) == list(FAMILIES)
    for family, (prefix, added, turned, masks) in EXPECTED.items():
        row = table.loc[family]
        assert (row["prefix tokens"], row["table added"], row["rotation"]) == (prefix, added, turned), family
        assert (row["rotary masks per axis"] == "yes") == masks
        assert (row["additive scaling"] == "yes") == (added == "yes") and (row["rotary scaling"] == "yes") == (turned == "yes"), family


def test_what_applies_is_found_on_the_model_and_not_by_its_name():
    "A head makes accuracies possible; a model that was given one at another grid is described anew."
    assert applies(small("DINOv2"))["accuracy"].startswith("no") and applies(small("DINOv2", num_classes=3))["accuracy"] == "yes"
    wide = resize_input(small("RoPE"), (32, 128))
    assert describe(wide).grid == (2, 8) and applies(wide)["rotary masks per axis"] == "yes"
    with torch.no_grad(): assert not torch.equal(wide.rope.get_embed(), small("RoPE").rope.get_embed())
