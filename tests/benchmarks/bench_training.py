"""Our training loop against a bare one: same model, same tensors in memory, forward, backward and optimizer step only.

    python tests/benchmarks/bench_training.py

Both loops run in turn in one process, thirty steps each, and the ratio is the median over the rounds.
"""

import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from record import record
from tqdm import trange

from vitposnb.config import configure
from vitposnb.data import load_images, steps_per_epoch, train_batches
from vitposnb.model import build_model
from vitposnb.training import Progress, make_optimizer, train_epoch

STEPS, ROUNDS, LIMIT = 30, 8, 1.10


def bare(model, optimizer, batches):
    for x, y in batches:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    cfg, cpu = configure(pe="rope"), torch.device("cpu")
    images = load_images(cfg)
    batches = list(itertools.islice(train_batches(images, cfg, 0, cpu), STEPS))
    model = build_model(cfg)
    optimizer = make_optimizer(model, cfg)
    last = steps_per_epoch(images, cfg) - STEPS
    ratios = []
    for _ in trange(ROUNDS, desc="rounds"):
        start = time.process_time()
        bare(model, optimizer, batches)
        middle = time.process_time()
        train_epoch(model, optimizer, images, cfg, cpu, Progress(step=last), [None])
        ratios.append((time.process_time() - middle) / (middle - start))
    record("training loop", "bare loop, same model and tensors (steps only: no validation, no saving)", statistics.median(ratios), LIMIT)


if __name__ == "__main__":
    main()
