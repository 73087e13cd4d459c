"Intervals and tests: exact cases, definitions, and (slow) what they promise."
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitposnb.stats import (_half_width, accuracy_interval, contrast, holm, image_se, jackknife, minimum_detectable, percentiles,
                            poisson_bootstrap, poisson_means, power, simultaneous, stouffer)


def test_poisson_means_shapes_and_pairing():
    v = np.random.default_rng(0).normal(size=(50, 3, 2))
    draws = poisson_means(v, 20)
    assert draws.shape == (20, 3, 2)
    assert np.allclose(poisson_means(v[:, :1], 20)[:, 0], draws[:, 0])
    assert np.allclose(poisson_means(v + 7, 20), draws + 7)


def test_poisson_means_do_not_depend_on_the_chunk():
    v = np.random.default_rng(0).normal(size=(30_000, 1))
    assert poisson_means(v, 150).std() == pytest.approx(1 / 30_000**0.5, rel=0.25)
    assert np.array_equal(poisson_means(v, 150, seed=3), poisson_means(v, 150, seed=3))


def test_poisson_means_leave_nan_out():
    v = np.arange(40, dtype=float)
    v[::2] = np.nan
    low, high = poisson_bootstrap(v)
    assert low < np.nanmean(v) < high
    assert np.isnan(poisson_bootstrap(np.full(5, np.nan))).all() and np.isnan(poisson_bootstrap([3.0])).all()


def test_percentiles_of_one_undefined_column():
    draws = np.stack([np.arange(101.0), np.full(101, np.nan)], 1)
    low, high = percentiles(draws, 0.9)
    assert (low[0], high[0]) == pytest.approx((5, 95)) and np.isnan(low[1]) and np.isnan(high[1])


def test_jackknife_unequal_groups():
    v, sizes = np.random.default_rng(1).normal(size=31), np.array([5] * 6 + [1])
    edges = np.concatenate([[0], np.cumsum(sizes)])
    left_out = [np.delete(v, np.arange(a, b)).mean() for a, b in zip(edges[:-1], edges[1:], strict=True)]
    low, high = jackknife(v.mean(), left_out, sizes)
    assert (low + high) / 2 == pytest.approx(v.mean())
    assert high - v.mean() == pytest.approx(stats.t.ppf(0.975, 6) * v.std(ddof=1) / 31**0.5, rel=0.6)
    assert np.isnan(jackknife(1.0, [1.0], [3])).all()


def test_jackknife_linear_with_equal_groups_is_the_t_interval_of_group_means():
    v = np.random.default_rng(2).normal(size=(20, 5))
    left_out = [np.delete(v, g, 0).mean() for g in range(20)]
    assert np.allclose(jackknife(v.mean(), left_out, [5] * 20), stats.t.interval(0.95, 19, v.mean(), v.mean(1).std(ddof=1) / 20**0.5))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.floats(0, 1))
def test_contrast_p_touches_zero(d, se):
    got = contrast(d, se)
    assert (got["p"] < 0.05) == (not got["low"] <= 0 <= got["high"]) or got["low"] == pytest.approx(0, abs=1e-7) or got["high"] == pytest.approx(0, abs=1e-7)
    mirrored = contrast([-v for v in d], se)
    assert mirrored["low"] == pytest.approx(-got["high"]) and mirrored["p"] == pytest.approx(got["p"])


def test_contrast_special_cases():
    assert contrast([0.1, 0.1, 0.1])["low"] == pytest.approx(0.1)
    assert contrast([0.0, 0.0])["p"] == 1
    assert contrast([0.2, 0.2], 0.1)["p"] == pytest.approx(2 * stats.norm.sf(2))
    assert np.isnan(contrast([0.2, np.nan])["p"])
    with pytest.raises(ValueError, match="two|k >= 2"): contrast([0.1])
    assert image_se(np.array([[0, 2], [2, 4.0]])) == pytest.approx(np.std([1, 3], ddof=1) / 2**0.5)


def test_power_limits():
    assert power(0, 1, 5) == pytest.approx(0.05, abs=1e-4)
    assert power(0, 1, 3, se_image=1) < 0.05
    for k in (3, 5):
        effect = minimum_detectable(0.01, k, 0.004)
        rng = np.random.default_rng(0)
        d = effect + rng.normal(size=(40_000, 1)) * 0.004 + rng.normal(size=(40_000, k)) * 0.01
        assert (np.abs(d.mean(1)) > _half_width(d.std(1, ddof=1), k, 0.004)).mean() == pytest.approx(0.8, abs=0.008)
    assert minimum_detectable(0, 5) == 0 and np.isnan(minimum_detectable(np.nan, 5))
    assert minimum_detectable(0.02, 5, 0.008) == pytest.approx(2 * minimum_detectable(0.01, 5, 0.004))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm(p):
    adjusted, m = holm(p), len(p)
    order = np.argsort(p, kind="stable")
    for rank, index in enumerate(order):
        expected = min(1, max(p[order[r]] * (m - r) for r in range(rank + 1)))
        assert adjusted[index] == pytest.approx(expected)
    assert (adjusted >= np.array(p) - 1e-12).all()


def test_holm_edge_cases():
    assert np.isnan(holm([np.nan])).all() and len(holm([])) == 0
    with pytest.raises(ValueError, match="between 0 and 1"): holm([1.2])


def test_stouffer_and_wilson():
    assert stouffer([1, 1, 1, 1])[0] == pytest.approx(2)
    low, high = accuracy_interval(5, 10)
    assert (low, high) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))


def test_simultaneous_is_wider_and_contains_the_mean():
    v = np.random.default_rng(0).normal(size=(300, 12))
    joint, (low, high) = simultaneous(v), poisson_bootstrap(v)
    assert 2.5 < joint["critical"] < 3.4
    assert ((joint["high"] - joint["low"]) > (high - low) * 1.1).all()
    v[:, 3] += 1
    assert simultaneous(v)["p"][3] < 0.01 and simultaneous(v)["low"][3] > 0
    assert np.isfinite(simultaneous(np.ones((10, 2)))["low"]).all()
    with pytest.raises(ValueError, match="n >= 2"): simultaneous(np.ones((1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 5])
@pytest.mark.parametrize("parts", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (1, 1, 1), (4, 1, 1), (1, 4, 1)])
def test_contrast_coverage(k, parts):
    "At least nominal whatever the mixture; at least .98 where part of the image error is each network's own and dominates s."
    rng, (seed, common, own), runs = np.random.default_rng(0), parts, 200_000
    d = sum(rng.normal(size=(runs, s)) * v**0.5 for v, s in ((seed, k), (common, 1), (own, k)))
    covered = (np.abs(d.mean(1)) <= _half_width(d.std(1, ddof=1), k, (common + own / k) ** 0.5)).mean()
    assert covered > 0.948
    if parts in [(0, 0, 1), (1, 0, 1)]: assert covered > 0.98


@pytest.mark.slow
def test_bootstrap_and_simultaneous_coverage():
    one, all_of_them = [], []
    for s in range(600):
        v = np.random.default_rng(s).exponential(size=(400, 10)) - 1
        low, high = poisson_bootstrap(v[:, 0], 500, s)
        one.append(low <= 0 <= high)
        joint = simultaneous(v, 500, s)
        all_of_them.append(((joint["low"] <= 0) & (joint["high"] >= 0)).all())
    assert 0.92 < np.mean(one) < 0.975 and 0.91 < np.mean(all_of_them) < 0.98
