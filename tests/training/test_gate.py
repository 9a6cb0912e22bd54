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
from remanence.core.types import ModelState, Reply
from remanence.training import gate
from remanence.training.gate import ReplySchema, validate_replies

COHORT, ROUND, CAP = (2, 5, 7, 11), 4, 1000.0
NAN, INF = float("nan"), float("inf")


def expected() -> ReplySchema:
    params = {"w": torch.zeros(2), "b": torch.zeros(())}
    buffers, extras = {"n": torch.zeros((), dtype=torch.int64)}, {"part": {"e": torch.zeros(())}}
    return ReplySchema(
        round=ROUND, clients=COHORT, params=params, buffers=buffers, payload=extras, weight_cap=CAP
    )


def chunk(*clients: int, **changes: Any) -> Reply:
    """Good replies: client c sends w = (c, c), b = c, n = c, extra = c, weight c and keeps (c,
    c).
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


def codes(refusals: list[gate.Rejection]) -> list[tuple[int, str]]:
    return [(refusal.client, refusal.code) for refusal in refusals]


def with_value(reply: Reply, field: str, path: str, place: int, value: float) -> Reply:
    tree = pytree.clone(getattr(reply, field))
    pytree.flatten(tree)[path][place] = value
    return reply._replace(**{field: tree})


def same(a: Reply, b: Reply) -> bool:
    flat_a, flat_b = pytree.flatten({"reply": a._asdict()}), pytree.flatten({"reply": b._asdict()})
    return flat_a.keys() == flat_b.keys() and all(
        torch.equal(flat_a[name], flat_b[name]) for name in flat_a
    )


def test_a_norm_limit_by_hand() -> None:
    """Client c began at w = (1, 1), b = 0 and sends (c, c) and c: it moved by sqrt(2 (c - 1)^2
    + c^2), which is sqrt(6) for 2 and sqrt(57) for 5.
    """
    start = ModelState({"w": torch.ones(2), "b": torch.zeros(())}, {})
    limited = expected()._replace(max_norm=2.45, start=start)  # sqrt(6) = 2.449...
    replies, refusals = validate_replies([chunk(2, 5)], limited)
    assert codes(refusals) == [(5, "norm")]
    assert (
        refusals[0].reason == "its model moved by 7.55, beyond the limit of 2.45 (round.max_norm)"
    )
    assert replies is not None
    assert replies.client.tolist() == [2]
    assert codes(validate_replies([chunk(2)], limited._replace(max_norm=2.44))[1]) == [(2, "norm")]


def test_a_norm_is_measured_from_where_each_began() -> None:
    """Client c of the cohort (2, 5, 7, 11) began at its own values, so nobody moved; client 5
    as it would be 7, who moved sqrt(3) * 2.
    """
    c = torch.tensor(COHORT).float()
    start = ModelState({"w": torch.stack([c, c], dim=1), "b": c}, {})
    limited = expected()._replace(max_norm=1e-6, start=start, stacked=True)
    assert validate_replies([chunk(11), chunk(5, 7)], limited)[1] == []
    moved = chunk(7)._replace(client=torch.tensor([5]))
    assert codes(validate_replies([moved], limited)[1]) == [(5, "norm")]
    # a stranger has no place to begin
    assert codes(validate_replies([chunk(3)], limited)[1]) == [(3, "unknown-client")]


def test_what_is_much_too_large_is_not_looked_into() -> None:
    spy = {"spy": torch.zeros(2, 100_000)}
    _, refusals = validate_replies(
        [chunk(2, 5)._replace(params=GOOD.params | spy), chunk(7)], expected()
    )
    assert codes(refusals) == [(2, "oversized"), (5, "oversized")]
    assert refusals[0].reason == "it sent 400024 bytes where 24 are expected"  # w 8, b 4, n 8, e 4


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
def test_a_reply_that_does_not_say_who_it_is_from(client: Any) -> None:
    replies, refusals = validate_replies([GOOD._replace(client=client), chunk(7)], expected())
    assert len(refusals) == 1
    assert refusals[0].client in (2, gate.UNKNOWN_CLIENT)
    assert replies is not None
    assert replies.client.tolist() == [7]


def test_an_empty_chunk_is_nothing() -> None:
    replies, refusals = validate_replies(
        [chunk(7), chunk(5).select(slice(0, 0)), chunk(2)], expected()
    )
    assert refusals == []
    assert replies is not None
    assert replies.client.tolist() == [2, 7]


def test_what_clients_keep_cannot_change_its_form() -> None:
    known = expected()._replace(client_state={"part": {"kept": torch.zeros(2)}})
    assert validate_replies([chunk(2)], known)[1] == []
    for own, code in (
        ({}, "names"),
        ({"part": {"kept": torch.zeros(1, 3)}}, "shape"),
        ({"part": {"kept": torch.zeros(1, 2).double()}}, "dtype"),
    ):
        assert codes(validate_replies([chunk(2)._replace(client_state=own)], known)[1]) == [
            (2, code)
        ]


def test_probes_by_hand() -> None:
    """Client 0 tried 1 and 2, client 1 tried 0 and nobody, client 2 has no rows and so cannot
    judge: NaN from 1 for 0, less than 0 from 0 for 1.
    """
    probed = torch.tensor([[1, 2], [0, -1], [0, 1]])
    losses = torch.tensor([[NAN, 0.5], [-0.1, NAN], [NAN, NAN]])
    heard, bad, refusals = gate.validate_probe_losses(probed, losses, torch.tensor([5, 5, 0]))
    assert bad.tolist() == [[True, False], [True, False], [False, False]]
    assert [(refusal.client, refusal.code) for refusal in refusals] == [(0, "probe"), (1, "probe")]
    assert heard[0].tolist() == [INF, 0.5]
    assert heard[1, 0] == INF
    assert bool(torch.isnan(heard[1, 1]))
    plain = torch.tensor([[0.1, 0.2]] * 3)
    assert gate.validate_probe_losses(probed, plain, torch.tensor([5, 5, 5]))[0] is plain


def test_good_replies_pass_unchanged_in_cohort_order() -> None:
    replies, refusals = validate_replies([chunk(11), chunk(5, 2), chunk(7)], expected())
    assert refusals == []
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
            "its parameters are not the expected ones: b is missing",
        ),
        (
            {"params": GOOD.params | {"z": torch.zeros(2)}},
            "names",
            "its parameters are not the expected ones: z is unknown",
        ),
        ({"buffers": {}}, "names", "its buffers are not the expected ones: n is missing"),
        ({"payload": {}}, "names", "its extras are not the expected ones: part/e is missing"),
        (
            {"payload": GOOD.payload | {"spy": {"x": torch.zeros(2)}}},
            "names",
            "its extras are not the expected ones: spy/x is unknown",
        ),
        (
            {"params": GOOD.params | {"w": torch.zeros(2, 1)}},
            "shape",
            r"parameter w has shape \(1,\), not \(2,\)",
        ),
        (
            {"params": GOOD.params | {"w": torch.zeros(2)}},
            "shape",
            r"parameter w has shape \(\), not \(2,\)",
        ),
        ({"params": GOOD.params | {"b": torch.zeros(())}}, "shape", "parameter b"),
        ({"params": GOOD.params | {"w": torch.zeros(1, 2)}}, "shape", "parameter w"),
        (
            {"params": GOOD.params | {"w": torch.zeros(2, 2).double()}},
            "dtype",
            "parameter w is torch.float64, not torch.float32",
        ),
        ({"buffers": {"n": torch.zeros(2)}}, "dtype", "buffer n is torch.float32, not torch.int64"),
        ({"payload": {"part": {"e": torch.zeros(3)}}}, "shape", "extra part/e"),
        ({"payload": {"part": {"e": torch.zeros(())}}}, "shape", "extra part/e"),
        ({"payload": {"part": {"e": torch.zeros(2, 0)}}}, "shape", "extra part/e"),
        (
            {"payload": {"part": {"e": torch.zeros(2).half()}}},
            "dtype",
            "extra part/e is torch.float16, not torch.float32",
        ),
        ({"round": torch.full((1,), ROUND)}, "shape", "client, round, weight and loss"),
        ({"weight": torch.ones(3, dtype=torch.float64)}, "shape", "client, round, weight and loss"),
        (
            {"weight": torch.ones(2, 1, dtype=torch.float64)},
            "shape",
            "client, round, weight and loss",
        ),
        ({"loss": torch.zeros(())}, "shape", "client, round, weight and loss"),
        ({"client": torch.tensor([[2], [5]])}, "shape", "client, round, weight and loss"),
    ],
)
def test_a_wrong_form_refuses_the_whole_chunk(
    changes: dict[str, Any], code: str, reason: str
) -> None:
    replies, refusals = validate_replies(
        [chunk(7), GOOD._replace(**changes), chunk(11)], expected()
    )
    assert replies is not None
    assert same(replies, chunk(7, 11))
    assert codes(refusals) == [(2, code), (5, code)]
    assert re.search(reason, refusals[0].reason)


def test_strange_names_in_extras_are_refused_not_a_crash() -> None:
    """A name may hold the separator of flattened trees."""
    replies, refusals = validate_replies(
        [chunk(2), chunk(5, payload={"part/e": torch.zeros(1)})], expected()
    )
    assert replies is not None
    assert same(replies, chunk(2))
    assert codes(refusals) == [(5, "names")]


def test_a_client_number_that_is_none_is_refused_not_a_crash() -> None:
    replies, refusals = validate_replies(
        [chunk(2), chunk(5, client=torch.tensor([NAN]))], expected()
    )
    assert replies is not None
    assert same(replies, chunk(2))
    assert len(refusals) == 1


@pytest.mark.parametrize(
    ("field", "path"), [("params", "w"), ("params", "b"), ("payload", "part/e")]
)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_refuses_its_client_alone(
    field: str, path: str, value: float
) -> None:
    replies, refusals = validate_replies(
        [with_value(chunk(2, 5, 7), field, path, 1, value)], expected()
    )
    assert replies is not None
    assert same(replies, chunk(2, 7))
    assert codes(refusals) == [(5, "not-finite")]


def test_what_stays_with_the_client_is_its_own_affair() -> None:
    """`own` never travels: a best loss of infinity is a fine first value."""
    reply = with_value(chunk(2, 5), "client_state", "part/kept", 0, INF)
    replies, refusals = validate_replies([reply], expected())
    assert replies is not None
    assert same(replies, reply)
    assert refusals == []


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
def test_impossible_weights_are_refused(weight: float, reason: str) -> None:
    replies, refusals = validate_replies(
        [chunk(2, 5, weight=torch.tensor([weight, 5.0], dtype=torch.float64))], expected()
    )
    assert replies is not None
    assert replies.client.tolist() == [5]
    assert codes(refusals) == [(2, "weight")]
    assert re.search(reason, refusals[0].reason)


def test_a_weight_at_the_cap_passes() -> None:
    replies, refusals = validate_replies(
        [chunk(2, weight=torch.tensor([CAP], dtype=torch.float64))], expected()
    )
    assert replies is not None
    assert refusals == []


def test_strangers_and_stale_replies_are_refused() -> None:
    replies, refusals = validate_replies(
        [chunk(2, 3), chunk(5, round=torch.tensor([ROUND - 1])), chunk(-1)], expected()
    )
    assert replies is not None
    assert replies.client.tolist() == [2]
    assert refusals == [
        (-1, "unknown-client", "it was not asked in this round"),
        (3, "unknown-client", "it was not asked in this round"),
        (5, "wrong-round", "it answered for round 3, not 4"),
    ]


def test_the_first_good_reply_of_a_client_counts() -> None:
    first_bad = with_value(chunk(5), "params", "b", 0, NAN)
    second = chunk(5, loss=torch.tensor([0.5]))
    third = chunk(5, 2, loss=torch.tensor([0.25, 2.0]))
    replies, refusals = validate_replies([first_bad, second, third], expected())
    assert replies is not None
    assert (replies.client.tolist(), replies.loss.tolist()) == ([2, 5], [2.0, 0.5])
    assert codes(refusals) == [(5, "duplicate"), (5, "not-finite")]


def test_the_first_chunk_does_not_decide_what_extras_look_like() -> None:
    replies, refusals = validate_replies(
        [chunk(5, payload={"other": {"e": torch.zeros(1)}}), chunk(2), chunk(7)], expected()
    )
    assert replies is not None
    assert same(replies, chunk(2, 7))
    assert codes(refusals) == [(5, "names")]


class Fault(NamedTuple):
    """What is wrong with one client's reply, and the code it must get."""

    name: str
    code: str | None


FAULTS = [
    Fault("none", None),
    Fault("stranger", "unknown-client"),
    Fault("late", "wrong-round"),
    Fault("nan", "not-finite"),
    Fault("infinite extra", "not-finite"),
    Fault("weightless", "weight"),
    Fault("greedy", "weight"),
]
FORMS = ["names", "shape", "dtype"]
some_chunks = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.sampled_from(COHORT), st.sampled_from(FAULTS), st.floats(0, 9, width=32)),
            min_size=1,
            max_size=3,
        ),
        st.sampled_from([None, None, None, *FORMS]),
    ),
    max_size=6,
)


def spoil(members: list[tuple[int, Fault, float]], form: str | None) -> Reply:
    reply = chunk(
        *(client if fault.name != "stranger" else client + 100 for client, fault, _ in members)
    )
    reply = reply._replace(loss=torch.tensor([mark for _, _, mark in members]))
    for place, (_, fault, _) in enumerate(members):
        if fault.name == "late":
            reply.round[place] = ROUND + 1
        elif fault.name == "nan":
            reply.params["w"][place, 1] = NAN
        elif fault.name == "infinite extra":
            reply.payload["part"]["e"][place] = -INF
        elif fault.name == "weightless":
            reply.weight[place] = 0
        elif fault.name == "greedy":
            reply.weight[place] = CAP * 2
    params = dict(reply.params)
    if form == "names":
        params.pop("b")
    elif form == "shape":
        params["w"] = params["w"][:, :1]
    elif form == "dtype":
        params["b"] = params["b"].double()
    return reply._replace(params=params)


@given(some_chunks)
def test_any_mix_of_good_and_bad_replies(
    mix: list[tuple[list[tuple[int, Fault, float]], str | None]],
) -> None:
    """A plain account beside it: the first faultless reply of a client in a well-formed chunk
    passes, everything else is named once.
    """
    good: dict[int, float] = {}
    bad: list[tuple[int, str]] = []
    for members, form in mix:
        for client, fault, mark in members:
            sent_as = client + 100 if fault.name == "stranger" else client
            if form is not None or fault.code is not None:
                bad.append((sent_as, form or str(fault.code)))
            elif client in good:
                bad.append((client, "duplicate"))
            else:
                good[client] = mark
    replies, refusals = validate_replies(
        [spoil(members, form) for members, form in mix], expected()
    )
    assert sorted(codes(refusals)) == sorted(bad)
    assert refusals == sorted(refusals)
    if not good:
        assert replies is None
        return
    assert replies is not None
    order = sorted(good)
    assert same(replies, chunk(*order, loss=torch.tensor([good[client] for client in order])))
    assert all(bool(torch.isfinite(leaf).all()) for leaf in leaves(replies))


def leaves(reply: Reply) -> list[Tensor]:
    return [leaf for leaf in pytree.leaves(reply._asdict()) if leaf.is_floating_point()]
