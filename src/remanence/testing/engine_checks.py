"""`check_engine`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from remanence.core import pytree
from remanence.core.engine import Engine, ExampleResults
from remanence.core.process_state import preserve_process_state
from remanence.core.types import ModelState
from remanence.engines.sequential import SequentialEngine
from remanence.experiment.build import BuiltExperiment
from remanence.rounds.federated import make_work
from remanence.testing.running import (
    TOLERANCE,
    check_equal_replies,
    check_inputs_unchanged,
    train,
)
from remanence.testing.toy_task import (
    EQUAL,
    all_slots_part,
    batch_norm_net,
    drifting_experiment,
    max_rel_diff,
    run_rounds,
    small_experiment,
    with_client_models,
)
from remanence.training.task import TrainingTask


@preserve_process_state()
def check_engine(make_engine: Callable[[TrainingTask], Engine], device: str = "cpu") -> None:
    """Check that an engine trains and evaluates as `sequential` does.

    At any time step its results must equal those of `sequential`, its inputs must not change, and
    a client's result must not depend on the other clients of the round.

    >>> from remanence.engines.vectorized import VectorizedEngine
    >>> check_engine(lambda task: VectorizedEngine(task, stack=2))

    Args:
        make_engine: Is called with a task. The engine is closed when it has been checked.
        device: Of the tasks: "cpu" or "cuda".

    Raises:
        AssertionError: With a sentence that names the first problem and its cause.
    """
    for experiment in (
        small_experiment(all_slots_part(), {"data.public": 8, "device": device}),
        small_experiment(all_slots_part(), EQUAL | {"device": device}, module=batch_norm_net()),
        drifting_experiment(all_slots_part(), 2, {"device": device}),
    ):
        state, _ = run_rounds(experiment, SequentialEngine(experiment.task), 1)
        # after one round, the clients and the server have a state
        work = make_work(experiment, state, 2)
        engine = make_engine(experiment.task)
        try:
            name = f"engine {engine.name}"
            for each in (work, with_client_models(work)):
                check_inputs_unchanged(engine, each, name)
                whole = train(engine, each, name)
                check_equal_replies(
                    whole,
                    train(SequentialEngine(experiment.task), each, "sequential"),
                    f"{name} and sequential train differently",
                )
                for places in ([1], [0, 2], [1, 2, 3]):
                    some = train(engine, each.select(torch.tensor(places)), name)
                    check_equal_replies(
                        some,
                        whole.select(torch.tensor(places)),
                        f"{name}: a client's reply depends on who else is in the round",
                    )
            _check_scores(engine, experiment, with_client_models(work).start, work.time_step)
        finally:
            engine.close()


def _check_scores(
    engine: Engine, experiment: BuiltExperiment, models: ModelState, step: int
) -> None:
    one, sequential = models.select(slice(0, 1)), SequentialEngine(experiment.task)
    before = pytree.clone({"params": models.params, "buffers": models.buffers})
    splits: list[tuple[str, np.ndarray | None]] = [
        ("test", None),
        ("train", None),
        ("valid", None),
        ("valid", np.array([4, 1])),
    ]
    if experiment.task.info.public_size:
        splits.append(("public", None))
    for split, owners in splits:
        for some in (one, models):
            mine, wanted = (e.score(some, split, owners, step) for e in (engine, sequential))
            place, distance = max_rel_diff(mine._asdict(), wanted._asdict())
            assert distance <= TOLERANCE, (
                f"engine {engine.name} and sequential score the split {split} differently: by"
                f" {distance:.1e} at {place}"
            )
    for split in ("train", "valid", "test"):
        _check_pairs(engine, sequential, models, split, step)
    if experiment.task.info.public_size:
        for some in (one, models):
            logits, wanted_logits = (
                e.predict_logits(some, experiment.task.public.to(experiment.task.info.device))
                for e in (engine, sequential)
            )
            distance = max_rel_diff({"": logits}, {"": wanted_logits})[1]
            assert distance <= TOLERANCE, (
                f"engine {engine.name} and sequential predict the public set differently:"
                f" by {distance:.1e}"
            )
    changed = max_rel_diff(before, {"params": models.params, "buffers": models.buffers})[1] > 0
    assert not changed, (
        f"engine {engine.name} changes the models it scores: score must leave them alone"
    )


def _check_pairs(
    engine: Engine, sequential: SequentialEngine, models: ModelState, split: str, step: int
) -> None:
    """Score pairs of a model and an owner: some models twice, one not at all, one owner without
    examples on the small task; with and without results on single examples.
    """
    which, owners = np.array([2, 0, 0, 3, 2]), np.array([5, 4, 0, 1, 0])
    if split == "test":
        owners = owners % sequential.task.population.num_concepts
    for examples in (False, True):
        mine, wanted = (
            e.score_pairs(models, which, owners, split, step, examples)
            for e in (engine, sequential)
        )
        assert (mine.examples is not None) == examples, (
            f"engine {engine.name} gives example results exactly where they are requested"
        )
        trees_of = [
            {"confusion": s.confusion, "loss": s.loss, **_results_tree(s.examples)}
            for s in (mine, wanted)
        ]
        place, distance = max_rel_diff(*trees_of)
        # margins are kept in float32: two that round apart are no defect
        allowed = 1e-6 if place == "margin" else TOLERANCE
        assert distance <= allowed, (
            f"engine {engine.name} and sequential score pairs on the split {split} differently:"
            f" by {distance:.1e} at {place}"
        )


def _results_tree(results: ExampleResults | None) -> pytree.Tree:
    return (
        {}
        if results is None
        else {name: torch.from_numpy(column) for name, column in results._asdict().items()}
    )
