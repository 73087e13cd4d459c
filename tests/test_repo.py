"The repository keeps its own rules: generated files are current, requirements are pinned, nothing private or unsafe is committed."
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vitposnb.config import literal_assignments
from vitposnb.docs import readme_is_current, result_rows
from vitposnb.runs import index

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").glob("[!._]*.ipynb"))
CELLS = {path: json.loads(path.read_text())["cells"] for path in NOTEBOOKS}
RUN_NOTEBOOKS = [path for path, cells in CELLS.items() if any("skip_exec: true" in "".join(c["source"]) for c in cells if c["cell_type"] == "raw")]
ENV = {k: v for k, v in os.environ.items() if k not in ("IN_TEST", "MAKEFLAGS", "MAKELEVEL", "PE", "PRESET", "SEED", "ARGS")}


def settings():
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini")
    return parser["DEFAULT"]


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists() or not shutil.which("git"): pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def sources(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for part in ("nbs", "vitposnb")
            for path in sorted((folder / part).rglob("*")) if path.suffix in (".py", ".ipynb") and "checkpoints" not in str(path)}


def nbdev(command: str, folder: Path):
    code = f"from nbdev.{command} import nbdev_{'export' if command == 'doclinks' else 'clean'} as run; run()"
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=ENV, check=True, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path):
    "A copy of what export and clean read and write."
    shutil.copy(ROOT / "settings.ini", tmp_path)
    for part in ("nbs", "vitposnb"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "data_files", ".ipynb_checkpoints"))
    return tmp_path


def test_export_changes_nothing(checkout):
    before = sources(checkout)
    for module in (checkout / "vitposnb").glob("*.py"):
        if module.name != "__init__.py": module.unlink()
    nbdev("doclinks", checkout)
    after = sources(checkout)
    assert sorted(before) == sorted(after)
    assert [name for name in before if before[name] != after[name]] == []


def test_clean_changes_nothing(checkout):
    before = sources(checkout)
    nbdev("clean", checkout)
    after = sources(checkout)
    assert [name for name in before if before[name] != after[name]] == []


def test_readme_is_current(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert readme_is_current(), "README.md differs from nbs/index.ipynb: run `make export`"


def test_readme_links_to_files_that_exist():
    links = re.findall(r"\]\((?!\w+:|#)([^)#]+)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_index_shows_what_the_code_says():
    "Its tables (but for the results, which the next test reads) come out the same when it runs again."
    code = ("import json, pathlib, sys; from execnb.nbio import read_nb; from execnb.shell import CaptureShell; path = pathlib.Path('index.ipynb')\n"
            "nb = read_nb(path); CaptureShell(path).run_all(nb, exc_stop=True)\n"
            "print('\\n', json.dumps([[o.get('data', {}).get('text/markdown') for o in c.get('outputs', [])] for c in nb.cells]))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "nbs", env=ENV, capture_output=True, text=True, check=True)
    fresh = json.loads(done.stdout.splitlines()[-1])
    stored = [[o.get("data", {}).get("text/markdown") for o in c.get("outputs", [])] for c in CELLS[ROOT / "nbs" / "index.ipynb"]]
    results = ["result_rows(" in "".join(c["source"]) for c in CELLS[ROOT / "nbs" / "index.ipynb"]]
    assert sum(map(len, stored)) > 3
    assert [new for new, old, skip in zip(fresh, stored, results, strict=True) if new != old and not skip] == [], "run `make export`"


def test_readme_results_are_those_of_the_files():
    "Runs added later may be missing from the table; whatever is in it must be what a run folder says."
    readme = (ROOT / "README.md").read_text()
    known = {row["run"]: [str(value) for value in row.values()] for row in result_rows(index(ROOT / "runs"))}
    rows = [[c.strip().strip("`") for c in line.strip("| ").split("|")] for line in readme.splitlines() if re.search(r"\| `\w+/\S+-s\d+\S*` \|$", line)]
    assert [row for row in rows if row != known.get(row[-1])] == []
    assert bool(rows) == bool(known)


@pytest.mark.parametrize("path", RUN_NOTEBOOKS, ids=lambda p: p.stem)
def test_run_notebook_has_one_tagged_cell_of_literals(path):
    "Without the tag papermill injects above the defaults, which then win."
    cells = ["".join(c["source"]) for c in CELLS[path] if "parameters" in c["metadata"].get("tags", [])]
    assert len(cells) == 1
    values = literal_assignments(cells[0])
    assert values, "the parameters cell must hold literal assignments only"
    lines = [line for line in cells[0].splitlines() if re.match(r"\w+\s*(:[^=]*)?=", line)]
    assert len(lines) == len(values) and [line for line in lines if "#" not in line] == []


def test_every_tagged_notebook_is_skipped_by_nbdev():
    tagged = [p for p, cells in CELLS.items() if any("parameters" in c["metadata"].get("tags", []) for c in cells)]
    assert tagged == RUN_NOTEBOOKS


def test_clean_keeps_tags():
    assert "tags" in settings()["allowed_cell_metadata_keys"].split()


def test_every_requirement_is_pinned_within_its_range():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [Requirement(text) for key, value in settings().items() if key.endswith("requirements") for text in value.split()]
    assert len(wanted) > 20
    assert [str(r) for r in wanted if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"), prereleases=True)] == []


def test_ruff():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "vitposnb", "tests"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


HOMES = re.compile(r"(?:^|[\s'\"(=:\[`])/(?:root|home|Users|tmp|work|mnt|private|opt|srv)/[\w.-]")


def texts(cell: dict) -> list[str]:
    found = ["".join(cell["source"])]
    for output in cell.get("outputs", []):
        data = {"text/plain": output.get("text", []), **output.get("data", {})}
        found += ["".join(value) for kind, value in data.items() if kind.startswith("text/")]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_has_no_errors_and_no_machine_paths(path):
    outputs = [o for c in CELLS[path] for o in c.get("outputs", [])]
    assert [o for o in outputs if o["output_type"] == "error"] == []
    own = str(ROOT) + "/"
    assert [text[:200] for cell in CELLS[path] for text in texts(cell) if HOMES.search(text) or own in text] == []


def test_machine_paths_are_recognised():
    assert all(HOMES.search(text) for text in ("'/" + "home/me/x'", "saved in /" + "tmp/run", "/" + "Users/me"))
    assert not any(HOMES.search(text) for text in ("runs/opt/x", "https://example.org/home/x", "nbs/srv/x", "a / root / b"))


def test_tracked_files_stay_small():
    assert sum(path.stat().st_size for path in tracked()) < 40e6


def unsafe(code: str) -> list[str]:
    "Where Python code would read or write pickles."
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom): names = [node.module or ""]
        else: names = []
        found += [n for n in names if n.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")]
        if isinstance(node, ast.Call):
            name, flags = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name == "torch.save" or name.endswith(("read_pickle", "to_pickle")): found.append(name)
            if name == "torch.load" and flags.get("weights_only") != "True": found.append(name)
            if flags.get("allow_pickle", "False") != "False": found.append(name)
    return found


def test_no_pickle():
    assert {p.name: unsafe(p.read_text()) for p in (ROOT / "vitposnb").glob("*.py") if unsafe(p.read_text())} == {}
    assert unsafe("import torch\ntorch.load('x', weights_only=True)\nnp.load('x', allow_pickle=False)") == []
    assert len(unsafe("import pickle\ntorch.load('x')\nnp.load('x', allow_pickle=True)\ntorch.save(1, 'x')")) == 4


@pytest.fixture
def make(tmp_path):
    "`make` in an environment that has papermill's name only: it prints what it was asked."
    if not shutil.which("make"): pytest.skip("no make on this machine")
    program = tmp_path / "bin" / "papermill"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor argument in "$@"; do echo "<$argument>"; done\n')
    program.chmod(0o755)
    (tmp_path / ".installed").touch()

    def run(*arguments: str) -> list[str]:
        done = subprocess.run(["make", f"VENV={tmp_path}", *arguments], cwd=ROOT, env=ENV, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()
    return run


def test_make_alone_lists_the_targets(make):
    listed = [line.split()[0] for line in make()[1:]]
    assert {"train", "test", "install", "lab", "export", "docs"} <= set(listed)


def test_make_train_passes_values_as_typed(make):
    typed = make("train", "PE=a b; echo 'x'", "SEED=3", "ARGS=-p epochs 3 -p data 'my folder'")
    options = typed[[line.startswith("<-p>") for line in typed].index(True):]
    assert options == ["<-p>", "<pe>", "<a b; echo 'x'>", "<-p>", "<seed>", "<3>", "<-p>", "<epochs>", "<3>", "<-p>", "<data>", "<my folder>"]
    assert not [line for line in make("train") if line == "<-p>"]
    assert make("train")[1] == "<runs/default-rope-s0.train.ipynb>"
