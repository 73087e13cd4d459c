"Two processes train what one trains: the same images in the same order, the same losses, the same weights on both."

import json
import os
import subprocess
import sys

import pytest
from conftest import read_json
from safetensors.torch import load_file

from vitposnb.config import ConfigError, config_hash, configure, run_name
from vitposnb.runs import verify

# In a process of its own, because a process that has trained cannot be forked.
SCRIPT = """
import json, sys
from pathlib import Path
from vitposnb import training
from vitposnb.config import configure
from vitposnb.data import load_images
from vitposnb.devices import Share, on_devices
from vitposnb.runs import write_tensors

def work(cfg, images, folder, share):
    kept, labels, build, batches = [], [], training.build_model, training.train_batches
    training.build_model = lambda *a: kept.append(build(*a)) or kept[0]
    def noted(*a):
        for x, y in batches(*a):
            labels.append(y.tolist())
            yield x, y
    training.train_batches = noted
    training._fit(cfg, images, folder, None, share)
    training.build_model, training.train_batches = build, batches
    write_tensors(folder / f"rank{share.rank}of{share.world}.safetensors", kept[0].state_dict())
    (folder / f"labels{share.rank}of{share.world}.json").write_text(json.dumps(labels))

folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
two = configure(preset="smoke", devices=2, progress=False, runs_dir=str(folder / "runs"), **given)
images = load_images(two)
for name in ("two", "one"): (folder / name).mkdir()
on_devices(work, (two, images, folder / "two"), 2, cuda=False)
training.train(two, images)
work(configure(preset="smoke", progress=False, **given), images, folder / "one", Share())
"""


@pytest.mark.parametrize("given", [dict(pe="ape-rpt", ape_init=1.0, flip=True), dict(pe="rope", ema=0.9, batch_size=32)], ids=lambda g: g["pe"])
def test_two_processes_train_what_one_trains(given, tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(given)], env={**os.environ, "OMP_NUM_THREADS": "1"},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = tmp_path / "one", tmp_path / "two"
    a, b = (load_file(two / f"rank{r}of2.safetensors") for r in (0, 1))
    assert all((a[k] == b[k]).all() for k in a)
    labels = [read_json(two / f"labels{r}of2.json") for r in (0, 1)]
    assert [x + y for x, y in zip(*labels, strict=True)] == read_json(one / "labels0of1.json")
    history = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (one, two)]
    for single, double in zip(*history, strict=True):
        for key in ("train_loss", "val_loss", "train_top1", "lr"):
            assert double[key] == pytest.approx(single[key], abs=1e-4), key
    single = load_file(one / "rank0of1.safetensors")
    assert all((a[k] - single[k]).abs().max() < 1e-3 for k in a)
    cfg = configure(preset="smoke", devices=2, **given)
    run = tmp_path / "runs" / "smoke" / run_name(cfg)
    assert run.name.endswith("devices=2") or "+devices=2" in run.name
    assert verify(run, weights=True) and read_json(run / "config.json")["devices"] == 2
    final = load_file(two / "model.safetensors")
    assert all((final[k] == v).all() for k, v in load_file(run / "model.safetensors").items()), "the same again, bit for bit"


def test_one_device_leaves_the_identity_as_it_was_and_two_are_another():
    "Runs made before there was a choice keep their hash; a sum over two processes has other bytes."
    one, two = (configure(preset="smoke", devices=n) for n in (1, 2))
    assert config_hash(one, "f") != config_hash(two, "f") and run_name(two) == "rope-s0+devices=2" and run_name(one) == "rope-s0"


@pytest.mark.parametrize("given, says", [(dict(devices=3), "devices = 3 does not divide batch_size = 64"), (dict(devices=0), "devices = 0"),
                                         (dict(devices=2, device="cuda:1"), "devices = 2 with device = 'cuda:1'")])  # fmt: skip
def test_what_cannot_be_shared_is_refused(given, says):
    with pytest.raises(ConfigError, match=says): configure(preset="smoke", **given)


def test_a_full_memory_names_a_smaller_batch(smoke, tmp_path, monkeypatch):
    import torch

    from vitposnb import training

    def full(*args): raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(training, "train_epoch", full)
    with pytest.raises(ConfigError, match="batch_size = 64 does not fit into the memory of cpu; allowed: a smaller one, e.g. batch_size = 32"):
        training.train(configure(preset="smoke", device="cpu", progress=False, runs_dir=str(tmp_path)), smoke)
