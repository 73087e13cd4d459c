"""Cost of the probes against scikit-learn, within one run: `python tests/benchmarks/bench_probe.py`.

One thread, processor time. Needs the committed run default/rope-s0.
"""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from statistics import median
from time import process_time

import numpy as np
import torch
from record import record
from sklearn.linear_model import LogisticRegression

from vitposnb.activations import collect
from vitposnb.analysis import open_subject
from vitposnb.config import Geometry, project_root
from vitposnb.permutation import RandomOrders
from vitposnb.probe import fit_probes


def probes_against_sklearn(images=1000, slack=0.005):
    "All layers and three targets, with the choice of weight decay and pass; then with the ten Latin controls too."
    subject = open_subject(Geometry(run=str(project_root() / "runs/default/rope-s0"), images=images, progress=False))
    acts = collect(subject.model, subject.batches(images), RandomOrders(subject.vit.grid, seed=0))

    def ours(controls):
        start = process_time()
        probes = fit_probes(acts, controls=controls)
        return process_time() - start, probes

    runs = [(ours(0), ours(5)) for _ in range(3)]
    bare, full, probes = median(r[0][0] for r in runs), median(r[1][0] for r in runs), runs[0][0][1]
    hits, N, theirs, behind = probes.hits(acts), acts.grid[0] * acts.grid[1], 0.0, []
    labels = dict(row=np.arange(N) // acts.grid[1], col=np.arange(N) % acts.grid[1], index=np.arange(N))
    for a, layer in enumerate(acts.layers):
        x = ((acts.x[a] - probes.mean[a]) / probes.sd[a]).numpy()
        train, test = (x[probes.split[k]].reshape(-1, x.shape[2]) for k in ("train", "test"))
        for target, label in labels.items():
            y = np.tile(label, len(probes.split["train"]))
            start = process_time()
            model = LogisticRegression(max_iter=1000).fit(train, y)
            theirs += process_time() - start
            accuracy = model.score(test, np.tile(label, len(probes.split["test"])))
            mine = hits[target][a].double().mean().item()
            behind.append(accuracy - mine)
            print(f"  layer {layer} {target}: scikit-learn {accuracy:.4f}, ours {mine:.4f}")
    assert max(behind) < slack, f"a probe is {max(behind):.4f} behind scikit-learn"
    print(f"  scikit-learn {theirs:.1f} s for {len(behind)} fits; ours {bare:.2f} s, with the Latin controls {full:.2f} s")
    record("probes_all_layers", "LogisticRegression per layer and target, 3 targets, 5 layers, accuracy within half a point", bare / theirs, 0.05)
    record("probes_with_controls", "the same fits of LogisticRegression, without controls", full / theirs, 0.05)


if __name__ == "__main__":
    torch.set_num_threads(1)
    probes_against_sklearn()
