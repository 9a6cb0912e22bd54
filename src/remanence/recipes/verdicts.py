"""What our numbers say about a claim, in one word, and what that word rests on.

- holds, does not hold: at least half of the published rounds, half of the claim's comparisons and
  two seeds
- holds so far, not so far: less than that
- mixed: some comparisons are as claimed and some are not
- too early to tell: under a tenth of the published rounds, or where the claim says so
- not tested: no comparison was run
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HOLDS, FAILS = "holds", "does not hold"
HOLDS_SO_FAR, FAILS_SO_FAR = "holds so far", "not so far"
MIXED, TOO_EARLY, UNTESTED = "mixed", "too early to tell", "not tested"
WORDS = (HOLDS, HOLDS_SO_FAR, MIXED, FAILS_SO_FAR, FAILS, TOO_EARLY, UNTESTED)

FIRM_SHARE, FIRM_SEEDS = 0.5, 2  # of the published rounds and of the comparisons; of the seeds
EARLY_SHARE = 0.1  # of the published rounds
ALL, MOST, SOME = "all", "most", "some"  # the comparisons of which a claim is made
DASH = "-"


@dataclass(frozen=True)
class Basis:
    """What a number of ours rests on."""

    rounds: int  # the round of the training that it shows
    published: int  # the same in the paper
    seeds: int

    @property
    def share(self) -> float:
        return self.rounds / self.published


@dataclass(frozen=True)
class ClaimCheck:
    """One comparison of a claim, with the number that decides it.

    A gap is in the claimed direction: positive is as claimed. With `by` it is at least that large.
    """

    what: str  # what is compared, in words
    ours: float | None  # None: not run
    published: float | None
    unit: str = "share"  # "times" for a ratio
    kind: str = "gap"  # gap, ratio, or value: a number against fixed limits
    by: float = 0.0  # of a gap or a ratio
    above: float = -math.inf  # the limits of a value
    below: float = math.inf
    basis: Basis | None = None  # of our number; None: not run

    @property
    def tested(self) -> bool:
        return self.ours is not None and not math.isnan(self.ours) and self.basis is not None

    @property
    def as_claimed(self) -> bool:
        return self.tested and self.accepts(self.ours)

    def accepts(self, number: float | None) -> bool:
        """Whether a number is as claimed. Two equal numbers are no gap."""
        if number is None:
            return False
        if self.kind == "value":
            return self.above < number < self.below
        return number > 0 if self.by == 0 else number >= self.by


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim with its comparisons.

    Args:
        text: The paper's statement.
        checks: All comparisons of the claim, run or not.
        section: Of the paper.
        line: Of the paper's plain text, with one line for each paragraph.
        of: Whether the paper claims it of all, most or some of the comparisons.
        too_early: Why less than `until` rounds cannot tell. Empty: the usual share decides.
        until: A published round. 0: no number of rounds can tell.
    """

    text: str
    checks: tuple[ClaimCheck, ...]
    section: str = ""
    line: int = 0
    of: str = ALL
    too_early: str = ""
    until: int = 0

    @property
    def run(self) -> list[ClaimCheck]:
        """The comparisons that were run."""
        return [check for check in self.checks if check.tested]

    @property
    def held(self) -> int:
        return sum(check.as_claimed for check in self.checks)

    @property
    def basis(self) -> Basis | None:
        """The weakest basis of the comparisons that were run; None if none was."""
        known = [check.basis for check in self.run if check.basis is not None]
        if not known:
            return None
        shortest = min(known, key=lambda basis: basis.share)
        return Basis(shortest.rounds, shortest.published, min(basis.seeds for basis in known))

    @property
    def word(self) -> str:
        basis = self.basis
        if basis is None:
            return UNTESTED
        return choose_word(
            self.held,
            len(self.run),
            len(self.checks),
            share=basis.share,
            seeds=basis.seeds,
            of=self.of,
            too_early=bool(self.too_early) and (not self.until or basis.rounds < self.until),
        )

    @property
    def phrase(self) -> str:
        """The word, with the count if the comparisons disagree."""
        count = f" ({self.held} of {len(self.run)} as claimed)"
        return self.word + (count if self.word == MIXED else "")

    @property
    def ours(self) -> str:
        """Our number, or the range of several."""
        return write_range(self.run, [check.ours for check in self.run])

    @property
    def published(self) -> str:
        """The published number of the comparisons that were run, or of all if none was."""
        checks = self.run or self.checks
        return write_range(checks, [check.published for check in checks])

    def to_json(self) -> dict[str, Any]:
        basis = self.basis
        return {
            "claim": self.text,
            "section": self.section,
            "line": self.line,
            "verdict": self.word,
            "ours": self.ours,
            "published": self.published,
            "as_claimed": self.held,
            "run": len(self.run),
            "comparisons": len(self.checks),
            "rounds": basis.rounds if basis else 0,
            "published_rounds": basis.published if basis else None,
            "seeds": basis.seeds if basis else 0,
        }


def choose_word(
    held: int,
    run: int,
    comparisons: int,
    *,
    share: float,
    seeds: int,
    of: str = ALL,
    too_early: bool = False,
) -> str:
    """The verdict on a claim.

    Args:
        held: Number of comparisons that are as claimed.
        run: Number of comparisons that were run.
        comparisons: Number of all comparisons of the claim.
        share: Rounds run of the published ones; the lowest share of the comparisons.
        seeds: The lowest number of seeds of the comparisons.
        of: Whether the claim is about all, most or some comparisons.
        too_early: Whether the runs are too short for this claim.

    >>> choose_word(1, 1, 27, share=1.0, seeds=3)
    'holds so far'
    >>> choose_word(14, 14, 27, share=0.5, seeds=2)
    'holds'
    """
    if not run:
        return UNTESTED
    if too_early or share < EARLY_SHARE:
        return TOO_EARLY
    needed = {ALL: held == run, MOST: 2 * held > run, SOME: held > 0}[of]
    if of == ALL and 0 < held < run:
        return MIXED
    firm = share >= FIRM_SHARE and run >= FIRM_SHARE * comparisons and seeds >= FIRM_SEEDS
    if needed:
        return HOLDS if firm else HOLDS_SO_FAR
    return FAILS if firm else FAILS_SO_FAR


def choose_longest(verdicts: Sequence[ClaimVerdict]) -> int:
    """The place of the verdict that counts, of those on one claim from several results: the one
    with the largest share of the published rounds; of equals, the one with the most comparisons,
    then the most seeds, then the first.
    """

    def rank(place: int) -> tuple[float, int, int, int]:
        basis = verdicts[place].basis
        if basis is None:
            return -1.0, 0, 0, -place
        return basis.share, len(verdicts[place].run), basis.seeds, -place

    return max(range(len(verdicts)), key=rank)


def write_range(checks: Sequence[ClaimCheck], values: Sequence[float | None]) -> str:
    """The numbers of comparisons as a text: one number, or the lowest and the highest.

    >>> gap = ClaimCheck("b against a", 0.021, None)
    >>> write_range([gap, gap], [0.021, -0.005])
    '-0.5 to +2.1 points'
    >>> write_range([gap], [None])
    '-'
    """
    known = [float(value) for value in values if value is not None and not math.isnan(value)]
    if not known:
        return DASH
    check = checks[0]
    scale, unit = {"share": (100.0, "points"), "percent": (1.0, "points")}.get(
        check.unit, (1.0, "" if check.unit == "count" else check.unit)
    )
    if check.kind == "value" and unit == "points":
        unit = "%"
    whole = check.unit in ("rounds", "count") and all(
        value.is_integer() or math.isinf(value) for value in known
    )
    low, high = (
        _write(scale * value, check.kind, 0 if whole else 1) for value in (min(known), max(known))
    )
    text = low if low == high else f"{low} to {high}"
    return text + (unit if unit == "%" else f" {unit}" if unit else "")


def _write(value: float, kind: str, digits: int) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value and not round(value, digits):
        digits += 1
    return f"{value:{'+' if kind == 'gap' else ''}.{digits}f}"
