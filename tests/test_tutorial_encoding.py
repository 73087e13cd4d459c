"The encodings that the tutorial adds, taken from its cells: against timm's rope, and against a loop over tokens."

import json
from copy import deepcopy

import pytest
import torch
from conftest import ROOT

from vitposnb.config import CONDITIONS, ENCODINGS, REGISTERED, configure
from vitposnb.docs import notebook_facts
from vitposnb.model import build_model, taps

OWN = ["rotary-values", "distance-bias"]
PAGE = ROOT / "nbs" / "new_encoding.ipynb"
TEXT = {name: next(s for c in json.loads(PAGE.read_text())["cells"] if c["cell_type"] == "code"
                   for s in ["".join(c["source"])] if f'register("{name}"' in s) for name in OWN}


@pytest.fixture(autouse=True)
def as_before():
    "Registered names are forgotten after each test."
    kept = [(d, dict(d)) for d in (REGISTERED, ENCODINGS, CONDITIONS)]
    yield
    for now, then in kept:
        now.clear()
        now.update(then)


@pytest.fixture
def own(tmp_path):
    "The tutorial's encodings, from files that hold nothing but its cells."
    files = {name: tmp_path / f"{name}.py" for name in OWN}
    for name, file in files.items():
        file.write_text(TEXT[name])
        configure(encodings=str(file))
    return files


def model_of(pe, noise=0.1, **kw):
    "A model whose weights are far from their start, the encoding's own included."
    model = build_model(configure(pe=pe, **kw)).eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters(): p += noise * torch.randn(p.shape, generator=generator)
    return model


def images(n=4, seed=0): return torch.randn(n, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


def place(grid): return torch.cartesian_prod(*(torch.arange(n) for n in grid))


def test_rotary_values_without_values_is_timms_rope(own):
    mine, rope, x = model_of("rotary-values"), model_of("rope"), images()
    with torch.no_grad():
        assert not torch.allclose(mine(x), rope(x), atol=1e-3)
        turn = mine.encoding.turn
        mine.encoding.qkv = lambda q, k, v, block: (turn(q), turn(k), v)
        mine.encoding.output = lambda out, block: out
        assert torch.allclose(mine(x), rope(x), atol=1e-6)


@pytest.mark.parametrize("pe", OWN)
def test_attention_against_a_naive_loop(own, pe):
    model, x = model_of(pe), images(1)
    with torch.no_grad(), taps(model) as t:
        model(x)
        h, attn, encoding = t.normed[1][0].double(), deepcopy(model.blocks[1].attn).double(), deepcopy(model.encoding).double()
        for module in attn.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        q, k, v = attn.qkv(h).reshape(50, 3, 4, 16).permute(1, 2, 0, 3)
        out = torch.zeros(50, 64, dtype=torch.float64)
        cos, sin = (encoding.table[:, 16:], encoding.table[:, :16]) if pe == "rotary-values" else (torch.ones(49, 16), torch.zeros(49, 16))

        def turned(vector, i, sign=1):
            if i == 0: return vector
            z = torch.complex(vector[0::2], vector[1::2]) * torch.complex(cos[i - 1, 0::2].double(), sign * sin[i - 1, 0::2].double())
            return torch.stack([z.real, z.imag], -1).flatten()

        for head in range(4):
            for i in range(50):
                scores = torch.stack([turned(q[head, i], i) @ turned(k[head, j], j) / 4 for j in range(50)])
                if pe == "distance-bias" and i:
                    scores[1:] -= encoding.slopes[1, head] * (place((7, 7)) - place((7, 7))[i - 1]).double().norm(dim=1)
                read = sum(w * turned(v[head, j], j) for j, w in enumerate(scores.softmax(0)))
                out[i, 16 * head : 16 * head + 16] = turned(read, i, -1)
        seen = []
        with_hooks = model.blocks[1].attn.register_forward_hook(lambda module, args, y: seen.append(y[0]))
        model(x)
        with_hooks.remove()
    assert torch.allclose(seen[0].double(), attn.proj(out), atol=1e-4)


def test_the_tutorial_is_among_the_pages_to_run():
    assert notebook_facts(PAGE)["section"] == "Run it yourself"
