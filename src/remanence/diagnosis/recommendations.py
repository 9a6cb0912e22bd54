"""Which method or setting fits which kind of forgetting, and why.

Methods are recommended by what their parts declare (`Part.addresses`), settings by what the runs
showed. A recommendation is something to try. What a run already uses is not recommended again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from remanence.core import expressions
from remanence.core.declarations import (
    ABSENT_CLASSES,
    AGGREGATION,
    DRIFT,
    HELD_CLASSES,
    MIXING,
    PEER_DRIFT,
    Remedy,
)
from remanence.core.errors import InputError
from remanence.core.slots import Part
from remanence.methods import PARTS
from remanence.metrics.groups import Group, primary_model
from remanence.results.run import Run


@dataclass(frozen=True)
class Recommendation:
    """What to try, and why it fits."""

    action: str
    reason: str


@cache
def parts_addressing(forgetting: str) -> tuple[tuple[Part, Remedy], ...]:
    """The parts that declare to reduce a kind of forgetting, in the order to recommend them."""
    found = [
        (part, remedy)
        for part in (make() for make in PARTS.values())
        for remedy in part.addresses
        if remedy.forgetting == forgetting
    ]
    return tuple(sorted(found, key=lambda pair: pair[1].rank))


def recommend_for_phase(
    phase: str, group: Group, absent: tuple[float, float] | None
) -> tuple[Recommendation, ...]:
    """Recommendations for the phase that loses most.

    Args:
        phase: The phase of a round, such as "local" or "aggregation".
        group: The runs of one method and setting.
        absent: What local training loses of classes that a client lacks, and of those it has;
            None where the runs do not show it.

    Returns:
        The recommendations, the most fitting first; none for drift, see `recommend_for_drift`.
    """
    run = group.runs[0]
    if phase == "local":
        return tuple(_recommend_local(run, absent))
    if phase == "aggregation":
        return tuple(_recommend_aggregation(run))
    if phase == "mixing":
        return tuple(_recommend_parts(MIXING, run))
    if phase == "server":
        return (
            Recommendation(
                "more public examples (data.public), or less training at the server",
                "the training at the server loses more accuracy than it gains",
            ),
        )
    return ()


def recommend_for_drift(
    group: Group, own: float | None, chance: float | None
) -> tuple[Recommendation, ...]:
    """Recommendations for accuracy that is lost by a drift.

    Args:
        group: The runs of one method and setting.
        own: The share of peer selections within the client's own cluster; None where it is not
            known.
        chance: The same share with peers drawn at random.

    Returns:
        The recommendations; none where clients already select their peers.
    """
    run = group.runs[0]
    if primary_model(run) == "global":
        return tuple(_recommend_parts(DRIFT, run))
    if _is_in_place(PEER_DRIFT, run):
        return ()
    if own is None or chance is None:
        return tuple(_recommend_parts(PEER_DRIFT, run))
    reason = (
        f"clients select similar peers; here {100 * own:.0f} % of the selections are within"
        f" clusters, and randomly drawn peers give {100 * chance:.0f} %"
    )
    return tuple(Recommendation(p.name, reason) for p, _ in parts_addressing(PEER_DRIFT))


def _recommend_local(run: Run, absent: tuple[float, float] | None) -> Iterable[Recommendation]:
    lacking, held = absent or (0.0, 0.0)
    if absent is None:
        yield from _recommend_losses(
            run,
            "help if the lost classes are those that a client lacks, which these runs do not show",
        )
    elif lacking > max(held, 0.0):
        yield from _recommend_losses(run, "", f"{100 * lacking:.1f} points in training")
        yield from _recommend_parts(ABSENT_CLASSES, run)
    elif not _is_in_place(HELD_CLASSES, run):
        found = list(_recommend_parts(HELD_CLASSES, run))
        lost = f": here training loses {100 * held:.1f} points of classes that clients have"
        for place, proposal in enumerate(found):
            yield Recommendation(proposal.action, proposal.reason + ("" if place else lost))
    local = run.config.local
    if local.steps > 1 or local.epochs > 1:
        amount = f"{local.steps} steps" if local.steps else f"{local.epochs} epochs"
        yield Recommendation(
            "less local training a round",
            f"a local model changes much in {amount} a round; with fewer, training takes more"
            " rounds",
        )


def _recommend_losses(run: Run, reason: str, lost: str = "") -> Iterable[Recommendation]:
    """The losses for absent classes in one line, because a method has one loss."""
    losses = [pair for pair in parts_addressing(ABSENT_CLASSES) if pair[0].loss is not None]
    proposed = [(p.name, remedy.reason) for p, remedy in losses if remedy.reason]
    if not {p.name for p, _ in losses} & parts_of(run):
        yield Recommendation(
            " or ".join(f"{run.method}+{name}" for name, _ in proposed),
            reason or f"{proposed[0][1]}, and those lose {lost}",
        )


def _recommend_parts(forgetting: str, run: Run) -> Iterable[Recommendation]:
    """What parts other than losses recommend for a kind of forgetting."""
    served, used = primary_model(run) == "global", parts_of(run)
    for p, remedy in parts_addressing(forgetting):
        fits = (
            p.loss is None
            and (served or not remedy.needs_server)
            and (run.config.local.steps == 0 or not remedy.needs_unequal_steps)
        )
        if fits and remedy.reason and p.name not in used:
            yield Recommendation(p.name, remedy.reason)


def _is_in_place(forgetting: str, run: Run) -> bool:
    return any(p.name in parts_of(run) for p, _ in parts_addressing(forgetting))


def _recommend_aggregation(run: Run) -> Iterable[Recommendation]:
    share = _participation(run)
    if share is not None and share < 1:
        yield Recommendation(
            "more clients a round (clients.sample)",
            f"{100 * share:.0f} % of the clients take part; aggregation does not see the"
            " classes of the others",
        )
    yield from _recommend_parts(AGGREGATION, run)


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
