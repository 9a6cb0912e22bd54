"""The engine `ray` equals `sequential`, and workers and nodes that die, hang or fail cost a retry and
nothing else.

One cluster of two nodes serves all tests, and so do its two workers, one on each node: an engine of
the same kind stays open, and the others share its crew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remanence.config import parse_experiment
from remanence.core import pytree
from remanence.core.contexts import ClientOps, Context
from remanence.core.errors import InputError, RunFailed
from remanence.core.model import init_module
from remanence.core.rng import Key
from remanence.core.slots import Part, StepTracker
from remanence.core.types import ClientStats, ModelState
from remanence.engines.packing import pack
from remanence.engines.ray import engine as ray_engine
from remanence.engines.ray.connection import connect
from remanence.engines.ray.engine import RayEngine
from remanence.engines.ray.model_store import ModelStore
from remanence.engines.ray.partial_sums import RemoteReplies
from remanence.engines.ray.pool import ActorRequest
from remanence.engines.ray.serialization import receive_task, send_task, unpack
from remanence.engines.ray.work_parts import balance
from remanence.engines.ray.worker import choose_inner
from remanence.engines.sequential import SequentialEngine
from remanence.engines.table import make_engine
from remanence.experiment.build import BuiltExperiment
from remanence.methods import fedavg, flashback
from remanence.results.checkpoint import fingerprint
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state, make_round
from remanence.testing import TOLERANCE, check_engine
from remanence.testing.toy_task import (
    drifting_experiment,
    fast_config,
    max_rel_diff,
    run_rounds,
    small_experiment,
    state_tree,
)

ray = pytest.importorskip(
    "ray", reason="the package ray is not installed (the extra remanence-fl[ray])"
)
pytestmark = [
    # Ray leaves its own log files and sockets to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # one cluster for all, where tests run in parallel (--dist loadgroup)
    pytest.mark.xdist_group("ray"),
]


def wide_net() -> torch.nn.Module:
    """For the built-in task, and large enough that nothing but models matters."""
    return init_module(
        lambda: torch.nn.Sequential(
            torch.nn.Linear(5, 4000), torch.nn.ReLU(), torch.nn.Linear(4000, 4)
        ),
        Key(0),
    )


WHOLE = {"local.steps": 2, "clients.sample": 6}  # everybody in every round, little work


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=2)
    before = signal.getsignal(signal.SIGTERM)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, before)
    standing = RayEngine(small_experiment("fedavg").task, 2, inner="sequential")
    wait_for_workers(standing)
    yield nodes
    standing.close()
    ray.shutdown()
    nodes.shutdown()


def assert_equals_loop(
    experiment: BuiltExperiment, engine: RayEngine, rounds: int = 2, tolerance: float = TOLERANCE
) -> None:
    expected, lines = run_rounds(experiment, SequentialEngine(experiment.task), rounds)
    state, others = run_rounds(experiment, engine, rounds)
    assert not [line for line in lines if line.get("rejected") or line.get("abandoned")]
    place, distance = max_rel_diff(state_tree(state), state_tree(expected))
    assert distance <= tolerance, f"ray differs from sequential by {distance:.1e} at {place}"
    for line, other in zip(lines, others, strict=True):
        assert {name: other[name] for name in ("per_class", "bytes_up") if name in line} == {
            name: line[name] for name in ("per_class", "bytes_up") if name in line
        }


def wait_for_workers(engine: RayEngine) -> list[int]:
    """-> the processes of all workers, once every one answers. A worker that was lost with its
    node, or that never started, is replaced first.
    """
    pool = engine.assemble()
    while True:
        while any(slot.starting is not None for slot in pool.slots):
            list(pool.map_unordered([ActorRequest("ready", ())]))
            time.sleep(0.1)
        try:
            processes: list[int] = ray.get([slot.actor.ready.remote() for slot in pool.slots])
        except ray.exceptions.RayError:  # a call through the pool replaces the lost worker
            list(pool.map_unordered([ActorRequest("ready", (), n) for n in range(len(pool.slots))]))
        else:
            return processes


# ------------------------------------------------------------------------------ equal to the reference

METHOD_PARTS = {"fedavg": fedavg, "flashback": flashback}
METHODS = {
    "fedavg": "vectorized",
    "scaffold+wsm": "sequential",
    "flashback": "vectorized",
    "fedwavg": "sequential",
    "hast": "vectorized",
}


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", TOLERANCE), ("fp32", 1e-5)])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_as_loop_on_two_nodes(
    method: str, precision: str, tolerance: float, cluster: Any
) -> None:
    changes = {"record.local": method == "fedavg", "precision": precision}
    experiment = small_experiment(
        "+".join(fast_config(name) for name in method.split("+")), changes
    )
    with closing(RayEngine(experiment.task, 2, inner=METHODS[method])) as engine:
        wait_for_workers(engine)
        before = len(engine.assemble().losses)
        assert_equals_loop(experiment, engine, tolerance=tolerance)
        assert len(engine.assemble().losses) == before


def test_the_same_while_the_data_drift(cluster: Any) -> None:
    experiment = drifting_experiment(fast_config("hast"), 2)
    with closing(RayEngine(experiment.task, 2, inner="sequential")) as engine:
        assert_equals_loop(experiment, engine)


def test_the_contract_of_engines(cluster: Any) -> None:
    check_engine(lambda task: RayEngine(task, 2, inner="sequential"))


@pytest.mark.parametrize("method", ["fedavg", "flashback"])  # models stay, or are sent back
def test_workers_that_step_eagerly_give_their_reason(method: str, cluster: Any) -> None:
    """A part may keep the batch before, of which there is none in its first step."""
    remembers = Part(
        "remembers",
        step_tracker=StepTracker(
            lambda ctx, ops: {}, lambda memory, before, after, batch, ops, ctx: {"last": batch.y}
        ),
    )
    experiment = small_experiment(METHOD_PARTS[method]() + remembers, WHOLE)
    with closing(RayEngine(experiment.task, 2, inner="vectorized", execution="captured")) as engine:
        assert_equals_loop(experiment, engine, rounds=1)
        assert engine.degraded_reason.startswith("steps could not be captured")
        assert engine.degraded_reason.count("changes the form") == 1


def test_one_worker_for_each_core_of_the_cluster(cluster: Any) -> None:
    """Four cores; where others hold some of them, who is there does all the work."""
    experiment = small_experiment("fedavg", WHOLE)
    with closing(RayEngine(experiment.task)) as engine:
        assert len(engine.assemble().slots) == 4
        job = make_work(experiment, first_state(experiment), 1)
        replies = list(engine.train(job))
        assert sorted(client for reply in replies for client in reply.client.tolist()) == list(
            range(6)
        )


def test_two_engines_of_a_run_share_their_workers(cluster: Any) -> None:
    """Fine-tuning is a task of its own: with workers of its own it would wait for cores that
    training holds. Who is last ends them, in any order.
    """
    training, tuning = small_experiment("scaffold", WHOLE), small_experiment("fedavg", WHOLE)
    first, second = (
        RayEngine(training.task, 2, inner="sequential"),
        RayEngine(tuning.task, 2, inner="vectorized"),
    )
    with closing(second):
        with closing(first):
            assert_equals_loop(training, first, 1)
            assert_equals_loop(tuning, second, 1)
            assert first.pool is second.pool
            assert len(set(wait_for_workers(second))) == 2
        assert_equals_loop(tuning, second, 1)
        where = lambda worker: ray.get_runtime_context().get_node_id()  # noqa: E731 (a lambda travels as it is, a function of this file by its name)
        assert (
            len(
                {
                    ray.get(member.actor.__ray_call__.remote(where))
                    for member in second.assemble().slots
                }
            )
            == 2
        )
    assert second.pool is None


# ------------------------------------------------------------------------------------------- faults


def mishap(armed: Path, client: int, *, kind: str) -> Part:
    """A part that does nothing, but where the file is there: then, at one client, a mishap;
    "once" takes the file away first.
    """
    once, path = kind.startswith("once"), str(armed)

    def own(start: ModelState, stats: ClientStats, info: Any) -> dict[str, Any]:
        return {"visits": torch.zeros((), dtype=torch.int64)}

    def before(ctx: Context, ops: ClientOps) -> tuple[dict[str, Any], dict[str, Any]]:
        if int(ctx.client) == client and os.path.exists(path):
            if once:
                os.unlink(path)
            if kind.endswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind.endswith("hung"):
                time.sleep(600)
            with open(path, "a") as file:
                file.write("raised\n")
            raise ValueError("the part's own mistake")
        return {"visits": ctx.client_state["visits"] + 1}, {}

    return Part("mishap", client_state=own, on_client_start=before)


def test_a_node_that_dies_moves_its_work(cluster: Any) -> None:
    """Its worker is lost in the second round and moves to the node that is left. The first of
    these tests: the two workers are still on two nodes.
    """
    experiment = small_experiment("scaffold", WHOLE)
    node = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)
    expected, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    with closing(RayEngine(experiment.task, 2, inner="sequential")) as engine:
        wait_for_workers(engine)
        before = len(engine.assemble().losses)
        train, rounds = engine.train, []

        def train_and_lose_a_node(job: Any) -> Iterator[Any]:
            rounds.append(job.round)
            for number, reply in enumerate(train(job)):
                if len(rounds) == 2 and number == 0:
                    cluster.remove_node(node, allow_graceful=False)
                yield reply

        engine.train = train_and_lose_a_node  # type: ignore[method-assign]
        try:
            state, _ = run_rounds(experiment, engine, 2)
        finally:
            cluster.add_node(num_cpus=2)
        losses = engine.assemble().losses[before:]
        assert losses
        assert all(sentence.startswith("Ray worker ") for sentence in losses)
    assert max_rel_diff(state_tree(state), state_tree(expected))[1] <= TOLERANCE


@pytest.mark.parametrize("kind", ["once killed", "once hung"])
def test_a_worker_lost_in_a_round_costs_a_retry(kind: str, cluster: Any, tmp_path: Path) -> None:
    """The model is the right one, and every client's own state has counted the round once."""
    armed = tmp_path / "armed"
    experiment = small_experiment(mishap(armed, 3, kind=kind), WHOLE)
    expected, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    armed.touch()
    patience = {"timeout": 10.0} if kind == "once hung" else {}
    with closing(RayEngine(experiment.task, 2, inner="sequential", **patience)) as engine:
        wait_for_workers(engine)  # starting may take longer than that on a busy machine
        before = len(engine.assemble().losses)
        state, _ = run_rounds(experiment, engine, 2)
        losses = [loss for loss in engine.assemble().losses[before:] if "another does" in loss]
    assert not armed.exists()
    assert max_rel_diff(state_tree(state), state_tree(expected))[1] <= TOLERANCE
    assert [int(state.client_states[client]["mishap"]["visits"]) for client in range(6)] == [2] * 6
    assert losses
    assert any("did not answer in 10 s" in loss for loss in losses) == (kind == "once hung")


def test_work_that_kills_every_worker_ends_the_run(cluster: Any, tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    armed.touch()
    experiment = small_experiment(mishap(armed, 0, kind="always killed"), WHOLE)
    job, words = (
        make_work(experiment, first_state(experiment), 1),
        r"the same work was lost 2 times .* go on with remanence resume",
    )
    with (
        closing(RayEngine(experiment.task, 2, inner="sequential", retries=1)) as engine,
        pytest.raises(RunFailed, match=words),
    ):
        list(engine.train(job))


def test_a_mistake_in_a_part_is_told_and_not_tried_again(cluster: Any, tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    armed.touch()
    experiment = small_experiment(mishap(armed, 0, kind="raised"), WHOLE)
    with closing(RayEngine(experiment.task, 2, inner="sequential")) as engine:
        wait_for_workers(engine)
        with pytest.raises(RunFailed, match="the part's own mistake"):
            list(engine.train(make_work(experiment, first_state(experiment), 1)))
        wait_for_workers(engine)  # a call made again would have been answered by now
    assert armed.read_text() == "raised\n"


def test_models_lost_before_they_are_summed_are_trained_again(cluster: Any) -> None:
    """Both workers die between the last reply and the sum, with the models they keep."""
    experiment = small_experiment("scaffold", WHOLE)
    expected, _ = run_rounds(experiment, SequentialEngine(experiment.task), 2)
    with closing(RayEngine(experiment.task, 2, inner="sequential")) as engine:
        train, rounds = engine.train, []

        def train_and_lose_the_workers(job: Any) -> Iterator[Any]:
            rounds.append(job.round)
            yield from train(job)
            if len(rounds) == 2:
                for process in wait_for_workers(engine):
                    os.kill(process, signal.SIGKILL)

        engine.train = train_and_lose_the_workers  # type: ignore[method-assign]
        state, _ = run_rounds(experiment, engine, 2)
    assert max_rel_diff(state_tree(state), state_tree(expected))[1] <= TOLERANCE


# ------------------------------------------------------------------------------ starting and ending

ALONE = """
import os, signal, sys
import ray
from remanence.engines.ray.engine import RayEngine
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import small_experiment
experiment = small_experiment("fedavg", {"local.steps": 1})
signal.signal(signal.SIGTERM, lambda *_: None)
mine = signal.getsignal(signal.SIGTERM)
engine, another = RayEngine(experiment.task, 1), RayEngine(experiment.task, 1)
assert not ray.is_initialized(), "nothing is started before there is something to do"
replies = list(engine.train(make_work(experiment, first_state(experiment), 1)))
assert signal.getsignal(signal.SIGTERM) is mine, "Ray took the handler that saves a run"
print(ray.get_runtime_context().gcs_address, os.environ["RAY_USAGE_STATS_ENABLED"], len(replies))
list(another.train(make_work(experiment, first_state(experiment), 1)))
engine.close()
assert ray.is_initialized(), "another engine still needs it"
another.close()
assert not ray.is_initialized()
another.close()
assert not ray.is_initialized(), "closing twice starts nothing"
"""


@pytest.mark.parametrize("where", ["here", "there"])
def test_it_starts_a_cluster_or_finds_one(where: str, cluster: Any) -> None:
    """Its own cluster ends with it; the one it found stays."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_ADDRESS": cluster.address} if where == "there" else {}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    address, telemetry, replies = done.stdout.split()
    assert (address == cluster.address) == (where == "there")
    assert telemetry == "0"
    assert int(replies) == 1
    assert ray.cluster_resources()["CPU"] == 4


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "auto:x"])
def test_an_address_without_a_cluster(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(
        ray, "init", lambda **settings: (_ for _ in ()).throw(ConnectionError("no such thing"))
    )
    with pytest.raises(
        InputError,
        match=rf"no Ray cluster can be used at {address} \(.+\): check the address, the token",
    ):
        connect(address, 1)


def test_workers_that_cannot_start_leave_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    users = [0]
    monkeypatch.setattr(ray_engine, "connect", lambda *_: users.append(users[-1] + 1))
    monkeypatch.setattr(ray_engine, "disconnect", lambda: users.append(users[-1] - 1))
    monkeypatch.setattr(ray_engine, "count_resources", lambda name: 1 / 0)
    engine = RayEngine(small_experiment("fedavg").task)
    with pytest.raises(ZeroDivisionError):
        engine.assemble()
    engine.close()
    assert users == [0, 1, 0]


def test_tokens_are_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are Ray's own settings in the environment: there when it connects, as they were, and
    never among the arguments, which end up in logs.
    """
    seen: dict[str, Any] = {}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-secret", "RAY_USE_TLS": "1"}
    for name, value in token.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def refuse(**settings: Any) -> None:
        seen.update(environment=dict(os.environ), settings=settings)
        raise ray.exceptions.AuthenticationError("the token is not the cluster's")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        InputError,
        match=r"no Ray cluster can be used at auto \(the token is not the cluster's.*the token"
        r" \(RAY_AUTH_TOKEN\)",
    ):
        connect("auto", 1)
    assert {name: seen["environment"][name] for name in token} == token
    assert seen["environment"]["RAY_USAGE_STATS_ENABLED"] == "0"
    assert "a-secret" not in str(seen["settings"])


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        InputError, match=r"engine ray needs the package ray .*pip install \"remanence-fl\[ray\]\""
    ):
        RayEngine(small_experiment("fedavg").task)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inner": "lop"}, "unknown inner engine of ray 'lop.*(known|did you mean)"),
        ({"device": "cuda:1"}, "device must be cpu or cuda, not 'cuda:1'"),
        ({"timeout": -1}, "timeout=-1 and retries=3 must be at least 0"),
        ({"retries": -1}, "retries=-1"),
        ({"cpus": 0}, "a worker cannot have 0 cores"),
        ({"cpus": 1.5}, "a worker cannot have 1.5 cores"),
        ({"gpus": 2, "device": "cuda"}, "a worker cannot use 2 GPUs: ray.gpus is at most 1"),
        ({"gpus": 0.5}, "ray.gpus=0.5 means nothing to workers that compute on the CPU"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        RayEngine(small_experiment("fedavg").task, **arguments)


def test_a_cluster_without_a_gpu(cluster: Any) -> None:
    engine = RayEngine(small_experiment("fedavg").task, device="cuda", gpus=0.5)
    with pytest.raises(
        InputError, match=r"the Ray cluster has 0 GPU and a worker needs 0.5: .* \(ray.gpus\)"
    ):
        engine.assemble()
    assert ray.is_initialized()  # what others use stays


def test_settings_reach_the_engine() -> None:
    config = parse_experiment(
        {},
        {
            f"ray.{name}": value
            for name, value in {
                "address": "h:1",
                "inner": "sequential",
                "cpus": 2,
                "retries": 1,
            }.items()
        },
    )
    engine = make_engine(
        "ray", small_experiment("fedavg").task, workers=3, timeout=7.0, ray=config.ray
    )
    assert isinstance(engine, RayEngine)
    assert (
        engine.address,
        engine.inner.name,
        engine.cpus,
        engine.retries,
        engine.workers,
        engine.timeout,
    ) == (
        "h:1",
        "sequential",
        2.0,
        1,
        3,
        7.0,
    )
    for key, value, words in (
        ("inner", "lop", "ray.inner must be one of"),
        ("gpus", 2, "ray.gpus must be at most 1"),
        ("retries", -1, "at least 0"),
    ):
        with pytest.raises(InputError, match=words):
            parse_experiment({}, {f"ray.{key}": value})


def test_where_it_runs_is_not_what_it_is() -> None:
    """A run may be resumed on another cluster."""
    one, other = (
        fingerprint(parse_experiment({}, {"ray.address": address}))
        for address in ("here:1", "there:1")
    )
    assert one == other


# ------------------------------------------------------------------------------------- what travels


@pytest.mark.parametrize("method", ["fedavg", "scaffold+wsm", "fednova", "fedavg+dp(noise=0.5)"])
def test_sums_travel_and_models_stay(
    method: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six clients on two workers: of six models two come back, as sums. Frames of other things
    are small beside a model of this width.
    """
    monkeypatch.setattr(
        RemoteReplies, "fetch", lambda self, pieces: pytest.fail("a model was fetched")
    )
    experiment = small_experiment(
        method, WHOLE | {"record.every": 10, "rounds": 10}, module=wide_net()
    )
    model = pytree.nbytes(experiment.task.model.initial.params)
    with closing(RayEngine(experiment.task, 2, inner="sequential")) as engine:
        state, _ = run_rounds(experiment, engine, 1)
        # control variates: those that are sent, and those that are kept
        extras = 6 * 2 * model if method.startswith("scaffold") else 0
        assert 2 * model <= engine.traffic.up - extras < 2.3 * model
    expected, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
    assert max_rel_diff(state_tree(state), state_tree(expected))[1] <= TOLERANCE


def test_a_crowd_is_put_once(cluster: Any) -> None:
    """HAST with everybody there: a round needs the models as mixed and as trained in the store,
    once each, however many calls read them. The models that peers try are those that were trained
    in the round before.
    """
    changes = {"clients.sample": 6, "local.steps": 1, "rounds": 10, "record.every": 10}
    experiment = small_experiment(fast_config("hast"), changes, module=wide_net())
    stack_bytes = 6 * pytree.nbytes(experiment.task.model.initial.params)
    with closing(RayEngine(experiment.task, 2, inner="sequential")) as engine:
        state, _ = run_rounds(experiment, engine, 1)
        down, up = engine.traffic.down, engine.traffic.up
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(make_round(experiment, engine, Path(folder))) as round,
        ):
            round.run(state)
        assert 2 * stack_bytes <= engine.traffic.down - down < 2.2 * stack_bytes
        assert stack_bytes <= engine.traffic.up - up < 1.1 * stack_bytes


def test_a_worker_takes_only_the_models_it_needs() -> None:
    """Blocks of one model each, of which the second and the fourth are asked for, one of them
    twice.
    """
    model = {"w": torch.arange(4 * (1 << 17), dtype=torch.float64).reshape(4, -1)}  # 1 MiB each
    store: list[Any] = []
    shelf = ModelStore(lambda packed: store.append(packed) or len(store) - 1)
    stack = ModelState(model, {})
    picked = shelf.pick(stack, np.array([3, 1, 3]))
    assert len(store) == 4
    assert picked.blocks == [1, 3]
    assert picked.place.tolist() == [1, 0, 1]
    shelf.pick(stack, np.array([0]))
    assert len(store) == 4  # known again
    shelf.pick(ModelState(dict(model), {}), np.array([0]))
    assert len(store) == 8


def test_what_cannot_be_pickled_is_refused_at_once() -> None:
    lock = threading.Lock()

    def before(ctx: Context, ops: ClientOps) -> tuple[dict[str, Any], dict[str, Any]]:
        with lock:
            return {}, {}

    with pytest.raises(
        InputError, match=r"cannot be pickled \(cannot pickle '_thread.lock' object\)"
    ):
        RayEngine(small_experiment(Part("locked", on_client_start=before)).task)


def test_a_function_that_says_torch_and_classes_travels() -> None:
    """A pickler takes `world.classes` beside `torch` for the module torch.classes, which cannot
    be pickled in the usual way.
    """

    def before(ctx: Context, ops: ClientOps) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"ones": torch.ones(ctx.info.num_classes)}

    task = receive_task(
        send_task(small_experiment(Part("counted", on_client_start=before)).task),
        torch.device("cpu"),
    )
    made = next(p for p in task.method.parts if p.name == "counted").on_client_start
    assert made is not None
    assert made is not before


def test_a_task_travels_whole() -> None:
    experiment = small_experiment("fedavg", {"record.local": True})
    sent = experiment.task
    parcel = send_task(sent)
    for array in parcel.examples.values():
        array.flags.writeable = False  # as an object store lends them
    task = receive_task(parcel, torch.device("cpu"))
    job = make_work(experiment, first_state(experiment), 1)
    for mine, theirs in zip(
        SequentialEngine(task).train(job), SequentialEngine(sent).train(job), strict=True
    ):
        assert max_rel_diff(mine._asdict(), theirs._asdict()) == ("", 0.0)
    # read where it lies, not copied
    assert task.train.x.data_ptr() == parcel.examples["train.x"].ctypes.data


def test_packed_and_unpacked() -> None:
    job = make_work(experiment := small_experiment("scaffold"), first_state(experiment), 1)
    there = pack(job)
    assert not any(isinstance(leaf, torch.Tensor) for leaf in pytree.leaves(there.client_state))
    back = unpack(there, torch.device("cpu"))
    assert type(back) is type(job)
    assert type(back.stats) is ClientStats
    assert (back.key, back.optimizer_hparams, back.clients.tolist()) == (
        job.key,
        job.optimizer_hparams,
        job.clients.tolist(),
    )
    assert max_rel_diff(back.client_state, job.client_state) == ("", 0.0)
    assert back.clients is not job.clients


def test_the_inner_engine_is_what_is_fastest_there() -> None:
    dense, images = (
        small_experiment("fedavg"),
        "synthetic(samples=64, classes=4, shape='1x28x28', test=0.25)",
    )
    convolutions = small_experiment("fedavg", {"data.name": images, "model": "lenet"}).task
    assert choose_inner(dense.task, "cpu") == "vectorized"
    assert choose_inner(convolutions, "cpu") == "sequential"
    assert choose_inner(convolutions, "cuda") == "vectorized"


@given(work=st.lists(st.integers(0, 50), min_size=1, max_size=30), hands=st.integers(1, 8))
def test_work_is_dealt_evenly(work: list[int], hands: int) -> None:
    """Everybody once; nobody has more than the mean and one client above it (Graham's bound),
    and the largest slice comes first.
    """
    slices = balance(np.array(work), hands)
    assert sorted(place for places in slices for place in places) == list(range(len(work)))
    assert len(slices) <= hands
    loads = [sum(max(work[place], 1) for place in places) for places in slices]
    assert loads == sorted(loads, reverse=True)
    assert max(loads) <= sum(loads) / min(hands, len(work)) + max(max(work), 1)
