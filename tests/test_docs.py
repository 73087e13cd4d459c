"The site: built once, then read as a browser without a network would."
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

from vitposnb.config import TrainConfig
from vitposnb.docs import notebooks
from vitposnb.reference import field_comments

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not find_spec("sphinx"), reason="the site needs the extra `docs`")


class Page(HTMLParser):
    "What a page refers to and what can be referred to in it."

    def __init__(self, path: Path):
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.ids, self.links, self.needs = set(), [], []
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[k] for k in ("id", "name") if given.get(k)}
        if tag == "a" and "href" in given: self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source", "video") and given.get("src"): self.needs.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "shortcut icon"): self.needs.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The folder of the site, built in a process of its own and once for all workers."
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ: shared = shared.parent
    code = "import sys; from vitposnb.docs import build_site; build_site(sys.argv[1])"
    with FileLock(shared / "site.lock"):
        if not (shared / "site").exists():
            done = subprocess.run([sys.executable, "-c", code, str(shared / "site")], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-6000:]
    return shared / "site"


@pytest.fixture(scope="module")
def pages(site):
    return {path.name: Page(path) for path in site.glob("*.html")}


@pytest.fixture(scope="module")
def facts():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return notebooks()


def test_every_notebook_has_a_page_in_the_contents(pages, facts):
    assert {f"{f['page']}.html" for f in facts} <= set(pages)
    landing = set(pages["index.html"].links)
    assert [f["page"] for f in facts if f["section"] and f"{f['page']}.html" not in landing] == []


def test_pages_are_named_without_numbers(facts):
    assert [name for name, count in Counter(f["page"] for f in facts).items() if count > 1] == []
    assert [f["page"] for f in facts if re.match(r"\d", f["page"])] == []


def test_every_public_symbol_has_a_heading(pages, facts):
    missing = []
    for fact in facts:
        module = ROOT / "vitposnb" / f"{fact['page']}.py"
        if fact["section"] != "How it works" or not module.exists(): continue
        names = re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", module.read_text(), re.M)
        shown = set(re.findall(r"<h\d>(\w+)<", pages[f"{fact['page']}.html"].text))
        missing += [f"{fact['page']}.{name}" for name in names if name not in shown]
    assert missing == []


def test_parameter_tables_hold_every_field_with_its_comment(pages):
    text = re.sub(r"<[^>]+>", "", pages["config.html"].text).replace("’", "'")
    for name, comment in field_comments(TrainConfig).items():
        assert comment and name in text
        assert comment.split("`")[0].replace("<", "&lt;")[:40] in text, name


def test_nothing_hidden_is_shown(pages):
    for name, page in pages.items():
        if name == "docs.html": continue
        assert "#| " not in page.text and "show_doc(" not in page.text and "default_exp" not in page.text, name


def test_internal_links_resolve(site, pages):
    broken = []
    for name, page in pages.items():
        for link in page.links + page.needs:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc: continue
            target = unquote(parts.path) or name
            if not (site / target).exists(): broken.append((name, link))
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids | {""}: broken.append((name, link))
    assert broken == []


def test_pages_need_no_network(site, pages):
    outside = [(name, url) for name, page in pages.items() for url in page.needs if urlsplit(url).scheme not in ("", "data")]
    styles = [p.name for p in site.rglob("*.css") if re.search(r"@import[^;]*//|url\(['\"]?(?:https?:)?//", p.read_text(encoding="utf-8", errors="ignore"))]
    assert outside == [] and styles == []


def test_maths_is_bundled(site, pages):
    with_maths = [page for page in pages.values() if 'class="math' in page.text]
    assert with_maths, "no page has a formula: this test would see nothing"
    for page in with_maths:
        script = next(url for url in page.needs if "mathjax" in url)
        assert (site / urlsplit(script).path).stat().st_size > 100_000
    assert list((site / "_static" / "mathjax").rglob("*.woff"))


def test_a_warning_of_sphinx_stops_the_build(tmp_path):
    code = ("import sys, vitposnb.docs as d; d.notebooks = lambda f=d.notebooks: [n for n in f() if not n['section']]; d.build_site(sys.argv[1])")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True)
    assert "RuntimeError: Sphinx warned" in done.stderr and not (tmp_path / "out").exists()
