"Encodings of the user's own: exact symmetries, matched starts, interventions, training, saving, and one-line refusals."

import json
import os
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from conftest import ROOT
from torch import nn

from vitposnb.analysis import read_table
from vitposnb.config import CONDITIONS, ENCODINGS, REGISTERED, ConfigError, config_hash, configure, run_encodings
from vitposnb.encoding import attach, register
from vitposnb.heads import attention_maps, blocked_attention
from vitposnb.intervention import random_attention, scaled_positions, without
from vitposnb.model import build_model, describe
from vitposnb.permutation import RandomOrders, permutation
from vitposnb.rotary import rotary_table
from vitposnb.runs import RunError, load_model, verify
from vitposnb.training import make_optimizer, train

TEXT = '''
import torch
from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat
from torch import nn
from vitposnb.encoding import register

class RotaryValues(nn.Module):
    def __init__(self, cfg, grid):
        super().__init__()
        axial = RotaryEmbeddingCat(cfg.embed_dim // cfg.num_heads, temperature=cfg.rope_temperature, feat_shape=grid, in_pixels=False)
        self.register_buffer("table", axial.get_embed(), persistent=False)

    def turn(self, x, direction=1):
        sin, cos = self.table.chunk(2, -1)
        return apply_rot_embed_cat(x, torch.cat([direction * sin, cos], -1))

    def qkv(self, q, k, v, block): return self.turn(q), self.turn(k), self.turn(v)
    def output(self, x, block): return self.turn(x, -1)

class DistanceBias(nn.Module):
    def __init__(self, cfg, grid):
        super().__init__()
        place = torch.cartesian_prod(*(torch.arange(float(n)) for n in grid))
        self.register_buffer("distance", torch.cdist(place, place, compute_mode="donot_use_mm_for_euclid_dist"), persistent=False)
        start = 2.0 ** (-8 * torch.arange(1, cfg.num_heads + 1) / cfg.num_heads)
        self.slopes = nn.Parameter(start.repeat(cfg.depth, 1))

    def bias(self, block): return -self.slopes[block, :, None, None] * self.distance

class RandomTable(nn.Module):
    def __init__(self, cfg, grid):
        super().__init__()
        self.table = nn.Parameter(torch.randn(grid[0] * grid[1], cfg.embed_dim))

    def tokens(self, x): return x + self.table

register("test-values", "rotary on queries, keys, values", RotaryValues)
register("test-distance", "distance times a learned slope", DistanceBias)
register("test-table", "a random table", RandomTable)
'''
OWN = ("test-values", "test-distance", "test-table")
RELATIVE = OWN[:2]
SMOKE = dict(preset="smoke", progress=False, device="cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    "The three encodings, registered from a file and forgotten afterwards."
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(TEXT)
    known = [dict(d) for d in (CONDITIONS, ENCODINGS, REGISTERED)]
    run_encodings(str(path))
    yield path
    for d, before in zip((CONDITIONS, ENCODINGS, REGISTERED), known, strict=True):
        d.clear()
        d.update(before)


def model_of(pe):
    "At random weights, with attention that matters more than at the start of training."
    model = build_model(configure(**SMOKE, pe=pe, seed=3)).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= 5
            block.attn.proj.weight *= 5
    return model


def forget(model):
    "The same model with zero angles, slopes or table."
    model, table = deepcopy(model), getattr(model.encoding, "table", None)
    with torch.no_grad():
        for p in model.encoding.parameters():
            p.zero_()
        if not isinstance(table, nn.Parameter) and table is not None:
            half = table.shape[-1] // 2
            model.encoding.table[:, :half], model.encoding.table[:, half:] = 0, 1
    return model


@pytest.fixture
def x():
    return torch.randn(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pe", RELATIVE)
def test_logits_of_equal_contents_depend_on_the_displacement_only(file, pe):
    "Of equal patch tokens, the softmax ratios among patches are those of the displacements: a naive loop over all pairs."
    model = model_of(pe)
    with torch.no_grad(), attention_maps(model, 0) as maps:
        model(torch.ones(1, 1, 28, 28))
    log = maps[0][0, :, 1:, 1:].double().log()
    log = log - log.diagonal(dim1=1, dim2=2)[..., None]
    seen, spread = {}, 0.0
    for i in range(49):
        for j in range(49):
            seen.setdefault((i // 7 - j // 7, i % 7 - j % 7), []).append(log[:, i, j])
    for values in seen.values():
        values = torch.stack(values)
        spread = max(spread, (values - values[0]).abs().max().item())
    assert len(seen) == 13 * 13
    assert spread < 1e-5 < 1e-3 < log.abs().max()


def shifted(pe, by):
    "The model on a window of a larger grid, `by` (rows, columns) from its corner."
    model, cfg = model_of(pe), configure(**SMOKE, pe=pe)
    size = (7 + by[0], 7 + by[1])
    window = torch.arange(size[0] * size[1]).reshape(size)[by[0] :, by[1] :].flatten()
    for name, value in REGISTERED[pe].build(cfg, size).named_buffers():
        setattr(model.encoding, name, value[window][:, window] if name == "distance" else value[window])
    return model


def patches_alone(model, x):
    "What the patches hold at the end when they never read the class token."
    with torch.no_grad(), blocked_attention(model, "patches", "prefix"):
        return model.forward_features(x)[:, 1:]


@pytest.mark.parametrize("pe", RELATIVE)
def test_without_prefix_tokens_all_coordinates_can_be_shifted(file, pe, x):
    "A relative encoding is blind to where the grid begins; through the class token, which reads turned values, rotary values are not."
    plain, moved, none = model_of(pe), shifted(pe, (2, 5)), model_of("none")
    change = (patches_alone(plain, x) - patches_alone(moved, x)).abs().max()
    assert change < 1e-4 < 1e-2 < (patches_alone(plain, x) - patches_alone(none, x)).abs().max()
    with torch.no_grad():
        assert ((plain(x) - moved(x)).abs().max() > 1e-2) == (pe == "test-values")
    assert (pe != "test-values") or not torch.allclose(plain.encoding.table, moved.encoding.table, atol=0.1)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_start_is_matched_with_every_built_in_condition(file, seed):
    "Blocks, tokens and head are the same at one seed, although an encoding draws random numbers of its own."
    shared = build_model(configure(**SMOKE, pe="none", seed=seed)).state_dict()
    for pe in [*OWN, "rope", "ape", "test-table-rpt", "test-table-fixed"]:
        model = build_model(configure(**SMOKE, pe=pe, seed=seed))
        state = model.state_dict()
        assert all(torch.equal(state[k], v) for k, v in shared.items()), pe
        own = [n for n, _ in model.named_parameters() if n.startswith("encoding.")]
        assert own == {"test-distance": ["encoding.slopes"], "test-table": ["encoding.table"]}.get(configure(pe=pe).pe, [])
    a, b = (build_model(configure(**SMOKE, pe="test-table", seed=s)).encoding.table for s in (seed, seed + 1))
    assert torch.equal(a, build_model(configure(**SMOKE, pe="test-table", seed=seed)).encoding.table) and not torch.equal(a, b)


@pytest.mark.parametrize("pe", OWN)
def test_zero_rotation_bias_or_table_is_the_model_without_positions(file, pe, x):
    none, model = model_of("none"), model_of(pe)
    with torch.no_grad():
        assert torch.equal(forget(model)(x), none(x)) and (model(x) - none(x)).abs().max() > 1e-4


@pytest.mark.parametrize("pe", OWN)
def test_interventions_act_and_leave_exactly(file, pe, x):
    model, info = model_of(pe), describe(model_of(pe))
    opened = [
        lambda: permutation(model, RandomOrders(info.grid)),
        lambda: without(model, 0, "attn"),
        lambda: without(model, 1, "mlp"),
        lambda: random_attention(model, 0),
        lambda: blocked_attention(model, "class", "patches"),
    ]
    with torch.no_grad():
        before = model(x)
        for intervene in opened:
            with intervene():
                assert (model(x) - before).abs().max() > 1e-3
            assert torch.equal(model(x), before)
    with pytest.raises(ValueError, match="not applicable: .* registered encoding"), scaled_positions(model, 0.5):
        pass
    with pytest.raises(TypeError, match="not applicable: .* is a registered encoding"):
        rotary_table(model)
    assert not info.additive and not info.rotary


def test_permuted_patches_are_seen_in_their_slots(file, x):
    "A permutation moves contents and leaves positions: the class logits are those of the permuted image."
    order = torch.randperm(49, generator=torch.Generator().manual_seed(1))
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(6, 1, 49, 4, 4)[:, :, order]
    image = patches.reshape(6, 1, 7, 7, 4, 4).permute(0, 1, 2, 4, 3, 5).reshape(6, 1, 28, 28)
    for pe in OWN:
        model = model_of(pe)
        with torch.no_grad():
            with permutation(model, order):
                permuted = model(x)
            assert torch.allclose(permuted, model(image), atol=1e-5)


@pytest.mark.parametrize("pe", OWN)
def test_fused_and_unfused_attention_agree(file, pe, x):
    model, found = model_of(pe), []
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
        model.zero_grad()
        logits = model(x)
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad for n, p in model.named_parameters() if n.startswith("encoding."))])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4) and a.abs().max() > 0


@pytest.mark.parametrize("pe", OWN)
def test_half_precision_is_the_same_model(file, pe, x):
    model = model_of(pe)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = model(x)
    with torch.no_grad():
        assert torch.allclose(half.float(), model(x), atol=0.05)


def test_the_bias_is_added_to_the_logits_of_patches_only(file, x):
    "Against the plain formula: the maps of the first block with bias are those without, times exp(bias), renormalised."
    model = model_of("test-distance")
    with torch.no_grad(), attention_maps(model, 0) as a:
        model(x)
    with torch.no_grad(), attention_maps(none := model_of("none"), 0) as b:
        none(x)
    weight = torch.ones(2, 50, 50)
    for i in range(49):
        for j in range(49):
            distance = ((i // 7 - j // 7) ** 2 + (i % 7 - j % 7) ** 2) ** 0.5
            weight[:, i + 1, j + 1] = torch.exp(-distance * torch.tensor([2.0**-4, 2.0**-8]))
    expected = b[0] * weight
    assert torch.allclose(a[0], expected / expected.sum(-1, keepdim=True), atol=1e-6)


def test_its_parameters_are_not_decayed(file):
    model = build_model(cfg := configure(**SMOKE, pe="test-table"))
    group = next(g for g in make_optimizer(model, cfg).param_groups if any(p is model.encoding.table for p in g["params"]))
    assert group["weight_decay"] == 0


@pytest.fixture(scope="module")
def runs(file, smoke, tmp_path_factory):
    "One epoch on 128 images for each variant."
    small = dict(train_images=256, epochs=1, warmup_epochs=0, checkpoints=0, runs_dir=str(tmp_path_factory.mktemp("runs")))
    names = ("test-distance", "test-distance-rpt", "test-values-fixed")
    return {pe: train(configure(**SMOKE, **small, pe=pe), smoke) for pe in names}


def test_variants_train_and_are_saved_with_their_text(runs, file):
    for pe, run in runs.items():
        result = json.loads((run / "result.json").read_text())
        assert result["condition"] == pe and 0 < result["test_top1"] < 1
        assert "encoding.py" in verify(run, weights=True)["files"] and (run / "encoding.py").read_text() == TEXT.strip() + "\n"
    start = torch.tensor([2.0**-4, 2.0**-8]).repeat(2, 1)
    slopes = {pe: load_model(run)[0].encoding.slopes.detach() for pe, run in runs.items() if "distance" in pe}
    assert all(not torch.equal(s, start) for s in slopes.values()) and not torch.equal(*slopes.values())
    assert torch.equal(load_model(runs["test-distance"], trained=False)[0].encoding.slopes, start)
    fixed = load_model(runs["test-values-fixed"])[0].patch_embed.order
    assert sorted(fixed.tolist()) == list(range(49)) != fixed.tolist()


OPEN = """
import sys, torch
from pathlib import Path
from vitposnb.config import run_encodings
from vitposnb.runs import RunError, load_model
run = Path(sys.argv[1])
try: load_model(run)
except RunError as reason: print(reason)
run_encodings(str(run / "encoding.py"))
print(load_model(run)[0](torch.ones(1, 1, 28, 28)).detach().double().sum().item())
"""


def test_another_process_opens_a_run_once_it_knows_the_encoding(runs):
    run = runs["test-distance-rpt"]
    done = subprocess.run([sys.executable, "-c", OPEN, str(run)], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    refusal, total = done.stdout.splitlines() or [done.stderr, ""]
    assert "'test-distance', which must be registered first" in refusal and str(run / "encoding.py") in refusal
    assert float(total) == pytest.approx(load_model(run)[0](torch.ones(1, 1, 28, 28)).detach().double().sum().item(), rel=1e-5)


def test_another_text_is_another_run(runs, smoke, file, tmp_path, monkeypatch):
    cfg = configure(**SMOKE, pe="test-distance")
    before, none = config_hash(cfg, "f"), config_hash(configure(**SMOKE, pe="none"), "f")
    assert config_hash(cfg, "f") == before
    edited = tmp_path / "edited.py"
    edited.write_text(TEXT.replace("-8 *", "-4 *"))
    with pytest.raises(ConfigError, match="was registered with another text before"):
        run_encodings(str(edited))
    assert config_hash(cfg, "f") == before
    for d in (CONDITIONS, ENCODINGS, REGISTERED):
        for key in [k for k in d if k.startswith("test-")]:
            monkeypatch.delitem(d, key)
    run_encodings(str(edited))
    assert len({before, none, config_hash(cfg, "f")}) == 3 and config_hash(configure(**SMOKE, pe="none"), "f") == none
    with pytest.raises(RunError, match="another encoding that was also named 'test-distance'"):
        load_model(runs["test-distance"])
    with pytest.raises(RunError, match="another configuration"):
        train(configure(**SMOKE, pe="test-distance", train_images=256, epochs=1, warmup_epochs=0, checkpoints=0,
                        runs_dir=str(runs["test-distance"].parents[1])), smoke)  # fmt: skip


class Good(nn.Module):
    "An encoding that register( would take."

    def __init__(self, cfg, grid):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def tokens(self, x):
        return x + self.bias


class Idle(nn.Module):
    def __init__(self, cfg, grid):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))


class Shrinks(Good):
    def tokens(self, x):
        return x[:, 1:]


class Whole(Good):
    def tokens(self, x):
        return x.long()


class Infinite(Good):
    def tokens(self, x):
        return x / 0


class Single(Good):
    def qkv(self, q, k, v, block):
        return q


class LateError(Good):
    def output(self, x, block):
        return x * [1.0][block]


class NoModule:
    def __init__(self, cfg, grid):
        pass

    def tokens(self, x):
        return x


@pytest.mark.parametrize("name", ["rope", "none", "ape-rpt", "ape-frozen", "rpt", "frozen"])
def test_names_of_the_library_are_refused(name):
    known = dict(CONDITIONS), dict(ENCODINGS)
    with pytest.raises(ConfigError, match="allowed"):
        register(name, "mine", Good)
    assert (CONDITIONS, ENCODINGS) == known


@pytest.mark.parametrize("name", ["Mine", "my encoding", "mine-rpt", "mine-fixed", "", "-x", "my_encoding", "../x"])
def test_names_that_make_no_condition_are_refused(name):
    with pytest.raises(ConfigError, match="name = .* is not allowed; allowed: lower case"):
        register(name, "mine", Good)


BAD = [
    (Idle, "does nothing; allowed: at least one of the methods tokens, qkv, bias, output"),
    (Shrinks, r"tokens returns \[\(2, 48, 64\)\]; allowed: \(2, 49, 64\)"),
    (Whole, "tokens returns no finite floating point"),
    (Infinite, "tokens returns no finite floating point"),
    (Single, r"qkv returns \[\(2, 4, 49, 16\)\]"),
    (LateError, "output stops with IndexError"),
    (NoModule, "is a NoModule; allowed: a torch.nn.Module"),
    (lambda cfg: Good, "cannot be built: TypeError"),
    (nn.Identity, "does not register it"),
    ("Good", "is built by a str"),
]


@pytest.mark.parametrize("build, says", BAD, ids=[getattr(b, "__name__", "text") for b, _ in BAD])
def test_wrong_interfaces_are_refused_in_one_line(build, says):
    known = dict(CONDITIONS), dict(ENCODINGS), dict(REGISTERED)
    with pytest.raises(ConfigError, match=says) as error:
        register("test-bad", "wrong", build)
    assert "\n" not in str(error.value) and (CONDITIONS, ENCODINGS, REGISTERED) == known


def test_a_parameter_named_like_a_method_is_none(x):
    none, model = model_of("none"), model_of("none")
    attach(model, Good(None, None))
    with torch.no_grad():
        assert torch.equal(model(x), none(x))


FILES = [
    ("missing.py", None, "is not an existing .py file"),
    ("notes.txt", TEXT, "is not an existing .py file"),
    ("broken.py", "def f(:\n", "stops with SyntaxError"),
    ("raises.py", "import no_such_module_here\n", "stops with ModuleNotFoundError: No module named 'no_such_module_here'"),
    ("two_lines.py", "raise ValueError('first\\nsecond')\n", "stops with ValueError: first second"),
    ("clash.py", TEXT.replace("test-values", "rope"), "name = 'rope' is taken by the library"),
]


@pytest.mark.parametrize("name, text, says", FILES, ids=[f[0] for f in FILES])
def test_a_file_that_cannot_be_used_is_refused_in_one_line(name, text, says, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        configure(encodings=str(tmp_path / name))
    assert "\n" not in str(error.value) and "allowed" in str(error.value)


def test_an_unknown_encoding_points_to_the_tutorial():
    with pytest.raises(ConfigError, match=r"once it is registered \(https://.*new_encoding"):
        configure(pe="test-unheard-of")


@pytest.mark.slow
def test_geometry_reads_a_run_of_a_registered_encoding(runs, run_notebook):
    "In a kernel of its own, which knows the encoding from the run's folder alone."
    run = runs["test-distance"]
    few = dict(images="60", permutations="2", permutation_images="20", relabelings="19", resamples="100", batch_size="60")
    run_notebook("geometry", run=str(run), encodings=str(run / "encoding.py"), device="cpu", progress="false", **few)
    table = read_table(next(run.glob("geometry*")))
    assert set(table["condition"]) == {"test-distance"} and {"trained", "untrained"} <= set(table["weights"].dropna())
    rho = table[table["metric"] == "rho"]
    assert len(rho) and rho["value"].notna().all()
