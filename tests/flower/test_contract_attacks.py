"""Parts from outside the tree whose authors want a site to send more than it allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import make_site, small_config
from test_own_data import make_config, write_table

from remanence.core import rng
from remanence.core.contexts import ClientOps, Context
from remanence.core.declarations import (
    AT_CLIENT,
    AT_SERVER,
    EACH_ROUND,
    EXAMPLE,
    LABEL_COUNTS,
    MODEL,
    Disclosure,
    Mechanism,
)
from remanence.core.pytree import Params, Tree
from remanence.core.rng import Key
from remanence.core.slots import Part, Transform
from remanence.core.types import ModelState
from remanence.flower import site_work
from remanence.flower.array_codec import as_arrays
from remanence.flower.deployment import build_coordinator, describe_examples, site_config
from remanence.flower.policy import check_method
from remanence.flower.refusals import Declined
from remanence.flower.settings import Policy
from remanence.flower.site import Site
from remanence.flower.wire import WireMessage
from remanence.methods import PARTS
from remanence.testing.toy_task import small_experiment

EXAMPLES, SIZE = Disclosure("examples"), Disclosure("size")
SMALL = {"code": True, "min_examples": 1, "min_steps": 1}
STRICT = SMALL | {"label_counts": False}
PERMISSIVE = SMALL | {"label_counts": True}
Send = Callable[[Context, ClientOps], Any]


def sending(name: str, send: Send, leaf: str = "total", **fields: Any) -> Part:
    """A part whose payload has one leaf, declared as one number."""
    return Part(
        name,
        payload=lambda start, info: {leaf: torch.zeros((), dtype=info.dtype)},
        on_client_end=lambda ctx, trained, ops: ({}, {leaf: send(ctx, ops)}),
        **fields,
    )


def noised(ctx: Context, ops: ClientOps) -> Any:
    return ctx.stats.size + 100 * rng.normal(ctx.key, (), torch.float64)


NOISE = Mechanism(EXAMPLE, "total", AT_CLIENT, 100.0, EACH_ROUND)


def messages(method: str, own_data: bool = False) -> dict[str, WireMessage]:
    """A message of each kind with an experiment, as an honest coordinator would send them."""
    # one example changes the inputs of all where a site normalizes with its own statistics
    plain = {"data.normalize": False}
    config = make_config(method=method, **plain) if own_data else small_config(method)
    experiment, _ = build_coordinator(config)
    common = {
        "run": "a-test-run",
        "experiment": site_config(experiment.config),
        "examples": describe_examples(experiment),
    }
    work = {
        "round": 1,
        "time_step": 0,
        "clients": [0, 1],
        "state_rounds": [-1, -1],
        "per_client_start": False,
        "optimizer_hparams": experiment.optimizer_hparams(1),
        "key": Key(config.seed).fold_in("round", 1).value,
        "num_phases": 1,
        "validate": False,
    }
    pairs = {"split": "valid", "time_step": 0, "which": [0], "owners": [0]}
    start = as_arrays({"start": experiment.task.model.initial._asdict()})
    return {
        "ping": WireMessage(common | {"kind": "ping"}, {}),
        "train": WireMessage(common | work | {"kind": "train"}, start),
        "personal": WireMessage(common | work | {"kind": "personal"}, start),
        "score": WireMessage(common | pairs | {"kind": "score"}, {}),
    }


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Part], None]:
    """Install a part at coordinator and site."""
    return lambda part: monkeypatch.setitem(PARTS, part.name, lambda: part)


def test_counts_under_another_name_are_declined(
    tmp_path: Path, register: Callable[[Part], None]
) -> None:
    """Shares of the classes, sent as "bias"; no declaration names them."""
    part = Part(
        "innocent",
        reads_label_counts=True,
        payload=lambda start, info: {"bias": torch.zeros(info.num_classes, dtype=info.dtype)},
        on_client_end=lambda ctx, trained, ops: (
            {},
            {"bias": ctx.stats.label_counts / ctx.stats.size},
        ),
    )
    register(part)
    site = make_site(tmp_path, "strict", (0, 1), STRICT)
    for message in messages("fedavg+innocent").values():
        response = site.answer(message)
        assert response.header["code"] == "policy"
        assert "innocent sends bias, which it does not declare" in response.header["reason"]
        assert not response.arrays


def more_leaves(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    return {}, {"total": ctx.stats.size, "labels": ctx.stats.label_counts}


def larger_leaf(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    return {}, {"total": ctx.stats.label_counts / ctx.stats.size}


def other_dtype(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    """A complex number has room for two."""
    return {}, {"total": torch.complex(ctx.stats.size, ctx.stats.label_counts[0])}


def nested_leaf(ctx: Context, trained: ModelState, ops: ClientOps) -> tuple[Tree, Tree]:
    return {}, {"total": {"labels": ctx.stats.label_counts}}


@pytest.mark.parametrize("end", [more_leaves, larger_leaf, other_dtype, nested_leaf])
@pytest.mark.parametrize("clients", [(0,), (0, 1)])  # one client, and a vectorized engine
def test_a_payload_of_another_form_than_declared_does_not_leave_the_site(
    end: Any, clients: tuple[int, ...], tmp_path: Path, register: Callable[[Part], None]
) -> None:
    """One number is declared, with what a site allows; the coordinator's gate would reject more,
    too late.
    """
    part = replace(
        sending("liar", lambda ctx, ops: None, discloses={"total": SIZE}, reads_label_counts=True),
        on_client_end=end,
    )
    register(part)
    train = messages("fedavg+liar")["train"]
    header = train.header | {"clients": list(clients), "state_rounds": [-1] * len(clients)}
    response = make_site(tmp_path, "strict", clients, STRICT).answer(train._replace(header=header))
    assert (response.header["kind"], response.header["code"]) == ("declined", "failed")
    assert not response.arrays


def coordinators_guess(site: Site, train: WireMessage) -> dict[str, np.ndarray]:
    """What the site's reply would be if all its random numbers followed from the message."""
    real = site_work.draw_key
    site_work.draw_key = lambda: Key(int(train.header["key"]))  # type: ignore[assignment]
    try:
        return site.answer(train).arrays
    finally:
        site_work.draw_key = real  # type: ignore[assignment]


def shaken(grads: Params, params: Params, ctx: Context) -> Params:
    return {
        name: g + rng.normal(rng.fold_in(ctx.key, name), tuple(g.shape), g.dtype)
        for name, g in grads.items()
    }


NOISY_PARTS = {
    "declared": sending("noisy", noised, discloses={"total": EXAMPLES}, mechanisms=(NOISE,)),
    "undeclared leaf": sending("noisy", noised),
    "gradients, undeclared": Part("noisy", transforms=(Transform("noise", shaken),)),
    "gradients": Part(
        "noisy",
        transforms=(Transform("clip", shaken),),
        mechanisms=(Mechanism(EXAMPLE, MODEL, AT_CLIENT, 1.0, EACH_ROUND),),
    ),
}


@pytest.mark.parametrize("kind", NOISY_PARTS)
@pytest.mark.parametrize("own_data", [False, True])
def test_noise_cannot_be_computed_from_the_message(
    kind: str, own_data: bool, tmp_path: Path, register: Callable[[Part], None]
) -> None:
    """Two sites with the same data and message send different noise, and neither is the noise that
    follows from the seed, so nobody can subtract it exactly.
    """
    register(NOISY_PARTS[kind])
    train = messages("fedavg+noisy", own_data)["train"]

    def fresh(name: str) -> Site:
        if not own_data:
            return make_site(tmp_path, name, (0, 1), PERMISSIVE)
        for number in (0, 1):
            write_table(tmp_path / name / f"{number}.npz", 12)
        files = {str(number): f"npz(path='{number}.npz')" for number in (0, 1)}
        return make_site(tmp_path, name, (), PERMISSIVE, data=files)

    replies = [fresh(name).answer(train).arrays for name in ("one", "two")]
    replies.append(coordinators_guess(fresh("guess"), train))
    replies.append(coordinators_guess(fresh("again"), train))
    noisy = next(name for name in replies[0] if name.startswith("payload/") or "gradients" in kind)
    values = [reply[noisy] for reply in replies]
    assert (values[2] == values[3]).all()  # a guess is a function of the message
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (values[a] != values[b]).any()


def test_noise_on_label_counts_cannot_be_computed_from_the_message(tmp_path: Path) -> None:
    """It is drawn once a run; two runs, and two sites, draw it anew."""
    sites = [make_site(tmp_path, name, (0, 1)) for name in ("one", "two")]
    train = messages("fedavg+wsm+dp_counts(noise=50)")["train"]
    weights = [site.answer(train).arrays["params/head.weight"] for site in sites]
    assert (weights[0] != weights[1]).any()  # wsm reads the noised counts


def test_a_name_like_that_of_a_protected_leaf_protects_nothing() -> None:
    """A mechanism covers leaves of its own part alone, by whole names."""
    careful = sending("careful", noised, discloses={"total": EXAMPLES}, mechanisms=(NOISE,))
    permissive = Policy(label_counts=True)
    check_method(permissive, small_experiment(careful).task)
    for part in (
        sending("greedy", noised, discloses={"total": EXAMPLES}),  # the name of another's leaf
        sending("greedy", noised, "totals", discloses={"total": EXAMPLES, "totals": EXAMPLES}),
        sending("greedy", noised, "totals", discloses={"total": SIZE}),
        sending("greedy", noised, "labels", discloses={"total": EXAMPLES}, mechanisms=(NOISE,)),
    ):
        for policy in (permissive, Policy(methods=("careful", "greedy"))):
            with pytest.raises(Declined, match=r"(greedy|careful) sends|in what greedy sends"):
                check_method(policy, small_experiment(careful + part).task)


@pytest.mark.parametrize("noise", [0.0, 1e-300, 1e-9, 0.5, 10.0])
def test_noise_that_an_experiment_chooses_protects_nothing(noise: float) -> None:
    """The coordinator writes the number: fedwavg(noise=1e-300) sends the exact count. And every
    request gets new noise.
    """
    mechanism = NOISE._replace(noise=noise)
    part = sending("noisy", noised, discloses={"total": EXAMPLES}, mechanisms=(mechanism,))
    with pytest.raises(Declined, match="noisy sends total"):
        check_method(Policy(), small_experiment(part).task)
    with pytest.raises(Declined, match="fedwavg sends forgettable"):
        check_method(Policy(), small_experiment(f"fedwavg(noise={noise})").task)
    check_method(Policy(label_counts=True), small_experiment(f"fedwavg(noise={noise})").task)


@pytest.mark.parametrize(
    "mechanism",
    [
        NOISE._replace(drawn_at=AT_SERVER),  # too late: it has left the site
        NOISE._replace(covers=LABEL_COUNTS),
    ],
)
def test_noise_elsewhere_does_not_protect_a_leaf(mechanism: Mechanism) -> None:
    part = sending("noisy", noised, discloses={"total": EXAMPLES}, mechanisms=(mechanism,))
    if mechanism.covers == LABEL_COUNTS:
        part = replace(part, privatize_stats=lambda counts, key: counts)
    with pytest.raises(Declined, match="noisy sends total"):
        check_method(Policy(), small_experiment(part).task)
