"""Numbers, data frames, plots, tables and reports of runs and comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

import remanence as rem
from remanence.exports import FORMATS, TRACKERS
from remanence.extend import Context, Params, Transform, part, pytree
from remanence.reports.theme import PALETTE
from remanence.results.run import Run

QUICK: dict[str, Any] = {
    "rounds": 2,
    "clients": 4,
    "engine": "sequential",
    "model": "mlp(hidden=8)",
    "quiet": True,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rem.RunResult:
    return rem.run(out=tmp_path_factory.mktemp("one") / "run", **QUICK)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> rem.ComparisonResult:
    out = tmp_path_factory.mktemp("several") / "comparison"
    methods = ["fedavg", rem.methods.fedprox(mu=0.5) + rem.losses.tce()]
    return rem.compare(methods, seeds=2, out=out, **QUICK)


def test_numbers_are_of_the_test_set(run: rem.RunResult) -> None:
    last = next(line for line in reversed(run.metrics) if line["split"] == "test")
    assert run.accuracy == last["accuracy"]
    assert list(run.per_class.values()) == last["per_class"]
    assert list(run.per_class) == run.metadata["class_names"]
    assert run.accuracy != run.metrics[-1]["accuracy"]  # of the validation examples


def test_a_class_without_test_examples_has_no_accuracy(tmp_path: Path) -> None:
    run = rem.run(data="synthetic(samples=200, classes=3, features=4)", out=tmp_path / "r", **QUICK)
    lines = [
        json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    ]
    for line in lines:
        line["per_class"][1] = None
    (tmp_path / "r" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    for folder in (tmp_path / "r" / "checkpoints").iterdir():  # records are read as they are
        for file in folder.iterdir():
            file.unlink()
    values = list(rem.load(run.folder).per_class.values())  # type: ignore[union-attr]
    assert values[1] is None
    assert None not in (values[0], values[2])


def test_a_frame_of_a_run_has_a_row_for_each_round_and_split(run: rem.RunResult) -> None:
    frame = run.to_pandas()
    assert len(frame) == len(run.metrics) == 4
    assert not frame.duplicated(["round", "model", "split"]).any()
    test = frame[frame["split"] == "test"]
    assert test["accuracy"].tolist() == run.curve()[1]
    assert test["round"].tolist() == [1, 2]
    assert set(frame["method"]) == {"fedavg"}
    assert frame.dtypes["accuracy"] == np.float64


def test_a_frame_of_a_comparison_names_its_runs(comparison: rem.ComparisonResult) -> None:
    frame = comparison.to_pandas()
    assert len(frame) == 4 * len(comparison.runs) == 16
    assert not frame.duplicated(["method", "setting", "seed", "round", "model", "split"]).any()
    for run in comparison.runs:
        own = (frame["method"] == run.method) & (frame["seed"] == run.config.seed)
        assert frame[own & (frame["split"] == "test")]["accuracy"].tolist() == run.curve()[1]


def test_a_run_is_drawn_with_test_and_validation(run: rem.RunResult) -> None:
    axes = run.plot()
    test, valid = axes.get_lines()
    assert test.get_ydata().tolist() == run.curve()[1]
    assert valid.get_ydata().tolist() == run.curve("valid")[1]
    assert (test.get_linestyle(), valid.get_linestyle()) == ("-", "--")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["test", "validation"]
    assert run.plot("loss", axes) is axes
    assert len(axes.get_lines()) == 4


def test_a_comparison_is_drawn_with_means_and_bands(comparison: rem.ComparisonResult) -> None:
    axes = comparison.plot()
    curves = [run.curve()[1] for run in comparison.runs]
    first, second = axes.get_lines()
    assert first.get_ydata() == pytest.approx(np.mean(curves[:2], axis=0))
    assert second.get_ydata() == pytest.approx(np.mean(curves[2:], axis=0))
    assert [to_hex(line.get_color()) for line in (first, second)] == [
        c.lower() for c in PALETTE[:2]
    ]
    band = axes.collections[0].get_paths()[0].vertices
    mean, spread = np.mean(curves[:2], axis=0), np.std(curves[:2], axis=0, ddof=1)
    assert band[:, 1].max() == pytest.approx((mean + spread).max())
    assert band[:, 1].min() == pytest.approx((mean - spread).min())


def test_what_cannot_be_drawn_is_named(run: rem.RunResult) -> None:
    with pytest.raises(rem.InputError, match="unknown column 'acuracy': did you mean accuracy"):
        run.plot("acuracy")
    with pytest.raises(rem.InputError, match="no run has recorded attack_success"):
        run.plot("attack_success")


def test_tables_have_the_columns_that_are_named(comparison: rem.ComparisonResult) -> None:
    text = comparison.table(columns=["test accuracy", "worst"])
    assert text.split()[:4] == ["method", "accuracy", "%", "worst"]
    row = comparison.rows[0]
    assert f"{100 * row.accuracy:.1f} ± {100 * row.deviation:.1f}" in text  # type: ignore[operator]
    lines = comparison.table("markdown", ["Macro F1"]).splitlines()
    assert lines[0] == "| Method | Macro F1, % |"
    assert comparison.table("latex", ["Macro F1"]).count("&") == 3  # heading and two rows
    assert "Communication" in comparison.table("markdown")
    with pytest.raises(rem.InputError, match="unknown column 'worts': did you mean worst"):
        comparison.table(columns=["worts"])
    with pytest.raises(rem.InputError, match="unknown style 'html'"):
        comparison.table("html")


def test_the_best_method_needs_seeds(comparison: rem.ComparisonResult) -> None:
    best = comparison.best()
    assert bool(best) == (best.label is not None)
    assert str(best).split() == best.reason.split()
    one = rem.compare("fedavg, fedavg+wsm", **QUICK).best()
    assert not one
    assert one.label is None
    assert "One seed is not enough to tell this from noise" in one.reason


def test_a_clearly_best_method_has_its_label(tmp_path: Path) -> None:
    """A learning rate of nothing against one that learns."""
    done = rem.compare(
        "fedavg",
        grid={"lr": [1e-9, 0.5]},
        seeds=3,
        select="all",
        partition="iid",
        out=tmp_path / "c",
        **QUICK,
    )
    best = done.best()
    assert best.label == "fedavg, lr=0.5"
    assert "It is best: the seeds separate it" in best.reason


def test_a_notebook_gets_escaped_names_and_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = rem.run(out="a <b> 100%", **QUICK)
    assert "a &lt;b&gt; 100%; .report() writes the report" in run._repr_html_()
    assert run.report() == Path("a <b> 100%/report.html")
    assert '<a href="a%20%3Cb%3E%20100%25/report.html"' in run._repr_html_()
    assert f"<td>{100 * (run.accuracy or 0):.1f}</td>" in run._repr_html_()


def test_results_and_folders_are_taken_alike(
    run: rem.RunResult, comparison: rem.ComparisonResult, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    for given in (
        run,
        run.folder,
        str(run.folder),
        Run(run.folder),
        [run, comparison],
        [run.folder],
    ):
        found = rem.diagnose(given)
        assert found[0].label.startswith("fedavg")
        assert str(found).startswith(f"{found[0].label}\n\n  forgetting:")
        assert rem.report(given, page) == page
        page.unlink()
    assert [each.label for each in rem.diagnose(comparison)][-1] == ""
    for wrong in (3, [None]):
        with pytest.raises(rem.InputError, match="is neither a run nor a comparison"):
            rem.diagnose(wrong)  # type: ignore[arg-type]


def test_nothing_is_refused_and_results_name_their_folder(run: rem.RunResult) -> None:
    for use in (rem.diagnose, rem.report):
        with pytest.raises(rem.InputError, match="give at least one run"):
            use([])
    assert repr(run) == f"RunResult('{run.folder}')"


def test_evaluation_takes_names_and_objects(run: rem.RunResult) -> None:
    by_folder = rem.evaluate(run.folder)
    assert by_folder["accuracy"] == run.accuracy
    assert rem.evaluate(run, "digits") == by_folder
    assert str(by_folder).splitlines()[0].startswith("global model after round 2 on the 359 test")
    assert len(str(by_folder).splitlines()) == 11


def test_exports_return_their_files(run: rem.RunResult, tmp_path: Path) -> None:
    done = rem.export(run.folder, "safetensors", tmp_path / "model")
    assert [path.name for path in done.files] == ["model.safetensors", "model.json"]
    assert done.checkpoint is not None
    with pytest.raises(rem.InputError) as error:
        rem.export(run, "wandb")
    assert all(name in str(error.value) for name in (*FORMATS, *TRACKERS))


def test_columns_are_of_figures(run: rem.RunResult, tmp_path: Path) -> None:
    with pytest.raises(rem.InputError, match="add --figures"):
        rem.report(run, columns=["Macro F1"])
    rem.report(run, tmp_path / "r.html", figures=tmp_path / "figures", columns=["Macro F1"])
    assert "Macro F1" in (tmp_path / "figures" / "results.tex").read_text()
    assert "Communication" not in (tmp_path / "figures" / "results.tex").read_text()
    assert "bytes_per_round" in (tmp_path / "figures" / "results.csv").read_text()


@part
def pull(*, strength: float = 0.1) -> rem.Part:
    """A method of one's own, unknown by name."""

    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        away = pytree.sub(params, ctx.start.params)
        return pytree.axpy(ctx.hyper["strength"], away, grads)

    return rem.Part(
        "pull", hyper={"strength": strength}, transforms=(Transform("correct", correct),)
    )


def test_a_method_of_ones_own_is_compared_and_resumed(tmp_path: Path) -> None:
    methods = [pull(strength=0.5), "fedavg", rem.methods.fedprox(mu=0.5)]
    done = rem.compare(methods, out=tmp_path / "c", **QUICK)
    own, plain, prox = done.runs
    assert own.method == "pull(strength=0.5)"
    assert own.curve("valid", value="loss") != plain.curve("valid", value="loss")
    # the same pull towards the received model, written as a term of the gradient
    assert own.curve("valid", value="loss")[1] == pytest.approx(
        prox.curve("valid", value="loss")[1]
    )
    again = rem.resume(tmp_path / "c", method=[methods[0], methods[2]], quiet=True)  # type: ignore[list-item]
    assert isinstance(again, rem.ComparisonResult)
    assert [run.method for run in again.runs] == [run.method for run in done.runs]


def test_a_class_is_no_model() -> None:
    from torch import nn

    with pytest.raises(
        rem.InputError, match=r"the class Linear, not a model: write model=Linear\("
    ):
        rem.run(model=nn.Linear, **{k: v for k, v in QUICK.items() if k != "model"})  # type: ignore[arg-type]


@pytest.mark.parametrize("space", ["methods", "losses"])
def test_the_namespaces_are_the_registries(space: str) -> None:
    module = getattr(rem, space)
    table = getattr(module, space.upper())
    assert set(table) <= set(dir(module)) == set(module.__all__)
    for name, constructor in table.items():
        assert getattr(module, name) is constructor
        assert constructor.__doc__, name
    assert str(rem.methods.scaffold() + rem.losses.wsm())
