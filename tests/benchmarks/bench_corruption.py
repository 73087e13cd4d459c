"""Clean and ten corrupted versions of the test images, against eleven bare forward passes over prepared tensors in the same run.

    python tests/benchmarks/bench_corruption.py

Five JPEG qualities (encoding included) and five blurs. Processor time of all threads, so that neither other programs on the machine
nor the overlap of corrupting with computing flatters the ratio.
"""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from statistics import median
from time import process_time

import numpy as np
import timm
import torch
from record import record
from tqdm import trange

from vitposnb.config import configure, project_root
from vitposnb.corruption import primary_families, severity_grid
from vitposnb.data import eval_batches, load_images
from vitposnb.fragility import correct_table
from vitposnb.runs import load_model
from vitposnb.training import predict

LIMIT = 1.25


def ratio(model, x, y, mean, std, cfg, batch_size, rounds):
    grid, size = severity_grid(list(primary_families(cfg.img_size).values())), cfg.img_size
    prepared, ratios = list(eval_batches(x, y, (mean, std), cfg, "cpu", batch_size)), []
    for _ in trange(rounds, desc=f"{size} pixels"):
        start = process_time()
        for _ in range(1 + len(grid)): logits, labels = predict(model, prepared)
        middle = process_time()
        table = correct_table(model, x, y, mean, std, grid, batch_size=batch_size, size=size)
        ratios.append((process_time() - middle) / (middle - start))
    assert (table[:, 0] == (logits.argmax(1) == labels).numpy()).all()
    return median(ratios)


def main():
    torch.set_num_threads(1)
    images = load_images(configure(progress=False))
    model, cfg, _ = load_model(project_root() / "runs" / "default" / "rope-s0")
    small = ratio(model, images.x_test[:500], images.y_test[:500], images.mean, images.std, cfg, 250, 3)
    record("corrupted_28", "bare forward passes, default/rope-s0, clean + 10 versions of 500 test images at 28 px", small, LIMIT)
    x = np.random.default_rng(0).integers(0, 256, (4, 224, 224, 3)).astype(np.uint8)
    model, cfg = timm.create_model("vit_small_patch16_224", pretrained=False).eval(), configure(preset="imagenette", pe="ape")
    large = ratio(model, x, np.zeros(4, np.int64), (0.5,) * 3, (0.25,) * 3, cfg, 4, 3)
    record("corrupted_224", "bare forward passes of ViT-S/16, clean + 10 versions of noise images at 224 px (the worst case for JPEG)", large, LIMIT)


if __name__ == "__main__":
    main()
