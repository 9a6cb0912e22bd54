from __future__ import annotations

from typing import Any

import pytest
import torch

from remanence.core.compose import ComposedMethod, describe, parse_method, part
from remanence.core.compose_checks import (
    EXCLUSIVE_SLOTS,
    FUNCTION_SLOTS,
    SLOT_TYPES,
    SLOTS_WITH_SEVERAL,
    check,
)
from remanence.core.contexts import Context, ServerContext
from remanence.core.declarations import AT_CLIENT, EACH_ROUND, EXAMPLE, Disclosure, Mechanism
from remanence.core.errors import InputError
from remanence.core.expressions import options_of
from remanence.core.slots import (
    Aggregate,
    Method,
    ModelAssignment,
    Optimizer,
    Part,
    PeerSelection,
    Phase,
    Transform,
)
from remanence.methods import PARTS
from remanence.training.state import REMOTE
from remanence.training.task import PERSONAL


def client_context(**fields: Any) -> Context:
    nothing: dict[str, Any] = dict.fromkeys(Context._fields)
    return Context(
        **nothing | {"broadcast": {}, "client_state": {}, "tracker_state": {}, "hyper": {}} | fields
    )


def server_context(**fields: Any) -> ServerContext:
    nothing: dict[str, Any] = dict.fromkeys(ServerContext._fields)
    return ServerContext(**nothing | {"state": {}, "hyper": {}} | fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"loss_terms": len}, r"loss_terms must be a tuple of functions, .* \(function,\)"),
        ({"regularizers": (3,)}, "regularizers must hold functions, not int"),
        ({"transforms": Transform("clip", len)}, "transforms must be a tuple of Transforms"),
        ({"transforms": (len,)}, "transforms must hold Transforms, not builtin_function"),
        ({"aggregate": len}, "aggregate must be of the type Aggregate, not builtin_function"),
        ({"on_client_end": 3}, "on_client_end must be a function, not int"),
    ],
)
def test_a_slot_takes_its_own_kind_of_value(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"mine: {sentence}"):
        check(Method((Part("mine", **fields),)))


def test_every_slot_that_holds_a_function_is_checked() -> None:
    """A slot added to `Part` is added to the check of slots."""
    empty = {name for name, f in Part.__dataclass_fields__.items() if f.default in (None, ())}
    checked = {*SLOT_TYPES, *SLOTS_WITH_SEVERAL, *FUNCTION_SLOTS}
    assert checked == empty - {"static", "mechanisms", "addresses"}


def say(word: str) -> Any:
    """A function that can be recognized by what it returns."""
    return lambda *args: word


FILLINGS: dict[str, Any] = {
    "loss": say("loss"),
    "gradient": say("gradient"),
    "optimizer": Optimizer("mine", {"lr": 0.1}, say("init"), say("step")),
    "project": say("project"),
    "client_weights": say("client_weights"),
    "aggregate": Aggregate(say("partial"), say("finish")),
    "server_update": say("server_update"),
    "server_train": say("server_train"),
    "phases": lambda phase: (phase,),
    "peers": PeerSelection(say("init"), say("probe"), say("decide")),
    "model_assignment": ModelAssignment(say("init"), say("decide")),
    "privatize_stats": say("privatize_stats"),
    "personalize": Phase(epochs=1),
}


def test_every_slot_for_one_is_tried_here() -> None:
    assert set(FILLINGS) == set(EXCLUSIVE_SLOTS)


@pytest.mark.parametrize("slot", EXCLUSIVE_SLOTS)
def test_two_parts_that_fill_the_same_slot_are_refused_with_both_names(slot: str) -> None:
    first, second = Part("zebra", **{slot: FILLINGS[slot]}), Part("ant", **{slot: FILLINGS[slot]})
    with pytest.raises(
        InputError,
        match=f"zebra and ant cannot be combined: both replace the {EXCLUSIVE_SLOTS[slot]}; keep"
        " one of them",
    ):
        ComposedMethod(first + second)
    check(first + Part("ant"))


def test_a_part_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match=r"method 'wsm\+fedavg\+wsm' has wsm twice: write it once"):
        check(Part("wsm") + Part("fedavg") + Part("wsm"))


def test_a_transform_with_an_unknown_stage_is_refused() -> None:
    odd = Part("odd", transforms=(Transform("later", say("x")),))
    with pytest.raises(
        InputError, match="odd: a transform's stage is one of correct, clip, noise, not 'later'"
    ):
        check(Method((odd,)))


@pytest.mark.parametrize(
    ("field", "word"),
    [("unit", "Client"), ("covers", "total"), ("drawn_at", "site"), ("spent", "step")],
)
def test_a_mechanism_with_an_unknown_word_is_refused(field: str, word: str) -> None:
    """A word that nothing reads would hide the noise from the accountant or from sites."""
    noise = Mechanism(EXAMPLE, "count", AT_CLIENT, 1.0, EACH_ROUND)
    shown = {"count": Disclosure("examples")}
    check(Method((Part("mine", discloses=shown, mechanisms=(noise,)),)))
    mistyped = Part("mine", discloses=shown, mechanisms=(noise._replace(**{field: word}),))
    with pytest.raises(InputError, match=f"mine: {field} of a Mechanism is one of .*'{word}'"):
        check(Method((mistyped,)))


@pytest.mark.parametrize(
    ("field", "number"),
    [("noise", -1.0), ("noise", float("nan")), ("every", 0), ("delta", 1.0), ("budget", -2.0)],
)
def test_a_mechanism_with_an_impossible_number_is_refused(field: str, number: float) -> None:
    """The accountant would report an epsilon for it."""
    noise = Mechanism(EXAMPLE, "count", AT_CLIENT, 1.0, EACH_ROUND)
    shown = {"count": Disclosure("examples")}
    odd = Part("mine", discloses=shown, mechanisms=(noise._replace(**{field: number}),))
    with pytest.raises(InputError, match=f"mine: {field} of a Mechanism is .*, not {number}"):
        check(Method((odd,)))


@pytest.mark.parametrize("name", ["", "a/b", "two words", "7up", PERSONAL, REMOTE])
def test_a_part_needs_a_name_that_state_can_be_stored_under(name: str) -> None:
    with pytest.raises(InputError, match=f"a part cannot be called '{name}'"):
        check(Method((Part(name),)))


def test_methods_are_joined_in_the_order_written() -> None:
    a, b, c = Part("a"), Part("b"), Part("c")
    assert (c + a).parts == (c, a)
    assert ((c + a) + b).parts == (c, a, b)
    assert (b + (c + a)).parts == (b, c, a)
    assert ((a + b) + Method((c,))).parts == (a, b, c)


def test_slots_of_different_parts_merge() -> None:
    merged = ComposedMethod(
        Part("a", loss=say("loss of a"))
        + Part("b", client_weights=say("weights of b"), loss_terms=(say("term of b"),))
    )
    assert merged.hook("loss")() == "loss of a"
    assert merged.hook("client_weights")() == "weights of b"
    assert [term() for term in merged.hooks("loss_terms")] == ["term of b"]
    assert merged.part_filling("client_weights").name == "b"


def test_an_empty_part_leaves_every_slot_to_its_default() -> None:
    empty = ComposedMethod(Method((Part("fedavg"),)))
    assert [empty.hook(slot) for slot in EXCLUSIVE_SLOTS] == [None] * len(EXCLUSIVE_SLOTS)
    assert [
        empty.hooks(slot)
        for slot in (
            "loss_terms",
            "regularizers",
            "on_client_start",
            "on_client_end",
            "update_server_state",
            "broadcast",
        )
    ] == [[]] * 6
    assert empty.transforms() == []
    assert empty.optimizer() is None
    assert empty.hyper == {}
    assert not empty.is_stateful


def test_functions_stand_in_name_order_however_the_method_was_written() -> None:
    """Sums of floats depend on the order of the terms."""
    parts = [
        Part(name, loss_terms=(say(f"{name}1"), say(f"{name}2")), on_client_end=say(name))
        for name in ("wsm", "ant", "moon")
    ]
    for written in (parts, parts[::-1], [parts[1], parts[0], parts[2]]):
        composed = ComposedMethod(Method(tuple(written)))
        assert [term() for term in composed.hooks("loss_terms")] == [
            "ant1",
            "ant2",
            "moon1",
            "moon2",
            "wsm1",
            "wsm2",
        ]
        assert [(hook.name, hook()) for hook in composed.hooks("on_client_end")] == [
            ("ant", "ant"),
            ("moon", "moon"),
            ("wsm", "wsm"),
        ]
        assert composed.method.parts == tuple(written)


def test_transforms_run_by_stage_and_then_by_name() -> None:
    privacy = Part(
        "a_privacy", transforms=(Transform("noise", say("noise")), Transform("clip", say("clip a")))
    )
    scaffold = Part(
        "scaffold",
        transforms=(
            Transform("correct", say("correct s1")),
            Transform("correct", say("correct s2")),
        ),
    )
    clip = Part(
        "clip",
        transforms=(Transform("clip", say("clip c")), Transform("correct", say("correct c"))),
    )
    for method in (privacy + scaffold + clip, clip + scaffold + privacy):
        in_turn = [transform() for transform in ComposedMethod(method).transforms()]
        assert in_turn == ["correct c", "correct s1", "correct s2", "clip a", "clip c", "noise"]


def test_a_client_function_sees_only_its_own_subtrees() -> None:
    seen: list[Context] = []
    watch = Part("mine", loss_terms=(lambda out, batch, ops, ctx: seen.append(ctx),))
    ctx = client_context(
        broadcast={"mine": {"c": 1}, "other": {"c": 2}},
        client_state={"mine": {"d": 3}, "other": {"d": 4}},
        hyper={"mine": {"mu": 5}, "other": {"mu": 6}},
        optimizer_hparams={"lr": 7},
        round=8,
    )
    ComposedMethod(watch + Part("other")).hooks("loss_terms")[0]("out", "batch", "ops", ctx)
    assert (seen[0].broadcast, seen[0].client_state, seen[0].hyper) == (
        {"c": 1},
        {"d": 3},
        {"mu": 5},
    )
    assert (seen[0].optimizer_hparams, seen[0].round) == ({"lr": 7}, 8)
    assert ctx.client_state == {
        "mine": {"d": 3},
        "other": {"d": 4},
    }  # the context itself is not changed


def test_a_server_function_sees_only_its_own_subtrees() -> None:
    seen: list[ServerContext] = []
    watch = Part("mine", server_update=lambda params, delta, srv: seen.append(srv))
    srv = server_context(
        state={"mine": {"m": 1}, "other": {"m": 2}}, hyper={"other": {"beta": 3}}, round=4
    )
    ComposedMethod(Method((watch,))).hook("server_update")({}, {}, srv)
    assert (seen[0].state, seen[0].hyper, seen[0].round) == ({"m": 1}, {}, 4)


def test_a_part_without_subtrees_sees_empty_ones() -> None:
    watch = Part(
        "mine", regularizers=(lambda params, ctx: (ctx.broadcast, ctx.client_state, ctx.hyper),)
    )
    ctx = client_context(
        broadcast={"other": {"c": 1}}, client_state={"other": {}}, hyper={"other": {"mu": 1}}
    )
    assert ComposedMethod(Method((watch,))).hooks("regularizers")[0]({}, ctx) == ({}, {}, {})


def test_the_context_is_found_wherever_it_stands() -> None:
    """`before` has it first, `term` last, `share` alone."""
    watch = Part(
        "mine",
        on_client_start=lambda ctx, ops: (ctx.client_state, ops),
        broadcast=lambda srv: srv.state,
    )
    composed = ComposedMethod(Method((watch,)))
    assert composed.hooks("on_client_start")[0](
        client_context(client_state={"mine": {"a": 1}}), "ops"
    ) == (
        {"a": 1},
        "ops",
    )
    assert composed.hooks("broadcast")[0](server_context(state={"mine": {"b": 2}})) == {"b": 2}


def test_an_optimizer_that_a_part_brings_sees_that_parts_subtree() -> None:
    step = lambda params, grads, slots, ctx: (ctx.hyper, ctx.optimizer_hparams)  # noqa: E731
    composed = ComposedMethod(
        Method((Part("mine", optimizer=Optimizer("sam", {"lr": 0.5}, say("init"), step)),))
    )
    optimizer = composed.optimizer()
    assert optimizer is not None
    assert (optimizer.name, optimizer.hparams, optimizer.init({})) == ("sam", {"lr": 0.5}, "init")
    ctx = client_context(hyper={"mine": {"rho": 1}, "other": {}}, optimizer_hparams={"lr": 2})
    assert optimizer.step({}, {}, {}, ctx) == ({"rho": 1}, {"lr": 2})


def test_a_pair_of_functions_in_one_slot_is_one_thing() -> None:
    combine = Aggregate(say("partial"), say("finish"))
    composed = ComposedMethod(Method((Part("mine", aggregate=combine),)))
    assert composed.part_filling("aggregate").aggregate is combine
    assert len(composed.hooks("aggregate")) == 1


def test_frozen_and_personal_names_of_all_parts_are_joined() -> None:
    a = Part("a", frozen=lambda info: ["x", "y"], personal=lambda info: [info])
    b = Part("b", frozen=lambda info: ("y", "z"))
    composed = ComposedMethod(a + b)
    assert composed.frozen("w") == {"x", "y", "z"}
    assert composed.personal("w") == {"w"}


def test_numbers_by_part_and_who_keeps_state() -> None:
    composed = ComposedMethod(
        Part("b", hyper={"mu": 0.1})
        + Part("a", client_state=say("own"))
        + Part("c", hyper={"tau": 2.0})
    )
    assert composed.hyper == {"b": {"mu": 0.1}, "c": {"tau": 2.0}}
    assert composed.is_stateful


@part
def sample(first: int = 1, *, mu: float = 0.5, mode: str = "plain") -> Part:
    """A part for the tests."""
    return Part("sample", hyper={"mu": mu})


def test_a_part_remembers_how_it_was_made() -> None:
    assert sample(mu=2.0).arguments == {"first": 1, "mu": 2.0, "mode": "plain"}
    assert sample(3).arguments == {"first": 3, "mu": 0.5, "mode": "plain"}
    assert sample.__name__ == "sample"
    assert {name: option.type for name, option in options_of(sample).items()} == {
        "mu": float,
        "mode": str,
    }


TABLE = {"sample": sample, "empty": part(lambda: Part("empty"))}


def test_expressions_become_methods() -> None:
    method = parse_method("sample(mu=0.25) + empty", TABLE)
    assert [p.name for p in method.parts] == ["sample", "empty"]
    assert method.parts[0].hyper == {"mu": 0.25}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("smaple", "unknown method 'smaple': did you mean sample?"),
        ("sample(mud=1)", "method 'sample' has no option 'mud': did you mean mu?"),
        ("sample(mu=x)", "method 'sample': mu must be a number, not x"),
        ("empty+empty", "has empty twice"),
        ("", "expected a name"),
    ],
)
def test_wrong_expressions_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_method(text, TABLE)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("text", ["fedavg", "fedprox(mu=0.25)+wsm", "fedprox+tce"])
def test_a_description_makes_the_same_method_again(text: str) -> None:
    method = parse_method(text, PARTS)
    again = parse_method(describe(method), PARTS)
    assert [(p.name, dict(p.arguments)) for p in again.parts] == [
        (p.name, dict(p.arguments)) for p in method.parts
    ]
    assert describe(again) == describe(method)


def test_descriptions_tell_different_numbers_apart() -> None:
    """A run started from Python is recognized by its description: another mu is another
    experiment.
    """
    assert describe(parse_method("fedprox(mu=0.1)", PARTS)) != describe(
        parse_method("fedprox(mu=0.2)", PARTS)
    )


def test_two_losses_are_refused_by_the_words_of_the_paper() -> None:
    with pytest.raises(
        InputError, match="wsm and tce cannot be combined: both replace the loss; keep one of them"
    ):
        parse_method("fedavg+wsm+tce", PARTS)


def test_phases_are_a_function_of_the_experiments_phase() -> None:
    twice = Part("twice", phases=lambda phase: (phase, phase._replace(epochs=2 * phase.epochs)))
    phases = ComposedMethod(Method((twice,))).hook("phases")
    assert phases is not None
    assert phases(Phase(epochs=3)) == (Phase(epochs=3), Phase(epochs=6))


def test_scoped_functions_work_inside_vmap() -> None:
    watch = Part(
        "mine",
        regularizers=(lambda params, ctx: params["w"] * ctx.hyper["mu"] + ctx.client_state["a"],),
    )
    penalty = ComposedMethod(Method((watch,))).hooks("regularizers")[0]

    def one(w: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return penalty(
            {"w": w},
            client_context(
                client_state={"mine": {"a": a}}, hyper={"mine": {"mu": torch.tensor(10.0)}}
            ),
        )

    assert torch.func.vmap(one)(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])).tolist() == [
        10.5,
        20.25,
    ]


def test_a_part_that_works_at_a_server_has_no_place_without_one() -> None:
    alone = Part("alone", peers=FILLINGS["peers"])
    for slot in (
        "client_weights",
        "aggregate",
        "server_update",
        "server_train",
        "update_server_state",
        "server_state",
        "broadcast",
        "model_assignment",
        "personalize",
    ):
        with pytest.raises(
            InputError,
            match="alone and other cannot be combined: other works at a server, and alone has none",
        ):
            check(alone + Part("other", **{slot: FILLINGS.get(slot, say(slot))}))
    check(
        alone + Part("other", loss=say("loss"), client_state=say("own"), phases=FILLINGS["phases"])
    )


def test_what_is_made_for_one_global_model_is_refused_beside_several() -> None:
    many = Part("many", model_assignment=FILLINGS["model_assignment"])
    for slot in (
        "server_state",
        "broadcast",
        "server_train",
        "update_server_state",
        "personal",
        "personalize",
    ):
        with pytest.raises(
            InputError,
            match="many and other cannot be combined: many has several global models, and other"
            " is made for one",
        ):
            check(many + Part("other", **{slot: FILLINGS.get(slot, say(slot))}))
    check(
        many + Part("other", client_weights=say("client_weights"), aggregate=FILLINGS["aggregate"])
    )


def test_a_missing_name_is_explained() -> None:
    """A regularizer of one parameter and a transform that look up names, and a number that is not
    declared.
    """
    made = Part(
        "mine",
        hyper={"alpha": 1.0},
        regularizers=(lambda params, ctx: ctx.client_state["h"]["w"],),
        transforms=(Transform("correct", lambda grads, params, ctx: ctx.client_state["h"]),),
        on_client_start=lambda ctx, ops: ctx.hyper["mu"],
    )
    composed = ComposedMethod(Method((made,)))
    ctx = client_context(stats=None)
    for hook, arguments, words in (
        (composed.hooks("regularizers")[0], ({}, ctx), "a regularizer is also called with a model"),
        (composed.transforms()[0], ({}, {}, ctx), "personal parameters are trained and are not in"),
        (composed.hooks("on_client_start")[0], (ctx, None), "if mu is a hyper-parameter, declare"),
    ):
        with pytest.raises(KeyError) as caught:
            hook(*arguments)
        assert any(note.startswith(f"mine: {words}") for note in caught.value.__notes__), words
