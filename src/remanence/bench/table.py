"""Prints the results of `remanence bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = ("job", "seconds", "examples/s", "x sequential", "of lower bound", "memory", "compared with")


def render(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of results, with the engine of each job and the machine below it."""
    rows = [HEAD, *(_cells(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    notes = [f"{result['job']}: {result['about']}; engine {result['engine']}" for result in results]
    return "\n".join([*lines, "", *notes, "", *dict.fromkeys(_where(result) for result in results)])


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    relative = result["relative_to"]
    return (
        result["job"],
        f"{result['seconds']:.4g}",
        f"{result['samples_per_second']:,.0f}",
        _maybe(result["ratio_to_sequential"], "{:.2f}"),
        _maybe(result["share_of_lower_bound"], "{:.0%}"),
        f"{result['peak_memory_bytes'] / 2**20:,.0f} MB",
        f"{result['ratio_to_relative']:.2f} x {relative}" if relative else "",
    )


def _maybe(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _where(result: dict[str, Any]) -> str:
    threads = f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"
    return (
        f"{result['device_name']}, {result['precision']}, {threads}, torch"
        f" {result['torch']}, Python {result['python']}, {result['system']}"
    )
