"""The checkers catch what they are for: each broken thing here is one an author could write."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remanence.core.compose import part as as_part
from remanence.core.contexts import ClientOps, Context, ServerContext, ServerOps
from remanence.core.declarations import Disclosure
from remanence.core.engine import ClientWork, ConfusionCounts, PairCounts
from remanence.core.errors import InputError
from remanence.core.pytree import Params, Tree
from remanence.core.slots import Part, Transform
from remanence.core.types import Batch, ModelState, Output, Reply
from remanence.engines.sequential import SequentialEngine
from remanence.methods import METHODS, PARTS
from remanence.models import MODELS
from remanence.testing import check_engine, check_method, check_model
from remanence.testing.disclosure_checks import check_disclosures
from remanence.testing.part_checks import check_numbers
from remanence.testing.toy_task import fast_config, max_rel_diff, run_rounds, small_experiment
from remanence.training.task import TrainingTask

# ------------------------------------------------------------------------------------- check_method


@pytest.mark.parametrize("method", [fast_config(name) for name in METHODS])
def test_our_methods_pass(method: str) -> None:
    check_method(method, rounds=3)


def test_a_method_that_refuses_batch_norm_passes() -> None:
    check_method("dp_sgd(clip=1, noise=1)")


def test_numbers_that_decide_the_shape_are_declared_static() -> None:
    check_numbers(replace(reads_a_closure(), static=("pull",)))
    for name, make in PARTS.items():
        part = make()
        check_numbers(part)
        reaches = set(part.hyper) | set(part.static)
        assert set(part.arguments) <= reaches, name


def forgets_weights() -> Part:
    """The mean over all rows of the split, padding included."""

    def after(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
        return {"mean": ops.predict(trained)[0].logits.mean()}, {}

    return Part(
        "forgets_weights",
        client_state=lambda start, stats, info: {"mean": torch.zeros((), dtype=info.dtype)},
        on_client_end=after,
    )


def branches() -> Part:
    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return grads if ctx.stats.size > 3 else {name: 2 * g for name, g in grads.items()}

    return Part("branches", transforms=(Transform("correct", correct),))


def writes_into_its_input() -> Part:
    def after(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
        return {"n": ctx.client_state["n"].add_(1)}, {}

    return Part("writes", client_state=lambda *_: {"n": torch.zeros(())}, on_client_end=after)


def divides_by_zero() -> Part:
    """By the number of examples of a class."""

    def base(out: Output, batch: Batch, ctx: Context) -> Tensor:
        return (
            nn.functional.cross_entropy(out.logits, batch.y, reduction="none")
            * (1 / ctx.stats.label_counts).sum()
        )

    return Part("divides", loss=base, reads_label_counts=True)


def reads_undeclared_counts() -> Part:
    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return {name: g / ctx.stats.label_counts.sum() for name, g in grads.items()}

    return Part("undeclared", transforms=(Transform("correct", correct),))


def hides_state() -> Part:
    """A server that counts rounds where no checkpoint looks."""
    rounds: list[int] = []

    def weigh(replies: Reply, srv: Any) -> Tensor:
        rounds.append(srv.round)
        return replies.weight ** len(rounds)

    return Part("hides", client_weights=weigh)


@as_part
def reads_a_closure(*, pull: float = 0.1) -> Part:
    """A number that a stack of several runs would share."""

    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return {name: g * (1 + pull) for name, g in grads.items()}

    return Part("reads", transforms=(Transform("correct", correct),))


@as_part
def reads_beside_hyper(*, pull: float = 0.1) -> Part:
    def scale(g: Tensor) -> Tensor:
        return g * (1 + pull)

    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return {name: scale(g) for name, g in grads.items()}

    return Part("beside", hyper={"pull": pull}, transforms=(Transform("correct", correct),))


def lacks_the_decorator(*, pull: float = 0.1) -> Part:
    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return {name: g * (1 + pull) for name, g in grads.items()}

    return Part("lacks", transforms=(Transform("correct", correct),))


def lacks_the_decorator_for_hyper(*, pull: float = 0.1) -> Part:
    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return {name: g * (1 + ctx.hyper["pull"]) for name, g in grads.items()}

    return Part("lacks", hyper={"pull": pull}, transforms=(Transform("correct", correct),))


@as_part
def reads_half_of_it(*, pull: float = 0.1) -> Part:
    half = pull / 2

    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return {name: g * (1 + half) for name, g in grads.items()}

    return Part("half", hyper={"pull": pull}, transforms=(Transform("correct", correct),))


@as_part
def reads_it_as_a_tensor(*, pull: float = 0.1) -> Part:
    factor = torch.tensor(pull, dtype=torch.float64)

    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return {name: g * (1 + factor) for name, g in grads.items()}

    return Part("tensor", hyper={"pull": pull}, transforms=(Transform("correct", correct),))


def takes_too_few_arguments() -> Part:
    return Part("few", transforms=(Transform("correct", lambda grads, params: grads),))


def misspells_a_state() -> Part:
    def end(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
        return {"hk": trained.params}, {}

    return Part(
        "misspelt",
        client_state=lambda start, stats, info: {"h": start.params},
        on_client_end=end,
    )


def returns_some_parameters() -> Part:
    def update(params: Params, delta: Params, srv: ServerContext) -> tuple[Params, Tree]:
        return {name: params[name] + move for name, move in list(delta.items())[1:]}, {}

    return Part("some", server_update=update)


def forgets_a_state_of_the_server() -> Part:
    return Part(
        "forgets",
        server_state=lambda start, info: {"a": start.params, "round": torch.zeros(())},
        update_server_state=lambda replies, srv: {"a": srv.state["a"]},
    )


def grows_at_the_server() -> Part:
    return Part(
        "grows",
        server_state=lambda start, info: {"seen": torch.zeros(1)},
        update_server_state=lambda replies, srv: {"seen": torch.cat([srv.state["seen"]] * 2)},
    )


def trains_without_public_data() -> Part:
    def train(
        merged: ModelState, previous: ModelState, replies: Reply, ops: ServerOps, srv: ServerContext
    ) -> ModelState:
        return ops.fit(merged, public_loss, {}, steps=1)

    return Part("public", server_train=train)


def public_loss(out: Output, batch: Batch, index: Tensor, loss_args: Tree) -> Tensor:
    return nn.functional.cross_entropy(out.logits, batch.y, reduction="none")


def linear_in_its_state() -> Part:
    def pull(params: Params, ctx: Context) -> Tensor:
        h: Params = ctx.client_state["h"]
        return torch.stack([(params[name] * h[name]).sum() for name in params]).sum()

    return Part(
        "linear",
        client_state=lambda start, stats, info: {"h": start.params},
        regularizers=(pull,),
    )


def misspells_an_attribute() -> Part:
    def stop(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
        return {"n": ctx.clients.size}, {}  # type: ignore[attr-defined]

    return Part("misspells", client_state=lambda *_: {"n": torch.zeros(())}, on_client_end=stop)


def pulled(pull: float, out: Output, batch: Batch, ops: ClientOps, ctx: Context) -> Tensor:
    return pull * out.logits.square().sum(dim=1)


@as_part
def binds_a_number(*, pull: float = 0.1) -> Part:
    return Part("binds", loss_terms=(functools.partial(pulled, pull),))


@as_part
def binds_half_of_it(*, pull: float = 0.1) -> Part:
    return Part("bound", hyper={"pull": pull}, loss_terms=(functools.partial(pulled, pull / 2),))


@as_part
def reads_half_of_it_in_a_helper(*, pull: float = 0.1) -> Part:
    numbers = {"half": pull / 2}

    def scale(g: Tensor) -> Tensor:
        return g * (1 + numbers["half"])

    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return {name: scale(g) for name, g in grads.items()}

    return Part("helper", hyper={"pull": pull}, transforms=(Transform("correct", correct),))


@as_part
def switches_undeclared(*, twice: bool = False) -> Part:
    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return {name: 2 * g for name, g in grads.items()} if twice else grads

    return Part("switches", transforms=(Transform("correct", correct),))


class Counter:
    def __init__(self) -> None:
        self.calls = 0


def counts_in_an_object() -> Part:
    counter = Counter()

    def weigh(replies: Reply, srv: Any) -> Tensor:
        counter.calls += 1
        return replies.weight

    return Part("counts", client_weights=weigh)


def draws_from_a_generator() -> Part:
    generator = np.random.default_rng(0)

    def weigh(replies: Reply, srv: Any) -> Tensor:
        return replies.weight * 0 + generator.random()

    return Part("draws", client_weights=weigh)


def sends_undeclared() -> Part:
    return Part(
        "sends",
        payload=lambda start, info: {"size": torch.zeros((), dtype=info.dtype)},
        on_client_end=lambda ctx, trained, ops: (
            {},
            {"size": ctx.stats.size.to(trained.params["head.bias"])},
        ),
    )


def breaks_when_personal() -> Part:
    """It expects every parameter to be trained."""

    def correct(grads: Params, params: Params, ctx: Context) -> Params:
        return grads | {"head.bias": 2 * grads["head.bias"]}

    return Part("breaks", transforms=(Transform("correct", correct),))


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (
            forgets_weights(),
            r"forgets_weights with unequal clients.*vectorized \(stack=3\) differs from sequential by"
            r" .* at client_states?/.*weight",
        ),
        (
            branches(),
            r"branches with unequal clients.*cannot run on the engine vectorized.*no `if`",
        ),
        (
            writes_into_its_input(),
            r"writes with unequal clients.*changes its input client_state/writes/n.*add_",
        ),
        (
            divides_by_zero(),
            r"divides with unequal clients.*client \d is rejected, because .*NaN or infinity",
        ),
        (
            reads_undeclared_counts(),
            r"undeclared with unequal clients.*reads ctx.stats.label_counts and does not declare",
        ),
        (hides_state(), r"hides: a run changes .*client_weights carries \(rounds\)"),
        (reads_a_closure(), r"reads: a function .*transforms reads pull .*neither in hyper nor"),
        (reads_beside_hyper(), r'beside: a function .*reads pull .*read ctx.hyper\["pull"\]'),
        (binds_a_number(), r"binds: a function of the slot loss_terms reads pull"),
        (binds_half_of_it(), r"bound: .*loss_terms reads the number 0.05 .*@part"),
        (reads_half_of_it_in_a_helper(), r"helper: .*transforms reads the number half .*@part"),
        (switches_undeclared(), r"switches: the argument twice is neither in hyper nor in static"),
        (counts_in_an_object(), r"counts: a run changes .*client_weights carries \(calls\)"),
        (lacks_the_decorator(), r"lacks: .*transforms reads the number pull .*@part"),
        (lacks_the_decorator_for_hyper(), r"lacks has hyper-parameters \(pull\) and no .*@part"),
        (
            misspells_an_attribute(),
            r"AttributeError: .*clients.*, in the function stop of the slot on_client_end of",
        ),
        (reads_half_of_it(), r"half: .*transforms reads the number half .*@part"),
        (reads_it_as_a_tensor(), r"tensor: .*transforms reads the number factor .*@part"),
        (takes_too_few_arguments(), r"TypeError: .*3 were given, in .*transforms of few"),
        (misspells_a_state(), r"misspelt: on_client_end returns the state hk/.*does not have"),
        (returns_some_parameters(), r"some: server_update does not return body"),
        (
            forgets_a_state_of_the_server(),
            r"forgets: update_server_state does not return round: return all entries",
        ),
        (
            grows_at_the_server(),
            r"grows: update_server_state changes seen .* from \(1,\) .* to \(2",
        ),
        (trains_without_public_data(), r"InputError: .*public set: declare needs_public_data=True"),
        (
            linear_in_its_state(),
            r"linear with effective steps \(\+fednova\) .*regularizers of linear",
        ),
        (sends_undeclared(), r"sends does not declare what the leaf size of its payload reveals"),
        (breaks_when_personal(), r"breaks with frozen parameters \(\+frozen_head\) cannot run"),
    ],
    ids=lambda value: value.name if isinstance(value, Part) else "",
)
def test_broken_methods_are_named(part: Part, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_method(part)


def test_generators_and_iterators_are_named() -> None:
    with pytest.raises(AssertionError, match=r"client_weights carries generator .*draw from keys"):
        check_numbers(draws_from_a_generator())


def test_state_between_rounds_needs_two() -> None:
    with pytest.raises(InputError, match="rounds=1: give 2 or more"):
        check_method("fedavg", rounds=1)


def test_an_expression_is_checked_like_any() -> None:
    with pytest.raises(InputError, match="did you mean fedprox"):
        check_method("fedporx")


def reveals(what: str, send: Callable[[Context, ClientOps], Tensor], **fields: Any) -> Part:
    """A part that sends one number and declares what it reveals."""
    return Part(
        "teller",
        payload=lambda start, info: {"number": torch.zeros((), dtype=info.dtype)},
        on_client_end=lambda ctx, trained, ops: ({}, {"number": send(ctx, ops)}),
        discloses={"number": Disclosure(what)},
        **fields,
    )


def of_inputs(ctx: Context, ops: ClientOps) -> Tensor:
    _, batch = ops.predict(ctx.start)
    return (batch.x.sum(dim=1) * batch.weight).sum()


def of_labels(ctx: Context, ops: ClientOps) -> Tensor:
    _, batch = ops.predict(ctx.start)
    return (batch.y * batch.weight).sum().to(ctx.info.dtype)


def of_counts(ctx: Context, ops: ClientOps) -> Tensor:
    return ctx.stats.label_counts[0]


def of_sizes(ctx: Context, ops: ClientOps) -> Tensor:
    return ctx.stats.size / 2


def remembers_labels(what: str) -> Part:
    """It sends in a round what it has kept from the round before."""

    def after(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
        return {"seen": of_labels(ctx, ops)}, {"number": ctx.client_state["seen"]}

    return replace(
        reveals(what, of_labels),
        on_client_end=after,
        client_state=lambda start, stats, info: {"seen": torch.zeros((), dtype=info.dtype)},
    )


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        (reveals("nothing", of_inputs), "nothing, and it changes with the clients' inputs"),
        (reveals("size", of_inputs), "size, and it changes with the clients' inputs"),
        (reveals("label_counts", of_inputs), "label_counts, and it changes .* inputs"),
        (reveals("nothing", of_labels), "nothing, and it changes with the clients' labels"),
        (reveals("size", of_labels), "size, and it changes with the clients' labels"),
        (
            reveals("size", of_counts, reads_label_counts=True),
            "size, and it changes with the clients' labels",
        ),
        (reveals("nothing", of_sizes), "nothing, and it changes with the clients' sizes"),
        (remembers_labels("nothing"), "nothing, and it changes with the clients' labels"),
    ],
)
def test_a_payload_that_reveals_more_than_it_declares_is_found(part: Part, changed: str) -> None:
    with pytest.raises(AssertionError, match=f"teller/number .* declared as revealing {changed}"):
        disclose(part)


def disclose(part: Part) -> None:
    experiment = small_experiment(part)
    state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    check_disclosures(experiment, state, part.name)


def test_check_method_checks_disclosures() -> None:
    with pytest.raises(AssertionError, match=r"teller: the leaf teller/number .* inputs"):
        check_method(reveals("size", of_inputs))


def test_a_payload_that_reveals_what_it_declares_passes() -> None:
    for part in (
        reveals("size", of_sizes),
        reveals("label_counts", of_labels),
        reveals("label_counts", of_counts, reads_label_counts=True),
        reveals("examples", of_inputs),
    ):
        disclose(part)


# ------------------------------------------------------------------------------------- check_engine


class Broken(SequentialEngine):
    """A loop with one fault."""

    name = "broken"

    def __init__(self, task: TrainingTask, fault: str):
        super().__init__(task)
        self.fault = fault

    def train(self, work: ClientWork) -> Iterator[Reply]:
        if self.fault == "shares nothing":
            work = work._replace(
                broadcast={
                    part: {"gradient": {n: 0 * v for n, v in tree["gradient"].items()}}
                    for part, tree in work.broadcast.items()
                }
            )
        for number, reply in enumerate(super().train(work)):
            if self.fault == "loses a client" and number == 1:
                continue
            if self.fault == "counts the cohort":
                reply = reply._replace(loss=reply.loss + (len(work.clients) < 4))
            if self.fault == "rounds":
                reply = reply._replace(
                    params={name: value.float().double() for name, value in reply.params.items()}
                )
            if self.fault == "touches its input":
                work.stats.size.add_(1)
            yield reply

    def score(
        self, models: ModelState, split: str, owners: np.ndarray | None = None, time_step: int = 0
    ) -> ConfusionCounts:
        scores = super().score(
            models, split, None if self.fault == "ignores owners" else owners, time_step
        )
        return scores._replace(loss=scores.loss + 1e-9) if self.fault == "miscounts" else scores

    def score_pairs(
        self,
        models: ModelState,
        which: np.ndarray,
        owners: np.ndarray,
        split: str,
        time_step: int = 0,
        examples: bool = False,
    ) -> PairCounts:
        step = 0 if self.fault == "stays at the first time step" else time_step
        scores = super().score_pairs(models, which, owners, split, step, examples)
        if self.fault == "forgets example results":
            return scores._replace(examples=None)
        return (
            scores._replace(loss=scores.loss.roll(1)) if self.fault == "mixes pairs up" else scores
        )

    def predict_logits(self, models: ModelState, ids: Tensor) -> Tensor:
        said = super().predict_logits(models, ids)
        return said.roll(1, dims=1) if self.fault == "mixes rows up" else said


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("shares nothing", "engine broken and sequential train differently"),
        ("loses a client", "every client replies once"),
        (
            "counts the cohort",
            "a client's reply depends on who else is in the round: by .* at loss",
        ),
        ("rounds", "sequential train differently.*params"),
        ("touches its input", "changes its input stats/size"),
        ("ignores owners", "score the split valid differently"),
        ("miscounts", "score the split test differently.*loss"),
        ("mixes pairs up", "score pairs on the split train differently.*loss"),
        ("forgets example results", "gives example results exactly where they are requested"),
        ("mixes rows up", "predict the public set differently"),
        ("stays at the first time step", "score pairs on the split train differently"),
    ],
)
def test_broken_engines_are_named(fault: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_engine(lambda task: Broken(task, fault))


# -------------------------------------------------------------------------------------- check_model


@pytest.mark.parametrize(("name", "shape"), [("mlp", (5,)), ("mlp", (1, 4, 4)), ("text", (6,))])
def test_our_models_pass(name: str, shape: tuple[int, ...]) -> None:
    check_model(MODELS[name](shape, 3), shape, 3)


class Net(nn.Module):
    """A net with one fault."""

    def __init__(self, fault: str):
        super().__init__()
        self.fault, self.body, self.head = fault, nn.Linear(5, 4), nn.Linear(4, 3)
        if fault == "unused":
            self.spare = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.body(x))
        if self.fault == "logarithm":
            features = torch.log(features)
        # finite forward, but the slope of a root at 0 times a mask is infinity times 0
        if self.fault == "root":
            features = torch.sqrt(features * (features > 0))
        if self.fault == "counter":
            self.calls += 1
            features = features * self.calls
        if self.fault == "centred":
            features = features - features.mean(dim=0)
        if self.fault == "branch" and features.sum() > 0:
            features = 2 * features
        logits: Tensor = self.head(features)
        return logits


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("unused", "Net never uses its parameter spare.weight"),
        ("logarithm", "Net gives NaN or infinity"),
        ("root", "Net has NaN or infinite weights"),
        ("centred", "Net in evaluation mode lets the examples of a batch influence each other"),
        ("counter", "Net gives two outputs for the same examples"),
        ("branch", "Net .*(influence each other|cannot be stacked by torch.vmap)"),
    ],
)
def test_broken_models_are_named(fault: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_model(Net(fault), (5,), 3)


def test_a_healthy_net_passes() -> None:
    check_model(Net(""), (5,), 3)


def test_a_model_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(InputError, match="7 classes"):
        check_model(Net(""), (5,), 7)


def test_a_shape_that_no_data_have_is_refused() -> None:
    with pytest.raises(InputError, match="channels, height, width"):
        check_model(Net(""), (2, 5), 3)


# ---------------------------------------------------------------------------------- process state


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_method("fedavg"),
        lambda: check_engine(SequentialEngine),
        lambda: check_model(Net(""), (5,), 3),
        lambda: check_model(Net("unused"), (5,), 3),
    ],
    ids=["method", "engine", "model", "failing"],
)
def test_a_check_restores_the_process(
    check: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A build turns determinism off and puts the working directory on `sys.path`."""
    monkeypatch.chdir(tmp_path)
    path, was_deterministic = list(sys.path), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with contextlib.suppress(AssertionError):
            check()
        assert torch.are_deterministic_algorithms_enabled()
        assert sys.path == path
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


# ------------------------------------------------------------------------------------ max_rel_diff


def test_trees_that_cannot_be_compared_are_infinitely_far_apart() -> None:
    one = {"a": torch.zeros(2), "b": {"c": torch.ones(1)}}
    assert max_rel_diff(one, one) == ("", 0.0)
    assert max_rel_diff(one, {"a": torch.zeros(2)}) == ("b/c", float("inf"))
    assert max_rel_diff({"a": torch.zeros(2)}, {"a": torch.zeros(3)}) == ("a", float("inf"))
    assert max_rel_diff({"a": torch.zeros(2)}, {"a": torch.zeros(2).double()}) == (
        "a",
        float("inf"),
    )
    assert max_rel_diff({"a": torch.tensor([float("nan")])}, {"a": torch.zeros(1)}) == (
        "a",
        float("inf"),
    )
