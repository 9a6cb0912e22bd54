"""A run that learns nothing, diverges or has settings without effect says so, in one sentence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remanence as rem
from remanence.config import parse_experiment
from remanence.core.engine import ClientWork
from remanence.core.pytree import Params
from remanence.core.remote_params import RemoteParams
from remanence.core.rng import Key
from remanence.core.types import Batch, ClientStats, ModelState, Output, Reply
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.experiment.build import build
from remanence.experiment.hints import find_hints
from remanence.losses import LOSSES
from remanence.rounds.loop import resume_run, start_run
from remanence.rounds.replies import find_unmoved

SMALL = {
    "data.name": "synthetic(samples=300, classes=4, features=4)",
    "data.partition": "iid",
    "model": "mlp(hidden=4)",
    "clients.count": 6,
    "rounds": 3,
    "engine": "sequential",
}


class Listener:
    """Keeps the logged messages; a note once, as in a terminal."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self, title: str, done: int, total: int) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...
    def prepare(self, text: str) -> None: ...
    def finish(self) -> None: ...
    def log(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        if text not in self.said:
            self.said.append(text)


def said_by(folder: Path, changes: dict[str, Any], **objects: Any) -> list[str]:
    listener = Listener()
    start_run(parse_experiment({}, SMALL | changes), folder, progress=listener, **objects)
    return listener.said


def one_class_each() -> Any:
    """Examples whose groups are their classes: `by_group` gives every client a single class."""
    generator = np.random.default_rng(0)
    labels = np.arange(120) % 4

    def split(y: np.ndarray) -> DatasetSplit:
        x = generator.normal(size=(len(y), 4)).astype(np.float32)
        return DatasetSplit(x, y.astype(np.int64), y.astype(np.int64))

    return ArrayDataset("groups", "table", tuple("abcd"), split(labels), split(labels[:40]))


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({}, []),
        (
            {"data.partition": "dirichlet(alpha=0.001)"},
            ["dirichlet(alpha=0.001) gives", "clients examples of a single class: raise alpha"],
        ),
        (
            {"method": "fedavg+wsm", "data.partition": "dirichlet(alpha=0.001)"},
            ["on which the loss of wsm is constant: they learn nothing from their examples"],
        ),
        (
            {"local.optimizer": "sgd(momentum=0.9)", "local.epochs": 0, "local.steps": 1},
            ["the momentum of local.optimizer has no effect: it starts anew in every round"],
        ),
        (
            {"local.optimizer": "sgd(momentum=0.9)", "local.batch_size": 500},
            ["the momentum of local.optimizer has no effect"],
        ),
        ({"local.optimizer": "sgd(momentum=0.9)", "local.epochs": 2, "local.batch_size": 500}, []),
        (
            {"local.schedule": "cosine"},
            ["local.schedule=cosine has a learning rate of 0 in round 3 of 3"],
        ),
        ({"local.schedule": "cosine(final=0.1)"}, []),
        (
            {"clients.sample": 0.01},
            ["clients.sample=0.01 of 6 clients is less than one client: a round samples 1"],
        ),
        (
            {"record.every": 4},
            ["record.every=4 is more than the 3 rounds: only the last round is evaluated"],
        ),
        ({"method": "dac", "clients.count": 1}, ["1 of 1 clients have no peers"]),
        ({"method": "local", "clients.count": 1}, []),
        (
            {"local.lr": 1e-30},
            ["round 1: the local training of 6 of 6 clients changed nothing", "raise local.lr"],
        ),
        (
            {"round.weight_cap": 1},
            [
                "round 1: no update could be used: every reply was rejected, most as weight",
                "weight_cap",
            ],
        ),
        (
            {"clients.availability": "random(offline=0.999)"},
            ["round 1: no update could be used: no client was online and sampled"],
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, dict) else "",
)
def test_one_sentence_with_cause_and_cure(
    tmp_path: Path, changes: dict[str, Any], texts: list[str]
) -> None:
    said = said_by(tmp_path / "run", changes)
    assert len(said) == (1 if texts else 0), said
    for text in texts:
        assert text in said[0]


def test_all_clients_stop_early_at_once(tmp_path: Path) -> None:
    """Their models never get better than after the warm-up: two rounds later all have stopped."""
    changes = {"method": "local", "peers.patience": 1, "rounds": 6, "local.lr": 1e-30}
    assert said_by(tmp_path / "run", changes)[-1] == (
        "local: round 2: all 6 clients have stopped early, and no model changes any more: raise"
        " peers.patience (now 1) or lower rounds"
    )


def test_public_examples_that_lack_classes() -> None:
    public = SMALL | {"method": "feddf(validation=0)", "data.public": 2}
    (hint,) = find_hints(build(parse_experiment({}, public)))
    assert "public examples (2) have 2 of 4 classes: feddf trains the server on them" in hint
    assert find_hints(build(parse_experiment({}, public | {"data.public": 40}))) == []


def test_batch_norm_on_a_batch_of_one_image() -> None:
    """About 143 examples a client: batches of one, and of three whose rest is dropped, and of ten."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU()
            )
            self.head = torch.nn.Linear(2, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pooled: torch.Tensor = self.head(self.body(x).mean(dim=(2, 3)))
            return pooled

    images = {"data.name": "digits", "data.partition": "iid", "clients.count": 10}
    for size, dropped, said in ((1, False, True), (3, True, False), (10, False, False)):
        changes = images | {"local.batch_size": size, "local.drop_last": dropped}
        hints = find_hints(build(parse_experiment({}, changes), module=Net()))
        assert [hint[:47] for hint in hints] == (
            ["some client has a batch of a single example, by"] if said else []
        )


@pytest.mark.parametrize("loss", ["tce", "fedlc", "masked_ce"])
def test_clients_of_one_class_under_a_loss(tmp_path: Path, loss: str) -> None:
    """masked_ce trains them: the absent classes stay in its denominator."""
    changes = {"method": f"fedavg+{loss}", "data.partition": "by_group", "data.validation": 0}
    changes |= {"clients.count": 4}
    said = said_by(tmp_path / "run", changes, source=one_class_each())
    run = rem.load(tmp_path / "run")
    assert isinstance(run, rem.RunResult)
    if loss == "masked_ce":
        assert said == []
        assert run.learned
        assert run.metrics[0]["unmoved"] == 0
    else:
        assert len(said) == 1
        assert (
            f"4 of 4 clients have examples of a single class, on which the loss of {loss}"
            in said[0]
        )
        assert not run.learned
        assert run.warnings[0].endswith("local training changed no client's model")
        assert [line["unmoved"] for line in run.metrics] == [4, 4, 4]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_declares_whether_it_needs_two_classes(name: str) -> None:
    """Declared exactly where the gradient of a client with a single class is 0."""
    part = LOSSES[name]()
    assert part.loss is not None
    stats = ClientStats(torch.tensor(5.0), torch.tensor([0.0, 5.0, 0.0]))
    hyper = {key: torch.tensor(value) for key, value in part.hyper.items()}
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    label = torch.ones(5, dtype=torch.int64)
    batch = Batch(torch.zeros(5, 1), label, torch.ones(5), torch.arange(5))

    class Ctx:
        pass

    ctx: Any = Ctx()
    ctx.stats, ctx.hyper = stats, hyper
    part.loss(Output(logits, logits), batch, ctx).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert part.needs_two_classes == bool((logits.grad.abs() < 1e-6).all())


def test_divergence_is_named_once_in_its_round(tmp_path: Path) -> None:
    said = said_by(tmp_path / "run", {"local.lr": 1e30})
    assert said == [
        "fedavg: round 1: training diverged, the models of 6 of 6 clients hold NaN or infinity:"
        " lower the learning rate (now sgd(lr=1e+30)), or limit the updates with norm_clip or"
        " dp_sgd(noise=0)"
    ]
    parse_experiment({}, {"method": "fedavg+norm_clip"})
    build(parse_experiment({}, SMALL | {"method": "fedavg+dp_sgd(noise=0)"}))


def test_a_loss_that_explodes_is_named_in_its_round(tmp_path: Path) -> None:
    """The models stay finite; the loss of the global model does not stay small."""
    said = said_by(tmp_path / "run", {"local.lr": 1e6, "rounds": 1})
    assert len(said) == 1
    assert "round 1: training diverged, the loss is" in said[0]


def test_attackers_who_send_nan_are_no_divergence(tmp_path: Path) -> None:
    assert said_by(tmp_path / "run", {"attack": "nan(fraction=0.5)"}) == []


def test_a_run_that_learned_nothing_says_so_in_python(tmp_path: Path) -> None:
    with pytest.warns(rem.LearnedNothing, match="fedavg learned nothing in 3 rounds") as found:
        run = rem.run(set=SMALL | {"round.weight_cap": 1}, out=tmp_path / "run", quiet=True)
    assert found[0].filename == __file__
    assert not run.learned
    assert run.warnings[0].startswith("learned nothing in 3 rounds, its model is the untrained")
    assert (tmp_path / "run" / "experiment.toml").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learned = rem.run(set=SMALL, out=tmp_path / "other", quiet=True)
    assert learned.learned
    assert learned.warnings == []


def test_a_comparison_goes_on_when_a_setting_diverges(tmp_path: Path) -> None:
    """Both in one stack: the other run ends with the same numbers as alone."""
    with pytest.warns(rem.LearnedNothing, match="lr=1e\\+30"):
        done = rem.compare(
            ["fedavg"],
            grid={"lr": [0.1, 1e30]},
            set={key: value for key, value in SMALL.items() if key != "engine"},
            engine="vectorized",
            select="all",
            out=tmp_path / "comparison",
            quiet=True,
        )
    good, bad = done.runs
    assert good.learned
    assert not bad.learned
    assert not done.learned
    assert good.finished
    assert bad.finished
    alone = rem.run(set=SMALL | {"engine": "vectorized"}, out=tmp_path / "alone", quiet=True)
    assert good.curve()[1] == alone.curve()[1]
    page = (tmp_path / "comparison").with_suffix(".html")
    rem.report(done.folder, out=page)
    first = page.read_text().split('<p class="first">')[1].split("</p>")[0]
    assert first.startswith("Warning: fedavg, lr=1e+30 learned nothing in 3 rounds")


def test_a_resumed_run_knows_that_it_learned_before(tmp_path: Path) -> None:
    """The column is in metrics.jsonl, so a run that later only abandons rounds has learned."""
    start_run(parse_experiment({}, SMALL), tmp_path / "run")
    run = resume_run(tmp_path / "run", rounds=4)
    assert [line["learned"] for line in run.metrics if line["split"] == "test"] == [True] * 4
    assert run.learned


def test_a_warm_up_counts_as_learning(tmp_path: Path) -> None:
    """Without a server the clients train before round 1, where the first round then says so."""
    changes = {"method": "random", "rounds": 1, "round.weight_cap": 1}
    start_run(parse_experiment({}, SMALL | changes), tmp_path / "capped")
    run = rem.load(tmp_path / "capped")
    assert isinstance(run, rem.RunResult)
    assert not run.learned
    start_run(parse_experiment({}, SMALL | changes | {"round.weight_cap": 1e9}), tmp_path / "run")
    assert rem.load(tmp_path / "run").learned


def test_unmoved_clients_by_hand() -> None:
    """Three replies of a cohort of four; clients 5 and 9 send what they received."""
    received = {"w": torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]), "b": torch.zeros(4, 1)}
    sent = {"w": torch.tensor([[3.0, 4], [5, 7], [7, 8]]), "b": torch.zeros(3, 1)}
    work = cohort([2, 5, 7, 9], received, stacked=True)
    assert find_unmoved(reply([5, 7, 9], sent), work) == {5, 9}
    shared = cohort([2, 5, 7, 9], {"w": torch.tensor([5.0, 7]), "b": torch.zeros(1)}, stacked=False)
    assert find_unmoved(reply([5, 7, 9], sent), shared) == {7}
    assert find_unmoved(None, work) == set()


def test_unmoved_clients_whose_models_stay_with_their_workers() -> None:
    """The norm that the worker reports decides; nothing is fetched."""
    remote: Any = RemoteParams(
        None,  # type: ignore[arg-type]
        {"w": torch.zeros(2)},
        torch.zeros(2, dtype=torch.int64),
        torch.arange(2),
        torch.ones(2, dtype=torch.bool),
        torch.tensor([0.0, 1e-30], dtype=torch.float64),
    )
    work = cohort([3, 4], {"w": torch.zeros(2)}, stacked=False)
    assert find_unmoved(reply([3, 4], remote), work) == {3}


def cohort(clients: list[int], params: Params, stacked: bool) -> ClientWork:
    count = len(clients)
    return ClientWork(
        1,
        0,
        np.array(clients),
        ModelState(params, {}),
        stacked,
        {},
        {},
        ClientStats(torch.ones(count), torch.ones(count, 2)),
        {},
        Key(0),
    )


def reply(clients: list[int], params: Any) -> Reply:
    count = len(clients)
    ones = torch.ones(count, dtype=torch.int64)
    return Reply(torch.tensor(clients), ones, params, {}, {}, ones.double(), {}, ones.double())


def test_validation_examples_of_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 examples 240 are training data: 6 clients of 40, 20 of them for validation."""
    monkeypatch.setattr("remanence.experiment.hints.MANY_EXAMPLES", 100)
    many = SMALL | {"data.validation": 0.9, "clients.count": 6, "clients.sample": 1}
    (hint,) = find_hints(build(parse_experiment({}, many)))
    assert hint.startswith(
        "every evaluation takes the 216 validation examples of all clients, and a round trains on"
        " about 4: raise record.every"
    )
    for less in ({"clients.sample": 6}, {"data.validation": 0.4}, {"record.validation": False}):
        assert find_hints(build(parse_experiment({}, many | less))) == []
