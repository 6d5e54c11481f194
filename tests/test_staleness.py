"""Staleness policies follow the paper's formulas; statistics follow numpy."""

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_recsync.callbacks.training_report import sample_of
from tf_recsync.staleness import (
    COUNTERS,
    Constant,
    InversePower,
    Policy,
    Rescale,
    Statistics,
    Threshold,
)

TAUS = [1, 2, 3, 5, 10, 31, 100, 875, 2090, 10**6]


def test_constant_counts_every_gradient_in_full():
    assert [Constant()(tau) for tau in TAUS] == [1.0] * len(TAUS)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_baseline_of_one_gives_equation_4(k):
    for tau in TAUS:
        assert InversePower(k=k)(tau) == pytest.approx(tau**-k, rel=1e-12)
        assert InversePower(k=k, normalized=False)(tau) == pytest.approx(tau**-k, rel=1e-12)


def test_power_one_without_a_baseline_is_classic_staleness_aware_sgd():
    for tau in TAUS:  # Zhang et al. 2016 divide the learning rate by tau
        assert 0.3 * InversePower(k=1, baseline=1)(tau) == pytest.approx(0.3 / tau, rel=1e-12)


@pytest.mark.parametrize("baseline", [1, 10, 1000])
def test_without_normalization_it_is_equation_7_to_the_letter(baseline):
    policy = InversePower(k=2, baseline=baseline, normalized=False)
    for tau in [*TAUS, baseline, baseline + 1]:
        expected = 1.0 if tau <= baseline else 1 / tau**2
        assert policy(tau) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("k", [0.5, 1, 2, 5])
def test_normalized_weights_have_no_step_at_the_baseline(k):
    policy = InversePower(k=k, baseline=50)
    assert policy(50) == 1.0
    assert policy(50 + 1e-9) == pytest.approx(1.0, abs=1e-9)
    for tau in (51, 75, 500):
        assert policy(tau) == pytest.approx((50 / tau) ** k, rel=1e-12)


def test_doubling_tau_beyond_the_baseline_divides_the_weight_by_two_to_the_k():
    for normalized in (True, False):
        policy = InversePower(k=3, baseline=10, normalized=normalized)
        assert policy(80) == pytest.approx(policy(40) / 8, rel=1e-12)


@pytest.mark.parametrize("sensitivity", [0.0, 0.5, 20.0])
def test_sensitivity_takes_the_weight_at_the_tau_of_equation_6(sensitivity):
    policy = InversePower(k=2, baseline=4, update_sensitivity=sensitivity)
    for tau in TAUS:
        for length in (0.0, 1e-3, 0.7, 40.0):
            seen = tau / (1 + math.exp(-sensitivity * length))
            expected = 1.0 if seen <= 4 else (4 / seen) ** 2
            assert policy(tau, last_update=length) == pytest.approx(expected, rel=1e-12)


def test_a_stale_gradient_counts_more_once_the_model_has_settled():
    policy = InversePower(k=2, baseline=1, update_sensitivity=3.0)
    weights = [policy(10, last_update=length) for length in (5.0, 1.0, 0.1, 0.0)]
    assert weights == sorted(weights)
    assert weights[-1] == pytest.approx(4 / 100)  # sigmoid(0) is a half


def test_rescaling_maps_the_measured_spread_to_the_baseline_clusters():
    for tau in TAUS:
        simple = InversePower(k=2, baseline=10, rescale=Rescale(deviation=3.0))
        scaled = 3.0 / 12.0 * tau
        expected = 1.0 if scaled <= 10 else (10 / scaled) ** 2
        assert simple(tau, deviation=12.0, mean=100.0) == pytest.approx(expected, rel=1e-12)
        full = InversePower(k=2, baseline=10, rescale=Rescale(deviation=3.0, mean=9.0))
        scaled = 3.0 * (tau - 100.0) / 12.0 + 9.0
        expected = 1.0 if scaled <= 10 else (10 / scaled) ** 2
        assert full(tau, deviation=12.0, mean=100.0) == pytest.approx(expected, rel=1e-12)


def test_tau_is_kept_until_a_spread_was_measured():
    for rescale in (Rescale(3.0), Rescale(3.0, mean=9.0)):
        policy = InversePower(k=1, rescale=rescale)
        assert policy(4, deviation=0.0, mean=4.0) == 0.25


def test_a_threshold_compares_the_age_which_is_zero_when_fresh():
    assert [Threshold(iota=0)(tau) for tau in (1, 2, 3)] == [1.0, 0.0, 0.0]
    assert [Threshold(iota=4)(tau) for tau in (1, 5, 6)] == [1.0, 1.0, 0.0]


positive = st.floats(1e-3, 1e3)
rescales = st.none() | st.builds(Rescale, positive, st.none() | positive, st.integers(1, 10**6))
policies = st.one_of(
    st.builds(Constant),
    st.builds(Threshold, st.floats(0, 1e4)),
    st.builds(
        InversePower,
        k=st.floats(0.01, 10),
        baseline=st.floats(1, 1e4),
        normalized=st.booleans(),
        rescale=rescales,
        update_sensitivity=st.none() | st.floats(0, 1e3),
    ),
)


@settings(max_examples=400, deadline=None)
@given(
    policies,
    st.integers(1, 10**9),
    st.integers(1, 10**9),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
)
def test_weights_lie_between_0_and_1_and_never_rise_with_tau(policy, a, b, length, deviation, mean):
    measured = {"last_update": length, "deviation": deviation, "mean": mean}
    fresher, staler = (policy(tau, **measured) for tau in sorted((a, b)))
    assert 0.0 <= staler <= fresher * (1 + 1e-12)  # pow rounds
    assert fresher <= 1.0


@settings(max_examples=100, deadline=None)
@given(policies)
def test_policies_come_back_from_their_config(policy):
    assert type(policy).from_config(policy.get_config()) == policy
    serialized = keras.saving.serialize_keras_object(policy)
    assert keras.saving.deserialize_keras_object(serialized) == policy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InversePower(k=0), "k must be a finite number above 0, not 0"),
        (lambda: InversePower(k=-1.5), "k must be a finite number above 0, not -1.5"),
        (lambda: InversePower(k=math.nan), "k must be a finite.*, not nan"),
        (lambda: InversePower(k=math.inf), "k must be .*not inf"),
        (
            lambda: InversePower(baseline=0.5),
            "baseline must be .* of at least 1, not 0.5",
        ),
        (lambda: InversePower(baseline=math.inf), "baseline must be .*not inf"),
        (lambda: InversePower(update_sensitivity=-1), "update_sensitivity must be .*, not -1"),
        (lambda: InversePower(update_sensitivity=math.inf), "update_sensitivity must .*, not inf"),
        (lambda: InversePower(rescale=2.0), "rescale must be a Rescale or None, not 2.0"),
        (lambda: InversePower(k="1"), "k must be a finite number above 0, not '1'"),
        (lambda: InversePower(baseline=None), "baseline must be a finite .*, not None"),
        (lambda: InversePower(normalized=1), "normalized must be a bool, not 1"),
        (lambda: Threshold(iota=True), "iota must be a number of at least 0, not True"),
        (lambda: Threshold(iota=-1), "iota must be a number of at least 0, not -1"),
        (lambda: Threshold(iota=math.nan), "iota must be a number of at least 0, not nan"),
        (lambda: Rescale(deviation=0), "deviation must be a finite.*, not 0"),
        (lambda: Rescale(deviation=math.inf), "deviation must be .*not inf"),
        (
            lambda: Rescale(deviation=1.0, mean=-2),
            "mean must be a finite number above 0, not -2",
        ),
        (lambda: Rescale(1.0, window=0), "window must be an integer from 1 .*, got 0"),
        (lambda: Rescale(1.0, window=2.5), "window must be an integer from 1 .*, got 2.5"),
        (lambda: Rescale(1.0, window=True), "window must be an integer from 1 .*, got True"),
    ],
)
def test_bad_arguments_are_refused_with_name_value_and_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_base_policy_is_no_policy():
    with pytest.raises(TypeError, match="abstract class Policy"):
        Policy()


def counters_of(taus) -> np.ndarray:
    """The counters that the documentation describes."""
    taus = [int(t) for t in taus]
    counters = np.zeros([COUNTERS], np.int64)
    counters[:4] = len(taus), sum(taus), sum(t * t for t in taus), max(taus, default=0)
    for tau in taus:
        octave = tau.bit_length() - 1
        eighth = int((tau / 2**octave - 1) * 8)
        counters[4 + (tau if tau < 32 else 32 + 8 * (octave - 5) + eighth)] += 1
    return counters


taus_lists = st.lists(st.integers(1, 200) | st.integers(1, 2**24), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.lists(taus_lists, min_size=1, max_size=3), st.floats(0, 1))
def test_statistics_are_numpys_and_quantiles_stay_within_their_bucket(parts, quantile):
    statistics = Statistics.from_counters([counters_of(part) for part in parts])
    taus = np.concatenate(parts)
    assert statistics.count == len(taus)
    assert statistics.max == taus.max()
    assert statistics.mean == pytest.approx(taus.mean(), rel=1e-12)
    # The variance is a difference of two means of squares, each rounded.
    assert statistics.deviation == pytest.approx(taus.std(), rel=1e-6, abs=1e-6 * float(taus.max()))
    for q in (quantile, 0.25, 0.5, 0.75):
        exact = np.sort(taus)[max(math.ceil(q * len(taus)) - 1, 0)]
        if q != quantile:  # in these numbers numpy's own rule has no rounding either
            assert exact == np.quantile(taus, q, method="inverted_cdf")
        found = statistics.quantile(q)
        assert found == exact if exact < 32 else exact <= found <= 1.125 * exact


@settings(max_examples=100, deadline=None)
@given(taus_lists)
def test_the_histogram_holds_every_update_in_the_bucket_of_its_tau(taus):
    histogram = Statistics.from_counters([counters_of(taus)]).histogram
    edges = [edge for edge, _ in histogram]
    assert edges == sorted(set(edges))
    assert sum(count for _, count in histogram) == len(taus)
    for tau in taus:
        edge = min(e for e in edges if e >= tau)
        assert edge == tau if tau < 32 else edge < 1.125 * tau


def test_small_staleness_is_counted_exactly():
    statistics = Statistics.from_counters([counters_of([1, 1, 2, 31]), counters_of([31, 4])])
    assert statistics.histogram == ((1, 2), (2, 1), (4, 1), (31, 2))
    assert [statistics.quantile(q) for q in (0, 0.3, 0.5, 0.6, 1)] == [1, 1, 2, 4, 31]


def test_nothing_measured_reads_as_zero():
    for statistics in (Statistics.from_counters([]), Statistics.from_counters([counters_of([])])):
        assert (statistics.count, statistics.mean, statistics.deviation, statistics.max) == (
            0,
            0.0,
            0.0,
            0,
        )
        assert statistics.histogram == ()
        assert statistics.quantile(0.5) == 0


@pytest.mark.parametrize("quantile", [-0.1, 1.1, math.nan])
def test_a_quantile_outside_0_to_1_is_refused(quantile):
    with pytest.raises(ValueError, match=r"quantile must be a finite number from 0 to 1, not"):
        Statistics.from_counters([counters_of([1])]).quantile(quantile)


def test_counters_of_another_length_are_refused():
    with pytest.raises(ValueError, match=f"{COUNTERS}"):
        Statistics.from_counters([np.zeros([5], np.int64)])


def test_tensorboards_sample_has_the_shares_of_all_however_many_there_are():
    def sampled(histogram):
        counters = np.zeros(0)
        statistics = Statistics(sum(n for _, n in histogram), 0.0, 0.0, 0, histogram, 0, counters)
        return sample_of(statistics)

    few = ((1, 5), (2, 3), (40, 1))
    assert sampled(few).tolist() == [1] * 5 + [2] * 3 + [40]
    many = ((1, 240_000_000), (2, 60_000_000), (9, 10_000_000), (100, 1))
    taus, counts = np.unique(sampled(many), return_counts=True)
    assert taus.tolist() == [1, 2, 9, 100] and counts.sum() < 1_000_000
    np.testing.assert_allclose(counts / counts.sum(), [24 / 31, 6 / 31, 1 / 31, 0], atol=1e-3)
    assert sampled(()).size == 0
