"""A sweep over every block and head against as many full forward passes (one intact, one for each head).

    python tests/benchmarks/bench_heads.py

The promise: at most (L + 1) / (2 L) of them plus five points, L blocks. Both are timed in turn, several times, in processor time on one thread, and the median ratio counts.
"""

import statistics
import time

import torch
from record import record

from vitposnb.analysis import open_subject
from vitposnb.config import Analysis, configure
from vitposnb.heads import head_changes, sweep


@torch.inference_mode()
def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main():
    torch.set_num_threads(1)
    subject = open_subject(configure(Analysis, run="runs/default/rope-s0", progress=False))
    model, L = subject.model, subject.vit.depth
    x, _ = next(iter(subject.batches(250)))
    for part in ("rotations", "output"):
        changes = head_changes(model, part)
        full, swept = (lambda c=changes: [model(x) for _ in range(len(c) + 1)]), (lambda c=changes: list(sweep(model, x, c)))
        seconds(full), seconds(swept)
        ratios = [seconds(swept) / seconds(full) for _ in range(7)]
        record(f"head_sweep_{part}", f"{len(changes) + 1} full forward passes of default/rope-s0, 250 images", statistics.median(ratios), (L + 1) / (2 * L) + 0.05)


if __name__ == "__main__":
    main()
