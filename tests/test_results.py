"Results pages read files only: figures come back byte for byte, published figures have a source, agreement is counted by hand."
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

from vitposnb.planted import planted
from vitposnb.redraw import FIGURES, rebuild, redraw
from vitposnb.results import agreement, counterpart, finding, published, side_by_side
from vitposnb.rules import COLUMNS, KINDS, read_study
from vitposnb.runs import RunError, verify

RUN = ROOT / "runs/default/rope-s0"


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(RUN, tmp_path / "default" / RUN.name, ignore=shutil.ignore_patterns("*.safetensors")))


def contents(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_everything_is_drawn_again_byte_for_byte(copy, tmp_path):
    before = contents(copy)
    drawn = [name for name in before if "/" in name and name.endswith((".svg", ".png"))]
    assert drawn
    for name in drawn: (copy / name).unlink()
    found = rebuild(tmp_path)
    assert sorted(found["changed"]) == sorted(f"default/{RUN.name}/{name}" for name in drawn)
    assert contents(copy) == before
    index, claims = pd.read_csv(tmp_path / "index.csv"), pd.read_csv(tmp_path / "claims.csv")
    assert index["run"].tolist() == [f"default/{RUN.name}"] and index["test_top1"][0] == json.loads((RUN / "result.json").read_text())["test_top1"]
    assert list(claims.columns) == list(COLUMNS) and set(claims["verdict"]) == {"not testable"}


def test_every_committed_figure_has_a_function():
    for manifest in (ROOT / "runs").glob("[!.]*/[!.]*/[!.]*/manifest.json"):
        content = json.loads(manifest.read_text())
        names = {name.rsplit(".", 1)[0] for name in content["files"] if name.endswith(".svg")}
        assert names <= set(FIGURES.get(content["kind"], {})) | {"accuracy"}, manifest


def test_other_bytes_are_noted_in_the_manifest_and_a_changed_table_is_refused(copy):
    folder = copy / "geometry"
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["ssdc.svg"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError): verify(folder)
    redraw(folder)
    verify(folder)
    (folder / "table.csv").write_text((folder / "table.csv").read_text() + "\n")
    with pytest.raises(RunError, match=r"table\.csv"): redraw(folder)


def test_published_figures_have_a_source_and_a_measure():
    table = published()
    assert table["value"].notna().all() and table["source"].str.fullmatch(r"arXiv \d{4}\.\d{5}, .+").all()
    assert set(table["kind"]) == set(KINDS) and not table.duplicated(["group", "item"]).any()
    assert table.query("group == 'fragility, JPEG quality 5' and item == 'none'")["value"].item() == 0.646


def test_a_counterpart_is_the_row_of_the_table():
    study = read_study(ROOT / "runs")
    rows = pd.read_csv(ROOT / "runs/default/none-s0/geometry/table.csv").query("metric == 'top1' and intervention == 'none' and weights == 'trained'")
    row = published().query("group == 'clean accuracy' and item == 'none'").iloc[0].to_dict()
    found = counterpart(study, row)
    assert found[0] == rows["value"].item()
    assert not len(counterpart(study, row | dict(arm="ape-never"))) and not len(counterpart(study, row | dict(where="no_such=1")))


def test_planted_tables_agree_where_the_world_is_as_published():
    found = agreement(side_by_side(planted(1))).set_index("group")
    assert found.loc["SSDC under RPI, last block minus second (sign)", "same sign"] >= 1
    assert (found["same order"] <= found["pairs"]).all() and (found["measured"] <= found["figures"]).all()
    assert found.loc["fragility by alpha, JPEG", "measured"] == 3 == found.loc["fragility by alpha, JPEG", "same order"]


def test_agreement_counts_pairs_as_kendall_does():
    from scipy.stats import kendalltau
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.normal(size=(2, 6))
        found = agreement(pd.DataFrame(dict(paper="A", group="g", item=range(6), published=x, ours=y))).iloc[0]
        assert (2 * found["same order"] - found["pairs"]) / found["pairs"] == pytest.approx(kendalltau(x, y).statistic)


def test_a_finding_says_what_is_known():
    row = dict(verdict="supported", effect=0.1, low=0.05, high=0.15, n_seeds=3, note=np.nan, minimum_detectable=0.05)
    assert finding(row) == "0.100 [0.050, 0.150], 3 seeds"
    assert finding(row | dict(verdict="undecided", note="why")).endswith("detectable from 0.050; why")
