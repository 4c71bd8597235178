"""When requests are sent: the distributions of the time between them."""

import numpy as np
import pytest

from jaxllm.bench.arrivals import arrival_times, ramp_times

NUM = 20_000


def gaps(times):
    return np.diff(times, prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_the_time_between_is_gamma_distributed(burstiness):
    """Mean 1/rate, variance 1/(burstiness rate^2); burstiness 1 is Poisson."""
    rate = 50.0
    between = gaps(arrival_times(NUM, rate, burstiness, np.random.default_rng(0)))
    assert between.min() >= 0
    assert between.mean() == pytest.approx(1 / rate)
    assert between.var() == pytest.approx(1 / (burstiness * rate**2), rel=0.08)


def test_poisson_counts_have_a_variance_like_their_mean():
    times = arrival_times(NUM, 10.0, 1.0, np.random.default_rng(1))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(10, rel=0.02)
    assert counts.var() == pytest.approx(10, rel=0.1)


def test_the_rate_is_the_one_asked_for():
    times = arrival_times(10, 4.0, 1.0, np.random.default_rng(2))
    assert times[-1] == pytest.approx(10 / 4.0)
    assert (np.diff(times) > 0).all()


def test_an_infinite_rate_sends_all_at_once():
    assert arrival_times(3, float("inf"), 1.0, np.random.default_rng(0)).tolist() == [0, 0, 0]


def test_same_seed_same_times():
    first, second = (arrival_times(9, 2.0, 0.5, np.random.default_rng(7)) for _ in range(2))
    assert first.tolist() == second.tolist()


def test_a_linear_ramp_goes_from_rate_to_rate():
    rng = np.random.default_rng(3)
    between = gaps(ramp_times(NUM, "linear", 10.0, 100.0, 1.0, rng))
    for part, rate in [(slice(0, 1000), 12.25), (slice(-1000, None), 97.75)]:
        assert 1 / between[part].mean() == pytest.approx(rate, rel=0.1)


def test_an_exponential_ramp_has_the_geometric_mean_in_its_middle():
    rng = np.random.default_rng(4)
    between = gaps(ramp_times(NUM, "exponential", 1.0, 100.0, 1.0, rng))
    middle = between[NUM // 2 - 1000 : NUM // 2 + 1000]
    assert 1 / middle.mean() == pytest.approx(10.0, rel=0.1)
