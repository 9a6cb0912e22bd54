"""The numbers of all contenders, for people and for programs."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

from contenders import OURS, PLAIN
from turns import Score

from remanence.bench.machine import processor_name

HEAD = ("job", "simulator", "versions", "median s", "minimum s", "times ours", "first round apart")


def summarize(job: str, scores: Sequence[Score]) -> list[dict[str, Any]]:
    """One object a contender; `ratio_to_ours` above 1 means slower than us."""
    ours = next((score for score in scores if score.contender is OURS and not score.problem), None)
    return [
        {
            "job": job,
            "simulator": score.contender.name,
            "about": score.contender.about,
            "versions": score.versions,
            "note": score.note,
            "problem": score.problem or None,
            "seconds": statistics.median(score.seconds) if valid(score) else None,
            "fastest_seconds": min(score.seconds) if valid(score) else None,
            "all_seconds": score.seconds,
            "ratio_to_ours": statistics.median(score.seconds) / statistics.median(ours.seconds)
            if ours and valid(score)
            else None,
            "difference_from_plain_loop": score.difference,
        }
        for score in scores
    ]


def valid(score: Score) -> bool:
    return not score.problem and bool(score.seconds)


def render(results: Sequence[dict[str, Any]], machine: str) -> str:
    """Tables in Markdown, with what could not be measured and why, how each was run, and where."""
    lines = _align([HEAD, *(_cells(result) for result in results if not result["problem"])])
    lines += [
        "",
        *(_sum_up(job, results) for job in dict.fromkeys(result["job"] for result in results)),
    ]
    problems = [
        f"{result['job']}, {result['simulator']}: {result['problem']}"
        for result in results
        if result["problem"]
    ]
    notes = [
        f"{result['job']}, {result['simulator']} ({result['about']}): {result['note']}"
        for result in results
        if result["note"] and not result["problem"]
    ]
    for title, items in (("Not measured", problems), ("How", notes)):
        if items:
            lines += ["", f"{title}:", *(f"- {item}" for item in items)]
    return "\n".join([*lines, "", machine])


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    return (
        result["job"],
        result["simulator"],
        result["versions"],
        f"{result['seconds']:.2f}",
        f"{result['fastest_seconds']:.2f}",
        "-" if result["ratio_to_ours"] is None else f"{result['ratio_to_ours']:.2f}",
        f"{result['difference_from_plain_loop']:.0e}",
    )


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def _sum_up(job: str, results: Sequence[dict[str, Any]]) -> str:
    """The line that matters: the fastest peer."""
    own = (OURS.name, PLAIN.name)
    peers = [
        result
        for result in results
        if result["job"] == job and result["simulator"] not in own and result["ratio_to_ours"]
    ]
    if not peers:
        return f"{job}: no peer to compare with."
    best = min(peers, key=lambda result: result["ratio_to_ours"])
    return (
        f"{job}: the fastest peer is {best['simulator']}, which takes"
        f" {best['ratio_to_ours']:.2f} times as long as Remanence."
    )


def describe_machine(repeat: int) -> str:
    """Where and how it was measured, with the load that was there before."""
    return (
        f"{processor_name()}, {os.cpu_count()} cores, {platform.platform()}, Python"
        f" {platform.python_version()}; medians of {repeat} rounds after one to warm up, "
        f"contenders in turns; load average before the start {os.getloadavg()[0]:.1f}."
    )
