"""`rem.diagnose`, `rem.evaluate`, `rem.export` and `rem.report`, which the commands call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from remanence import diagnosis, exports
from remanence.analysis.results import AnyResult, ResultOrFolder, open_result, open_results
from remanence.config import forbid_code
from remanence.core.errors import InputError
from remanence.data import from_dataset
from remanence.data.dataset import ArrayDataset
from remanence.exports import TRACKERS, ExportedModel, ModelEvaluation
from remanence.reports import page
from remanence.reports.figure_files import write_figures


def diagnose(results: ResultOrFolder | Sequence[ResultOrFolder]) -> diagnosis.Diagnoses:
    """Find what was forgotten, in which phase, by which classes and clients, whether it exceeds
    the noise between seeds, and which methods may help.

    Args:
        results: A run, a comparison or a folder, or a list of them.

    Returns:
        A diagnosis for every method and, if there are several, one that compares them. Printed, or
        at the end of a notebook's cell, they are text.
    """
    return diagnosis.diagnose(open_results(results))


def report(
    results: ResultOrFolder | Sequence[ResultOrFolder],
    out: str | Path | None = None,
    *,
    figures: str | Path | None = None,
    columns: Sequence[str] | None = None,
) -> Path:
    """Write the report about runs and comparisons: one page that loads nothing.

    Args:
        results: A run, a comparison or a folder, or a list of them.
        out: The file. Default: report.html in the folder of the first of them.
        figures: A folder in which every figure is written as PDF, SVG, PNG and CSV, and every table
            as CSV, Markdown and LaTeX.
        columns: Headings of the tables of results in that folder, such as "Test accuracy".
            Default: all.

    Returns:
        The file.
    """
    if columns is not None and figures is None:
        raise InputError("columns are those of the tables in a folder of figures: add --figures")
    opened = open_results(results)
    if figures is not None:
        write_figures(opened, Path(figures), columns)
    return page.write_report(opened, None if out is None else Path(out))


def evaluate(
    run: ResultOrFolder,
    data: str | ArrayDataset | Dataset[Any] | None = None,
    *,
    data_dir: str | None = None,
    model: nn.Module | None = None,
    client: int | None = None,
    allow_code: bool = False,
) -> ModelEvaluation:
    """Evaluate the trained model of a run on a test set, with inputs normalized as in training.

    Args:
        run: The run, or its folder.
        data: A dataset with the same classes, as text or as an object. Default: that of the run.
        data_dir: The folder of the datasets. Default: that of the run.
        model: The model, where the run was started with an object.
        client: Evaluate the personal model of this client. Default: the global model.
        allow_code: Accept a model that is Python code to import.

    Returns:
        Accuracy, loss, macro F1 and accuracy by class, with a description of the model and the
        data. Printed, it is text.
    """
    opened = open_trusted(run, allow_code)
    if data is None or isinstance(data, str):
        source = exports.load_test_data(opened, data, data_dir)
    else:
        source = data if isinstance(data, ArrayDataset) else from_dataset(data)
    return exports.evaluate(opened, source, model, client)


def export(
    result: ResultOrFolder,
    format: str = "safetensors",
    out: str | Path | None = None,
    *,
    model: nn.Module | None = None,
    client: int | None = None,
    allow_code: bool = False,
) -> ExportedModel:
    """Write the trained model of a run, or the metrics of a run or a comparison, for other
    programs.

    Args:
        result: The run, or its folder; for the metrics also a comparison.
        format: safetensors, torchscript or onnx for the model; tensorboard or mlflow for the
            metrics.
        out: The output folder. Default: export in the folder of the run.
        model: The model, where the run was started with an object.
        client: Export the personal model of this client. Default: the global model.
        allow_code: Accept a model that is Python code to import.

    Returns:
        The files, and the checkpoint that the model was read from.
    """
    folder = None if out is None else Path(out)
    opened = open_trusted(result, allow_code or format in TRACKERS)  # metrics need no model
    if format in TRACKERS:
        return ExportedModel(exports.export(opened, folder, format), None)
    done = exports.export_model(opened, folder, format, model, client)
    done.warn(stacklevel=3)
    return done


def open_trusted(result: ResultOrFolder, allow_code: bool) -> AnyResult:
    """A run or a comparison whose model will be built.

    Args:
        result: The run or comparison, or its folder.
        allow_code: Accept settings that name Python code to import, `package.module:name`. A
            folder from another person must not decide which code runs.
    """
    found = open_result(result)
    if not allow_code:
        forbid_code(found.settings, found.folder)
    return found
