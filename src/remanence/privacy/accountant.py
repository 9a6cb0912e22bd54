"""The privacy accountant: epsilon at a delta, after a number of rounds of clipped and noised sums.

Client-level privacy. Two populations are neighbors if they are equal except for one client, and
epsilon is known for both relations that are in use:
- "remove": the client contributes nothing (its update is zero) in one of the two; one is added or
  removed. The two sums of clipped updates differ by the clip.
- "replace": it has other data in the other one, so the sums differ by twice the clip.
The number of clients that reply is treated as public. A round releases the sum of clipped updates
plus Gaussian noise with standard deviation `noise` times the clip.

Assumptions about the sampling of clients:
- "fixed": a number of clients is sampled without replacement in every round (the default).
  Where the client is not in the cohort another one is, so the two sums can differ by twice the
  clip under either relation. By advanced joint convexity (Balle, Barthe, Gaboardi: Privacy
  amplification by subsampling, 2018, theorem 2) the delta of a round is at most
  q * delta_G(log(1 + (e^eps - 1) / q)), with delta_G that of the Gaussian mechanism with noise / 2.
  This is a proven bound. It is much larger than the number for Poisson sampling, for reasons given
  by Lebeda, Regehr, Kamath, Steinke: Avoiding pitfalls for privacy accounting of subsampled
  mechanisms under composition, 2024.
- "poisson": every client joins independently (clients.sampling = "poisson"), and the sum is divided
  by the expected number of clients, so that it does not reveal the actual one. Papers often report
  this number for fixed cohorts too, for which it does not hold. It is for "remove"; for "replace"
  the bound of fixed cohorts holds here, too: its proof needs only that the client takes part with
  probability q and that two sums differ by twice the clip at most.
- "any": as if every client were in every round: one Gaussian mechanism with noise / sqrt(rounds),
  and half of that for "replace".
  It bounds every sampling that does not depend on the updates. Where the sampling depends on the
  clients' numbers of examples, these are treated as public.

"fixed" and "poisson" are composed over rounds by privacy loss distributions (dp-accounting, the
extra `dp`); all rounding is upwards.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from remanence.core.errors import InputError, unknown

SAMPLINGS = ("fixed", "poisson", "any")
REMOVE, REPLACE = "remove", "replace"  # neighboring relations
INTERVAL = 1e-4  # width of a cell of the privacy loss; larger where its range is large
MAX_CELLS = 100_000  # about; wider cells round further up
TAIL = 1e-15  # probability of losses beyond the range in a round, which is added to delta
MAX_ROUNDS = 1_000_000


def epsilon(
    rounds: int,
    *,
    fraction: float,
    noise: float,
    delta: float,
    sampling: str = "fixed",
    neighbors: str = REMOVE,
) -> float:
    """Epsilon at `delta` after `rounds` rounds in which a client takes part with probability
    `fraction`; infinity without noise.

    Args:
        rounds: Rounds played; epsilon is 0 before the first.
        fraction: Probability that a client is in a round.
        noise: Noise multiplier: standard deviation over the clip.
        delta: At which epsilon is reported.
        sampling: "fixed", "poisson" or "any"; see the module.
        neighbors: "remove" or "replace"; see the module.
    """
    if sampling not in SAMPLINGS:
        raise unknown("sampling", sampling, SAMPLINGS)
    if neighbors not in (REMOVE, REPLACE):
        raise unknown("neighboring relation", neighbors, (REMOVE, REPLACE))
    for name, value, good in (
        ("fraction", fraction, 0 < fraction <= 1),
        ("delta", delta, 0 < delta < 1),
        ("noise", noise, noise >= 0),
    ):
        if not good:
            raise InputError(
                f"epsilon cannot be computed with {name}={value}: fraction and delta lie"
                " between 0 and 1, noise is at least 0"
            )
    if rounds == 0:
        return 0.0
    if noise == 0:
        return math.inf
    distance = 2 if neighbors == REPLACE else 1  # of two sums, in clips
    unsampled = gaussian_epsilon(distance * math.sqrt(rounds) / noise, delta)
    if fraction == 1 or sampling == "any":
        return unsampled
    curve = "fixed" if neighbors == REPLACE else sampling
    return min(unsampled, _composed(rounds, fraction, noise, curve, delta))


def max_rounds_for_budget(
    budget: float, *, fraction: float, noise: float, delta: float, sampling: str = "fixed"
) -> int:
    """The most rounds after which epsilon is at most `budget`; at most a million."""

    def fits(rounds: int) -> bool:
        return (
            epsilon(rounds, fraction=fraction, noise=noise, delta=delta, sampling=sampling)
            <= budget
        )

    least, most = 0, 1
    while most < MAX_ROUNDS and fits(most):
        least, most = most, min(2 * most, MAX_ROUNDS)
    if most == MAX_ROUNDS and fits(most):
        return MAX_ROUNDS
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def calibrate_noise(
    budget: float, *, rounds: int, fraction: float, delta: float, sampling: str = "fixed"
) -> float:
    """The smallest noise multiplier, rounded up to a thousandth, with which the rounds stay within
    the budget.
    """
    if budget <= 0:
        raise InputError(
            f"no noise keeps epsilon within a budget of {budget}: give a budget above 0"
        )

    def fits(noise: float) -> bool:
        return (
            epsilon(rounds, fraction=fraction, noise=noise, delta=delta, sampling=sampling)
            <= budget
        )

    low, high = 0.0, 1.0
    while not fits(high):
        low, high = high, 2 * high
    while high - low > 5e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return math.ceil(high * 1000) / 1000


def require_accounting() -> None:
    """Raise InputError where the package dp-accounting is missing."""
    try:
        import dp_accounting.pld  # noqa: F401
    except ImportError as error:
        raise InputError(
            f'an epsilon needs the package dp-accounting ({error}): pip install "remanence-fl[dp]"'
        ) from error


def bound_of_a_round(epsilons: np.ndarray, fraction: float, noise: float) -> np.ndarray:
    """The smallest proven delta for each epsilon of a round with a fixed cohort, for both orders of
    the neighbors; decreasing and convex in e^epsilon.

    Args:
        epsilons: [n], of any sign.
        fraction: Probability that a client is in the round.
        noise: Noise multiplier.

    Returns:
        [n]
    """
    size = np.abs(epsilons)
    with np.errstate(over="ignore"):
        inner = np.where(
            size > 30,
            size - math.log(fraction),
            np.log1p(np.expm1(np.minimum(size, 30)) / fraction),
        )
    above = fraction * gaussian_delta(inner, 2 / noise)
    # H_a(P|Q) = 1 - a + a H_{1/a}(Q|P)
    return np.where(epsilons >= 0, above, 1 - np.exp(-size) + np.exp(-size) * above)


def gaussian_delta(epsilons: np.ndarray, distance: float) -> np.ndarray:
    """delta of two Gaussians with unit variance and means at a distance, for epsilon >= 0 (Balle
    and Wang: Improving the Gaussian mechanism, 2018, theorem 5).
    """
    from scipy.special import log_ndtr

    first = log_ndtr(distance / 2 - epsilons / distance)
    second = epsilons + log_ndtr(-distance / 2 - epsilons / distance)
    return np.asarray(np.exp(first) * -np.expm1(np.minimum(second - first, 0.0)))


def gaussian_epsilon(distance: float, delta: float) -> float:
    """The smallest epsilon at `delta` of two Gaussians with unit variance and means at a distance,
    rounded up to a billionth. Several Gaussian mechanisms compose to one.

    >>> round(gaussian_epsilon(2.0, 9.94e-6), 2)
    10.0
    """
    if distance == 0:
        return 0.0
    low, high = 0.0, 1.0
    while float(gaussian_delta(np.array([high]), distance)[0]) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if float(gaussian_delta(np.array([middle]), distance)[0]) <= delta
            else (middle, high)
        )
    return high


@functools.lru_cache(maxsize=256)
def _composed(rounds: int, fraction: float, noise: float, sampling: str, delta: float) -> float:
    return float(
        _one_round(fraction, noise, sampling).self_compose(rounds).get_epsilon_for_delta(delta)
    )


@functools.lru_cache(maxsize=16)
def _one_round(fraction: float, noise: float, sampling: str) -> Any:
    """The privacy loss distribution of a round."""
    require_accounting()
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    reach = 1.0
    while float(bound_of_a_round(np.array([reach]), fraction, noise)[0]) > TAIL:
        reach *= 1.25
    interval = max(INTERVAL, 2 * reach / MAX_CELLS)
    if sampling == "poisson" or fraction == 1:
        return privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=noise,
            sampling_prob=fraction,
            value_discretization_interval=interval,
            use_connect_dots=True,
        )
    last = math.ceil(reach / interval)
    deltas = bound_of_a_round(np.arange(-last, last + 1) * interval, fraction, noise)
    return privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -last, last, deltas)
    )
