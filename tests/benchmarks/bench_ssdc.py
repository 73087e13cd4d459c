"""Speed of the geometry measures, as ratios within one run: `python tests/benchmarks/bench_ssdc.py`.

One thread, and processor time instead of the clock on the wall, so that other programs on the machine matter less.
"""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from statistics import median
from time import process_time

import numpy as np
import timm
import torch
from record import record
from scipy.stats import spearmanr

from vitposnb.ranks import midranks
from vitposnb.ssdc import SSDC, target_ranks


def seconds(f):
    start = process_time()
    f()
    return process_time() - start


def spearman(rows=32, repeats=7):
    "Batched midranks and their product with the target, against a loop over scipy; 14 x 14 tokens, half of the rows with many ties."
    target = target_ranks((14, 14))[:, 0]
    values = torch.tanh(torch.randn(rows, len(target), generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3)
    values[::2] = torch.round(values[::2], decimals=2)
    values, distance = torch.round(values, decimals=6), target.numpy()
    ours, scipys, got = [], [], []
    for _ in range(repeats):
        ours.append(seconds(lambda: got.append(midranks(values) @ target / len(target))) / rows)
        scipys.append(seconds(lambda: [spearmanr(v, distance) for v in values[:6].numpy()]) / 6)
    assert np.allclose(got[0], [spearmanr(v, distance).statistic for v in values.numpy()], atol=1e-9)
    ratio = median(scipys) / median(ours)
    print(f"  one row: scipy {median(scipys) * 1e3:.2f} ms, batched {median(ours) * 1e3:.2f} ms")
    record("spearman_batched", f"rows a second of a loop over scipy.stats.spearmanr, {len(target)} pairs", ratio, 8, at_most=False)


def all_layers(images=64, batch=4, per=1000):
    "SSDC of 13 layers with null and bootstrap, for 1,000 images, against their bare forward passes (ViT-S/16, 224 px, random weights)."
    model = timm.create_model("vit_small_patch16_224", pretrained=False).eval()
    layers, taps = len(model.blocks) + 1, []
    x = torch.randn(images, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    measure, forward, update = SSDC((14, 14), layers, num_prefix=1), [], []
    with torch.inference_mode():
        for part in x.split(batch):
            hooks = [model.blocks[0].register_forward_pre_hook(lambda m, a: taps.append(a[0]))]
            hooks += [block.register_forward_hook(lambda m, a, out: taps.append(out)) for block in model.blocks]
            taps.clear()
            model(part)
            for hook in hooks: hook.remove()
            forward.append(seconds(lambda p=part: model(p)) / len(part))
            update.append(seconds(lambda: [measure.update(layer, tap) for layer, tap in enumerate(taps)]) / batch)
    for layer in measure.images: measure.images[layer] = [np.concatenate(measure.images[layer] * (per // images + 1))[:per]]
    finish = seconds(measure.result) / per
    ratio = (median(update) + finish) / median(forward)
    print(f"  one image: forward {median(forward) * 1e3:.1f} ms, update {median(update) * 1e3:.1f} ms, "
          f"null and bootstrap {finish * 1e3:.2f} ms (once for {per} images)")
    record("ssdc_all_layers", "bare forward passes of ViT-S/16 at 224 px, 1,000 images, one tap", ratio, 0.15)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    spearman()
    all_layers()
