"The sparse autoencoder: planted dictionaries, exact files, independence of batch mates, errors, and what splicing does to a model."

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from vitposnb.config import configure
from vitposnb.data import eval_batches
from vitposnb.model import build_model, describe, taps
from vitposnb.permutation import RandomOrders
from vitposnb.sae import KINDS, SAE, Fit, activations, fit_scale, folded, load_sae, save_sae, shuffled, train_saes
from vitposnb.splice import Quality, changed, splice_gate, spliced


def atoms(n=64, D=32, seed=1): return F.normalize(torch.randn(n, D, generator=torch.Generator().manual_seed(seed)), dim=1)


def planted(epoch, k=4, n=20_000, size=9.0, shift=3.0):
    g = torch.Generator().manual_seed(epoch)
    chosen = torch.rand(n, 64, generator=g).topk(k).indices
    yield shift + size * torch.zeros(n, 64).scatter(1, chosen, 0.5 + torch.rand(n, k, generator=g)) @ atoms()


@pytest.fixture(scope="module", params=KINDS)
def trained(request):
    return train_saes([SAE(32, 64, 4, request.param)], planted, tokens=400_000, lr=5e-3, progress=False)[0]


def test_a_planted_dictionary_is_found_again(trained):
    "Also in data with a mean and a scale; random directions reach no such cosine."
    assert (trained.decoder @ atoms().T).amax(0).mean() >= 0.95
    assert (SAE(32, 64, 4, seed=7).decoder @ atoms().T).amax(0).mean() < 0.7


def test_saved_and_loaded_gives_the_same_codes(trained, tmp_path):
    save_sae(trained, tmp_path / "a.safetensors")
    again, x = load_sae(tmp_path / "a.safetensors"), next(planted(99, n=300))
    assert torch.equal(again.encode(x), trained.encode(x)) and (again.k, again.kind, again.prefix) == (trained.k, trained.kind, trained.prefix)
    save_sae(again, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@torch.no_grad()
def test_a_token_does_not_depend_on_its_batch_mates(trained):
    x = next(planted(98, n=200))
    together, alone = trained.encode(x), torch.cat([trained.encode(x[i:i + 1]) for i in range(200)])
    assert torch.equal(together > 0, alone > 0) and torch.allclose(together, alone, rtol=0, atol=1e-5)
    assert torch.allclose(trained.encode(torch.cat([x[:3], 50 * x])[:3]), together[:3], rtol=0, atol=1e-5)


@torch.no_grad()
def test_folding_the_scale_changes_no_reconstruction(trained):
    x = next(planted(97, n=500))
    assert trained.scale > 1.5 and folded(trained).scale == 1
    assert ((folded(trained)(x) - trained(x)).norm(dim=1) / x.norm(dim=1)).max() <= 1e-5


def test_every_step_keeps_decoder_norms_at_1_even_when_latents_restart():
    sae, x = SAE(32, 256, 3), next(planted(0))
    fit_scale(sae, x)
    fit, before = Fit(sae, dead_after=1000), sae.decoder.detach().clone()
    quiet = []
    for part in x.split(500):
        fit.step(part)
        quiet.append(int((fit.quiet > 2000).sum()))
        assert torch.allclose(sae.decoder.norm(dim=1), torch.ones(256), rtol=0, atol=1e-6)
    assert not torch.allclose(before, sae.decoder) and quiet[-1] == 0


def test_training_is_deterministic_and_a_twin_on_the_same_stream_changes_nothing():
    def make(n): return train_saes([SAE(32, 64, 4, seed=s) for s in range(n)], planted, tokens=20_000, progress=False)[0].state_dict()
    a, b = make(1), make(2)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_batchtopk_keeps_k_on_average_and_its_threshold(tmp_path):
    sae, = train_saes([SAE(32, 64, 4, "batchtopk")], planted, tokens=200_000, lr=5e-3, progress=False)
    active = (sae.encode(next(planted(96, n=2000))) > 0).sum(1).float()
    assert active.mean() == pytest.approx(4, abs=0.6) and sae.threshold > 0


@pytest.mark.parametrize("spoil, why", [(lambda x: x * float("nan"), "NaN"), (lambda x: x * 0, "all zero"), (lambda x: x * 0 + 5, "constant"),
                                        (lambda x: x[:, :7], "allowed: .n, 32."), (lambda x: x * float("inf"), "NaN or infinite")])
def test_what_cannot_be_encoded_is_refused(spoil, why):
    with pytest.raises(ValueError, match=why):
        train_saes([SAE(32, 64, 4)], lambda epoch: [spoil(next(planted(0, n=3000)))], tokens=2000, progress=False)


def test_nan_that_comes_late_and_an_empty_stream_are_refused():
    def late(epoch):
        yield next(planted(0, n=40_000))
        yield next(planted(1, n=40_000)) * float("nan")
    with pytest.raises(ValueError, match="NaN"):
        train_saes([SAE(32, 64, 4)], late, tokens=80_000, batch=500, capacity=2000, progress=False)
    with pytest.raises(ValueError, match="no activations"): train_saes([SAE(32, 64, 4)], lambda epoch: [], tokens=2000, progress=False)
    for wrong, text in ((dict(k=65), "allowed: 1 to 64"), (dict(k=0), "allowed: 1 to 64"), (dict(k=4, kind="relu"), "allowed: topk")):
        with pytest.raises(ValueError, match=text): SAE(32, 64, **wrong)


def test_the_shuffle_buffer_gives_each_token_once_in_another_order():
    x = torch.arange(5000.0)[:, None]
    out = torch.cat(list(shuffled(iter(x.split(70)), 100, 900)))[:, 0]
    assert len(out) == 5000 and torch.equal(out.sort().values, x[:, 0]) and np.corrcoef(out[:500], x[:500, 0])[0, 1] < 0.9
    assert all(len(b) == 100 for b in shuffled(iter(x.split(333)), 100, 50))


@pytest.fixture(scope="module")
def model(smoke):
    return build_model(configure(preset="smoke", pe="ape", ape_init=1.0)).eval()


def batches(smoke, n=60, size=20):
    return list(eval_batches(smoke.x_test[:n], smoke.y_test[:n], smoke, configure(preset="smoke"), "cpu", size))


def test_streamed_activations_are_the_residual_stream(smoke, model):
    info = describe(model)
    for layer in range(info.depth + 1):
        for prefix in (False, True):
            got = torch.cat(list(activations(model, batches(smoke), layer, RandomOrders((7, 7), 2), prefix)))
            with torch.no_grad(), taps(model) as t:
                from vitposnb.permutation import permutation
                with permutation(model, RandomOrders((7, 7), 2)):
                    whole = torch.cat([(model(x), t.raw[layer])[1] for x, _ in batches(smoke)])
            assert torch.equal(got, whole if prefix else whole[:, info.num_prefix:])
    with pytest.raises(ValueError, match="layer 3 is outside the model; allowed: 0 to 2"): next(activations(model, batches(smoke), 3))
    with pytest.raises(ValueError, match="allowed: 0 to 2"): changed(model, -1, lambda x: x).__enter__()


@torch.no_grad()
@pytest.mark.parametrize("prefix", [False, True])
def test_splicing_with_the_error_added_back_changes_nothing(smoke, model, prefix):
    sae, = train_saes([SAE(32, 160, 3, prefix=prefix)], lambda e: activations(model, batches(smoke), 1, prefix=prefix), tokens=20_000, progress=False)
    x = batches(smoke)[0][0]
    intact = model(x)
    with spliced(model, 1, sae, error=True): assert (model(x) - intact).abs().max() <= 1e-5
    with spliced(model, 1, sae), taps(model, [1]) as t:
        assert (model(x) - intact).abs().max() > 1e-3
        with taps(model, [0]): own = t.raw[1]
    stream = next(activations(model, [x], 1, prefix=True))
    assert torch.equal(own[:, 0], stream[:, 0]) == (not prefix)
    assert torch.equal(model(x), intact)


@torch.no_grad()
def test_quality_is_what_its_definition_says(trained):
    x = next(planted(95, n=3000))
    quality = Quality(trained)
    for part in x.split(700): quality.update(part)
    found, z = quality.result(), trained.encode(x)
    assert found["fvu"] == pytest.approx(((x - trained(x)).double().square().sum() / (x - x.mean(0)).double().square().sum()).item(), rel=1e-4)
    assert found["l0"] == pytest.approx((z > 0).sum(1).float().mean().item()) and found["dead"] == (~(z > 0).any(0)).float().mean().item()
    with pytest.raises(ValueError, match="constant"):
        quality = Quality(trained)
        quality.update(x[:1].expand(50, -1))
        quality.result()


def test_the_gate_closes_above_two_points():
    assert splice_gate(0.80, 0.785)[0] and splice_gate(0.80, 0.81)[0] and not splice_gate(0.80, 0.775)[0]
    assert "2.5 points" in splice_gate(0.80, 0.775)[1]
