"""Epsilon against closed forms, published numbers and a worst case computed by integration."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from remanence.core.errors import InputError
from remanence.privacy.accountant import (
    bound_of_a_round,
    calibrate_noise,
    epsilon,
    gaussian_delta,
    max_rounds_for_budget,
    require_accounting,
)
from remanence.privacy.guarantees import ClientGuarantee

needs_accounting = pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="the package dp-accounting is not installed (the extra remanence-fl[dp])",
)
DELTA = 1e-5


def exact_delta(eps: float, mu: float) -> float:
    """Of the Gaussian mechanism with mean over deviation mu."""
    return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu))


# ----------------------------------------------------------------------------- the curve of a round


def test_the_gaussian_mechanism_by_hand() -> None:
    """mu = 2 at epsilon 10: Phi(1 - 5) - e^10 Phi(-1 - 5) = 3.167e-5 - 22026.5 * 9.866e-10 =
    9.94e-6.
    """
    assert gaussian_delta(np.array([10.0]), 2.0)[0] == pytest.approx(9.94e-6, rel=2e-3)
    # the total variation
    assert gaussian_delta(np.array([0.0]), 2.0)[0] == pytest.approx(2 * norm.cdf(1.0) - 1)


def hockey_stick(alpha: float, p: np.ndarray, q: np.ndarray, width: float) -> float:
    return float(np.maximum(p - alpha * q, 0).sum() * width)


@pytest.mark.parametrize("fraction", [0.05, 0.5])
@pytest.mark.parametrize("noise", [0.8, 3.0])
def test_the_bound_covers_the_worst_case_of_a_fixed_cohort(fraction: float, noise: float) -> None:
    """All others push by -1, the client by +1 or by nothing. With chance q it is in the cohort;
    else one more of the others is, which shifts the sum by -1.

    So the noised sum is (1-q) N(-1) + q N(+1) against (1-q) N(-1) + q N(0), in units of the clip
    and relative to the other k-1.
    """
    x = np.linspace(-60, 60, 600_001)
    n = {mean: norm.pdf(x, mean, noise) for mean in (-1, 0, 1)}
    there, absent = (
        (1 - fraction) * n[-1] + fraction * n[1],
        (1 - fraction) * n[-1] + fraction * n[0],
    )
    for eps in (-1.0, 0.0, 0.1, 0.5, 1.0, 2.0):
        bound = float(bound_of_a_round(np.array([eps]), fraction, noise)[0])
        both = [
            hockey_stick(math.exp(eps), *pair, x[1] - x[0])
            for pair in ((there, absent), (absent, there))
        ]
        assert max(both) <= bound + 1e-9
    # far out the bound is nearly reached, so nothing much smaller would hold; the curve for coins
    # is passed there
    far = math.log1p(fraction * (math.exp(10 / noise) - 1))
    reached, bound = (
        hockey_stick(math.exp(far), there, absent, x[1] - x[0]),
        float(bound_of_a_round(np.array([far]), fraction, noise)[0]),
    )
    coins = fraction * float(gaussian_delta(np.array([10 / noise]), 1 / noise)[0])
    assert coins < reached <= bound


@pytest.mark.parametrize("fraction", [0.05, 0.5])
@pytest.mark.parametrize("noise", [0.8, 3.0])
def test_the_bound_covers_a_client_that_is_replaced(fraction: float, noise: float) -> None:
    """The client pushes by +1 or by -1. Under Poisson sampling it is there with chance q, else
    nobody is in its place: (1-q) N(0) + q N(+1) against (1-q) N(0) + q N(-1). In a fixed cohort
    another client is, whose push is any of -1, 0 and +1.
    """
    x = np.linspace(-60, 60, 600_001)
    n = {mean: norm.pdf(x, mean, noise) for mean in (-1, 0, 1)}
    passed = []
    for other in (-1, 0, 1):
        plus, minus = ((1 - fraction) * n[other] + fraction * n[sign] for sign in (1, -1))
        for eps in (-1.0, 0.0, 0.1, 0.5, 1.0, 2.0):
            bound = float(bound_of_a_round(np.array([eps]), fraction, noise)[0])
            reached = max(
                hockey_stick(math.exp(eps), *pair, x[1] - x[0])
                for pair in ((plus, minus), (minus, plus))
            )
            assert reached <= bound + 1e-9
            passed.append(
                reached > fraction * float(gaussian_delta(np.array([max(eps, 0)]), 1 / noise)[0])
            )
    # the curve for a client that is added or removed does not cover it
    assert any(passed)


@given(fraction=st.floats(0.001, 1), noise=st.floats(0.3, 20))
def test_the_bound_is_a_curve_that_can_be_composed(fraction: float, noise: float) -> None:
    """From 1 down, and convex in e^epsilon: else no privacy loss distribution has it."""
    alphas = np.exp(np.linspace(-4, 4, 801))
    deltas = bound_of_a_round(np.log(alphas), fraction, noise)
    slopes = np.diff(deltas) / np.diff(alphas)
    assert (deltas >= 0).all()
    assert (deltas <= 1).all()
    assert (slopes <= 1e-12).all()
    assert (np.diff(slopes) >= -1e-9).all()


# --------------------------------------------------------------------------------- over many rounds


@needs_accounting
def test_without_sampling_rounds_add_up_to_one_gaussian() -> None:
    """16 rounds with noise 2 are one with noise 2 / sqrt(16) = 1/2: mu = 2, whose delta at
    epsilon 10 is just below 1e-5 (above).
    """
    assert epsilon(16, fraction=1, noise=2, delta=DELTA) == pytest.approx(
        brentq(lambda eps: exact_delta(eps, 2.0) - DELTA, 5, 15), rel=1e-3
    )
    assert 9.9 < epsilon(16, fraction=1, noise=2, delta=DELTA) < 10


@needs_accounting
def test_published_numbers_for_coins() -> None:
    """Bu, Dong, Long, Su: Deep learning with Gaussian differential privacy, 2020, figure 4: batches
    of 256 of 60000 rows, 20 epochs, delta 1e-5.

    The moments accountant gives epsilon 1.34 for noise 1.3, and the limit of many steps, mu = q
    sqrt(T (e^(1/noise^2) - 1)), gives the same 1.34, with mu = .35, for noise 1.06. A tight account
    of noise 1.3 lies between its own limit, which is too small, and theirs, which is too large.
    """
    rounds, fraction = 20 * 60_000 // 256, 256 / 60_000

    def limit(noise: float) -> tuple[float, float]:
        mu = fraction * math.sqrt(rounds * math.expm1(noise**-2))
        return mu, float(brentq(lambda eps: exact_delta(eps, mu) - DELTA, 0.01, 10))

    assert limit(1.06) == pytest.approx((0.35, 1.34), abs=0.01)
    assert (
        limit(1.3)[1]
        < epsilon(rounds, fraction=fraction, noise=1.3, delta=DELTA, sampling="poisson")
        < 1.34
    )


@needs_accounting
def test_a_fixed_cohort_agrees_with_the_published_bound_for_it() -> None:
    """Against Renyi accounting of sampling without replacement (Wang, Balle, Kasiviswanathan
    2019), which is looser: with twice the clip, noise / 2.
    """
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    accountant.compose(
        dp_accounting.SampledWithoutReplacementDpEvent(
            100, 5, dp_accounting.GaussianDpEvent(4.0 / 2)
        ),
        200,
    )
    ours = epsilon(200, fraction=0.05, noise=4.0, delta=DELTA)
    assert (
        epsilon(200, fraction=0.05, noise=4.0, delta=DELTA, sampling="poisson")
        < ours
        < accountant.get_epsilon(DELTA)
    )


@needs_accounting
def test_what_epsilon_depends_on() -> None:
    def after(rounds: int = 20, **changes: Any) -> float:
        return epsilon(rounds, **{"fraction": 0.2, "noise": 2.0, "delta": DELTA} | changes)

    assert after(0) == 0
    assert after(noise=0) == math.inf
    assert after(10) < after(20) < after(40)
    assert after(noise=4.0) < after() < after(noise=1.0)
    assert after(fraction=0.1) < after() < after(fraction=1)
    assert after(delta=1e-3) < after() < after(delta=1e-7)
    assert after(sampling="poisson") < after() <= after(sampling="any")
    assert after(sampling="any") == after(fraction=1)


@needs_accounting
def test_replacing_a_client_and_removing_it() -> None:
    """With everybody in every round a replaced client moves the sum twice as far, which is half the
    noise. The bound of fixed cohorts is for both; the number of Poisson sampling is for removing
    alone.
    """

    def after(**changes: Any) -> float:
        return epsilon(20, **{"fraction": 0.2, "noise": 4.0, "delta": DELTA} | changes)

    for everybody in ({"fraction": 1}, {"sampling": "any"}):
        assert after(**everybody, neighbors="replace") == after(**everybody, noise=2.0)
        assert after(**everybody, neighbors="replace") > after(**everybody)
    fixed = after()
    assert after(neighbors="replace") == fixed < after(fraction=1)
    assert after(sampling="poisson") < fixed
    assert after(sampling="poisson", neighbors="replace") == fixed
    with pytest.raises(InputError, match="unknown neighboring relation 'add'"):
        after(neighbors="add")


@needs_accounting
@settings(max_examples=10)
@given(fraction=st.floats(0.5, 1), noise=st.floats(1, 5), rounds=st.integers(1, 20))
def test_sampling_never_costs(fraction: float, noise: float, rounds: int) -> None:
    """Where the bound for fixed cohorts says more than that everybody is always there, the
    latter counts.
    """
    whole = epsilon(rounds, fraction=1, noise=noise, delta=DELTA)
    assert epsilon(rounds, fraction=fraction, noise=noise, delta=DELTA) <= whole


@needs_accounting
@pytest.mark.parametrize("budget", [0.5, 3.0])
def test_rounds_within_a_budget(budget: float) -> None:
    found = max_rounds_for_budget(budget, fraction=0.2, noise=4.0, delta=DELTA)
    assert (
        epsilon(found, fraction=0.2, noise=4.0, delta=DELTA)
        <= budget
        < epsilon(found + 1, fraction=0.2, noise=4.0, delta=DELTA)
    )


@needs_accounting
def test_the_noise_for_a_budget() -> None:
    found = calibrate_noise(3.0, rounds=10, fraction=1, delta=DELTA)
    assert (
        epsilon(10, fraction=1, noise=found, delta=DELTA)
        <= 3
        < epsilon(10, fraction=1, noise=found - 0.01, delta=DELTA)
    )
    with pytest.raises(InputError, match="no noise keeps epsilon within a budget of 0"):
        calibrate_noise(0, rounds=10, fraction=1, delta=DELTA)


# ------------------------------------------------------------------------------ what a run promises


@needs_accounting
def test_a_guarantee_keeps_its_budget() -> None:
    kept = ClientGuarantee(noise=4.0, delta=DELTA, budget=3.0, cohort=2, clients=10)
    last = kept.last_round(10_000)
    assert kept.epsilon(last) <= 3 < kept.epsilon(last + 1)
    assert kept.last_round(last - 1) == last - 1
    assert (
        ClientGuarantee(noise=4.0, delta=DELTA, budget=0.0, cohort=2, clients=10).last_round(10_000)
        == 10_000
    )
    assert (
        ClientGuarantee(noise=1.0, delta=DELTA, budget=0.01, cohort=2, clients=10).last_round(5)
        == 0
    )


@needs_accounting
def test_a_guarantee_says_what_it_rests_on() -> None:
    fixed = ClientGuarantee(noise=2.0, delta=DELTA, budget=20.0, cohort=10, clients=10)
    assert fixed.describe(16) == (
        f"epsilon {fixed.epsilon(16):.2f} of a budget of 20 for adding or removing any one client,"
        f" {fixed.epsilon(16, 'replace'):.2f} for replacing it, at delta 1e-05 after 16 rounds"
        " (10 of 10 clients sampled without replacement, noise 2); the noise of a simulation"
        " comes from its seed: not private"
    )
    both = ClientGuarantee(noise=4.0, delta=DELTA, budget=0.0, cohort=1, clients=10)
    assert both.describe(16).startswith(
        f"epsilon {both.epsilon(16):.2f} for adding, removing or replacing any one client, at delta"
    )
    anybody = ClientGuarantee(
        noise=2.0, delta=DELTA, budget=0.0, cohort=1, clients=10, sampling="any"
    )
    assert anybody.epsilon(16) == fixed.epsilon(16)
    assert "nothing assumed about the sampling of clients" in anybody.describe(16)
    assert "not private" in anybody.describe(16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"fraction": 1.1}, "fraction=1.1"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"noise": math.nan}, "noise=nan"),
        ({"sampling": "fixd"}, "unknown sampling 'fixd': did you mean fixed"),
    ],
)
def test_numbers_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        epsilon(1, **{"fraction": 0.5, "noise": 1.0, "delta": DELTA} | changes)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dp_accounting", "dp_accounting.pld"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        InputError, match=r"needs the package dp-accounting .*pip install \"remanence-fl\[dp\]\""
    ):
        require_accounting()
