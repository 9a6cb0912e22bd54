"""The results of a published job as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from published_contenders import Course
from published_jobs import PublishedJob

HEAD = (
    "contender",
    "versions",
    "before, s",
    "rounds",
    "seconds",
    "s a round",
    "test loss",
    "accuracy",
)


def render(job: PublishedJob, results: Sequence[dict[str, Any]], target: float) -> str:
    """A table in Markdown, what was published, who could not run, and how each ran."""
    courses = [(result, course_of(result)) for result in results]
    rows = [cells(result, course, target) for result, course in courses if not course.problem]
    head = [*HEAD, f"s to {target:.0%}"]
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, f"|---|---|{'--:|' * (len(head) - 2)}")
    lines += ["", f"{job.about}.", f"Published: {job.published}.", f"Differs: {job.differs}."]
    lines += [f"Source: {source}" for source in job.sources]
    if results:
        one = results[0]
        lines.append(
            f"Here: {one['device_name']}, {one['cores']} cores, {one['precision']}, {one['data']}."
        )
    lines += [
        f"- {course.contender} did not run: {course.problem}"
        for _, course in courses
        if course.problem
    ]
    for result, course in courses:
        if not course.problem:
            lines.append(f"- {course.contender}: {course.note}{describe_rest(result, course)}")
    return "\n".join(lines) + "\n"


def course_of(result: dict[str, Any]) -> Course:
    return Course(**{name: result[name] for name in Course.__dataclass_fields__})


def cells(result: dict[str, Any], course: Course, target: float) -> list[str]:
    reached = course.seconds_to(target)
    number, loss, accuracy = course.evaluations[-1] if course.evaluations else (0, None, None)
    done = len(course.seconds)
    place = "" if number == done else f" (round {number})"
    return [
        course.contender,
        course.versions,
        f"{course.before:.1f}",
        f"{done:,} of {result['published_rounds']:,}",
        f"{course.seconds[-1]:.1f}",
        f"{course.seconds_a_round():.3g}",
        "-" if loss is None else f"{loss:.3f}{place}",
        "-" if accuracy is None else f"{accuracy:.2%}{place}",
        "-" if reached is None else f"{reached:.1f}",
    ]


def describe_rest(result: dict[str, Any], course: Course) -> str:
    """What a shortened run leaves open; its numbers are of the rounds that ran."""
    done, whole = len(course.seconds), result["published_rounds"]
    if done >= whole:
        return ""
    rest = (whole - done) * course.seconds_a_round()
    return (
        f"; {done:,} of {whole:,} rounds, extrapolated: no (the other {whole - done:,} would take"
        f" about {rest / 60:.0f} minutes at the median round)"
    )
