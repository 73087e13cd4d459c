"""Traps of the data layer: order, resume, interruption, broken images, and sources that lie."""
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import threading
import warnings
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torchvision import datasets
from torchvision.transforms import v2

from vitposnb import data, sources
from vitposnb.config import ConfigError, TrainConfig, cache_dir, configure
from vitposnb.data import DeviceImages, augment, cached, epoch_draws, eval_batches, load_images, normalise, steps_per_epoch, train_batches
from vitposnb.sources import array_source, decode, digest, find_source, to_square


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITPOSNB_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fashion():
    with np.load(sources.resources.files("vitposnb") / "data_files" / "fashion_mnist_10000_5000.npz") as f: return dict(f)


@pytest.fixture
def rgb(fashion):
    "200 + 60 small colour images: Fashion-MNIST in three shades, 32 x 32."
    x = np.pad(fashion["x_train"][:260], ((0, 0), (2, 2), (2, 2)))
    x = np.stack([x, x // 2, 255 - x], -1)
    return dict(x_train=x[:200], y_train=np.arange(200) % 10, x_test=x[200:], y_test=np.arange(60) % 10)


def write_parquet(folder, arrays, column="img", seed=0, codec="webp", names=True, **more):
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        rows, labels = [], []
        for i in np.random.default_rng(seed).permutation(len(x)):
            out = io.BytesIO()
            Image.fromarray(x[i]).save(out, codec, **({"lossless": True} if codec == "webp" else {}))
            rows.append(dict(bytes=out.getvalue(), path=f"{i}.png")); labels.append(int(y[i]))
        features = {"info": {"features": {"label": {"names": [f"class {c}" for c in range(10)], "_type": "ClassLabel"}}}}
        table = pa.table({column: rows, "label": labels})
        if names: table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet", row_group_size=64)
    return folder


def write_folder(folder, x, y, splits=("train", "val"), form="png", share=0.7):
    for i, (image, label) in enumerate(zip(x, y, strict=True)):
        file = folder / splits[i >= share * len(x)] / f"class {label}" / f"{i}.{form}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return folder


def small(path, **given) -> TrainConfig:
    return configure(**{**dict(data=str(path), val_images=20, batch_size=8, flip=True, crop="pad", progress=False), **given})


def stems():
    return sorted(p.name for p in (cache_dir() / "images").iterdir() if not p.name.endswith(".lock"))


# ---- subsets and order

def test_cifar_from_torchvision_and_from_parquet_give_the_same_subset(tmp_path, rgb, monkeypatch):
    class Fake:
        def __init__(self, root, train, download):
            split = "train" if train else "test"
            self.data, self.targets = rgb[f"x_{split}"], rgb[f"y_{split}"].tolist()
    monkeypatch.setattr(datasets, "CIFAR10", Fake)
    given = dict(in_chans=3, img_size=32, train_images=100)
    one = load_images(small("cifar10", **given))
    two = load_images(small(write_parquet(tmp_path / "copy", rgb), **given))
    assert one.fingerprint == two.fingerprint and one.mean == two.mean
    for part in ("train", "val", "test"):
        np.testing.assert_array_equal(getattr(one, f"x_{part}"), getattr(two, f"x_{part}"))
        np.testing.assert_array_equal(getattr(one, f"y_{part}"), getattr(two, f"y_{part}"))
    assert one.classes[0] == "airplane" and two.classes[0] == "class 0"
    assert "in place of" in two.note and "stored at 32 x 32" in two.note


def test_a_subset_is_the_smallest_digests_of_the_original_pixels(tmp_path, rgb):
    images = load_images(small(write_parquet(tmp_path / "p", rgb, seed=3), in_chans=1, img_size=16, train_images=50))
    want = sorted(range(200), key=lambda i: digest(rgb["x_train"][i]))
    np.testing.assert_array_equal(images.y_val, rgb["y_train"][want[:20]])
    np.testing.assert_array_equal(images.y_train, rgb["y_train"][want[20:70]])
    np.testing.assert_array_equal(images.x_train[7], to_square(rgb["x_train"][want[27]], 16, 1))


def test_a_subset_of_fewer_source_images_is_the_same_if_they_are_the_smallest(tmp_path, rgb):
    order = sorted(range(200), key=lambda i: digest(rgb["x_train"][i]))[:100]
    half = dict(rgb, x_train=rgb["x_train"][order], y_train=rgb["y_train"][order])
    given = dict(in_chans=3, img_size=32, train_images=60)
    a, b = (load_images(small(write_parquet(tmp_path / n, d, seed=s), **given)) for n, d, s in (("all", rgb, 1), ("half", half, 2)))
    assert a.fingerprint == b.fingerprint


def test_equal_pixels_with_different_labels_have_one_order(tmp_path, rgb):
    twin = dict(rgb, x_train=np.concatenate([rgb["x_train"][:50]] * 2), y_train=np.concatenate([np.zeros(50, int), np.ones(50, int)]))
    a, b = (load_images(small(write_parquet(tmp_path / str(s), twin, seed=s), in_chans=3, img_size=32)) for s in (1, 2))
    assert a.fingerprint == b.fingerprint
    np.testing.assert_array_equal(a.y_train, b.y_train)


def test_the_fingerprint_sees_pixels_labels_and_parts(tmp_path, rgb):
    other = {k: v.copy() for k, v in rgb.items()}
    other["y_train"][0] = 9
    third = {k: v.copy() for k, v in rgb.items()}
    third["x_test"][0, 0, 0, 0] ^= 1
    folders = [write_parquet(tmp_path / str(i), d) for i, d in enumerate((rgb, other, third))]
    seen = {load_images(small(folder, in_chans=3, img_size=32)).fingerprint for folder in folders}
    seen |= {load_images(small(tmp_path / "0", in_chans=3, img_size=32, **kw)).fingerprint for kw in (dict(val_images=21), dict(test_images=30))}
    assert len(seen) == 5


def test_mean_and_deviation_are_those_of_the_training_images_only(tmp_path, rgb):
    images = load_images(small(write_parquet(tmp_path / "p", rgb), in_chans=3, img_size=32, train_images=64))
    pixels = images.x_train / 255
    np.testing.assert_allclose(images.mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(images.std, pixels.std((0, 1, 2)), rtol=1e-9)


def test_constant_images_do_not_divide_by_zero(tmp_path):
    flat = dict(x_train=np.zeros((40, 8, 8), np.uint8), y_train=np.arange(40) % 2, x_test=np.zeros((4, 8, 8), np.uint8), y_test=np.arange(4) % 2)
    np.savez(tmp_path / "flat.npz", **flat)
    images = load_images(small(tmp_path / "flat.npz", img_size=8))
    assert all(torch.isfinite(x).all() for x, _ in train_batches(images, small(tmp_path / "flat.npz", img_size=8), 0, "cpu"))


# ---- pixels

@pytest.mark.parametrize("shape", [(300, 500), (500, 300), (231, 230), (40, 61)])
def test_photos_are_resized_and_cropped_as_torchvision_does(shape, fashion):
    photo = np.asarray(Image.fromarray(fashion["x_train"][0]).convert("RGB").resize(shape[::-1], Image.Resampling.BICUBIC))
    want = v2.CenterCrop(64)(v2.Resize(64, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)(Image.fromarray(photo)))
    np.testing.assert_array_equal(to_square(photo, 64, 3), np.asarray(want))


def test_grey_and_colour_are_converted(tmp_path, fashion):
    folder = write_folder(tmp_path / "grey", fashion["x_train"][:100], fashion["y_train"][:100])
    grey, colour = (load_images(small(folder, in_chans=c)) for c in (1, 3))
    assert grey.x_train.shape[1:] == (28, 28, 1) and colour.x_train.shape[1:] == (28, 28, 3)
    np.testing.assert_array_equal(np.repeat(grey.x_train, 3, -1), colour.x_train)
    assert grey.fingerprint == colour.fingerprint
    np.testing.assert_allclose(np.repeat(grey.mean, 3), colour.mean)


def test_every_mode_of_pillow_is_read_or_refused():
    base = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    for mode, form, shape in [("1", "png", (16, 16)), ("L", "png", (16, 16)), ("LA", "png", (16, 16)), ("P", "png", (16, 16, 3)),
                              ("RGBA", "png", (16, 16, 3)), ("CMYK", "jpeg", (16, 16, 3)), ("I;16", "png", (16, 16))]:
        out = io.BytesIO(); base.convert(mode).save(out, form)
        pixels = decode(out.getvalue())
        assert pixels.shape == shape and pixels.dtype == np.uint8, mode
    out = io.BytesIO(); base.convert("F").save(out, "tiff")
    with pytest.raises(ValueError): decode(out.getvalue())


# ---- batches

def test_any_start_gives_the_same_batches_and_conditions_share_them(tmp_path, rgb):
    given = dict(in_chans=3, img_size=32, crop_padding=4)
    folder = write_parquet(tmp_path / "p", rgb)
    images, cfg = load_images(small(folder, **given)), small(folder, **given)
    whole = list(train_batches(images, cfg, 2, "cpu"))
    assert len(whole) == steps_per_epoch(images, cfg) == 180 // 8
    for start in (1, 7, len(whole) - 1, len(whole)):
        again = list(train_batches(load_images(cfg), small(folder, pe="ape-rpt", ape_init=1.0, **given), 2, "cpu", start=start))
        assert len(again) == len(whole) - start
        for (x, y), (p, q) in zip(whole[start:], again, strict=True): assert torch.equal(x, p) and torch.equal(y, q)
    other_epoch, other_seed = (next(train_batches(images, c, e, "cpu")) for c, e in ((cfg, 3), (replace(cfg, seed=1), 2)))
    assert not torch.equal(whole[0][0], other_epoch[0]) and not torch.equal(whole[0][0], other_seed[0])


def test_augmentation_does_not_change_the_order(tmp_path, rgb):
    folder = write_parquet(tmp_path / "p", rgb)
    one, two = (small(folder, in_chans=3, img_size=32, crop=c, flip=f) for c, f in (("pad", True), ("none", False)))
    images = load_images(one)
    ys = [torch.cat([y for _, y in train_batches(images, c, 1, "cpu")]) for c in (one, two)]
    assert torch.equal(*ys)


def test_an_epoch_sees_every_image_at_most_once(tmp_path, rgb):
    cfg = small(write_parquet(tmp_path / "p", rgb), in_chans=3, img_size=32, crop="none", flip=False)
    images = load_images(cfg)
    seen = torch.cat([x for x, _ in train_batches(images, cfg, 0, "cpu")])
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (images.mean, images.std))
    back = (seen * std + mean).mul(255).round().byte().movedim(1, -1).numpy()
    names = {digest(x) for x in back}
    assert len(names) == len(back) == 176 and names <= {digest(x) for x in images.x_train}


def test_memory_map_and_memory_give_the_same_batches(tmp_path, rgb):
    cfg = small(write_parquet(tmp_path / "p", rgb), in_chans=3, img_size=32)
    images, mapped = load_images(cfg), load_images(cfg)
    mapped.kept["cpu"] = DeviceImages(mapped.x_train, mapped.y_train, "cpu", limit=0)
    assert not mapped.kept["cpu"].resident
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = list(zip(train_batches(images, cfg, 0, "cpu"), train_batches(mapped, cfg, 0, "cpu"), strict=True))
    assert images.kept["cpu"].resident and all(torch.equal(a, b) for p, q in pairs for a, b in zip(p, q, strict=True))


def test_evaluation_covers_all_images_once_in_order(tmp_path, rgb):
    cfg = small(write_parquet(tmp_path / "p", rgb), in_chans=3, img_size=32)
    images = load_images(cfg)
    batches = list(eval_batches(images.x_test, images.y_test, images, cfg, "cpu", batch_size=25))
    assert [len(y) for _, y in batches] == [25, 25, 10]
    np.testing.assert_array_equal(torch.cat([y for _, y in batches]), images.y_test)
    want = (images.x_test / 255 - np.array(images.mean)) / np.array(images.std)
    np.testing.assert_allclose(torch.cat([x for x, _ in batches]).movedim(1, -1), want, atol=2e-5)


@pytest.mark.parametrize("chans", [1, 3])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_shift_and_flip_agree_with_one_image_at_a_time(chans, padding, rgb):
    x = np.ascontiguousarray(rgb["x_train"][:40, 2:30, 1:29, :chans])
    cfg = configure(img_size=28, in_chans=chans, crop_padding=padding, flip=True, crop="pad")
    draws = epoch_draws(40, cfg, 0)
    draws[0, 3:], draws[1, 3:] = 0, 1 - 2**-24
    got = augment(torch.from_numpy(x), draws, cfg, (0.0,) * chans, (1 / 255,) * chans).movedim(1, -1).numpy()
    for i in range(40):
        top, left = (int(u * (2 * padding + 1)) for u in draws[i, 3:].tolist())
        one = np.pad(x[i], ((padding, padding), (padding, padding), (0, 0)))[top:top + 28, left:left + 28]
        np.testing.assert_allclose(got[i], one[:, ::-1] if draws[i, 0] < 0.5 else one, atol=1e-3)


def test_crop_none_takes_the_centre_of_a_larger_cache():
    x = torch.arange(2 * 12 * 12, dtype=torch.uint8).view(2, 12, 12, 1)
    cfg = replace(configure(img_size=8), crop="none", flip=False, cache_size=12)
    assert torch.equal(augment(x, torch.zeros(2, 5), cfg, (0.0,), (1 / 255,)).round().byte(), x[:, 2:10, 2:10].movedim(-1, 1))


def test_resized_crops_at_224_agree_with_torchvision(fashion):
    photo = np.asarray(Image.fromarray(fashion["x_train"][1]).convert("RGB").resize((256, 256), Image.Resampling.BICUBIC))
    cfg = configure(preset="imagenette", crop_scale=0.25)
    draws = torch.tensor([[0.9, 0.0, 0.5, 0.25, 0.75], [0.1, 0.0, 0.5, 0.25, 0.75]])
    got = augment(torch.tensor(photo).expand(2, -1, -1, -1), draws, cfg, (0.0,) * 3, (1 / 255,) * 3)
    pixels = torch.tensor(photo).movedim(-1, 0)[None].float()
    want = v2.functional.resized_crop(pixels, 32, 96, 128, 128, [224, 224], v2.InterpolationMode.BILINEAR, antialias=False)[0]
    inner = slice(2, -2)
    assert got.shape == (2, 3, 224, 224)
    torch.testing.assert_close(got[0][:, inner, inner], want[:, inner, inner], atol=0.05, rtol=0)
    torch.testing.assert_close(got[1].flip(-1)[:, inner, inner], want[:, inner, inner], atol=0.05, rtol=0)


def test_resized_crops_stay_inside_and_cover_the_stated_areas():
    ramp = torch.linspace(1, 255, 64).round().byte().view(1, 64, 1, 1).expand(500, 64, 64, 1)
    cfg = configure(img_size=28, cache_size=64, crop="resized", crop_scale=0.2, flip=False)
    out = augment(ramp, epoch_draws(500, cfg, 0), cfg, (0.0,), (1 / 255,))
    assert out.min() >= 1 and out.max() <= 255.01
    heights = (out[:, 0, -1, 0] - out[:, 0, 0, 0]) / 254 * 28 / 27
    assert 0.3 < heights.min() < 0.5 and heights.max() > 0.95


# ---- the cache

def counted(rgb, calls, fail_at=None, error=KeyboardInterrupt):
    source = array_source("counted", "", "stamp", lambda: rgb)
    def open_():
        calls.append(1)
        classes, splits = source.open()
        n, items = splits["train"]
        def stopping():
            yield from islice(items, fail_at)
            error() if error is kill else (_ for _ in ()).throw(error)
        return classes, splits if fail_at is None else dict(splits, train=(n, stopping()))
    return replace(source, open=open_)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_interrupted_cache_leaves_nothing(rgb):
    with pytest.raises(KeyboardInterrupt): cached(counted(rgb, [], fail_at=150), 32, 3)
    assert stems() == []
    calls = []
    meta, arrays = cached(counted(rgb, calls), 32, 3)
    assert len(arrays["train_y"]) == 200 and len(calls) == 1 and len(stems()) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_cache_is_never_read(rgb):
    process = multiprocessing.get_context("fork").Process(target=cached, args=(counted(rgb, [], fail_at=150, error=kill), 32, 3))
    process.start(); process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(stems()) == 1 and stems()[0].endswith(".partial")
    _, arrays = cached(counted(rgb, []), 32, 3)
    assert len(arrays["train_y"]) == 200 and len(stems()) == 1 and not stems()[0].endswith(".partial")


@pytest.mark.parametrize("file", ["train_x.npy", "test_y.npy", "train_digest.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_cache_is_built_again(rgb, file, damage):
    calls = []
    _, before = cached(counted(rgb, calls), 32, 3)
    want = np.array(before["train_x"])
    del before
    path = cache_dir() / "images" / stems()[0] / file
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-7])
    _, after = cached(counted(rgb, calls), 32, 3)
    assert len(calls) == 2
    np.testing.assert_array_equal(after["train_x"], want)


def test_a_hit_opens_no_source_and_a_change_is_noticed(rgb, tmp_path):
    calls = []
    for _ in range(3): cached(counted(rgb, calls), 32, 3)
    cached(counted(rgb, calls), 32, 1); cached(counted(rgb, calls), 16, 3)
    assert len(calls) == 3
    folder = write_parquet(tmp_path / "p", rgb)
    before = load_images(small(folder, in_chans=3, img_size=32)).fingerprint
    rgb["x_train"][0] = 7
    write_parquet(folder, rgb)
    assert load_images(small(folder, in_chans=3, img_size=32)).fingerprint != before


def test_two_at_once_decode_once(rgb):
    calls = []
    threads = [threading.Thread(target=cached, args=(counted(rgb, calls), 32, 3)) for _ in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(calls) == 1 and len(stems()) == 1


def test_a_full_disk_is_noticed_before_decoding(rgb, monkeypatch):
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(ConfigError, match="VITPOSNB_CACHE"): cached(counted(rgb, []), 32, 3)
    assert stems() == []


# ---- broken images

def test_broken_images_are_reported_and_refused_above_the_share(tmp_path, fashion):
    folder = write_folder(tmp_path / "photos", fashion["x_train"][:100], fashion["y_train"][:100])
    files = sorted(folder.glob("train/*/*.png"))
    files[3].write_bytes(files[3].read_bytes()[:60])
    files[9].write_bytes(b"")
    files[11].unlink(); files[11].symlink_to(tmp_path / "nowhere.png")
    for limit in (0.0, 0.001, 0.029):
        with pytest.raises(ConfigError, match=r"max_broken = .* 3 of 100 images cannot be read \(.*\); allowed") as e:
            load_images(small(folder, max_broken=limit))
        assert "\n" not in str(e.value) and str(files[3]) in str(e.value) and stems() == []
    with pytest.warns(UserWarning, match="3 unreadable"): images = load_images(small(folder, max_broken=0.03))
    assert images.broken == [str(files[i]) for i in (3, 9, 11)]
    assert len(images.y_train) == 70 - 3 - 20
    with pytest.raises(ConfigError, match="max_broken = 0.01 is exceeded"): load_images(small(folder, max_broken=0.01))


def test_broken_rows_of_parquet_are_named(tmp_path, rgb):
    folder = write_parquet(tmp_path / "p", rgb)
    file = folder / "train-00000-of-00001.parquet"
    rows = pq.read_table(file).to_pylist()
    rows[70]["img"]["bytes"] = rows[70]["img"]["bytes"][:40]
    rows[71]["img"]["bytes"] = None
    pq.write_table(pa.Table.from_pylist(rows), file)
    with pytest.warns(UserWarning): images = load_images(small(folder, in_chans=3, img_size=32, max_broken=0.02))
    assert [b.split(", ")[1:] for b in images.broken] == [["row 70", rows[70]["img"]["path"]], ["row 71", rows[71]["img"]["path"]]]


def test_a_repaired_image_is_read(tmp_path, fashion):
    folder = write_folder(tmp_path / "photos", fashion["x_train"][:100], fashion["y_train"][:100])
    file = sorted(folder.glob("train/*/*.png"))[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:50])
    with pytest.warns(UserWarning): load_images(small(folder, max_broken=0.1))
    file.write_bytes(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_images(small(folder)).broken == []


# ---- sources

def test_a_class_list_restricts_a_folder(tmp_path, fashion, monkeypatch):
    folder = write_folder(tmp_path / "imagenet", fashion["x_train"][:300], fashion["y_train"][:300])
    chosen = tmp_path / "list.txt"
    chosen.write_text("class 7\nclass 2\n\n")
    images = load_images(small(folder, class_list=str(chosen)))
    assert images.classes == ["class 2", "class 7"]
    source = find_source(small(folder, class_list=str(chosen))).open()[1]["train"][1]
    assert all(f"class {(2, 7)[label]}" in path for path, label, _ in source)
    for text, complaint in [("class 7\nclass 7\n", "twice"), ("\n", "empty"), ("class 77\n", "lacks .class 77")]:
        chosen.write_text(text)
        with pytest.raises(ConfigError, match=complaint): load_images(small(folder, class_list=str(chosen)))


def test_the_list_of_imagenet100_is_checked(tmp_path, fashion, monkeypatch):
    folder = write_folder(tmp_path / "imagenet", fashion["x_train"][:300], fashion["y_train"][:300])
    chosen = tmp_path / "imagenet100.txt"
    chosen.write_text("class 7\nclass 2\n")
    given = dict(preset="imagenet100", class_list=str(chosen), img_size=32, cache_size=0)
    with pytest.raises(ConfigError, match=f"expected {sources.IMAGENET100}, found [0-9a-f]{{64}}"): load_images(small(folder, **given))
    monkeypatch.setattr(sources, "IMAGENET100", hashlib.sha256(chosen.read_bytes()).hexdigest())
    assert load_images(small(folder, **given)).classes == ["class 2", "class 7"]
    with pytest.raises(ConfigError, match="class_list = ''"): load_images(small(folder, **{**given, "class_list": ""}))
    with pytest.raises(ConfigError, match="data = .*class_list"): load_images(configure(preset="imagenet100"))
    with pytest.raises(ConfigError, match="class_list restricts"): load_images(configure(class_list=str(chosen)))


def test_hidden_folders_other_files_and_symlinks_do_not_matter(tmp_path, fashion):
    folder = write_folder(tmp_path / "photos", fashion["x_train"][:100], fashion["y_train"][:100], splits=("train", "test"))
    before = load_images(small(folder)).fingerprint
    (folder / "train" / ".cache").mkdir(); (folder / "train" / "class 1" / "notes.txt").write_text("x")
    (folder / "test" / "class 1").rename(tmp_path / "elsewhere"); (folder / "test" / "class 1").symlink_to(tmp_path / "elsewhere")
    assert load_images(small(folder)).fingerprint == before


def test_test_without_labels_falls_back_to_val(tmp_path, fashion):
    folder = write_folder(tmp_path / "photos", fashion["x_train"][:100], fashion["y_train"][:100])
    (folder / "test").mkdir(); Image.fromarray(fashion["x_train"][0]).save(folder / "test" / "0.png")
    assert "val/" in load_images(small(folder)).note


@pytest.mark.parametrize("what, complaint", [
    ("no train", "has no train/"), ("no test", "has no test/ or val/"), ("empty class", "no images of 'class 3'"),
    ("new class", "classes in val/ that train/ lacks"), ("nothing", "has no train/")])
def test_incomplete_folders_are_refused_in_one_line(tmp_path, fashion, what, complaint):
    folder = write_folder(tmp_path / "photos", fashion["x_train"][:100], fashion["y_train"][:100])
    if what in ("no train", "nothing"): shutil.rmtree(folder / "train")
    if what in ("no test", "nothing"): shutil.rmtree(folder / "val")
    if what == "empty class": [p.unlink() for p in (folder / "train" / "class 3").iterdir()]
    if what == "new class": (folder / "val" / "class 3").rename(folder / "val" / "class 33")
    with pytest.raises(ConfigError, match=f"^data = .*{complaint}.*; allowed: ") as e: load_images(small(folder))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("what, complaint", [
    ("no test", "has no test"), ("column", "has the columns photo, label"), ("label", "the label 10 at .*; allowed: 0 to 9"),
    ("negative", "the label -1"), ("null", "the label None"), ("cut", "cannot be read"), ("middle", "cannot be read")])
def test_wrong_parquet_is_refused_in_one_line(tmp_path, rgb, what, complaint):
    if what in ("label", "negative"): rgb["y_test"][5] = 10 if what == "label" else -1
    folder = write_parquet(tmp_path / "p", rgb, column="photo" if what == "column" else "image", names=what != "negative")
    train, test = (folder / f"{s}-00000-of-00001.parquet" for s in ("train", "test"))
    if what == "no test": test.unlink()
    if what == "cut": train.write_bytes(train.read_bytes()[:-100])
    if what == "middle":
        whole = bytearray(train.read_bytes())
        whole[4:2000] = bytes(1996)
        train.write_bytes(whole)
    if what == "null":
        rows = pq.read_table(train).to_pylist()
        rows[3]["label"] = None
        pq.write_table(pa.Table.from_pylist(rows), train)
    with pytest.raises(ConfigError, match=f"^data .*{complaint}.*") as e: load_images(small(folder, in_chans=3, img_size=32))
    assert "\n" not in str(e.value) and "allowed" in str(e.value)


def test_parquet_without_names_counts_its_classes(tmp_path, rgb):
    assert load_images(small(write_parquet(tmp_path / "p", rgb, names=False), in_chans=3, img_size=32)).classes == list("0123456789")


@pytest.mark.parametrize("change, complaint", [
    (dict(x_test=None), "lacks x_test"), (dict(x_train=np.zeros((200, 8, 8))), "float64"), (dict(y_train=np.zeros(3, int)), r"y_train int64 \(3,\)"),
    (dict(y_train=np.arange(200) % 10 + 0.5), "y_train float64"), (dict(y_train=np.array(["cat"] * 200)), "whole numbers as labels")])
def test_wrong_arrays_are_refused(tmp_path, rgb, change, complaint):
    np.savez(tmp_path / "a.npz", **{k: v for k, v in {**rgb, **change}.items() if v is not None})
    with pytest.raises(ConfigError, match=complaint): load_images(small(tmp_path / "a.npz", in_chans=3))


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64])
def test_labels_of_any_integer_type_are_counted(tmp_path, rgb, kind):
    np.savez(tmp_path / "a.npz", **{k: v.astype(kind) if k[0] == "y" else v for k, v in rgb.items()})
    images = load_images(small(tmp_path / "a.npz", in_chans=3, img_size=32))
    assert images.classes == list("0123456789") and images.y_train.dtype == np.int64


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"plain text"])
def test_a_file_that_is_no_npz_is_refused(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="^data = .*a.npz.*allowed"): load_images(small(tmp_path / "a.npz"))


def test_pickles_in_an_npz_are_never_loaded(tmp_path, rgb):
    np.savez(tmp_path / "a.npz", **{**rgb, "y_train": np.array([print] * 200, object)})
    with pytest.raises(ConfigError, match="cannot be read"): load_images(small(tmp_path / "a.npz"))


@pytest.mark.parametrize("given, complaint", [
    (dict(train_images=200), "train_images = 200 is more than the 180"), (dict(test_images=61), "test_images = 61 is more than the 60"),
    (dict(val_images=200), "val_images = 200 leaves nothing"), (dict(batch_size=181), "batch_size = 181 exceeds the 180")])
def test_too_many_images_are_refused_with_the_number_there_is(tmp_path, rgb, given, complaint):
    folder = write_parquet(tmp_path / "p", rgb)
    with pytest.raises(ConfigError, match=f"^{complaint}.*; allowed: "): load_images(small(folder, in_chans=3, img_size=32, **given))


def test_without_a_network_the_message_says_what_to_type(monkeypatch):
    def offline(*args, **kwargs): raise OSError("Name or service not known")
    monkeypatch.setattr(datasets, "CIFAR10", offline)
    with pytest.raises(ConfigError, match="data = 'cifar10' could not be downloaded to .*allowed without a network: fashion-mnist-15k, or the path"):
        load_images(configure(preset="cifar10", progress=False))


def test_imagenette_from_torchvision(fashion, monkeypatch):
    wnids = sorted(datasets.Imagenette._WNID_TO_CLASS)
    root = cache_dir() / "downloads" / "imagenette2-160"
    for i, image in enumerate(fashion["x_train"][:100]):
        file = root / ("train" if i < 70 else "val") / wnids[i % 10] / f"{i}.JPEG"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).convert("RGB").resize((200, 160)).save(file)
    cfg = configure(preset="imagenette64", val_images=20, batch_size=8, progress=False)
    with pytest.raises(ConfigError, match="incomplete: 70 \\+ 30 images"): load_images(cfg)
    monkeypatch.setitem(sources.OFFICIAL, "imagenette", (70, 30))
    images = load_images(cfg)
    assert images.classes[:2] == ["tench", "English springer"] and images.x_train.shape == (50, 64, 64, 3) and "160px" in images.note
    shutil.rmtree(root)
    assert load_images(cfg).fingerprint == images.fingerprint


def test_the_default_data_is_as_published(fashion):
    images = load_images(configure(progress=False))
    assert (len(images.y_train), len(images.y_val), len(images.y_test)) == (9000, 1000, 5000) and images.broken == []
    assert np.bincount(images.y_test).tolist() == [500] * 10 and images.classes[9] == "Ankle boot"
    assert {digest(x[..., 0]) for x in images.x_test} == {digest(x) for x in fashion["x_test"]}
    assert not {digest(x) for x in images.x_val} & {digest(x) for x in images.x_train}
    x, y = next(train_batches(images, configure(flip=True, crop="pad"), 0, "cpu"))
    assert x.shape == (64, 1, 28, 28) and x.dtype == torch.float32 and x.is_contiguous() and y.dtype == torch.int64


def test_normalise_leaves_its_input_alone():
    for chans in (1, 3):
        x = torch.full((2, 4, 4, chans), 100.0)
        normalise(x, (0.5,) * chans, (0.5,) * chans)
        assert (x == 100).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_sees_the_same_batches(tmp_path, rgb):
    for crop in ("pad", "resized"):
        cfg = small(write_parquet(tmp_path / "p", rgb), in_chans=3, img_size=32, crop=crop)
        images = load_images(cfg)
        for (x, y), (p, q) in zip(train_batches(images, cfg, 0, "cpu"), train_batches(images, cfg, 0, "cuda"), strict=True):
            torch.testing.assert_close(x, p.cpu(), atol=1e-4, rtol=0)
            assert torch.equal(y, q.cpu())


def test_normalise_accepts_any_layout():
    x = torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).view(2, 4, 4, 3)
    out = normalise(x.flip(1)[:, 1:3], (0.5,) * 3, (0.25,) * 3)
    torch.testing.assert_close(out, (x.flip(1)[:, 1:3].movedim(-1, 1) / 255 - 0.5) / 0.25)
