"The presets for photos, a few steps of each at 224 px with patch 16, on folders that hold broken files."

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

from vitposnb import sources
from vitposnb.config import ConfigError, configure
from vitposnb.data import load_images
from vitposnb.model import describe
from vitposnb.runs import load_model, verify
from vitposnb.training import train


@pytest.fixture
def photos(tmp_path):
    "Two of three class folders are listed; sizes differ, some files are no pictures, one is grey and one is cut off."
    rng, n = np.random.default_rng(0), 0
    for split, count in (("train", 6), ("val", 3)):
        for name in ("n01", "n02", "n99"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                shape = (150 + 40 * i, 330 - 30 * i, 3) if i else (260, 250)
                Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)).save(folder / f"{(n := n + 1)}.JPEG")
    (tmp_path / "photos" / "train" / "n01" / "text.JPEG").write_text("no picture")
    whole = (tmp_path / "photos" / "val" / "n02" / f"{n - 4}.JPEG").read_bytes()
    (tmp_path / "photos" / "val" / "n02" / "half.JPEG").write_bytes(whole[:len(whole) // 2])
    (tmp_path / "list.txt").write_text("n02\nn01\n")
    return tmp_path / "photos"


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("preset, pe", [("imagenet100", "ape-rpt"), ("imagenette", "rope")])
def test_a_few_steps_at_224_pixels(preset, pe, photos, tmp_path, monkeypatch):
    given = dict(data=str(photos), runs_dir=str(tmp_path / "runs"), progress=False, device="cpu", epochs=1, warmup_epochs=0, batch_size=4,
                 val_images=3, max_broken=0.2)  # fmt: skip
    if preset == "imagenet100":
        listed = tmp_path / "list.txt"
        with pytest.raises(ConfigError, match="is not the list of ImageNet-100"):
            load_images(configure(preset=preset, class_list=str(listed), **given))
        monkeypatch.setattr(sources, "IMAGENET100", hashlib.sha256(listed.read_bytes()).hexdigest())
        given["class_list"] = str(listed)
    with pytest.raises(ConfigError, match="max_broken = 0.001 is exceeded: 2 of"):
        load_images(configure(preset=preset, pe=pe, **{**given, "max_broken": 0.001}))
    cfg = configure(preset=preset, pe=pe, **given)
    images = load_images(cfg)
    assert len(images.broken) == 2 and images.x_train.shape[1:] == (256, 256, 3)
    run = train(cfg, images)
    model, _, known = load_model(run)
    info, result = describe(model), json.loads((run / "result.json").read_text())
    assert verify(run, weights=True) and info.grid == (14, 14) and (info.embed_dim, info.num_heads) == (384, 8)
    assert known["classes"] == (["n01", "n02"] if preset == "imagenet100" else ["n01", "n02", "n99"])
    assert np.isfinite(result["test_loss"]) and result["train_images"] >= 8 and all(torch.isfinite(p).all() for p in model.parameters())
