"""Which method or setting fits which kind of forgetting, and why: what the papers propose, matched
to what a run showed.

A cure is a proposal to try, never a promise. What a run already uses is not proposed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remanence.core import expressions
from remanence.core.errors import InputError
from remanence.metrics.groups import Group, primary_model
from remanence.results.run import Run

# one of them fills the place of the loss
ABSENT_CLASS_LOSSES = ("wsm", "tce", "masked_ce", "fedlc", "fedrs")
METHODS = (
    "dac",
    "feddrift",
    "fednova",
    "fedntd",
    "fedprox",
    "fedwavg",
    "flashback",
    "hast",
    "scaffold",
    "tce",
    "wsm",
)  # proposed by name below


@dataclass(frozen=True)
class Recommendation:
    """What to try, and why it fits."""

    action: str
    reason: str


def recommend_for_phase(
    phase: str, group: Group, absent: tuple[float, float] | None
) -> tuple[Recommendation, ...]:
    """Cures for the phase that loses most; `absent`: what local training loses of classes that
    a client lacks, and of those it holds.
    """
    run = group.runs[0]
    used = parts_of(run)
    if phase == "local":
        return tuple(_recommend_local(run, used, absent))
    if phase == "aggregation":
        return tuple(_recommend_aggregation(run, used))
    if phase == "mixing":
        return tuple(_recommend_mixing(used))
    if phase == "server":
        return (
            Recommendation(
                "more public rows (data.public), or less training at the server",
                "the server's own training loses more than it gives",
            ),
        )
    return ()  # drift has its own numbers, and cure_drift


def recommend_for_drift(
    group: Group, own: float | None, chance: float | None
) -> tuple[Recommendation, ...]:
    """Cures for what a drift costs; `own`: the share of listening within the own cluster,
    against what chance gives.
    """
    run = group.runs[0]
    used = parts_of(run)
    if primary_model(run) == "global":
        found = [
            Recommendation(
                "feddrift",
                "keeps a global model for every concept, so that one concept's clients do not"
                " unlearn another's",
            ),
            Recommendation(
                "hast",
                "needs no server: clients share the whole model with anybody and the"
                " classifier with those alike",
            ),
        ]
    elif used & {"hast", "dac"}:
        found = []  # they already choose their peers
    elif own is not None and chance is not None:
        why = (
            f"clients choose peers by likeness; here {100 * own:.0f} % of the listening was"
            f" within clusters, and chance gives {100 * chance:.0f} %"
        )
        found = [Recommendation("hast", why), Recommendation("dac", why)]
    else:
        found = [
            Recommendation(
                "hast",
                "shares features with anybody, so that a client that changes cluster keeps them",
            )
        ]
    return tuple(cure for cure in found if cure.action not in used)


def _recommend_local(
    run: Run, used: set[str], absent: tuple[float, float] | None
) -> Iterable[Recommendation]:
    lacking, held = absent or (0.0, 0.0)
    served, masked = primary_model(run) == "global", bool(used & set(ABSENT_CLASS_LOSSES))
    losses = f"{run.method}+wsm or {run.method}+tce"
    if absent is None:
        if not masked:
            yield Recommendation(
                losses,
                "fit if the classes lost are those that a client lacks, which these runs do"
                " not tell",
            )
    elif lacking > max(held, 0.0):
        if not masked:
            yield Recommendation(
                losses,
                "a client then says nothing about classes it lacks, and those lose"
                f" {100 * lacking:.1f} points in training",
            )
        if served and "fedntd" not in used:
            yield Recommendation(
                "fedntd",
                "distils what the global model says about all classes but the true one, the"
                " absent ones among them",
            )
    elif served and not used & {"fedprox", "scaffold"}:
        yield Recommendation(
            "fedprox",
            "ties every local model to the global one: here training loses"
            f" {100 * held:.1f} points of classes that clients hold",
        )
        yield Recommendation("scaffold", "turns every client's gradient to everyone's direction")
    local = run.config.local
    if local.steps > 1 or local.epochs > 1:
        amount = f"{local.steps} steps" if local.steps else f"{local.epochs} epochs"
        yield Recommendation(
            "less local training a round",
            f"{amount} a round take a model far from where it began; fewer cost more rounds",
        )


def _recommend_aggregation(run: Run, used: set[str]) -> Iterable[Recommendation]:
    share = _participation(run)
    if share is not None and share < 1:
        yield Recommendation(
            "more clients a round (clients.sample)",
            f"{100 * share:.0f} % of the clients take part; the others' classes have no"
            " voice in a merge",
        )
    if "flashback" not in used:
        yield Recommendation(
            "flashback",
            "lets the server distill what the clients knew into the merged model (it needs"
            " public rows: data.public)",
        )
    if "fedwavg" not in used:
        yield Recommendation(
            "fedwavg", "weighs clients by the examples that the last merge made the model forget"
        )
    if "fednova" not in used and run.config.local.steps == 0:
        yield Recommendation(
            "fednova", "keeps clients with many local steps from pulling harder than others"
        )


def _recommend_mixing(used: set[str]) -> Iterable[Recommendation]:
    if "hast" not in used:
        yield Recommendation(
            "hast", "averages the classifier only with those alike, where mixing loses"
        )
    if "dac" not in used:
        yield Recommendation(
            "dac", "listens to peers whose models do well on the client's own data"
        )


def parts_of(run: Run) -> set[str]:
    """The names in a method's expression; none for a method that was given as an object.

    >>> from types import SimpleNamespace
    >>> sorted(parts_of(SimpleNamespace(method="fedprox(mu=0.1)+wsm")))
    ['fedprox', 'wsm']
    """
    try:
        return {call.name for call in expressions.parse_parts(run.method)}
    except InputError:
        return set()


def _participation(run: Run) -> float | None:
    """The share of the clients that take part in a round; None where it is not known."""
    sample, everyone = (
        run.config.clients.sample,
        run.metadata.get("clients") or run.config.clients.count,
    )
    if sample is None:
        return 1.0
    return float(sample) if isinstance(sample, float) else sample / everyone if everyone else None
