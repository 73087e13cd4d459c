"Corruptions against independent implementations, on grey, colour, small, large and non-square images."
import io
import math
from importlib.resources import files

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torchvision.transforms.v2.functional import gaussian_blur

from vitposnb.blur import blur, effective_sigma, gaussian_taps
from vitposnb.corruption import (FAMILIES, PAPER_A, SEVERITIES, Corruption, codec, contrast, corrupt, jpeg, noise, occlude, pixelate,
                                 primary_families, settings, severity_grid, shuffle)

SHAPES = [(2, 28, 28, 1), (3, 32, 32, 3), (1, 224, 224, 3), (2, 40, 61, 3), (1, 28, 50, 1)]


def natural(shape, seed=0):
    "Smooth random images with edges: uint8."
    rng = np.random.default_rng(seed)
    smooth = gaussian_filter(rng.normal(size=shape), (0, *[min(shape[1:3]) / 10] * 2, 0))
    smooth = (smooth - smooth.min()) / (smooth.max() - smooth.min()) * 200 + 40 * (gaussian_filter(rng.normal(size=shape), (0, 1, 1, 0)) > 0)
    return torch.from_numpy(smooth.clip(0, 255).astype(np.uint8))


def by_pillow(image, quality):
    stream = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream)).reshape(image.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quality", [1, 5, 10, 25, 75, 100])
def test_jpeg_equals_pillow_bit_for_bit(shape, quality):
    x = natural(shape)
    ours = jpeg(x, quality)
    assert ours.dtype == torch.uint8 and np.array_equal(ours.numpy(), np.stack([by_pillow(i, quality) for i in x.numpy()]))


def test_codec_is_named():
    assert "Pillow" in codec() and "jpeg" in codec() and settings(PAPER_A["jpeg-5"], (28, 28))["codec"] == codec()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sigma", [0.5, 1, 1.3, 2.5, 3])
def test_blur_equals_scipy(shape, sigma):
    x = natural(shape)
    reference = gaussian_filter(x.double().numpy(), (0, sigma, sigma, 0), mode="mirror", radius=(0, *[math.ceil(4 * sigma)] * 2, 0))
    assert np.abs(blur(x, sigma).numpy() - reference).max() < 1e-5
    assert np.abs(blur(x.double() / 255, sigma).numpy() - reference / 255).max() < 1e-12


@pytest.mark.parametrize(("sigma", "kernel"), [(2.5, 5), (1, 3), (2, 17)])
def test_blur_equals_torchvision_with_the_same_kernel(sigma, kernel):
    x = natural((2, 28, 40, 3)).double()
    reference = gaussian_blur(x.movedim(-1, 1), [kernel, kernel], [sigma, sigma]).movedim(1, -1)
    assert torch.allclose(blur(x, sigma, kernel), reference, atol=1e-4)


def test_effective_sigma():
    assert effective_sigma(2.5, 5) == pytest.approx(1.33452, abs=1e-5)
    assert effective_sigma(3) == pytest.approx(3, abs=0.01) and len(gaussian_taps(3)) == 25
    impulse = torch.zeros(1, 41, 41, 1, dtype=torch.float64)
    impulse[0, 20, 20] = 1
    place = torch.arange(41) - 20
    spread = (blur(impulse, 2.5, 5)[0, ..., 0].sum(0) * place**2).sum().sqrt().item()
    assert spread == pytest.approx(effective_sigma(2.5, 5), abs=1e-9)
    assert settings(PAPER_A["blur-2.5"], (224, 224))["sigma_effective"] == pytest.approx(1.3345, abs=1e-4)


@pytest.mark.parametrize("bad", [
    lambda x: jpeg(x, 0), lambda x: jpeg(x, 101), lambda x: jpeg(x, 7.5), lambda x: jpeg(x.float(), 5), lambda x: jpeg(x[..., :0], 5),
    lambda x: blur(x, 0), lambda x: blur(x, -1), lambda x: blur(x, float("nan")), lambda x: blur(x, 4), lambda x: blur(x, 1, 29), lambda x: blur(x, 1, 4),
    lambda x: noise(x, 0, [0, 1]), lambda x: contrast(x, 1.5), lambda x: pixelate(x, 2.5), lambda x: shuffle(x, 2, [0, 1]),
    lambda x: shuffle(x, 0.5, [0, 1], cell=20), lambda x: occlude(x, 0, [0, 1]), lambda x: corrupt(x, Corruption("blur", 5)),
    lambda x: Corruption("fog", 1), lambda x: Corruption("jpeg", 6), lambda x: Corruption("jpeg", True), lambda x: Corruption("jpeg", 1.5),
    lambda x: Corruption("jpeg"), lambda x: Corruption("jpeg", 1, 5), lambda x: Corruption("noise", 1, kernel=3), lambda x: Corruption("blur", amount="2"),
    lambda x: severity_grid(["jpg"])])
def test_errors_are_one_line_and_say_what_is_allowed(bad):
    with pytest.raises(ValueError, match="allowed") as error: bad(natural((2, 28, 28, 1)))
    assert "\n" not in str(error.value)


def grid(shape): return severity_grid(side=min(shape[1:3]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_corruption_keeps_the_shape_and_the_input_and_ignores_batch_mates(shape):
    x = natural(shape)
    before = x.clone()
    for c in grid(shape):
        out = corrupt(x, c, range(7, 7 + len(x)), seed=3)
        assert out.shape == x.shape and out.dtype == (torch.float32 if c.family.startswith("blur") else torch.uint8)
        assert torch.equal(out[-1:], corrupt(x[-1:], c, [6 + len(x)], seed=3)), c
        assert torch.equal(x, before) and not torch.equal(out, x), c


def test_severity_0_is_untouched():
    x = natural((2, 28, 28, 1))
    assert all(corrupt(x, Corruption(f, 0)) is x for f in FAMILIES)


@pytest.mark.parametrize("size", [28, 64, 224])
def test_damage_rises_with_severity_on_real_images(smoke, size):
    photo = Image.open(files("matplotlib") / "mpl-data/sample_data/grace_hopper.jpg").resize((size, size))
    x = torch.from_numpy(np.array(smoke.x_test[:128]) if size == 28 else np.array(photo)[None])
    for family in dict.fromkeys(c.family for c in severity_grid(side=size)):
        error = [(corrupt(x, Corruption(family, s)).double() - x.double()).square().mean().item() for s in SEVERITIES]
        assert error[0] == 0 and (np.diff(error) > 0).all(), (family, error)


def test_random_families_follow_the_index_and_the_seed():
    x = natural((1, 28, 28, 1)).expand(3, -1, -1, -1)
    for family in ("noise", "shuffle", "occlusion"):
        c = Corruption(family, 3)
        a, b, other = corrupt(x, c, [4, 4, 5])
        assert torch.equal(a, b) and not torch.equal(a, other)
        assert not torch.equal(corrupt(x, c, [4, 4, 5], seed=1)[0], a)


def test_noise_has_the_deviation_it_says():
    x = torch.full((2, 224, 224, 3), 128, dtype=torch.uint8)
    assert (noise(x, 0.08, [0, 1]).double() - 128).std().item() / 255 == pytest.approx(0.08, rel=0.01)


def test_contrast_and_pixelate_by_hand():
    x = natural((2, 29, 31, 3))
    mean = x.double().mean((1, 2), keepdim=True)
    assert (contrast(x, 0.25).double() - (mean + 0.25 * (x - mean))).abs().max() <= 0.501
    blocks = pixelate(x, 4)
    assert (blocks[:, 4:8, 8:12].double() - x[:, 4:8, 8:12].double().mean((1, 2), keepdim=True)).abs().max() <= 0.501
    assert (blocks[:, 28:, 28:].double() - x[:, 28:, 28:].double().mean((1, 2), keepdim=True)).abs().max() <= 0.501
    assert torch.equal(pixelate(x, 99), pixelate(x, 29))


def test_shuffle_moves_whole_cells_and_exactly_the_share():
    x = torch.arange(49).repeat_interleave(4).view(7, 28).repeat_interleave(4, 0).to(torch.uint8)[None, ..., None]
    for severity, share in enumerate(FAMILIES["shuffle"]["grid"], 1):
        out = corrupt(x, Corruption("shuffle", severity))[0, ..., 0].unfold(0, 4, 4).unfold(1, 4, 4).flatten(2)
        assert (out == out[..., :1]).all() and sorted(out[..., 0].flatten().tolist()) == list(range(49))
        assert (out[..., 0].flatten() != torch.arange(49)).sum() == round(share * 49)


def test_occlusion_grows_around_its_place():
    x = torch.zeros(4, 28, 40, 1, dtype=torch.uint8)
    boxes = [occlude(x, side, range(4)) == 128 for side in FAMILIES["occlusion"]["grid"]]
    assert [b[0].sum().item() for b in boxes] == [round(s * 28) * round(s * 40) for s in FAMILIES["occlusion"]["grid"]]
    assert all((big.sum((1, 2, 3)) > small.sum((1, 2, 3))).all() for small, big in zip(boxes, boxes[1:], strict=False))


def test_blur_by_fraction_follows_the_side_and_says_so():
    c, x = Corruption("blur-fraction", 3), natural((1, 50, 80, 1))
    assert torch.equal(corrupt(x, c), blur(x, 0.03 * 50))
    assert settings(c, (50, 80))["sigma"] == 1.5 and settings(c, (50, 80))["scale"] == "fraction"
    assert settings(Corruption("blur", 3), (224, 224))["scale"] == "pixels" and settings(Corruption("blur", 0), (8, 8))["sigma"] is None


def test_the_grid_is_imagenet_c_at_224_pixels():
    grid = severity_grid()
    assert [c.amount for c in grid if c.family == "jpeg"] == [25, 18, 15, 10, 7]
    assert [c.amount for c in grid if c.family == "blur"] == [1, 2, 3, 4, 6]
    assert not [c for c in grid if c.family.endswith("-small")]


def test_small_images_have_their_own_jpeg_and_blur():
    small, large = ({c.family for c in severity_grid(side=side)} for side in (64, 65))
    assert small - large == {"jpeg-small", "blur-small"} and large - small == {"blur"}
    assert set(primary_families(28).values()) <= small and set(primary_families(224).values()) <= large
    c, x = Corruption("jpeg-small", 5), natural((2, 28, 28, 1))
    assert torch.equal(corrupt(x, c), jpeg(x, 1)) and settings(c, (28, 28))["quality"] == 1 and settings(c, (28, 28))["codec"] == codec()
