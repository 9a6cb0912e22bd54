"""What the lines of metrics.jsonl say about a run as a whole: did it learn anything, and did it
diverge?

The round loop asks after every round, a `Run` about all of its lines. Lines may come from another
person; `readers.py` has checked their numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

NOT_FINITE = "not-finite"  # the code of a rejection
# A mean cross-entropy above these has diverged: in the first evaluated round, whose data may not
# be normalized, and in later rounds, where it must also be ten times the lowest one so far.
LARGE_LOSS, LARGER_LOSS, GROWTH = 1e4, 100.0, 10.0
CURE = "lower the learning rate, or limit the updates (norm_clip, dp_sgd(noise=0))"


class DivergenceDetector:
    """Finds the round in which training diverges.

    Args:
        attackers: Clients whose replies do not count: theirs may be invalid on purpose.
    """

    def __init__(self, attackers: Collection[int] = ()):
        self.attackers, self.lowest = frozenset(attackers), math.inf

    def check(self, line: Mapping[str, Any]) -> str:
        """What diverged in a round, from its line of one split; empty where nothing did."""
        rejected = [
            reply for reply in line.get("rejected") or [] if reply["client"] not in self.attackers
        ]
        bad = len({reply["client"] for reply in rejected if reply["code"] == NOT_FINITE})
        if bad:
            replies = int(line.get("replies") or 0) + len({reply["client"] for reply in rejected})
            return f"the models of {bad} of {replies} clients hold NaN or infinity"
        if "NaN or infinity" in str(line.get("problem") or ""):
            return str(line["problem"])
        if line.get("accuracy") is None:
            return ""
        loss, lowest = line.get("loss"), self.lowest
        if loss is None:
            return "the loss is not finite"
        self.lowest = min(lowest, loss)
        limit = LARGE_LOSS if lowest == math.inf else max(LARGER_LOSS, GROWTH * lowest)
        return f"the loss is {loss:.3g}" if loss > limit else ""


def find_divergence(
    lines: Iterable[Mapping[str, Any]], attackers: Collection[int] = (), split: str = "test"
) -> tuple[int, str] | None:
    """The first round that diverged, and what did; None where none did.

    Args:
        lines: Of metrics.jsonl.
        attackers: Clients whose replies do not count.
        split: Whose losses are read.
    """
    detector = DivergenceDetector(attackers)
    for line in lines:
        if line["split"] == split and (found := detector.check(line)):
            return int(line["round"]), found
    return None


def has_learned(line: Mapping[str, Any]) -> bool:
    """Whether a round changed a model by what clients or the server learned from examples."""
    learned = line.get("learned")
    return learned if isinstance(learned, bool) else not line.get("abandoned")


def why_nothing_learned(lines: Iterable[Mapping[str, Any]]) -> str:
    """Why no round changed a model; empty where one did, or where no round is recorded.

    >>> line = {"round": 1, "abandoned": True, "replies": 0, "rejected": []}
    >>> why_nothing_learned([line])
    'no client was online and sampled'
    >>> why_nothing_learned([line, line | {"round": 2, "abandoned": False}])
    ''
    """
    rounds = list({line["round"]: line for line in lines}.values())
    if not rounds or any(has_learned(line) for line in rounds):
        return ""
    if any(line.get("replies") for line in rounds):
        return _why_unused(rounds)
    codes = Counter(
        (str(reply["code"]), str(reply.get("reason", "")))
        for line in rounds
        for reply in line.get("rejected") or []
    )
    if codes:
        code, reason = codes.most_common(1)[0][0]
        return f"every reply was rejected, most as {code}: {reason}"
    if any(line.get("late") for line in rounds):
        return "every reply was late"
    if any(line.get("no_response") for line in rounds):
        return "no client replied"
    return "no client was online and sampled"


def _why_unused(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Why valid replies changed no model."""
    problems = [str(line["problem"]) for line in rounds if line.get("problem")]
    if problems:
        return problems[0]
    if all(line.get("abandoned") for line in rounds):
        return "too few replies were valid"
    if all((line.get("unmoved") or 0) >= (line.get("replies") or 0) for line in rounds):
        return "local training changed no client's model"
    return "the updates of the clients never changed the model"


def describe_outcome(lines: Sequence[Mapping[str, Any]], attackers: Collection[int]) -> list[str]:
    """The sentences that a reader of the results must know first; empty for a run that learned."""
    found, why = [], why_nothing_learned(lines)
    if why:
        count = len({line["round"] for line in lines})
        rounds = "1 round" if count == 1 else f"{count} rounds"
        found.append(f"learned nothing in {rounds}, its model is the untrained one: {why}")
    if diverged := find_divergence(lines, attackers):
        found.append(f"diverged in round {diverged[0]}: {diverged[1]}; {CURE}")
    return found
