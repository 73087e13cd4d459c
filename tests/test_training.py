"Same seed, same bytes; resumed equals uninterrupted; nothing half-written is read."

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, read_json
from safetensors.torch import load_file

from vitposnb import runs
from vitposnb.config import ConfigError, config_hash, configure, run_path
from vitposnb.data import train_batches
from vitposnb.runs import RunError, find_runs, index, load_model, partial_path, verify
from vitposnb.training import TrainingDiverged, checkpoint_dir, pick_device, train

SMOKE = dict(preset="smoke", progress=False)


def weights(run):
    return verify(run, weights=True)["files"]["model.safetensors"]


def steady(run):
    "The metrics without the clock."
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("condition", ["none", "ape", "sincos", "rope", "ape-rpt", "rope-fixed", "rope-mixed"])
def test_every_condition_trains_twice_to_the_same_bytes(condition, smoke, tmp_path):
    a, b = (train(configure(pe=condition, runs_dir=str(tmp_path / d), **SMOKE), smoke) for d in "ab")
    assert weights(a) == weights(b) and steady(a) == steady(b)
    result = read_json(a / "result.json")
    assert {"preset", "condition", "seed", "epochs", "params", "val_top1", "test_top1", "train_seconds", "images_per_second", "threads",
            "device"} <= set(result)  # fmt: skip
    assert result["condition"] == condition and 0 <= result["test_top1"] <= 1


def test_everything_on_at_once_also_repeats(smoke, tmp_path):
    extra = dict(dropout=0.1, drop_path=0.1, ema=0.9, precision="bf16", permute_scope="batch", crop="resized", global_pool="avg")
    a, b = (train(configure(pe="ape-rpt", runs_dir=str(tmp_path / d), **extra, **SMOKE), smoke) for d in "ab")
    assert weights(a) == weights(b)


def test_conditions_see_the_same_batches(smoke):
    streams = [list(train_batches(smoke, configure(pe=pe, **SMOKE), 1, torch.device("cpu"))) for pe in ("none", "rope", "ape-rpt")]
    for batches in zip(*streams, strict=True):
        assert all(torch.equal(x, batches[0][0]) and torch.equal(y, batches[0][1]) for x, y in batches)


KILLED = dict(preset="smoke", progress=False, pe="ape-rpt", epochs=2, ema=0.9, drop_path=0.1, batch_size=2, save_minutes=0.01)
TRAIN = f"""
import sys
from vitposnb.config import configure
from vitposnb.training import train
train(configure(runs_dir=sys.argv[1], **{KILLED}))
"""


def test_killed_in_mid_epoch_and_resumed_equals_uninterrupted(smoke, tmp_path):
    "A real kill -9 after a state in the middle of an epoch was written."
    whole = train(configure(runs_dir=str(tmp_path / "whole"), **KILLED), smoke)
    cfg = configure(runs_dir=str(tmp_path / "killed"), **KILLED)
    path = run_path(cfg)
    state = partial_path(path) / "state.json"
    process = subprocess.Popen([sys.executable, "-c", TRAIN, str(tmp_path / "killed")], cwd=ROOT, env=os.environ)
    while process.poll() is None and not (state.exists() and read_json(state)["step"] > 0):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = read_json(state)
    assert saved["step"] > 0 and saved["sums"][0] > 0 and not path.exists()
    train(cfg, smoke)
    assert weights(whole) == weights(path) and steady(whole) == steady(path)
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "manifest.json", "metrics.jsonl", "model.safetensors", "result.json"]


def test_killed_while_finishing_leaves_a_folder_that_completes(smoke, tmp_path, monkeypatch):
    cfg = configure(runs_dir=str(tmp_path), **SMOKE)
    path = run_path(cfg)
    with monkeypatch.context() as patch:
        patch.setattr(runs.os, "replace", lambda a, b: os.rename(a, b) if b != path else (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(cfg, smoke)
    assert (partial_path(path) / "manifest.json").exists() and not path.exists() and not find_runs(tmp_path)
    assert verify(train(cfg, smoke), weights=True) and len(find_runs(tmp_path)) == 1


def test_a_machine_without_git_finishes_its_run(smoke, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert verify(train(configure(runs_dir=str(tmp_path), **SMOKE), smoke))["git_commit"] is None


def test_weights_that_cannot_be_restored_are_not_put_back(smoke, tmp_path):
    cfg = configure(runs_dir=str(tmp_path), **SMOKE)
    run = train(cfg, smoke)
    (run / "model.safetensors").unlink()
    manifest = read_json(run / "manifest.json")
    manifest["files"]["model.safetensors"] = "0" * 64
    (run / "manifest.json").write_text(json.dumps(manifest))
    for _ in range(2):
        with pytest.raises(RunError, match="the weights trained here differ"):
            train(cfg, smoke)
    assert not (run / "model.safetensors").exists() and len(find_runs(tmp_path)) == 1


def test_training_puts_threads_and_random_state_back(smoke, tmp_path):
    torch.manual_seed(7)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train(configure(runs_dir=str(tmp_path), dropout=0.1, **{**SMOKE, "threads": threads + 1}), smoke)
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads


def test_a_finished_run_is_a_no_op_that_says_so(smoke, tmp_path, capsys):
    cfg = configure(runs_dir=str(tmp_path), **SMOKE)
    run = train(cfg, smoke)
    before = {p.name: p.stat().st_mtime_ns for p in run.iterdir()}
    assert train(cfg, smoke) == run and "complete already" in capsys.readouterr().out
    assert before == {p.name: p.stat().st_mtime_ns for p in run.iterdir()}


def test_lost_weights_are_restored_to_the_same_bytes(smoke, tmp_path, capsys):
    cfg = configure(runs_dir=str(tmp_path), **SMOKE)
    run = train(cfg, smoke)
    expected = weights(run)
    (run / "model.safetensors").unlink()
    assert len(index(tmp_path)) == 1
    with pytest.raises(RunError, match="train it again"):
        load_model(run)
    train(cfg, smoke)
    assert weights(run) == expected and len(find_runs(tmp_path)) == 1


def test_damaged_and_foreign_folders_are_refused_by_name(smoke, tmp_path):
    cfg = configure(runs_dir=str(tmp_path), **SMOKE)
    run = train(cfg, smoke)
    other = dataclasses.replace(smoke, fingerprint="of other images")
    with pytest.raises(RunError, match="rope-s0 holds a run of another configuration or other data"):
        train(cfg, other)
    for name in ("result.json", "config.json", "metrics.jsonl", "model.safetensors", "manifest.json"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(RunError, match="rope-s0 is damaged"):
            train(cfg, smoke)
        (run / name).write_bytes(content)
    assert train(cfg, smoke) == run


def test_a_run_in_the_making_belongs_to_one_process(smoke, tmp_path):
    from filelock import FileLock

    cfg = configure(runs_dir=str(tmp_path), **SMOKE)
    path = run_path(cfg)
    path.parent.mkdir(parents=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        with pytest.raises(RunError, match="being written by another process"):
            train(cfg, smoke)
    assert train(cfg, smoke) == path


def test_work_in_progress_of_another_identity_is_not_continued(smoke, tmp_path):
    cfg = configure(runs_dir=str(tmp_path), **SMOKE)
    partial = partial_path(run_path(cfg))
    partial.mkdir(parents=True)
    (partial / "state-identity").write_text("something else")
    with pytest.raises(RunError, match="begun with another configuration"):
        train(cfg, smoke)


def test_divergence_stops_and_keeps_the_last_good_state(smoke, tmp_path, monkeypatch):
    from vitposnb import training

    cfg = configure(runs_dir=str(tmp_path), **{**SMOKE, "batch_size": 4, "epochs": 3})
    real, schedule = training.lr_at, lambda step, total, warm, peak: float("nan") if step >= 64 else real(step, total, warm, peak)
    monkeypatch.setattr(training, "lr_at", schedule)
    with pytest.raises(TrainingDiverged, match="the loss is nan in epoch 2"):
        train(cfg, smoke)
    partial = partial_path(run_path(cfg))
    saved = read_json(partial / "state.json")
    assert saved["epoch"] == 1 and all(v.isfinite().all() for v in load_file(partial / saved["file"]).values())
    monkeypatch.setattr(training, "lr_at", real)
    assert verify(train(cfg, smoke))


def test_checkpoints_along_training_end_in_the_final_weights(smoke, tmp_path):
    from vitposnb.runs import checkpoint_files

    cfg = configure(runs_dir=str(tmp_path), epochs=4, **{**SMOKE, "checkpoints": 2})
    run = train(cfg, smoke)
    files = checkpoint_files(checkpoint_dir(config_hash(cfg, smoke.fingerprint)))
    assert list(files) == [2, 4]
    final, last = load_file(run / "model.safetensors"), load_file(files[4])
    assert all(torch.equal(v, last[k]) for k, v in final.items())
    assert any(not torch.equal(v, load_file(files[2])[k]) for k, v in final.items())


def test_loaded_model_scores_what_the_run_says(smoke, tmp_path):
    from vitposnb.data import eval_batches
    from vitposnb.training import predict, score

    for pe in ("sincos", "rope-fixed"):
        run = train(configure(pe=pe, runs_dir=str(tmp_path), **SMOKE), smoke)
        model, cfg, _ = load_model(run)
        top1 = score(*predict(model, eval_batches(smoke.x_test, smoke.y_test, smoke, cfg, torch.device("cpu"), 77)))["top1"]
        assert top1 == read_json(run / "result.json")["test_top1"]


@pytest.mark.slow
def test_a_compiled_model_trains(smoke, tmp_path):
    pytest.importorskip("torch._inductor")
    from shutil import which

    if not which("g++"):
        pytest.skip("torch.compile needs a C++ compiler")
    run = train(configure(pe="ape-rpt", compile=True, runs_dir=str(tmp_path), **SMOKE), smoke)
    plain = train(configure(pe="ape-rpt", runs_dir=str(tmp_path), **SMOKE), smoke)
    a, b = (steady(r)[-1]["train_loss"] for r in (run, plain))
    assert a == pytest.approx(b, abs=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the message where there is no GPU")
def test_a_missing_gpu_is_named():
    with pytest.raises(ConfigError, match="device = 'cuda' is not there; allowed here: auto, cpu"):
        pick_device("cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_trains(smoke, tmp_path):
    for precision in ("float32", "bf16"):
        run = train(configure(device="cuda", precision=precision, runs_dir=str(tmp_path), **SMOKE), smoke)
        assert read_json(run / "result.json")["device"] == "cuda"
