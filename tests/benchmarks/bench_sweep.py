"""The alpha sweep over clean and ten corrupted versions of the test images, against as many bare forward passes over prepared tensors.

    python tests/benchmarks/bench_sweep.py

Twelve alphas, corrupting and scaling included. Processor time of all threads, so that neither other programs on the machine nor the
overlap of corrupting with computing flatters the ratio.
"""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from statistics import median
from time import process_time

import torch
from record import record
from tqdm import trange

from vitposnb.config import configure, project_root
from vitposnb.corruption import primary_families, severity_grid
from vitposnb.data import eval_batches, load_images
from vitposnb.fragility import correct_by_state
from vitposnb.intervention import ALPHAS, scaled_positions
from vitposnb.runs import load_model
from vitposnb.training import predict

LIMIT = 1.1


def ratio(run, images, n, rounds):
    model, cfg, _ = load_model(project_root() / "runs" / "default" / run)
    x, y, grid = images.x_test[:n], images.y_test[:n], severity_grid(list(primary_families(cfg.img_size).values()))
    states = {a: lambda a=a: scaled_positions(model, a) for a in ALPHAS}
    prepared, ratios = list(eval_batches(x, y, images, cfg, "cpu", 100)), []
    for _ in trange(rounds, desc=run):
        start = process_time()
        for _ in range(len(ALPHAS) * (1 + len(grid))): logits, labels = predict(model, prepared)
        middle = process_time()
        correct = correct_by_state(states, x, y, images.mean, images.std, grid, batch_size=100)
        ratios.append((process_time() - middle) / (middle - start))
    assert (correct[1.0][:, 0] == (logits.argmax(1) == labels).numpy()).all()
    return median(ratios)


def main():
    torch.set_num_threads(1)
    images = load_images(configure(progress=False))
    found = ratio("ape-s0", images, 100, 3)
    record("alpha_sweep", "bare forward passes, default/ape-s0, 12 alphas x (clean + 10 versions) of 100 test images at 28 px", found, LIMIT)


if __name__ == "__main__":
    main()
