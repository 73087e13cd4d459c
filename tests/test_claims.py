"Every verdict follows its table: it turns with planted tables of the opposite sign, and no table decides nothing."
import hashlib
import tomllib

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

from vitposnb import claims_a, claims_b
from vitposnb.claims_a import half_depth
from vitposnb.planted import ARMS, planted
from vitposnb.rules import COLUMNS, KINDS, RULES, VERDICTS, Case, Quantity, Study, Untestable, corrected, decide, estimate, leaf, pick, read_rules, read_study
from vitposnb.stats import contrast
from vitposnb.verdicts import choices, verdicts

WORLDS = {"supported": 1, "not supported": -1, "undecided": 0}
READS = {  # claim -> the tables it reads
    **{claim: {"geometry"} for claim in ("A1", "A2", "A3", "A4")}, "A5": {"geometry", "robustness"},
    **{claim: {"robustness"} for claim in ("A6", "A7", "A8", "A9")}, **{claim: {"features"} for claim in ("B1", "B5")},
    **{claim: {"position"} for claim in ("B2", "B3", "B4", "B6")},
}


@pytest.fixture(scope="module")
def worlds():
    return {verdict: planted(sign) for verdict, sign in WORLDS.items()}


@pytest.fixture(scope="module")
def decided(worlds):
    return {verdict: verdicts(world) for verdict, world in worlds.items()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("claim", READS)
def test_verdict_follows_the_planted_truth(decided, world, claim):
    part = decided[world].query("claim == @claim")
    assert len(part) and set(part["verdict"]) == {world}
    assert set(part["n_seeds"]) == {5}


@pytest.mark.parametrize("kind", KINDS)
def test_replacing_one_table_turns_the_claims_that_read_it_and_no_others(worlds, kind):
    world = worlds["supported"]
    turned = verdicts(Study("planted", {**world.tables, kind: worlds["not supported"].tables[kind]}))
    for claim, part in turned.groupby("claim"):
        assert set(part["verdict"]) == ({"not supported"} if kind in READS[claim] else {"supported"}), claim


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_table_makes_untestable_with_a_reason(worlds, kind):
    found = verdicts(Study("planted", {k: t for k, t in worlds["supported"].tables.items() if k != kind}))
    gone = found["claim"].map(lambda c: kind in READS[c])
    assert set(found.loc[gone, "verdict"]) == {"not testable"} and (found.loc[gone, "note"].str.len() > 5).all()
    assert set(found.loc[~gone, "verdict"]) == {"supported"}


def test_nothing_at_all_is_not_testable():
    for tables in ({}, {kind: pd.DataFrame(columns=["run", "seed", "metric", "value"]) for kind in KINDS}):
        found = verdicts(Study("empty", tables))
        assert set(found["verdict"]) == {"not testable"} and list(found.columns) == list(COLUMNS)


def test_two_seeds_are_too_few():
    assert set(verdicts(planted(1, seeds=2))["verdict"]) == {"not testable"}
    found = verdicts(planted(1, seeds=3))
    assert "not testable" not in set(found["verdict"]) and set(found["n_seeds"]) == {3}


def test_a_condition_not_trained_is_named():
    found = verdicts(planted(1, arms=tuple(a for a in ARMS if a != "sincos-fixed")))
    lost = found[found["verdict"] == "not testable"]
    assert set(lost["claim"] + lost["part"].str[:6]) == {"A9sincos"} and lost["note"].str.contains("sincos-fixed").all()


def test_rows_of_one_model_suffice_for_all_claims(worlds):
    "No row is a contrast of models: each is found in the table of one run."
    for table in worlds["supported"].tables.values():
        assert not table.drop(columns=["value", "low", "high", "z"], errors="ignore").duplicated().any()


@pytest.mark.parametrize("change, claim, why", [
    (lambda t: t.assign(value=t["value"].where(t["metric"] != "splice_loss", 0.1)), "B5", "splice"),
    (lambda t: t.assign(value=t["value"].where(~((t["metric"] == "top1") & (t["intervention"] == "early off")), 0.3)), "B6", "early window"),
    (lambda t: t.assign(value=t["value"].where(~((t["metric"] == "selectivity") & (t["intervention"] == "rpi")), 0.01)), "B2", "selectivity"),
])
def test_gates_close(worlds, change, claim, why):
    tables = {k: change(t) if k in READS[claim] else t for k, t in worlds["supported"].tables.items()}
    part = verdicts(Study("planted", tables), (claim,))
    assert set(part["verdict"]) == {"not testable"} and part["note"].str.contains("gate").all() and part["note"].str.contains(why).all()


def test_damaged_rows_never_crash(worlds):
    "Doubled rows, lost intervals and lost values give a reason, not an exception."
    world = worlds["supported"].tables
    for spoil in (lambda t: pd.concat([t, t]), lambda t: t.assign(low=np.nan), lambda t: t.assign(value=np.nan, note="undefined: planted")):
        found = verdicts(Study("planted", {k: spoil(t) for k, t in world.items()}))
        assert set(found["verdict"]) == {"not testable"}


def test_without_checkpoints_fragility_is_not_supported_but_can_be_refuted(worlds):
    def found(name):
        tables = {k: t[t["intervention"] != "checkpoint"] for k, t in worlds[name].tables.items()}
        return verdicts(Study("planted", tables), ("A6",))
    supported = found("supported")
    assert set(supported["verdict"]) == {"undecided"} and supported["note"].str.contains("checkpoints").all()
    assert set(found("not supported")["verdict"]) == {"not supported"}


def test_one_weak_contrast_of_six_decides_nothing(worlds):
    tables = dict(worlds["supported"].tables)
    t = tables["robustness"].copy()
    weak = (t["condition"] == "sincos") & (t["metric"] == "fragility_area") & (t["primary"] == "jpeg")
    t.loc[weak, "value"] = 0.5 + np.random.default_rng(0).normal(0, 0.05, weak.sum())
    part = verdicts(Study("planted", {**tables, "robustness": t}), ("A6",)).set_index("part")["verdict"]
    assert part["ape, jpeg"] == "undecided" and part["ape, blur"] == "supported"


def invented(values, name, se=0.0):
    return leaf(name, pd.DataFrame(dict(run=[f"t/{name}-s{i}" for i in range(len(values))], seed=range(len(values)), value=values, se=se)))


def test_quantity_is_linear_algebra():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5))
    a, b = invented(x, "a", 0.3), invented(y, "b", 0.4)
    q = (2 * a - b / 4 + 1 - a).seeds()
    np.testing.assert_allclose(q["value"], x - y / 4 + 1, atol=1e-12)
    np.testing.assert_allclose(q["se"], np.hypot(0.3, 0.1), atol=1e-12)
    assert (0.5 - a).seeds()["value"].tolist() == pytest.approx((0.5 - x).tolist())
    assert (a - b).runs() == sorted(f"t/{n}-s{i}" for n in "ab" for i in range(5))


def test_pairs_by_seed_not_by_order():
    a = invented([1.0, 2.0, 3.0], "a")
    table = pd.DataFrame(dict(run=["t/b-s2", "t/b-s0", "t/b-s1"], seed=[2, 0, 1], value=[3.0, 1.0, 2.0], se=0.0))
    assert (a - leaf("b", table)).seeds()["value"].tolist() == [0, 0, 0]


def test_estimate_is_the_contrast_of_stats():
    general = read_rules()[0]["general"]
    values = [0.1, 0.3, 0.2, 0.25]
    found, reference = estimate(invented(values, "a", 0.02), general), contrast(np.array(values), 0.02)
    assert {k: found[k] for k in reference} == reference
    with pytest.raises(Untestable, match="2 common seeds; needed: 3"): estimate(invented([1, 2], "a"), general)


def test_decisions_keep_their_error_rate():
    "Where nothing is there, one contrast in about 20 is decided either way; Holm over 30 leaves about one study in 20."
    rules, rng, studies = read_rules()[0], np.random.default_rng(0), []
    for _ in range(10):
        cases = [invented(rng.normal(0, 1, 5), f"q{i}") for i in range(30)]
        rows = [dict(claim="A1", **decide(Case(q, [q], [[-q]]), rules["general"])) for q in cases]
        studies.append(corrected(rows, rules))
    alone = np.mean([(t["unadjusted"] != "undecided").mean() for t in studies])
    assert 0.03 < alone < 0.07
    assert np.mean([(t["verdict"] != "undecided").any() for t in studies]) < 0.15


def test_an_undecided_verdict_states_what_it_could_have_seen(decided):
    assert (decided["undecided"]["minimum_detectable"] > 0).all()


@pytest.mark.parametrize("curve, depth", [([0, 1, 1], 0.25), ([1, 1, 1], 0), ([0, 0, 1], 0.75), ([0, 0.2, 0.1, 0.4], 1 / 3), ([-1, -2, -3], np.nan)])
def test_half_depth(curve, depth):
    assert half_depth(np.array(curve, float)) == pytest.approx(depth, nan_ok=True)


def test_half_depth_of_many_curves_equals_one_by_one():
    curves = np.random.default_rng(0).random((50, 7))
    np.testing.assert_allclose(half_depth(curves), [half_depth(c) for c in curves])


def test_every_verdict_carries_the_checksum_of_the_rules(decided):
    digest = hashlib.sha256(RULES.read_bytes()).hexdigest()
    assert all(set(t["rule_hash"]) == {digest} for t in decided.values())


def test_every_claim_has_a_rule_and_every_threshold_is_used():
    rules = tomllib.loads(RULES.read_text())
    claims = {claim for claim, _, _ in choices(rules)}
    assert claims == set(rules) - {"general", "arms", "fragility"} == set(READS)
    code = "".join((RULES.parents[1] / f"{name}.py").read_text() for name in ("claims_a", "claims_b", "rules"))
    texts = {"paper", "claim", "supported", "against"}
    unused = [f"{c}.{k}" for c in claims for k in rules[c] if k not in texts and f'["{k}"]' not in code]
    assert unused == []
    assert all(len(rules[c][k]) > 10 for c in claims for k in texts - {"paper"}) and {rules[c]["paper"] for c in claims} == {"A", "B"}


def test_verdicts_are_the_four():
    assert VERDICTS == ("supported", "not supported", "undecided", "not testable")
    assert isinstance(invented([1.0], "a"), Quantity)


def test_the_real_tables_hold_every_row_that_a_rule_picks(worlds, monkeypatch):
    "Asked of the planted world, found in the committed tables of the same arm, where it has one."
    asked, real = {}, read_study(ROOT / "runs")

    def noted(study, kind, name, *args, **columns):
        asked.setdefault((kind, name), []).append((args, columns))
        return pick(study, kind, name, *args, **columns)

    for module in (claims_a, claims_b): monkeypatch.setattr(module, "pick", noted)
    verdicts(worlds["supported"])
    assert {kind for kind, _ in asked} == set(KINDS)
    missing, tried = [], 0
    for (kind, name), reads in asked.items():
        try: real.arm(kind, name)
        except Untestable: continue
        for args, columns in reads:
            tried += 1
            try: pick(real, kind, name, *args, **columns)
            except Untestable as reason: missing.append(str(reason))
    assert tried > 10 and not missing


def test_three_copies_of_the_real_tables_decide_every_claim_that_has_its_arms():
    "With the committed seed thrice, only a table that is not there may leave a claim untested: no name is wrong."
    real = read_study(ROOT / "runs")
    copies = {kind: pd.concat([t.assign(seed=s, run=t["run"].str.replace("-s0", f"-s{s}", regex=False)) for s in range(3)])
              for kind, t in ((kind, t[t["seed"] == 0]) for kind, t in real.tables.items())}
    found = verdicts(Study("copies", copies))
    untested = found[found["verdict"] == "not testable"]
    assert untested["note"].str.contains(r"no \w+ table|gate|undefined").all(), untested[["claim", "part", "note"]].to_string()
    assert {"A1", "A2", "A3", "A4"} <= set(found.loc[found["n_seeds"] == 3, "claim"])
