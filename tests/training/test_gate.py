from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remanence.core import pytree
from remanence.core.engine import Rejection
from remanence.core.types import ModelState, Reply
from remanence.training import gate
from remanence.training.gate import validate_replies
from remanence.training.reply_schema import ReplySchema
from remanence.training.task import PERSONAL

COHORT, ROUND, CAP = (2, 5, 7, 11), 4, 1000.0
NAN, INF = float("nan"), float("inf")


def expected() -> ReplySchema:
    params = {"w": torch.zeros(2), "b": torch.zeros(())}
    buffers, payload = {"n": torch.zeros((), dtype=torch.int64)}, {"part": {"e": torch.zeros(())}}
    return ReplySchema(
        round=ROUND, clients=COHORT, params=params, buffers=buffers, payload=payload, weight_cap=CAP
    )


def chunk(*clients: int, **changes: Any) -> Reply:
    """Valid replies: client c sends w = (c, c), b = c, n = c, e = c and weight c, and keeps
    (c, c).
    """
    c = torch.tensor(clients)
    value = c.float()
    good = Reply(
        client=c,
        round=torch.full_like(c, ROUND),
        params={"w": torch.stack([value, value], dim=1), "b": value.clone()},
        buffers={"n": c.clone()},
        payload={"part": {"e": value.clone()}},
        weight=c.double(),
        client_state={"part": {"kept": torch.stack([value, value], dim=1)}},
        loss=value.clone(),
    )
    return good._replace(**changes)


def codes(rejections: list[Rejection]) -> list[tuple[int, str]]:
    return [(rejection.client, rejection.code) for rejection in rejections]


def with_value(reply: Reply, field: str, path: str, position: int, value: float) -> Reply:
    tree = pytree.clone(getattr(reply, field))
    pytree.flatten(tree)[path][position] = value
    return reply._replace(**{field: tree})


def same(a: Reply, b: Reply) -> bool:
    flat_a, flat_b = pytree.flatten({"reply": a._asdict()}), pytree.flatten({"reply": b._asdict()})
    return flat_a.keys() == flat_b.keys() and all(
        torch.equal(flat_a[name], flat_b[name]) for name in flat_a
    )


def test_a_norm_limit_by_hand() -> None:
    """Client c starts at w = (1, 1), b = 0 and sends (c, c) and c: it moves by
    sqrt(2 (c - 1)^2 + c^2), which is sqrt(6) for 2 and sqrt(57) for 5.
    """
    start = ModelState({"w": torch.ones(2), "b": torch.zeros(())}, {})
    limited = expected()._replace(max_norm=2.45, start=start)  # sqrt(6) = 2.449...
    replies, rejections = validate_replies([chunk(2, 5)], limited)
    assert codes(rejections) == [(5, "norm")]
    assert (
        rejections[0].reason == "its model moved by 7.55, beyond the limit of 2.45 (round.max_norm)"
    )
    assert replies is not None
    assert replies.client.tolist() == [2]
    assert codes(validate_replies([chunk(2)], limited._replace(max_norm=2.44))[1]) == [(2, "norm")]


def test_a_norm_is_measured_from_each_clients_start() -> None:
    """Client c of the cohort (2, 5, 7, 11) starts at its own values, so no model moves; a reply
    of client 5 with the values of 7 moves by sqrt(3) * 2.
    """
    c = torch.tensor(COHORT).float()
    start = ModelState({"w": torch.stack([c, c], dim=1), "b": c}, {})
    limited = expected()._replace(max_norm=1e-6, start=start, stacked=True)
    assert validate_replies([chunk(11), chunk(5, 7)], limited)[1] == []
    moved = chunk(7)._replace(client=torch.tensor([5]))
    assert codes(validate_replies([moved], limited)[1]) == [(5, "norm")]
    # a client outside the cohort has no start
    assert codes(validate_replies([chunk(3)], limited)[1]) == [(3, "unknown-client")]


def test_an_oversized_reply_is_rejected_unread() -> None:
    spy = {"spy": torch.zeros(2, 100_000)}
    _, rejections = validate_replies(
        [chunk(2, 5)._replace(params=GOOD.params | spy), chunk(7)], expected()
    )
    assert codes(rejections) == [(2, "oversized"), (5, "oversized")]
    assert (
        rejections[0].reason == "it sent 400024 bytes where 24 are expected"
    )  # w 8, b 4, n 8, e 4


@pytest.mark.parametrize(
    "client",
    [
        None,
        torch.tensor([[2]]),
        torch.tensor([math.nan]),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(1, device="meta"),
    ],
)
def test_a_reply_without_a_valid_client_number(client: Any) -> None:
    replies, rejections = validate_replies([GOOD._replace(client=client), chunk(7)], expected())
    assert len(rejections) == 1
    assert rejections[0].client in (2, gate.UNKNOWN_CLIENT)
    assert replies is not None
    assert replies.client.tolist() == [7]


def test_an_empty_chunk_is_ignored() -> None:
    replies, rejections = validate_replies(
        [chunk(7), chunk(5).select(slice(0, 0)), chunk(2)], expected()
    )
    assert rejections == []
    assert replies is not None
    assert replies.client.tolist() == [2, 7]


def test_a_client_state_cannot_change_its_schema() -> None:
    known = expected()._replace(client_state={"part": {"kept": torch.zeros(2)}})
    assert validate_replies([chunk(2)], known)[1] == []
    for client_state, code in (
        ({}, "names"),
        ({"part": {"kept": torch.zeros(1, 3)}}, "shape"),
        ({"part": {"kept": torch.zeros(1, 2).double()}}, "dtype"),
    ):
        assert codes(
            validate_replies([chunk(2)._replace(client_state=client_state)], known)[1]
        ) == [(2, code)]


def test_probes_by_hand() -> None:
    """Client 0 tries 1 and 2, client 1 tries 0 alone, client 2 has no examples and so computes
    no loss. The model of 1 has a loss of NaN at 0, the model of 0 one below 0 at 1.
    """
    candidates = torch.tensor([[1, 2], [0, -1], [0, 1]])
    losses = torch.tensor([[NAN, 0.5], [-0.1, NAN], [NAN, NAN]])
    valid, bad, rejections = gate.validate_probe_losses(candidates, losses, torch.tensor([5, 5, 0]))
    assert bad.tolist() == [[True, False], [True, False], [False, False]]
    assert [(rejection.client, rejection.code) for rejection in rejections] == [
        (0, "probe"),
        (1, "probe"),
    ]
    assert valid[0].tolist() == [INF, 0.5]
    assert valid[1, 0] == INF
    assert bool(torch.isnan(valid[1, 1]))
    plain = torch.tensor([[0.1, 0.2]] * 3)
    assert gate.validate_probe_losses(candidates, plain, torch.tensor([5, 5, 5]))[0] is plain


def test_valid_replies_pass_unchanged_in_cohort_order() -> None:
    replies, rejections = validate_replies([chunk(11), chunk(5, 2), chunk(7)], expected())
    assert rejections == []
    assert replies is not None
    assert same(replies, chunk(2, 5, 7, 11))


def test_no_replies_at_all() -> None:
    assert validate_replies([], expected()) == (None, [])


GOOD = chunk(2, 5)


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        (
            {"params": {"w": torch.zeros(2, 2)}},
            "names",
            "parameters: b is missing",
        ),
        (
            {"params": GOOD.params | {"z": torch.zeros(2)}},
            "names",
            "parameters: z is unknown",
        ),
        ({"buffers": {}}, "names", "buffers: n is missing"),
        ({"payload": {}}, "names", "payload: part/e is missing"),
        (
            {"payload": GOOD.payload | {"spy": {"x": torch.zeros(2)}}},
            "names",
            "payload: spy/x is unknown",
        ),
        (
            {"params": GOOD.params | {"w": torch.zeros(2, 1)}},
            "shape",
            r"parameters: w has shape \(1,\), not \(2,\)",
        ),
        (
            {"params": GOOD.params | {"w": torch.zeros(2)}},
            "shape",
            r"parameters: w has shape \(\), not \(2,\)",
        ),
        ({"params": GOOD.params | {"b": torch.zeros(())}}, "shape", "parameters: b"),
        ({"params": GOOD.params | {"w": torch.zeros(1, 2)}}, "shape", "parameters: w"),
        (
            {"params": GOOD.params | {"w": torch.zeros(2, 2).double()}},
            "dtype",
            "parameters: w is torch.float64, not torch.float32",
        ),
        (
            {"buffers": {"n": torch.zeros(2)}},
            "dtype",
            "buffers: n is torch.float32, not torch.int64",
        ),
        ({"payload": {"part": {"e": torch.zeros(3)}}}, "shape", "payload: part/e"),
        ({"payload": {"part": {"e": torch.zeros(())}}}, "shape", "payload: part/e"),
        ({"payload": {"part": {"e": torch.zeros(2, 0)}}}, "shape", "payload: part/e"),
        (
            {"payload": {"part": {"e": torch.zeros(2).half()}}},
            "dtype",
            "payload: part/e is torch.float16, not torch.float32",
        ),
        ({"round": torch.full((1,), ROUND)}, "shape", "client, round, weight and loss"),
        ({"weight": torch.ones(3, dtype=torch.float64)}, "shape", "client, round, weight and loss"),
        (
            {"weight": torch.ones(2, 1, dtype=torch.float64)},
            "shape",
            "client, round, weight and loss",
        ),
        ({"loss": torch.zeros(())}, "shape", "client, round, weight and loss"),
        ({"loss": torch.zeros(2, dtype=torch.complex64)}, "dtype", "weight and loss floating-"),
        ({"client": torch.tensor([[2], [5]])}, "shape", "client, round, weight and loss"),
    ],
)
def test_a_wrong_schema_rejects_the_whole_chunk(
    changes: dict[str, Any], code: str, reason: str
) -> None:
    replies, rejections = validate_replies(
        [chunk(7), GOOD._replace(**changes), chunk(11)], expected()
    )
    assert replies is not None
    assert same(replies, chunk(7, 11))
    assert codes(rejections) == [(2, code), (5, code)]
    assert re.search(reason, rejections[0].reason)


def test_strange_names_in_a_payload_are_rejected() -> None:
    """A name may contain the separator of flattened trees."""
    replies, rejections = validate_replies(
        [chunk(2), chunk(5, payload={"part/e": torch.zeros(1)})], expected()
    )
    assert replies is not None
    assert same(replies, chunk(2))
    assert codes(rejections) == [(5, "names")]


def test_a_client_number_that_is_nan_is_rejected() -> None:
    replies, rejections = validate_replies(
        [chunk(2), chunk(5, client=torch.tensor([NAN]))], expected()
    )
    assert replies is not None
    assert same(replies, chunk(2))
    assert len(rejections) == 1


@pytest.mark.parametrize(
    ("field", "path"), [("params", "w"), ("params", "b"), ("payload", "part/e")]
)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_rejects_its_client_alone(
    field: str, path: str, value: float
) -> None:
    replies, rejections = validate_replies(
        [with_value(chunk(2, 5, 7), field, path, 1, value)], expected()
    )
    assert replies is not None
    assert same(replies, chunk(2, 7))
    assert codes(rejections) == [(5, "not-finite")]


def with_state(reply: Reply, kept: Tensor, personal: Tensor) -> Reply:
    return reply._replace(client_state={"part": {"kept": kept}, PERSONAL: {"head": personal}})


@pytest.mark.parametrize(
    ("kept", "personal", "accepted"),
    [
        (3.0, 1.0, True),
        (INF, 1.0, True),  # such as the best loss before the first one
        (-INF, 1.0, True),
        (NAN, 1.0, False),
        (3.0, NAN, False),
        (3.0, INF, False),  # a client would train from this parameter in the next round
    ],
)
def test_a_state_with_nan_or_a_personal_model_that_is_not_finite_rejects_its_client(
    kept: float, personal: float, accepted: bool
) -> None:
    states = {"part": {"kept": torch.zeros(2)}, PERSONAL: {"head": torch.zeros(1)}}
    known = expected()._replace(client_state=states)
    reply = with_state(
        chunk(2, 5), torch.tensor([[1.0, 1.0], [1.0, kept]]), torch.tensor([[1.0], [personal]])
    )
    replies, rejections = validate_replies([reply], known)
    assert replies is not None
    assert replies.client.tolist() == ([2, 5] if accepted else [2])
    assert codes(rejections) == ([] if accepted else [(5, "not-finite")])
    # a site keeps its states: the coordinator has nothing to check
    assert validate_replies([reply], expected())[1] == []


def test_counts_in_a_client_state_are_no_floats() -> None:
    states = {"part": {"rounds": torch.zeros((), dtype=torch.int64), "new": torch.tensor(True)}}
    kept = {"part": {"rounds": torch.tensor([1, 2]), "new": torch.tensor([True, False])}}
    reply = chunk(2, 5)._replace(client_state=kept)
    assert validate_replies([reply], expected()._replace(client_state=states))[1] == []


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (0.0, "its weight is 0.0, not a positive number"),
        (-3.0, "its weight is -3.0"),
        (NAN, "its weight is nan"),
        (INF, "its weight is inf"),
        (CAP + 1, r"its weight of 1001 is above the cap of 1000 \(round.weight_cap\)"),
    ],
)
def test_impossible_weights_are_rejected(weight: float, reason: str) -> None:
    replies, rejections = validate_replies(
        [chunk(2, 5, weight=torch.tensor([weight, 5.0], dtype=torch.float64))], expected()
    )
    assert replies is not None
    assert replies.client.tolist() == [5]
    assert codes(rejections) == [(2, "weight")]
    assert re.search(reason, rejections[0].reason)


def test_a_weight_at_the_cap_passes() -> None:
    replies, rejections = validate_replies(
        [chunk(2, weight=torch.tensor([CAP], dtype=torch.float64))], expected()
    )
    assert replies is not None
    assert rejections == []


def test_unknown_clients_and_wrong_rounds_are_rejected() -> None:
    replies, rejections = validate_replies(
        [chunk(2, 3), chunk(5, round=torch.tensor([ROUND - 1])), chunk(-1)], expected()
    )
    assert replies is not None
    assert replies.client.tolist() == [2]
    assert rejections == [
        (-1, "unknown-client", "it is not in this round's cohort"),
        (3, "unknown-client", "it is not in this round's cohort"),
        (5, "wrong-round", "it replied for round 3, not 4"),
    ]


def test_the_first_valid_reply_of_a_client_counts() -> None:
    first_bad = with_value(chunk(5), "params", "b", 0, NAN)
    second = chunk(5, loss=torch.tensor([0.5]))
    third = chunk(5, 2, loss=torch.tensor([0.25, 2.0]))
    replies, rejections = validate_replies([first_bad, second, third], expected())
    assert replies is not None
    assert (replies.client.tolist(), replies.loss.tolist()) == ([2, 5], [2.0, 0.5])
    assert codes(rejections) == [(5, "duplicate"), (5, "not-finite")]


def test_the_first_chunk_does_not_decide_the_schema_of_payloads() -> None:
    replies, rejections = validate_replies(
        [chunk(5, payload={"other": {"e": torch.zeros(1)}}), chunk(2), chunk(7)], expected()
    )
    assert replies is not None
    assert same(replies, chunk(2, 7))
    assert codes(rejections) == [(5, "names")]


class Fault(NamedTuple):
    """A fault of one reply, and the code that the gate must report."""

    name: str
    code: str | None


FAULTS = [
    Fault("none", None),
    Fault("outside the cohort", "unknown-client"),
    Fault("late", "wrong-round"),
    Fault("nan", "not-finite"),
    Fault("infinite payload", "not-finite"),
    Fault("weight 0", "weight"),
    Fault("weight above the cap", "weight"),
]
SCHEMA_FAULTS = ["names", "shape", "dtype"]
some_chunks = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.sampled_from(COHORT), st.sampled_from(FAULTS), st.floats(0, 9, width=32)),
            min_size=1,
            max_size=3,
        ),
        st.sampled_from([None, None, None, *SCHEMA_FAULTS]),
    ),
    max_size=6,
)


def spoil(members: list[tuple[int, Fault, float]], schema_fault: str | None) -> Reply:
    reply = chunk(
        *(
            client if fault.name != "outside the cohort" else client + 100
            for client, fault, _ in members
        )
    )
    reply = reply._replace(loss=torch.tensor([mark for _, _, mark in members]))
    for position, (_, fault, _) in enumerate(members):
        if fault.name == "late":
            reply.round[position] = ROUND + 1
        elif fault.name == "nan":
            reply.params["w"][position, 1] = NAN
        elif fault.name == "infinite payload":
            reply.payload["part"]["e"][position] = -INF
        elif fault.name == "weight 0":
            reply.weight[position] = 0
        elif fault.name == "weight above the cap":
            reply.weight[position] = CAP * 2
    params = dict(reply.params)
    if schema_fault == "names":
        params.pop("b")
    elif schema_fault == "shape":
        params["w"] = params["w"][:, :1]
    elif schema_fault == "dtype":
        params["b"] = params["b"].double()
    return reply._replace(params=params)


@given(some_chunks)
def test_any_mix_of_valid_and_invalid_replies(
    mix: list[tuple[list[tuple[int, Fault, float]], str | None]],
) -> None:
    """An independent count: the first valid reply of a client in a chunk with the right schema
    passes, and everything else is rejected once.
    """
    good: dict[int, float] = {}
    bad: list[tuple[int, str]] = []
    for members, schema_fault in mix:
        for client, fault, mark in members:
            sent_as = client + 100 if fault.name == "outside the cohort" else client
            if schema_fault is not None or fault.code is not None:
                bad.append((sent_as, schema_fault or str(fault.code)))
            elif client in good:
                bad.append((client, "duplicate"))
            else:
                good[client] = mark
    replies, rejections = validate_replies(
        [spoil(members, schema_fault) for members, schema_fault in mix], expected()
    )
    assert sorted(codes(rejections)) == sorted(bad)
    assert rejections == sorted(rejections)
    if not good:
        assert replies is None
        return
    assert replies is not None
    order = sorted(good)
    assert same(replies, chunk(*order, loss=torch.tensor([good[client] for client in order])))
    assert all(bool(torch.isfinite(leaf).all()) for leaf in leaves(replies))


def leaves(reply: Reply) -> list[Tensor]:
    return [leaf for leaf in pytree.leaves(reply._asdict()) if leaf.is_floating_point()]
