"What arrives from a command line must become the right type, or one line that says what is allowed."

import ast
import dataclasses
import re

import nbformat
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from papermill.cli import _resolve_type

import vitposnb.config as config
from vitposnb.config import CONDITIONS, PRESETS, ConfigError, TrainConfig, check, config_hash, configure, parse_condition, run_name


def typed(**raw):
    "A configuration from text, as papermill's `-p` delivers it."
    return configure(**{k: _resolve_type(v) for k, v in raw.items()})


@pytest.mark.parametrize("text", ["none", "None", "NONE", "nOnE"])
def test_none_is_a_condition(text):
    assert typed(pe=text).pe == "none"


@pytest.mark.parametrize("text", ["ROPE", "rope", " Rope "])
def test_case_does_not_matter(text):
    assert typed(pe=text).pe == "rope"


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_condition_resolves_to_its_own_name(condition):
    cfg = configure(pe=condition)
    assert config.condition(cfg) == condition
    assert run_name(cfg) == f"{condition}-s0"
    assert configure(pe=cfg.pe, permute=cfg.permute) == cfg


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_allowed_and_names_no_override(preset):
    cfg = configure(preset=preset)
    assert run_name(cfg) == "rope-s0"
    assert check(cfg) == cfg


def test_numbers_keep_their_type():
    cfg = typed(lr="1e-3", epochs="003", seed="001", ape_init="1", flip="False")
    assert (cfg.lr, cfg.epochs, cfg.seed, cfg.ape_init, cfg.flip) == (1e-3, 3, 1, 1.0, False)
    assert type(cfg.epochs) is int and type(cfg.ape_init) is float and cfg.flip is False


@pytest.mark.parametrize("word", ["false", "False", "no", "off"])
def test_a_word_for_false_is_false(word):
    assert typed(flip=word).flip is False


WRONG = [
    (dict(pe="ropee"), "pe = 'ropee'", "did you mean 'rope'"),
    (dict(per="rope"), "per is not a parameter", "did you mean 'pe'"),
    (dict(epochs="ten"), "epochs = 'ten'", "a whole number from 1"),
    (dict(epochs="-3"), "epochs = -3", "a whole number from 1"),
    (dict(epochs="2.5"), "epochs = 2.5", "a whole number"),
    (dict(preset="defualt"), "preset = 'defualt'", "did you mean 'default'"),
    (dict(seed="1.5"), "seed = 1.5", "a whole number from 0"),
    (dict(seed="True"), "seed = True", "a whole number"),
    (dict(batch_size="0"), "batch_size = 0", "from 1"),
    (dict(data="./nowhere"), "data = './nowhere'", "an existing path"),
    (dict(data="cifar01"), "data = 'cifar01'", "did you mean 'cifar10'"),
    (dict(data="001"), "data = 1", "text"),
    (dict(embed_dim="72", num_heads="12"), "embed_dim = 72", "head width divisible by 4"),
    (dict(embed_dim="66"), "num_heads = 4 does not divide embed_dim = 66", "a divisor"),
    (dict(patch_size="5"), "patch_size = 5", "a divisor"),
    (dict(lr="nan"), "lr = nan", "a number from"),
    (dict(lr="0"), "lr = 0", "a number from"),
    (dict(flip="maybe"), "flip = 'maybe'", "true or false"),
    (dict(flip="1"), "flip = 1", "true or false"),
    (dict(permute="randon"), "permute = 'randon'", "did you mean 'random'"),
    (dict(pe="rope-rpt", permute="fixed"), "permute = 'fixed'", "contradicts"),
    (dict(pe="none", permute="random"), "permute = 'random'", "no positions"),
    (dict(device="gpu"), "device = 'gpu'", "auto, cpu, cuda"),
    (dict(crop="resize"), "crop = 'resize'", "did you mean 'resized'"),
    (dict(cache_size="32"), "cache_size = 32", "crop = resized"),
    (dict(warmup_epochs="10"), "warmup_epochs = 10", "under 10"),
    (dict(class_list="no.txt"), "class_list = 'no.txt'", "a text file"),
    (dict(in_chans="2"), "in_chans = 2", "1 (grey) or 3 (RGB)"),
    (dict(precision="fp16"), "precision = 'fp16'", "float32, bf16"),
    (dict(threads="0"), "threads = 0", "from 1"),
]


@pytest.mark.parametrize("raw, names, allows", WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_parameters_are_refused_in_one_line(raw, names, allows):
    with pytest.raises(ConfigError) as error:
        typed(**raw)
    message = str(error.value)
    assert names in message and allows in message and "\n" not in message


def test_the_run_name_holds_what_differs_and_nothing_else(tmp_path):
    assert run_name(configure(pe="ape", ape_init=1.0)) == "ape-s0+ape_init=1.0"
    assert run_name(configure(pe="ape", device="cpu", runs_dir="x", checkpoints=3)) == "ape-s0"
    (tmp_path / "photos").mkdir()
    assert run_name(configure(pe="ape", data=str(tmp_path / "photos"))) == "ape-s0+data=photos"
    (tmp_path / "cifar10").mkdir()
    assert run_name(configure(preset="cifar10", data=str(tmp_path / "cifar10"))) == "rope-s0"


@pytest.mark.parametrize("name", config.SCIENTIFIC)
def test_every_scientific_field_enters_the_hash(name):
    cfg = TrainConfig()
    value = getattr(cfg, name)
    other = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else value + "x"
    assert config_hash(dataclasses.replace(cfg, **{name: other}), "f") != config_hash(cfg, "f")


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(config.Execution)])
def test_no_field_of_execution_enters_the_hash(name):
    assert config_hash(dataclasses.replace(TrainConfig(), **{name: "other"}), "f") == config_hash(TrainConfig(), "f")


@given(st.text(max_size=12))
def test_any_text_is_a_condition_or_a_config_error(text):
    try:
        assert parse_condition(text)[0] in config.ENCODINGS
    except ConfigError as error:
        assert "allowed" in str(error)


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2)))
def test_coerce_gives_the_type_or_refuses(value):
    for kind in (int, float, bool, str):
        try:
            assert type(config.coerce("epochs" if kind is int else "free", kind, value)) is kind
        except ConfigError:
            pass


def test_train_notebook_offers_every_field_with_its_comment():
    cell = next(c for c in nbformat.read(ROOT / "nbs/train.ipynb", 4).cells if "parameters" in c.metadata.get("tags", []))
    offered = {n.target.id: ast.literal_eval(n.value) for n in ast.parse(cell.source).body}
    source = (ROOT / "vitposnb/config.py").read_text()
    assert set(offered) == {f.name for f in dataclasses.fields(TrainConfig)}
    assert configure(**offered) == configure()
    for name in offered:
        comment = re.search(rf"^    {name}: \w+ = [^#]*# (.*)$", source, re.M).group(1)
        assert re.search(rf"^{name}: \w+ = .*# {re.escape(comment)}$", cell.source, re.M), name
