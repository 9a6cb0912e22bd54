"""A run and a comparison with all that can be asked of them; `rem.load(DIR)` opens a folder."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remanence.analysis.frames import comparison_frame, run_frame
from remanence.analysis.html import render_html
from remanence.analysis.plots import plot_curves
from remanence.core.errors import InputError
from remanence.core.safe_path import SafePath
from remanence.metrics.groups import class_curve, group_runs, last_value, select_by_validation
from remanence.metrics.summary_rows import MethodRow, best_row
from remanence.reports import page
from remanence.reports.figure_files import format_table
from remanence.reports.phrases import list_warnings
from remanence.reports.summary_text import describe_accuracy
from remanence.reports.tables import chosen_rows
from remanence.reports.theme import name_classes
from remanence.results import run as folders
from remanence.sweeps.search_result import SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH = 100  # characters of a line of text


class _Views:
    """What a run and a comparison have in common."""

    files: SafePath

    @cached_property
    def rows(self) -> list[MethodRow]:
        """The numbers of each method, as means over seeds. Of a grid, the setting that validation
        accuracy selects, unless the comparison shows all.
        """
        return chosen_rows(self._result)

    @property
    def labeled_warnings(self) -> list[str]:
        """Why numbers are not what they seem, by method."""
        return list_warnings(group_runs([self._result]))

    def table(self, style: str = "text", columns: Sequence[str] | None = None) -> str:
        """The table of results, one row for each method.

        Args:
            style: "text", "markdown" or "latex".
            columns: Headings to show, such as "Test accuracy". Default: all, and as text those that
                fit in a line.
        """
        return format_table([self._result], style, columns)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report, one page that loads nothing.

        Args:
            out: The file. Default: report.html in the folder.

        Returns:
            The file.
        """
        return page.write_report([self._result], None if out is None else Path(out))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._result.folder)!r})"

    @property
    def _result(self) -> AnyResult:
        assert isinstance(self, RunResult | ComparisonResult)
        return self

    def _repr_html_(self) -> str:
        return render_html(self._result, self.rows)


class RunResult(_Views, folders.Run):
    """A run: its settings, records, numbers and trained model.

    `config` has the settings, `metrics` a dictionary for each round, split and model, `ledger` the
    counts by class, and `model()` is the trained network. Numbers without another word are of the
    test set, at the last recorded round.

    Args:
        folder: Of the run.
        resumed: The checkpoint from which `rem.resume` has continued it.
    """

    @property
    def accuracy(self) -> float | None:
        """Test accuracy, from 0 to 1, at the last recorded round; None before the first one."""
        return last_value(self)

    @property
    def per_class(self) -> dict[str, float | None]:
        """Test accuracy of each class at the last recorded round; None for a class without test
        examples.
        """
        rounds, shares = class_curve(self)
        if not len(rounds):
            return {}
        names = name_classes(self.metadata["class_names"], shares.shape[1])
        values = [None if share != share else float(share) for share in shares[-1]]
        return dict(zip(names, values, strict=True))

    def to_pandas(self) -> Any:
        """The metrics as a tidy pandas.DataFrame: one row for each round, model and split.

        The columns are method, seed, round, model, split, and the numbers that the run recorded,
        see `results.columns.NUMBERS`.
        """
        return run_frame(self)

    def plot(self, value: str = "accuracy", ax: Axes | None = None) -> Axes:
        """Draw a number over rounds: a solid line for the test set and a dashed one for the
        clients' validation examples.

        Args:
            value: A column of the metrics, such as accuracy, loss, macro_f1 or train_loss.
            ax: The axes to draw in. Default: new ones.
        """
        return plot_curves([self], value, ax)


@dataclass(frozen=True)
class BestMethod:
    """The best method of a comparison, if there is one. It is true only then.

    Args:
        label: Method and setting; None where no method is clearly best.
        reason: Why, in sentences.
    """

    label: str | None
    reason: str

    def __bool__(self) -> bool:
        return self.label is not None

    def __str__(self) -> str:
        return textwrap.fill(self.reason, WIDTH)


class ComparisonResult(_Views, folders.Comparison):
    """A comparison: its runs, and what they show together. `cells` lists the planned runs with
    method, setting and seed.

    Args:
        folder: Of the comparison.
        resumptions: The runs that `rem.resume` has continued, and from which checkpoints.
    """

    @cached_property
    def runs(self) -> Sequence[RunResult]:
        """The runs that have begun, in the order of the plan."""
        return [RunResult(run.files, run.resumed) for run in super().runs]

    def best(self) -> BestMethod:
        """The method with the highest test accuracy, if the seeds separate it from all others: the
        95 % intervals of the differences between equal seeds do not contain 0. Otherwise `label` is
        None, and `reason` says why.
        """
        found, groups = best_row(self.rows), select_by_validation(group_runs([self]))
        reason = " ".join(describe_accuracy(groups, self.rows))
        return BestMethod(None if found is None else found.label, reason)

    def to_pandas(self) -> Any:
        """The metrics of all runs as a tidy pandas.DataFrame: one row for each run, round, model
        and split. `setting` has the values of the grid as text.
        """
        return comparison_frame(self)

    def plot(self, value: str = "accuracy", ax: Axes | None = None) -> Axes:
        """Draw a number over rounds on the test set: one line for each method, the mean over its
        seeds, with a band of one standard deviation.

        Args:
            value: A column of the metrics, such as accuracy, loss, macro_f1 or train_loss.
            ax: The axes to draw in. Default: new ones.
        """
        return plot_curves([self], value, ax)


AnyResult = RunResult | ComparisonResult
ResultOrFolder = folders.Run | folders.Comparison | SearchResult | str | Path


def load(folder: str | Path | SafePath) -> AnyResult:
    """Read the folder of a run or a comparison.

    Args:
        folder: The folder. That of a search is the comparison of its runs.
    """
    return _with_views(folders.load(folder))


def open_result(result: ResultOrFolder) -> AnyResult:
    """A run or a comparison, from itself or from its folder."""
    if isinstance(result, SearchResult):
        result = result.comparison
    if isinstance(result, folders.Run | folders.Comparison):
        return _with_views(result)
    if isinstance(result, str | Path | SafePath):
        return load(result)
    raise InputError(
        f"{type(result).__name__} is neither a run nor a comparison: give what rem.run or"
        " rem.compare returns, or a folder"
    )


def open_results(results: ResultOrFolder | Sequence[ResultOrFolder]) -> list[AnyResult]:
    """Runs and comparisons, from one of them or several, each as itself or as its folder."""
    if isinstance(results, Sequence) and not isinstance(results, str):
        if not results:
            raise InputError("no runs are given: give at least one run, comparison or folder")
        return [open_result(result) for result in results]
    return [open_result(results)]


def _with_views(result: folders.Run | folders.Comparison) -> AnyResult:
    if isinstance(result, RunResult | ComparisonResult):
        return result
    if isinstance(result, folders.Run):
        return RunResult(result.files, result.resumed)
    return ComparisonResult(result.files, result.resumptions)
