"Somebody else's model and images: files, heads, grids, preprocessing, and what is refused."

import json
import time

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config

from vitposnb.analysis import open_subject
from vitposnb.config import ConfigError, Geometry, configure
from vitposnb.data import normalise
from vitposnb.foreign import foreign_images, test_folder, test_source
from vitposnb.model import timm_model
from vitposnb.weights import read_weights, resize_input

NAME = "vit_tiny_patch16_224"
test_folder.__test__ = test_source.__test__ = False


def picture(path, size=(60, 48), seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path):
    "Ten pictures of two classes in val/, of different shapes, and a file that is none."
    for i in range(10):
        picture(tmp_path / "photos" / "val" / "ab"[i % 2] / f"{i}.png", (40 + 9 * i, 70 - 3 * i), i)
    (tmp_path / "photos" / "val" / "a" / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    return tmp_path / "photos"


def opened(photos, tmp_path, model=NAME, **kw):
    given = dict(weights="random", images=5, device="cpu", progress=False, runs_dir=str(tmp_path / "runs"))
    return open_subject(configure(Geometry, model=model, data=str(photos), **{**given, **kw}))


@pytest.mark.parametrize("config", [dict(crop_pct=0.9), dict(crop_pct=0.875, interpolation="bilinear"), dict(crop_pct=1.0, crop_mode="squash"),
                                    dict(crop_pct=1.0, crop_mode="border"), dict(crop_pct=0.95, interpolation="lanczos")], ids=str)  # fmt: skip
def test_preprocessing_is_timms_own_to_the_bit(photos, config):
    data = resolve_data_config(model=timm.create_model(NAME, depth=1))
    data = {**data, "input_size": (3, 64, 64), **config}
    with pytest.warns(UserWarning, match="broken.jpg"):
        images = foreign_images(test_folder(photos), data)
    transform = create_transform(**data, is_training=False)
    theirs = {transform(Image.open(p).convert("RGB")).numpy().tobytes() for p in photos.rglob("*.png")}
    ours = normalise(torch.from_numpy(np.array(images.x_test)), images.mean, images.std)
    assert len(theirs) == len(ours) == 10
    for x in ours:
        assert any(np.allclose(np.frombuffer(t, np.float32), x.numpy().ravel(), rtol=0, atol=1e-5) for t in theirs)


def test_only_the_test_part_is_read(photos, monkeypatch):
    (photos / "train" / "c").mkdir(parents=True)
    (photos / "train" / "c" / "never.png").write_bytes(b"must not be opened")
    source = test_folder(photos)
    assert source.open()[0] == ["a", "b", "c"] and not any("train" in p for p, _, _ in source.open()[1]["test"][1])


def test_a_sample_mixes_the_classes_and_does_not_depend_on_the_place(photos, tmp_path):
    for i in range(40):
        picture(photos / "val" / "ab"[i % 2] / f"more{i}.png", (8, 8), i)
    labels = [y for _, y, _ in test_folder(photos, take=20).open()[1]["test"][1]]
    assert len(labels) == 20 and 4 < sum(labels) < 16
    moved = photos.rename(tmp_path / "elsewhere")
    assert labels == [y for _, y, _ in test_folder(moved, take=20).open()[1]["test"][1]]


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("suffix", ["safetensors", "pth", "wrapped", "folder"])
def test_weights_of_a_finetuned_model(suffix, photos, tmp_path):
    model = timm.create_model(NAME, num_classes=2, depth=12).eval()
    state = model.state_dict()
    if suffix == "safetensors": save_file(state, path := tmp_path / "mine.safetensors")
    elif suffix == "pth": torch.save(state, path := tmp_path / "mine.pth")
    elif suffix == "wrapped": torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}, path := tmp_path / "mine.pth")
    else:
        (path := tmp_path / "mine").mkdir()
        save_file(state, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(dict(architecture=NAME, num_classes=2, pretrained_cfg=dict(crop_pct=1.0))))
    subject = opened(photos, tmp_path, weights=str(path))
    x, y = next(subject.batches(5))
    with torch.no_grad(): assert torch.equal(subject.model(x), model(x)) and not torch.equal(subject.twin(x), model(x))
    assert subject.labelled and set(y.tolist()) <= {0, 1} and subject.twin(x).shape == (5, 2)


def test_code_in_a_pth_file_is_not_run(tmp_path):
    class Bad:
        def __reduce__(self): return print, ("run!",)
    torch.save({"a": Bad()}, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match="tensors only"): read_weights(tmp_path / "bad.pth")


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("what, says", [("no head", "the model has no head"), ("1000 classes", "the model has 1000 classes and the images 2"),
                                        ("no labels", "the images have no labels")])  # fmt: skip
def test_without_a_head_or_labels_it_is_opened_and_says_so(what, says, photos, tmp_path, capsys):
    weights, folder = "random", photos
    if what == "no head":
        state = timm.create_model(NAME, num_classes=0).state_dict()
        save_file(state, tmp_path / "features.safetensors")
        weights = str(tmp_path / "features.safetensors")
    if what == "no labels": folder = photos / "val" / "b"
    subject = opened(folder, tmp_path, weights=weights)
    assert says in capsys.readouterr().out and not subject.labelled and len(next(subject.batches(5))[0]) == 5


def wrong_weights(tmp_path, name="vit_small_patch16_224", **kw):
    save_file(timm.create_model(name, depth=1, **kw).state_dict(), tmp_path / "other.safetensors")
    return str(tmp_path / "other.safetensors")


WRONG = {
    "name": (lambda p, t: opened(p, t, "vit_tny_patch16_224"), "did you mean 'vit_tiny_patch16_224'"),
    "no ViT": (lambda p, t: opened(p, t, "resnet18"), "is not a ViT"),
    "architecture": (lambda p, t: opened(p, t, weights=wrong_weights(t)), "weights are of another architecture"),
    "family": (lambda p, t: opened(p, t, weights=wrong_weights(t, "vit_small_patch16_dinov3")), "weights are of another architecture"),
    "file": (lambda p, t: opened(p, t, weights=str(t / "nowhere.safetensors")), "weights = "),
    "empty folder": (lambda p, t: opened((t / "none", (t / "none").mkdir())[0], t), "has no images"),
    "only train": (lambda p, t: opened((p.rename(p.with_name("train")).parent / "x", (t / "x").mkdir(), (t / "train").rename(t / "x" / "train"))[0], t), "only train/"),
    "too many": (lambda p, t: opened(p, t, images=50), "more than the 10 test images"),
}


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_in_one_line_within_seconds(case, photos, tmp_path):
    make, says = WRONG[case]
    start = time.process_time()
    with pytest.raises(ConfigError) as error: make(photos, tmp_path)
    assert says in str(error.value) and "\n" not in str(error.value) and time.process_time() - start < 10


@pytest.mark.parametrize("grid", [(16, 16), (7, 28)])
def test_a_table_at_another_grid_is_the_interpolated_one(grid):
    model, _ = timm_model(NAME, depth=2)
    moved, data = timm_model(NAME, depth=2, img_size=tuple(16 * s for s in grid))
    assert tuple(data["input_size"]) == (3, *(16 * s for s in grid))
    state = {k: v for k, v in model.state_dict().items() if k != "pos_embed"}
    table = F.interpolate(model.pos_embed[:, 1:].reshape(1, 14, 14, -1).permute(0, 3, 1, 2), size=grid, mode="bicubic", antialias=True)
    resized = resize_input(timm_model(NAME, depth=2)[0], (224, 224))
    resized.load_state_dict(model.state_dict())
    resize_input(resized, tuple(16 * s for s in grid))
    assert torch.allclose(resized.pos_embed[:, 1:], table.permute(0, 2, 3, 1).flatten(1, 2), atol=1e-6)
    assert torch.equal(resized.pos_embed[:, 0], model.pos_embed[:, 0]) and all(torch.equal(v, resized.state_dict()[k]) for k, v in state.items())
    with torch.no_grad(): assert resized(torch.randn(1, 3, *(16 * s for s in grid))).shape == (1, 1000)


@pytest.mark.parametrize("grid", [(16, 16), (7, 28)])
@pytest.mark.parametrize("name, first", [("vit_small_patch16_rope_224", "column"), ("vit_base_patch16_rope_reg1_gap_256", "row"),
                                         ("vit_small_patch16_dinov3", "row")])  # fmt: skip
def test_a_rotary_table_at_another_grid_follows_its_index_rule(name, first, grid):
    "Angle = coordinate x frequency: the token's index, scaled to a reference grid where the model has one, or to [-1, 1]."
    model, _ = timm_model(name, depth=1)
    at = resize_input(model, tuple(16 * s for s in grid)).rope
    table = at.get_embed() if at.feat_shape else at.get_embed(shape=list(grid))
    width = table.shape[-1] // 2
    sin, cos = (t.reshape(*grid, width).double() for t in table.split(width, -1))
    if "dinov3" in name:
        place = [2 * (torch.arange(n).double() + 0.5) / n - 1 for n in grid]
        frequency, pairs = 2 * np.pi / at.periods.double(), lambda p: p
    else:
        reference = at.ref_feat_shape
        place = [torch.arange(n).double() * (reference[i] / n if reference else 1) for i, n in enumerate(grid)]
        frequency, pairs = at.bands.double() if hasattr(at, "bands") else None, lambda p: 2 * p
    for half, axis in enumerate(("row", "column") if first == "row" else ("column", "row")):
        for p, f in enumerate(frequency):
            angle = place[0][:, None] * f if axis == "row" else place[1][None, :] * f
            channel = pairs(half * len(frequency) + p)
            assert torch.allclose(sin[..., channel], angle.sin().expand(grid), atol=1e-5), (axis, p)
            assert torch.allclose(cos[..., channel], angle.cos().expand(grid), atol=1e-5), (axis, p)
