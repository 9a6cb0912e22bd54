"""Plans, keys and orders of many clients at once are, bit by bit, those of each of them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from remanence.core.rng import Key, fold_in, fold_in_batch, permutations
from remanence.data.batches import plan_batches, plan_batches_many
from remanence.engines import client_plan
from remanence.rounds.federated import make_work
from remanence.rounds.setup import first_state
from remanence.testing.toy_task import small_experiment


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    batch=st.integers(1, 14),
    length=st.sampled_from([(1, 0), (3, 0), (0, 1), (0, 7)]),
    drop_last=st.booleans(),
)
def test_plans(sizes: list[int], batch: int, length: tuple[int, int], drop_last: bool) -> None:
    epochs, steps = length
    each = [Key(3).fold_in("client", number) for number in range(len(sizes))]
    values = np.array([key.value for key in each], dtype=np.uint64)
    rows, widths = plan_batches_many(values, np.array(sizes), batch, epochs, steps, drop_last)
    for number, (key, size) in enumerate(zip(each, sizes, strict=True)):
        plan = plan_batches(key, size, batch, epochs, steps, drop_last)
        mine, wide = plan.indices.shape
        assert np.array_equal(rows[number, :mine, :wide], plan.indices)
        assert np.array_equal(
            rows[number, :mine, wide:], np.repeat(plan.indices[:, :1], rows.shape[2] - wide, axis=1)
        )
        assert np.array_equal(widths[number, :mine], plan.batch_sizes)
        assert not widths[number, mine:].any()
    assert rows.shape == (len(sizes), max(np.count_nonzero(widths, axis=1)), min(batch, max(sizes)))


@given(
    seed=st.integers(0, 2**64 - 1),
    numbers=st.lists(st.integers(0, 2**40), min_size=1, max_size=5),
    word=st.text(max_size=5),
)
def test_keys(seed: int, numbers: list[int], word: str) -> None:
    folded = fold_in_batch(Key(seed), word, np.array(numbers), 3)
    assert folded.dtype == np.uint64
    assert folded.tolist() == [Key(seed).fold_in(word, number, 3).value for number in numbers]


@given(count=st.integers(0, 20))
def test_orders(count: int) -> None:
    each = [Key(1).fold_in(number) for number in range(3)]
    orders = permutations(np.array([key.value for key in each], dtype=np.uint64), count)
    assert orders.tolist() == [key.permutation(count).tolist() for key in each]


def test_keys_of_a_phase_and_its_steps() -> None:
    """What a stack folds on the host is what `sequential` folds client by client."""
    experiment = small_experiment("fedavg")
    task, job = experiment.task, make_work(experiment, first_state(experiment), 1)
    values = client_plan.phase_keys(client_plan.client_keys(job, job.clients), 1)
    of_steps = fold_in_batch(values[:, None], np.arange(4)).view(np.int64)
    for place in range(len(job.clients)):
        ctx = client_plan.at_phase(client_plan.make_context(task, job, place), 1, 4)
        assert int(ctx.key) == int(values.view(np.int64)[place])
        assert fold_in(ctx.key, torch.arange(4)).tolist() == of_steps[place].tolist()
