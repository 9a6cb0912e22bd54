"""Captured steps, which read and write fixed memory, equal those of `sequential`, whatever the method;
where capturing or memory fails, the run continues.

On a CPU a step is traced to a flat list of operations, which takes a second each time. Most tests
therefore run the eager step on the same memory; on CUDA the same code captures a CUDA graph.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines.test_equal_engines import CASES, EVERYTHING, with_clients

from remanence.core.contexts import ClientOps, Context
from remanence.core.errors import RunFailed
from remanence.core.pytree import Tree
from remanence.core.slots import Part, StepTracker
from remanence.core.types import ModelState, Reply
from remanence.engines import captured_steps
from remanence.engines.autotune import Candidate, Trials, choose_engine, choose_execution
from remanence.engines.captured_steps import choose_sizes, round_up
from remanence.engines.cost import Workload
from remanence.engines.memory import gpu_memory_text
from remanence.engines.run_slices import RunSlice
from remanence.engines.sequential import SequentialEngine
from remanence.engines.table import make_engine
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.kernels.capture import copy_tensors
from remanence.methods import METHODS
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing import TOLERANCE, check_engine
from remanence.testing.toy_task import (
    fast_config,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)
from remanence.training.task import ClientIndices


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        captured_steps, "TracedFunction", lambda step_all, example, compile=False: step_all
    )


def assert_equals_loop(
    experiment: BuiltExperiment, engine: VectorizedEngine, rounds: int = 3
) -> None:
    expected, _ = run_rounds(experiment, SequentialEngine(experiment.task), rounds)
    state, _ = run_rounds(experiment, engine, rounds)
    place, distance = max_rel_diff(state_tree(state), state_tree(expected))
    assert distance <= TOLERANCE, f"differs from sequential by {distance:.1e} at {place}"


def assert_captured_equals_sequential(
    experiment: BuiltExperiment, stack: int, steps: str = "captured"
) -> VectorizedEngine:
    engine = VectorizedEngine(experiment.task, stack, steps)
    assert_equals_loop(experiment, engine)
    assert engine.degraded_reason == ""
    assert engine.captured
    return engine


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("method", [fast_config(name) for name in METHODS])
def test_every_method(method: str) -> None:
    assert_captured_equals_sequential(small_experiment(method), stack=3)


@pytest.mark.parametrize("steps", ["captured", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_step_returns_an_input_under_another_name(steps: str) -> None:
    """A part may remember the parameters before the step: they lie where the new ones are about
    to be written.
    """
    last = StepTracker(
        lambda ctx, ops: {"last": dict(ctx.start.params)},
        lambda memory, before, after, batch, ops, ctx: {"last": dict(before.params)},
    )

    def tell(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
        moved = sum(
            (trained.params[name] - ctx.tracker_state["last"][name]).square().sum()
            for name in trained.params
        )
        return {}, {"moved": moved}

    part = Part(
        "last_step",
        step_tracker=last,
        on_client_end=tell,
        payload=lambda start, world: {"moved": torch.zeros((), dtype=world.dtype)},
        payload_description="moved",
    )
    experiment = small_experiment(part)
    job = make_work(experiment, first_state(experiment), 1)
    plain, ours = (
        torch.cat([reply.payload["last_step"]["moved"] for reply in engine.train(job)])
        for engine in (
            SequentialEngine(experiment.task),
            VectorizedEngine(experiment.task, 64, steps),
        )
    )
    assert float(plain.min()) > 0
    torch.testing.assert_close(ours.sort().values, plain.sort().values, rtol=1e-10, atol=0)


def test_tensors_are_read_before_they_are_overwritten() -> None:
    """Two that change places, one that stays, one turned around, one that is new."""
    a, b, c, d, e = (torch.arange(4.0).reshape(2, 2) + 10 * number for number in range(5))
    wanted = [b.clone(), a.clone(), c.clone(), d.t().clone(), e + 1]
    copy_tensors([a, b, c, d, e], [b, a, c, d.t(), e + 1])
    assert all(torch.equal(*pair) for pair in zip([a, b, c, d, e], wanted, strict=True))


@pytest.mark.usefixtures("untraced")
def test_a_step_that_changes_the_form_of_its_state_is_not_captured() -> None:
    """A part may remember the batch before, of which there is none in its first step."""
    remembers = Part(
        "remembers",
        step_tracker=StepTracker(
            lambda ctx, ops: {}, lambda memory, before, after, batch, ops, ctx: {"last": batch.y}
        ),
    )
    experiment = small_experiment(remembers)
    engine = VectorizedEngine(experiment.task, 3, "captured")
    assert_equals_loop(experiment, engine)
    assert "changes the form" in engine.degraded_reason


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("case", CASES)
def test_every_setting(case: str) -> None:
    changes, make_module = CASES[case]
    assert_captured_equals_sequential(
        small_experiment(EVERYTHING, changes, module=make_module() if make_module else None),
        stack=64,
    )


@pytest.mark.usefixtures("untraced")
def test_the_engine_contract() -> None:
    check_engine(lambda task: VectorizedEngine(task, 3, "captured"))


@pytest.mark.parametrize("method", ["fedavg", "scaffold+wsm"])
def test_traced(method: str) -> None:
    """Really traced: numbers of the round, the step and the client come in as arguments,
    or the second round would repeat the first.
    """
    assert_captured_equals_sequential(
        small_experiment(method, {"local.schedule": "cosine", "rounds": 3, "local.epochs": 2}),
        stack=64,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled() -> None:
    assert_captured_equals_sequential(
        small_experiment("fedprox(mu=0.1)"), stack=64, steps="compiled"
    )


@pytest.mark.usefixtures("untraced")
def test_few_sizes_are_captured_and_the_rest_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of 8, 4, 3, 1 and 1 rows in batches of 1: 5 are there in the first step, 3 in the
    second and third, 2 in the fourth, then 1.

    Sizes are halved, so 5, 2 and 1 are captured: with 3 clients there are two too many in the stack
    of 5.
    """
    asked: list[captured_steps.StepShape] = []
    record = captured_steps.CapturedPhase._capture
    monkeypatch.setattr(
        captured_steps.CapturedPhase,
        "_capture",
        lambda self, shape, fuse: asked.append(shape) or record(self, shape, fuse),
    )
    experiment = with_clients(
        small_experiment(EVERYTHING, {"local.batch_size": 1, "data.partition": "iid"}),
        [3, 1, 8, 1, 4],
    )
    assert_captured_equals_sequential(experiment, stack=64)
    assert [tuple(shape) for shape in asked] == [
        (5, 1, False),
        (5, 1, True),
        (2, 1, False),
        (1, 1, False),
    ]


def test_a_smaller_stack_uses_the_captured_steps_of_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five clients in stacks of 4 and of 1, then of 3 and of 2. Sizes are halved, so 4, 2 and 1
    are traced; with 3 the fourth is masked.
    """
    written: list[bool] = []
    monkeypatch.setattr(
        captured_steps,
        "TracedFunction",
        lambda step_all, example, compile=False: written.append(compile) or step_all,
    )
    experiment = with_clients(
        small_experiment("fedavg", {"data.partition": "iid"}), [4, 4, 4, 4, 4]
    )
    engine = VectorizedEngine(experiment.task, 4, "captured")
    assert_equals_loop(experiment, engine)
    assert len(engine.captured) == 1
    assert set(engine.captured[0].replays) == {(4, 4, False), (1, 4, False)}
    assert len(written) == 2
    engine.stack = 3
    assert_equals_loop(experiment, engine)
    assert set(engine.captured[0].replays) == {
        (4, 4, False),
        (1, 4, False),
        (4, 4, True),
        (2, 4, False),
    }
    assert len(written) == 3


@pytest.mark.parametrize(
    ("often", "compiled"), [(0.1, [True, True, True]), (0.2, [False, True, False])]
)
def test_rare_shapes_are_not_compiled(
    often: float, compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of 7, 6, 1 and 1 rows in batches of 1: of 7 steps the first is of four clients,
    five are of two, and the last is of one.
    """
    seen: list[bool] = []
    monkeypatch.setattr(
        captured_steps,
        "TracedFunction",
        lambda step_all, example, compile=False: seen.append(compile) or step_all,
    )
    monkeypatch.setattr(captured_steps, "MIN_COMPILED_SHARE", often)
    experiment = with_clients(
        small_experiment("fedavg", {"local.batch_size": 1, "data.partition": "iid"}), [7, 6, 1, 1]
    )
    assert_captured_equals_sequential(experiment, stack=64, steps="compiled")
    assert seen == compiled


def test_steps_that_cannot_be_captured_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise NotImplementedError("no such operation\nin this graph")

    monkeypatch.setattr(captured_steps, "TracedFunction", refuse)
    experiment = small_experiment(EVERYTHING)
    engine = VectorizedEngine(experiment.task, 3, "captured")
    assert_equals_loop(experiment, engine)
    assert engine.degraded_reason == "steps could not be captured (no such operation)"
    assert engine.execution == "eager"


# ------------------------------------------------------------------------------------------- memory


def scarce(monkeypatch: pytest.MonkeyPatch, room: int, error: Exception) -> list[int]:
    """Memory for `room` clients. -> the sizes of the stacks that were tried"""
    tried: list[int] = []
    whole = VectorizedEngine._train_stack

    def train(self: VectorizedEngine, slices: Sequence[RunSlice]) -> list[Reply]:
        tried.append(sum(len(each.indices) for each in slices))
        if tried[-1] > room:
            raise error
        return whole(self, slices)

    monkeypatch.setattr(VectorizedEngine, "_train_stack", train)
    return tried


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_out_of_memory_halves_the_stack_for_good(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Six clients, room for two: 6 fails, 3 fails, then 1 at a time (half of 3), in this round
    and the next.
    """
    tried = scarce(monkeypatch, 2, error)
    experiment = small_experiment("fedavg", {"clients.sample": 6})
    engine = VectorizedEngine(experiment.task, 64)
    assert_equals_loop(experiment, engine, rounds=2)
    assert tried == [6, 3] + [1] * 12
    assert engine.stack == 1


def test_one_client_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    scarce(monkeypatch, 0, torch.OutOfMemoryError("CUDA out of memory"))
    experiment = small_experiment("fedavg")
    with pytest.raises(RunFailed, match=r"smaller local\.batch"):
        list(
            VectorizedEngine(experiment.task).train(
                make_work(experiment, first_state(experiment), 1)
            )
        )


def test_the_memory_of_other_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GB 2 are free and 5 ours: other processes have 73."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 10**9)
    assert gpu_memory_text(torch.device("cuda")) == " (2.0 of 80.0 GB are free, 5.0 are this run's)"
    assert gpu_memory_text(torch.device("cpu")) == ""


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = scarce(monkeypatch, 0, RuntimeError("shapes do not match"))
    experiment = small_experiment("fedavg")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        list(
            VectorizedEngine(experiment.task).train(
                make_work(experiment, first_state(experiment), 1)
            )
        )
    assert tried == [4]


# --------------------------------------------------------------------------------------- the choice


class Clock:
    """Every training takes the seconds that its way of running steps is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]):
        self.now = 0.0
        train = VectorizedEngine.train

        def timed(engine: VectorizedEngine, job: Any) -> Any:
            yield from train(engine, job)
            self.now += seconds[engine.execution]

        monkeypatch.setattr(VectorizedEngine, "train", timed)

    def __call__(self) -> float:
        return self.now


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("seconds", "rounds", "steps"),
    [
        # too short a run for compiling to pay
        ({"eager": 2.0, "captured": 1.0, "compiled": 0.1}, 400, "captured"),
        ({"eager": 2.0, "captured": 1.0, "compiled": 0.1}, 10_000, "compiled"),
        ({"eager": 1.0, "captured": 2.0, "compiled": 3.0}, 10_000, "eager"),
        ({"eager": 2.0, "captured": 1.0, "compiled": 0.97}, 10_000, "captured"),  # 3% may be chance
    ],
)
def test_the_execution_of_steps_is_measured(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], rounds: int, steps: str
) -> None:
    experiment = small_experiment("fedavg")
    job = make_work(experiment, first_state(experiment), 1)
    workload, clock = Workload(rounds), Clock(monkeypatch, seconds)
    choice = choose_execution(experiment.task, job, 64, clock, workload)
    assert (choice.name, choice.execution) == ("vectorized", steps)
    # each client makes 8 steps in a trial, so 2 seconds are 250 milliseconds a step of all
    each = 1000 / 8 / len(job.clients)
    assert f" {each * seconds[steps]:.2f} ms per local step (vectorized" in choice.reason
    for kind in ("eager", "captured"):
        assert f" {each * seconds[kind]:.2f} ms" in choice.reason
    engine = make_engine(choice.name, experiment.task, execution=choice.execution)
    assert isinstance(engine, VectorizedEngine)
    assert engine.execution == steps


def test_the_choice_says_why_steps_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise NotImplementedError("no such operation")

    monkeypatch.setattr(captured_steps, "TracedFunction", refuse)
    experiment = small_experiment("fedavg")
    choice = choose_execution(
        experiment.task,
        make_work(experiment, first_state(experiment), 1),
        64,
        iter(range(99)).__next__,
        Workload(10_000),
    )
    assert choice.execution == "eager"
    assert choice.reason.endswith("; steps could not be captured (no such operation)")


def test_a_command_of_few_steps_captures_them_without_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = small_experiment("fedavg")
    job = make_work(experiment, first_state(experiment), 1)
    run, measured = Trials.run, list[str]()

    def record(trials: Trials, candidate: Candidate, steps: int) -> None:
        measured.append(candidate.execution)
        run(trials, candidate, steps)

    monkeypatch.setattr(Trials, "run", record)
    choice = choose_execution(experiment.task, job, 64, time.perf_counter, Workload(2))
    assert (choice.execution, measured) == ("captured", ["eager"])
    assert choice.reason.endswith("too few steps to measure more")


def test_eager_steps_are_a_choice_even_where_they_are_degraded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU without a compiler convolutions outside the steps are left to torch."""

    def without_kernels(engine: VectorizedEngine, job: Any) -> Any:
        engine.degraded_reasons = ["convolutions are left to torch (no C compiler)"]
        return iter(())

    monkeypatch.setattr(VectorizedEngine, "train", without_kernels)
    experiment = small_experiment("fedavg")
    job = make_work(experiment, first_state(experiment), 1)
    clock = iter(range(99)).__next__
    choice = choose_execution(experiment.task, job, 64, clock, Workload(10_000))
    assert choice.execution == "eager"
    assert choice.reason.endswith("; convolutions are left to torch (no C compiler)")


def test_a_short_run_on_a_cpu_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = small_experiment("fedavg", {"model": "mlp(hidden=6)"})
    monkeypatch.setattr(captured_steps, "TracedFunction", None)
    assert (
        choose_engine(
            experiment.task,
            make_work(experiment, first_state(experiment), 1),
            workload=Workload(3),
        ).execution
        == "eager"
    )


def test_sizes() -> None:
    assert choose_sizes(1) == [1]
    assert choose_sizes(16) == list(range(16, 0, -1))
    sizes = choose_sizes(100)
    assert sizes[0] == 100
    assert sizes[-1] == 1
    assert all(
        small < large and small >= int(0.8 * large)
        for large, small in itertools.pairwise(sizes)
        if large > 5
    )
    assert [round_up(n) for n in (0, 1, 2, 3, 64, 65)] == [0, 1, 2, 4, 64, 128]


def test_padding_repeats_real_examples() -> None:
    """Three rows become four by repeating the client's first with weight 0, whatever stood
    there before; no rows stay none.
    """
    rows = ClientIndices(
        torch.tensor([[5, 6, 7]]),
        torch.ones(1, 3),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(1, 0),
    )
    memory = ClientIndices(
        torch.full((1, 4), 9),
        torch.full((1, 4), 9.0),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(1, 0),
    )
    captured_steps.load_rows(memory, rows)
    assert memory.train.tolist() == [[5, 6, 7, 5]]
    assert memory.train_weight.tolist() == [[1, 1, 1, 0]]
    assert memory.valid.shape == (1, 0)


@pytest.mark.usefixtures("untraced")
def test_a_smaller_batch_is_padded_with_an_example_of_its_client() -> None:
    """Clients of 8 and of 7 rows, one after the other in the same memory, in one batch each."""
    experiment = with_clients(
        small_experiment(
            "fedavg", {"local.batch_size": 8, "local.epochs": 1, "data.partition": "iid"}
        ),
        [8, 7],
    )
    engine = assert_captured_equals_sequential(experiment, stack=1)
    assert len(engine.captured) == 1
    seen = engine.captured[0].ids[0, 0].tolist()
    assert sorted(seen[:7]) == sorted(experiment.task.population.at(0).train.for_client(1))
    assert seen[7] == seen[0]
