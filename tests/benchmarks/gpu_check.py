"""One GPU, under five minutes: is it right, and how fast is it?

    python tests/benchmarks/gpu_check.py            # writes runs/bench/gpu.csv
    python tests/benchmarks/gpu_check.py --tiny     # the same path at tiny size on the CPU; writes nothing

Right: logits, SSDC and the losses of a few training steps equal those of the CPU, and no training step waits for the device.
Fast: images a second of training ViT-S/16 at 224 px (bf16, eager and compiled), its share of the card's measured matrix peak,
SSDC of all layers and a sweep over all heads, each against bare forward passes.
"""

import argparse
import platform
import sys
import time
import warnings

import numpy as np
import pandas as pd
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitposnb.config import configure, project_root
from vitposnb.data import ImageSet, eval_batches
from vitposnb.model import build_model, taps
from vitposnb.runs import replacing
from vitposnb.ssdc import SSDC
from vitposnb.training import Progress, make_optimizer, train_epoch

TOLERANCES = {"logits, float32": 1e-3, "logits, bf16 over their spread": 0.05, "SSDC, float32": 1e-4, "losses of 10 steps, float32": 1e-3}


def synthetic(n: int, side: int, classes: int) -> ImageSet:
    "Smooth random pictures in the memory of an ImageSet: no decoding is timed."
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.integers(0, 255, (n, 3, 8, 8)).astype(np.float32))
    x = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear").permute(0, 2, 3, 1).byte().numpy()
    y = rng.integers(0, classes, n)
    return ImageSet("synthetic", "random", [str(c) for c in range(classes)], x, y, x[:64], y[:64], x, y, (0.5,) * 3, (0.25,) * 3, "none", [])


def timed(device: torch.device, work, repeats: int = 3) -> float:
    "Best seconds of several calls, after one to warm up, the device waited for."
    def once():
        start = time.perf_counter()
        work()
        if device.type == "cuda": torch.cuda.synchronize(device)
        return time.perf_counter() - start
    once()
    return min(once() for _ in range(repeats))


def matrix_peak(device: torch.device, n: int) -> float:
    "TFLOP/s of one large bf16 product."
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 10 * 2 * n**3 / timed(device, lambda: [a @ b for _ in range(10)]) / 1e12


def first(images: ImageSet, n: int, **kw) -> ImageSet:
    "The same with n training images."
    return ImageSet(**{**images.__dict__, "x_train": images.x_train[:n], "y_train": images.y_train[:n], "kept": {}, **kw})


def waits(model, images, cfg, device, count: int) -> int:
    "How often an epoch of `count` steps waits for the device."
    few = first(images, count * cfg.batch_size, kept=images.kept)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_epoch(model, make_optimizer(model, cfg), few, cfg, device, Progress(), [None])
    finally: torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


def steps(cfg, images, device, count: int, model=None):
    "The losses of `count` steps, and the model."
    model = model or build_model(cfg, len(images.classes)).to(device)
    losses, optimizer = [], make_optimizer(model, cfg)
    model.train()
    for k in range(count):
        progress = Progress(step=k)
        short = cfg.__class__(**{**cfg.__dict__, "epochs": 1, "warmup_epochs": 0.0})
        train_epoch(model, optimizer, first(images, (k + 1) * cfg.batch_size), short, device, progress, [None])
        losses.append(progress.sums[0])
    return torch.tensor(losses), model


@torch.inference_mode()
def compare(cfg, images, device) -> dict:
    "The largest differences between the device and the CPU."
    cpu, x = torch.device("cpu"), next(eval_batches(images.x_test[:16], images.y_test[:16], images, cfg, "cpu"))[0]
    model = build_model(cfg, len(images.classes)).eval()
    found = {}
    grid = tuple(model.patch_embed.grid_size)
    for where in (cpu, device):
        model.to(where)
        ssdc = SSDC(grid, cfg.depth + 1)
        with taps(model) as tap:
            logits = model(x.to(where))
            for layer in range(cfg.depth + 1): ssdc.update(layer, tap.patches(layer))
        with torch.autocast(where.type, torch.bfloat16): rounded = model(x.to(where)).float()
        found[where] = logits.cpu(), rounded.cpu(), torch.as_tensor(np.array(ssdc.per_image()))
    (a, _, s), (b, r, t) = found[cpu], found[device]
    return {"logits, float32": (a - b).abs().max().item(), "logits, bf16 over their spread": ((a - r).abs().max() / a.std()).item(),
            "SSDC, float32": (s - t).abs().max().item()}


@torch.inference_mode()
def head_sweep(model, x, device) -> float:
    "Seconds for every head of every block switched off in turn, over bare passes of the same number."
    heads = model.blocks[0].attn.num_heads

    def all_heads():
        for block in model.blocks:
            for h in range(heads):
                def off(module, args, h=h):
                    y = args[0].clone()
                    y.view(*y.shape[:2], heads, -1)[:, :, h] = 0
                    return (y,)
                handle = block.attn.proj.register_forward_pre_hook(off)
                try: model(x)
                finally: handle.remove()
    bare = timed(device, lambda: [model(x) for _ in range(heads * len(model.blocks))], 1)
    return timed(device, all_heads, 1) / bare


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="dry run on the CPU")
    tiny, begin = parser.parse_args().tiny, time.perf_counter()
    if not tiny and not torch.cuda.is_available(): sys.exit("no GPU here: nothing is measured (--tiny tries the script on the CPU)")
    device = torch.device("cpu" if tiny else "cuda")
    torch.set_float32_matmul_precision("highest")
    size = dict(img_size=32, cache_size=40, embed_dim=32, depth=2, num_heads=2, batch_size=8) if tiny else dict(batch_size=256)
    cfg = configure(preset="imagenette", pe="rope", epochs=1, warmup_epochs=0, val_images=64, **size)
    images = synthetic(64 if tiny else 256 * 30, cfg.cache_size, 10)
    rows, failed = [], []

    def note(name, value, unit, limit=None):
        holds = "" if limit is None else value <= limit
        if holds is False: failed.append(name)
        rows.append(dict(name=name, value=value, unit=unit, limit=limit, holds=holds))
        print(f"{time.perf_counter() - begin:6.1f} s  {name}: {value:.4g} {unit}" + ("" if limit is None else f" (allowed {limit:g}): {'holds' if holds else 'FAILS'}"))

    for name, value in compare(cfg, images, device).items(): note(name, value, "largest difference to the CPU", TOLERANCES[name])
    exact = cfg.__class__(**{**cfg.__dict__, "precision": "float32", "batch_size": 8})
    count = 2 if tiny else 10
    losses = [steps(exact, images, d, count)[0] for d in (torch.device("cpu"), device)]
    note("losses of 10 steps, float32", (losses[0] - losses[1]).abs().max().item(), "largest difference to the CPU", TOLERANCES["losses of 10 steps, float32"])

    peak = matrix_peak(device, 128 if tiny else 8192)
    note("matrix product, bf16", peak, "TFLOP/s")
    model = build_model(cfg, 10).to(device)
    with FlopCounterMode(display=False) as counter: model(torch.zeros(1, 3, cfg.img_size, cfg.img_size, device=device)).sum().backward()
    flops = counter.get_total_flops()
    batches = len(images.y_train) // cfg.batch_size
    for name, compiled in (("train ViT-S/16 at 224 px", False), ("train ViT-S/16 at 224 px, compiled", True)):
        if compiled and tiny: continue
        called, optimizer = torch.compile(model) if compiled else model, make_optimizer(model, cfg)
        model.train()
        train_epoch(called, optimizer, images, cfg, device, Progress(step=max(0, batches - 5)), [None])
        seconds = timed(device, lambda c=called, o=optimizer: train_epoch(c, o, images, cfg, device, Progress(), [None]), 1)
        speed = batches * cfg.batch_size / seconds
        note(name, speed, "images/s")
        note(f"{name}: share of the matrix peak", speed * flops / 1e12 / peak, "of 1")
    if device.type == "cuda":
        more = waits(model, images, cfg, device, 24) - waits(model, images, cfg, device, 12)
        note("waits for the device in 12 more steps", more, "(logging is every 50)", 0)

    model.eval()
    x = next(eval_batches(images.x_test[:8 if tiny else 256], images.y_test[:8 if tiny else 256], images, cfg, device))[0]

    @torch.inference_mode()
    def forward(): model(x)

    @torch.inference_mode()
    def measured():
        ssdc = SSDC(tuple(model.patch_embed.grid_size), cfg.depth + 1)
        with taps(model) as tap:
            model(x)
            for layer in range(cfg.depth + 1): ssdc.update(layer, tap.patches(layer))

    bare = timed(device, forward)
    note("forward, float32", len(x) / bare, "images/s")
    note("SSDC of all layers", timed(device, measured) / bare, "of bare forward passes")
    note("sweep over all heads", head_sweep(model, x[:2 if tiny else 64], device), "of bare forward passes")
    card = "CPU, tiny" if tiny else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, timm {timm.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    table = pd.DataFrame(rows).assign(device=card, versions=versions)
    if not tiny:
        path = project_root() / "runs" / "bench" / "gpu.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary: table.to_csv(temporary, index=False, float_format="%.5g")
    print(f"{card}, {versions}: {time.perf_counter() - begin:.0f} s, {'FAILED: ' + ', '.join(failed) if failed else 'all within the tolerances'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
