"""Where an aggregator's promise ends: refused before a run, abandoned in a round, never
weakened.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aggregators.points import combine

from remanence.aggregators.minimum_replies import check_cohort, minimum_of
from remanence.aggregators.robust import (
    geometric_median,
    krum,
    median,
    multi_krum,
    norm_clip,
    trimmed_mean,
)
from remanence.core.compose import ComposedMethod
from remanence.core.errors import AggregationFailed, InputError
from remanence.core.slots import Method, Part
from remanence.engines.sequential import SequentialEngine
from remanence.losses import wsm
from remanence.methods import fedavg, fedprox, fedwavg
from remanence.testing import check_method
from remanence.testing.toy_task import run_rounds, small_experiment

LEAST = [
    (median(), 3),
    (trimmed_mean(fraction=0.1), 10),  # floor(.1 * 9) = 0
    (trimmed_mean(fraction=0.49), 3),  # floor(.49 * 3) = 1, floor(.49 * 2) = 0
    (trimmed_mean(fraction=0.2), 5),
    (krum(byzantine=0), 3),
    (krum(byzantine=1), 5),
    (krum(byzantine=4), 11),
    (multi_krum(byzantine=1), 5),
    (multi_krum(byzantine=1, keep=2), 5),
    (multi_krum(byzantine=1, keep=6), 9),  # keep <= n - f - 2
    (geometric_median(), 3),
    (norm_clip(), 3),
    (norm_clip(limit=1), 1),
]


@pytest.mark.parametrize(
    ("made", "least"), LEAST, ids=[f"{made.name}-{least}" for made, least in LEAST]
)
def test_the_least_number_of_replies(made: Part, least: int) -> None:
    """One fewer is refused at set-up and abandons a round; the least itself works."""
    method, points = (
        ComposedMethod(Method((made,))),
        torch.randn(least, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    )
    check_cohort(method, least)
    assert bool(torch.isfinite(combine(made, points)).all())
    if least > 1:
        with pytest.raises(
            InputError,
            match=rf"{made.name} needs {least} clients in a round \(.+\) and there are"
            rf" {least - 1}: sample more of them .* or ",
        ):
            check_cohort(method, least - 1)
        with pytest.raises(
            AggregationFailed,
            match=rf"{made.name} needs {least} replies \(.+\) and {least - 1} came",
        ):
            combine(made, points[1:])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: trimmed_mean(fraction=0.5),
            "trimmed_mean: fraction must be a number above 0 and below 0.5, not 0.5",
        ),
        (lambda: trimmed_mean(fraction=0), "above 0 and below 0.5, not 0"),
        (lambda: trimmed_mean(fraction=float("nan")), "not nan"),
        (lambda: krum(byzantine=-1), "krum: byzantine must be a number of at least 0, not -1"),
        (lambda: multi_krum(byzantine=-1), "multi_krum: byzantine"),
        (lambda: multi_krum(keep=-1), "multi_krum: keep must be a number of at least 0"),
        (
            lambda: geometric_median(iterations=0),
            "geometric_median: iterations must be a number of at least 1",
        ),
        (
            lambda: geometric_median(tolerance=0),
            "geometric_median: tolerance must be a number above 0 and below 1",
        ),
        (
            lambda: geometric_median(weighted=2),
            "geometric_median: weighted must be true or false, not 2",
        ),  # type: ignore[arg-type]
        (lambda: norm_clip(limit=-1), "norm_clip: limit must be a number of at least 0"),
        (lambda: norm_clip(limit=float("inf")), "norm_clip: limit"),
    ],
)
def test_settings_that_cannot_be(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_who_holds_half_of_the_weight_decides_nothing() -> None:
    points = torch.eye(3, dtype=torch.float64)
    with pytest.raises(
        AggregationFailed,
        match=r"client 8 has 50% of the weight and would decide alone;"
        r" geometric_median\(weighted=false\)",
    ):
        combine(geometric_median(), points, weights=[1, 2, 1], clients=[3, 8, 9])
    assert bool(
        torch.isfinite(combine(geometric_median(weighted=False), points, weights=[1, 2, 1])).all()
    )


def test_weights_that_would_do_nothing_are_refused() -> None:
    for made in (
        median(),
        trimmed_mean(fraction=0.3),
        krum(byzantine=0),
        multi_krum(byzantine=0),
        geometric_median(weighted=False),
    ):
        with pytest.raises(
            InputError,
            match=f"fedwavg and {made.name} cannot be combined: {made.name} counts every client"
            " alike",
        ):
            check_cohort(ComposedMethod(fedwavg() + made), 9)
    for made in (geometric_median(), norm_clip()):
        check_cohort(ComposedMethod(fedwavg() + made), 9)


def test_other_methods_promise_nothing() -> None:
    assert minimum_of(ComposedMethod(Method((fedavg(),)))) is None
    check_cohort(ComposedMethod(Method((fedavg(),))), 1)
    found = minimum_of(ComposedMethod(fedprox(mu=0.1) + krum(byzantine=2)))
    assert found is not None
    assert found.minimum == 7


def test_a_round_with_too_few_replies_is_abandoned_and_named() -> None:
    """Five of six clients are wanted, two never answer, Krum with f = 1 needs five: the model
    stays as it was.
    """
    experiment = small_experiment(
        krum(byzantine=1), {"clients.sample": 5, "clients.availability": "never(clients='0 1')"}
    )
    state, lines = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert lines[0]["abandoned"]
    assert lines[0]["problem"] == "krum needs 5 replies (2 * byzantine + 3) and 4 came"
    for name, value in experiment.task.model.initial.params.items():
        assert torch.equal(state.server.model.params[name], value)


@pytest.mark.parametrize(
    "method",
    [
        median() + wsm(),
        trimmed_mean(fraction=0.25) + fedprox(mu=0.1),
        krum(byzantine=0),
        multi_krum(byzantine=0),
        geometric_median(weighted=False),
        norm_clip() + fedwavg(),
    ],
    ids=[
        "median+wsm",
        "trimmed_mean+fedprox",
        "krum",
        "multi_krum",
        "geometric_median",
        "norm_clip+fedwavg",
    ],
)
def test_the_contract(method: Any) -> None:
    check_method(method)
