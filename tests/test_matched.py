"Matched clean accuracy: the definition, its refusals, a planted difference, and a difference in clean accuracy only."

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitposnb.matched import lowest_final, matched_accuracy, probit, usable, value_at

PHI, QUANTILE = stats.norm.cdf, stats.norm.ppf


def shift_of(clean, slope=0.8, intercept=-0.5):
    return PHI(slope * QUANTILE(np.asarray(clean)) + intercept)


def binomial(seed, n, abilities, robustness):
    "Correctness of n images at each checkpoint, independent binomial noise in every cell."
    rng, ability = np.random.default_rng(seed), np.asarray(abilities)
    return rng.random((n, len(ability))) < PHI(ability), rng.random((n, len(ability))) < PHI(0.8 * ability - 0.6 + robustness)


def test_value_at_is_least_squares_on_probits():
    rng = np.random.default_rng(0)
    clean, shifted = rng.uniform(0.55, 0.7, 9), rng.uniform(0.3, 0.5, 9)
    slope, intercept = np.polyfit(QUANTILE(clean) - QUANTILE(0.6), QUANTILE(shifted), 1)
    assert np.allclose(value_at(clean, shifted, 0.6), (PHI(intercept), slope))
    many = value_at(np.stack([clean, clean[::-1]]), np.stack([shifted, shifted[::-1]]), 0.6)
    assert np.allclose(many, [[PHI(intercept)] * 2, [slope] * 2])


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 1.5), st.floats(-1, 0.5), st.floats(0.4, 0.8), st.integers(0, 100))
def test_on_a_line_the_value_is_exact_wherever_the_checkpoints_lie(slope, intercept, target, seed):
    clean = np.sort(np.r_[target - 0.05, target + 0.05, np.random.default_rng(seed).uniform(target - 0.07, target + 0.07, 3)])
    table = matched_accuracy({"a": (clean, shift_of(clean, slope, intercept))}, target=target)
    assert table.value[0] == pytest.approx(shift_of(target, slope, intercept), abs=1e-9)
    assert table.slope[0] == pytest.approx(slope, abs=1e-6) and np.isnan(table.low[0]) and table.n[0] == 0


def test_clean_accuracy_alone_makes_no_difference_without_noise():
    low, high = np.linspace(0.5, 0.62, 7), np.linspace(0.5, 0.74, 13)
    conditions = {"low": (low, shift_of(low)), "high": (high, shift_of(high)), "planted": (high, shift_of(high, intercept=-0.3))}
    table = matched_accuracy(conditions, [("high", "low"), ("planted", "low")]).set_index("condition")
    assert lowest_final(conditions) == 0.62 == table.target.iloc[0]
    assert table.value["high - low"] == pytest.approx(0, abs=1e-9)
    assert table.value["planted - low"] == pytest.approx(shift_of(0.62, intercept=-0.3) - shift_of(0.62), abs=1e-9)
    assert 1 - high[-1] and (1 - shift_of(high[-1]) / high[-1]) < (1 - shift_of(low[-1]) / low[-1])


def test_the_lowest_final_is_final_not_lowest():
    assert lowest_final({"a": ([0.2, 0.7], [0, 0]), "b": ([0.1, 0.6], [0, 0])}) == 0.6
    assert lowest_final({"a": (np.array([[1, 0], [0, 1], [1, 1]]), None)}) == pytest.approx(2 / 3)


@pytest.mark.parametrize("clean, reason", [
    ([0.3, 0.61, 0.63], "2 checkpoints within 0.08"),
    ([0.55, 0.57, 0.6], "reach from 0.5500 to 0.6000 and do not enclose 0.6200"),
    ([0.63, 0.65, 0.69, 0.4], "do not enclose"),
    ([0.62, 0.62, 0.62], "the same clean accuracy"),
])  # fmt: skip
def test_undefined_with_a_reason(clean, reason):
    assert reason in usable(np.array(clean), shift_of(clean), 0.62)[1]
    table = matched_accuracy({"a": (clean, shift_of(clean)), "b": ([0.6, 0.62, 0.64], [0.4, 0.42, 0.44])}, [("a", "b")], target=0.62)
    assert np.isnan(table[["value", "low", "high", "se"]].iloc[[0, 2]].to_numpy()).all() and table.value[1] == pytest.approx(0.42, abs=1e-3)
    assert reason in table.note[0] and table.note[2] == f"a: {table.note[0]}" and table.note[1] == ""


def test_a_checkpoint_at_the_target_encloses_it_and_the_window_is_closed():
    assert usable([0.5, 0.54, 0.62], [0.3, 0.3, 0.3], 0.62)[1].startswith("2 checkpoints")
    at, note = usable([0.54, 0.58, 0.62], [0.3, 0.3, 0.3], 0.62)
    assert at.tolist() == [0, 1, 2] and note == ""


def test_accuracies_of_zero_and_one():
    assert usable([0.6, 0.62, 0.64], [0.0, 0.1, 0.2], 0.62)[1] == "an accuracy of 0 or 1 has no probit"
    assert usable([0.6, 0.62, 0.64], [0.0, 0.1, 0.2], 0.62, n=100)[1] == ""
    assert np.isfinite(probit([0, 1], 100)).all() and probit(0, 100) == QUANTILE(0.005)


def test_wrong_input_is_refused():
    a = ([0.6, 0.62, 0.64], [0.3, 0.3, 0.3])
    for bad, text in (({"a": (a[0], a[1][:2])}, "allowed: both"), ({"a": (0.5, 0.5)}, "allowed: both"), ({"a": ([0.5, 60, 2], a[1])}, "between 0 and 1"),
                      ({"a": ([0.5, np.nan, 0.6], a[1])}, "between 0 and 1"), ({"a": a, "b": binomial(0, 50, [0.1, 0.2, 0.3], 0)}, "the same images"),
                      ({"a": binomial(0, 40, [0.1, 0.2, 0.3], 0), "b": binomial(0, 50, [0.1, 0.2, 0.3], 0)}, "the same images")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            matched_accuracy(bad)
    with pytest.raises(ValueError, match="'c' is not a condition; allowed: a"):
        matched_accuracy({"a": a}, [("a", "c")])


def test_the_bootstrap_is_seeded_paired_and_agrees_with_the_naive_one():
    conditions = {"a": binomial(0, 400, np.linspace(0.1, 0.4, 5), 0), "b": binomial(1, 400, np.linspace(0.1, 0.5, 5), 0.2)}
    table = matched_accuracy(conditions, [("b", "a")], n_boot=400)
    assert table.equals(matched_accuracy(conditions, [("b", "a")], n_boot=400))
    assert not table.low.equals(matched_accuracy(conditions, [("b", "a")], n_boot=400, seed=1).low)
    target, rng, naive = table.target[0], np.random.default_rng(5), []
    at = {k: usable(c.mean(0), s.mean(0), target, n=400)[0] for k, (c, s) in conditions.items()}
    for _ in range(400):
        rows = rng.integers(0, 400, 400)
        a, b = (value_at(c[rows][:, at[k]].mean(0), s[rows][:, at[k]].mean(0), target, 400)[0] for k, (c, s) in conditions.items())
        naive.append((a, b, b - a))
    assert np.allclose(np.std(naive, axis=0), table.se, rtol=0.15)
    same = matched_accuracy({"a": conditions["a"], "twin": conditions["a"]}, [("a", "twin")], n_boot=50)
    assert (same.loc[2, ["value", "low", "high", "se"]] == 0).all()


def test_accuracies_and_images_give_the_same_value():
    conditions = {"a": binomial(0, 500, np.linspace(0.1, 0.4, 5), 0), "b": binomial(1, 500, np.linspace(0.1, 0.5, 5), 0.2)}
    means = {k: (c.mean(0), s.mean(0)) for k, (c, s) in conditions.items()}
    both = [matched_accuracy(x, [("b", "a")], n_boot=20) for x in (conditions, means)]
    assert np.allclose(both[0].value, both[1].value) and both[0].checkpoints.equals(both[1].checkpoints)


@pytest.mark.parametrize("planted", [0.0, 0.3])
def test_planted_difference_is_recovered_under_binomial_noise(planted):
    "Independent noise in every cell is the worst case for a regression on a noisy accuracy; also at another clean accuracy."
    errors, covered, excludes = [], [], []
    for seed in range(120):
        conditions = {
            "low": binomial(2 * seed, 2000, np.linspace(0.2, 0.4, 6), 0),
            "high": binomial(2 * seed + 1, 2000, np.linspace(0.25, 0.6, 7), planted),
        }
        row = matched_accuracy(conditions, [("high", "low")], n_boot=200).iloc[2]
        ability = QUANTILE(row.target)
        truth = PHI(0.8 * ability - 0.6 + planted) - PHI(0.8 * ability - 0.6)
        errors.append(row.value - truth)
        covered.append(row.low <= truth <= row.high)
        excludes.append(not row.low <= 0 <= row.high)
    assert abs(np.mean(errors)) < 0.01 and np.mean(covered) >= 0.88, (np.mean(errors), np.mean(covered))
    assert (np.mean(excludes) > 0.95) if planted else (np.mean(excludes) < 0.12)
