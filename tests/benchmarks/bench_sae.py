"""Speed of training a sparse autoencoder, as ratios within one run: `python tests/benchmarks/bench_sae.py`.

One thread and processor time, so that other programs on the machine matter less. The comparison with `overcomplete` (0.3.0, not among the
requirements: `pip install overcomplete` to have it) is left out, with the reason, where it is not installed.
"""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from contextlib import redirect_stdout
from io import StringIO
from statistics import mean, median
from time import process_time

import torch
from record import record
from torch.nn import functional as F

from vitposnb.sae import SAE, Fit, fit_scale
from vitposnb.splice import Quality


def seconds(f):
    start = process_time()
    f()
    return process_time() - start


def step_against_products(D=768, width=3840, k=64, batch=1024, repeats=5):
    "A whole training step against its encoder and decoder products alone, forward and backward."
    x = torch.randn(batch, D, generator=torch.Generator().manual_seed(0))
    sae = SAE(D, width, k)
    fit_scale(sae, x)
    fit = Fit(sae)
    encoder, decoder = (torch.randn(width, D, requires_grad=True) for _ in range(2))

    def products(): F.linear(x, encoder).matmul(decoder).backward(x)

    fit.step(x), products()
    ours, bare = zip(*((seconds(lambda: fit.step(x)), seconds(products)) for _ in range(repeats)), strict=True)
    print(f"  one step of {batch} tokens: {median(ours):.3f} s, its products {median(bare):.3f} s")
    record("sae_step", f"encoder and decoder products, forward and backward, D {D}, width {width}, batch {batch}", median(ours) / median(bare), 2.5)


def against_overcomplete(tokens=200_000, batch=1024, lr=2e-3, seeds=3):
    "The same stream of a default run's size, the same width, k and batch: tokens a second, and FVU on held-out tokens."
    try:
        import matplotlib.cm
        if not hasattr(matplotlib.cm, "get_cmap"): matplotlib.cm.get_cmap = lambda name: matplotlib.colormaps[name]
        from overcomplete.sae import TopKSAE, train_sae
    except ImportError as reason:
        return print(f"  overcomplete: skipped, {reason}")
    D, width, k, data, held_out = 64, 320, 6, activations_of_ape(tokens + 20_000), 20_000
    train, held = data[:tokens // batch * batch], data[-held_out:]
    steps, spent = len(train) // batch, {"ours": [], "overcomplete": [], "unlogged": []}
    fvu, dead = ({"ours": [], "without restarts": [], "overcomplete": []} for _ in range(2))

    def criterion(x, x_hat, pre_codes, codes, dictionary): return (x - x_hat).square().mean()

    def loop(monitoring):
        theirs = TopKSAE(D, width, top_k=k)
        adam = torch.optim.Adam(theirs.parameters(), lr=lr)
        decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda i: min(1.0, 5 * (1 - i / steps)))
        with redirect_stdout(StringIO()):
            return theirs.eval(), seconds(lambda: train_sae(theirs.train(), list(scaled.split(batch)), criterion, adam, decay, nb_epochs=1, monitoring=monitoring))

    for seed in range(seeds):
        sae = SAE(D, width, k, seed=seed)
        fit_scale(sae, train)
        scaled, target = ((v / sae.scale - sae.bias).detach() for v in (train, held))
        fit = Fit(sae, lr, dead_after=held_out)
        spent["ours"].append(seconds(lambda fit=fit: [fit.step(x, min(1.0, 5 * (1 - i / steps))) for i, x in enumerate(train.split(batch))]))
        torch.manual_seed(seed)
        theirs, needed = loop(monitoring=1)
        spent["overcomplete"].append(needed)
        spent["unlogged"].append(loop(monitoring=0)[1])
        plain = SAE(D, width, k, seed=seed)
        fit_scale(plain, train)
        fit = Fit(plain, lr, dead_after=tokens)
        for i, x in enumerate(train.split(batch)): fit.step(x, min(1.0, 5 * (1 - i / steps)))
        for name, one in (("ours", sae), ("without restarts", plain)):
            quality = Quality(one.eval())
            quality.update(held)
            fvu[name].append(quality.result()["fvu"]), dead[name].append(quality.result()["dead"])
        with torch.no_grad(): _, codes, seen = theirs.eval()(target)
        fvu["overcomplete"].append(((target - seen).square().sum() / (target - target.mean(0)).square().sum()).item())
        dead["overcomplete"].append((~(codes > 0).any(0)).float().mean().item())
    for name in fvu: print(f"  {name}: held-out FVU {', '.join(f'{v:.4f}' for v in fvu[name])}; dead {', '.join(f'{v:.3f}' for v in dead[name])}")
    where = f"D {D}, width {width}, k {k}, batch {batch}"
    record("sae_throughput", f"tokens a second of overcomplete's loop as it comes, TopK, {where}", median(spent["overcomplete"]) / median(spent["ours"]), 1.0, at_most=False)
    record("sae_throughput_unlogged", f"the same loop with its logging switched off: like for like, {where}", median(spent["unlogged"]) / median(spent["ours"]), 1.0, at_most=False)
    same = f"held-out FVU of overcomplete's TopK, mean of {seeds} seeds, same data, width, k, {tokens} tokens"
    record("sae_fvu", f"{same}; AuxK and restarts off, which it does not have", mean(fvu["without restarts"]) / mean(fvu["overcomplete"]), 1.05)
    record("sae_fvu_default", f"{same}; ours as it is used, AuxK and restarts on", mean(fvu["ours"]) / mean(fvu["overcomplete"]), 1.05)


def activations_of_ape(tokens):
    "Layer 2 of the committed ape run, training images, in random order."
    from vitposnb.analysis import open_subject
    from vitposnb.config import Analysis, configure
    from vitposnb.data import eval_batches
    from vitposnb.sae import activations
    subject = open_subject(configure(Analysis, run="runs/default/ape-s0", progress=False))
    n = -(-tokens // 49)
    batches = eval_batches(subject.images.x_train[:n], subject.images.y_train[:n], subject.images, subject.config, "cpu", 250)
    x = torch.cat([a.flatten(0, 1) for a in activations(subject.model, batches, 2)])
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))][:tokens]


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step_against_products()
    against_overcomplete()
