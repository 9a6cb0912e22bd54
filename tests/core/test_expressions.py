from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remanence.core.errors import InputError
from remanence.core.expressions import (
    LONGEST,
    Call,
    Option,
    instantiate,
    options_of,
    parse_call,
    parse_parts,
)

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.:/\-]{0,8}", fullmatch=True)
# What can stand between quotes: anything without the quote itself, so never both kinds at once.
texts = st.one_of(
    st.text(st.characters(blacklist_characters=mark, blacklist_categories=("Cs",)), max_size=8)
    for mark in "\"'"
)
scalars = st.one_of(
    st.booleans(),
    st.none(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    names.filter(lambda word: word.lower() not in ("true", "false", "none")),
    texts,
)
values = st.recursive(scalars, lambda below: st.lists(below, max_size=3), max_leaves=4)
calls = st.builds(Call, names, st.dictionaries(names, values, max_size=3))


def levels(value: Any) -> int:
    return 1 + max((levels(item) for item in value), default=0) if isinstance(value, list) else 0


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type: 1, 1.0 and true are three things."""
    if isinstance(a, list):
        return (
            isinstance(b, list)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
    return type(a) is type(b) and a == b


@given(calls.filter(lambda call: all(levels(value) <= 4 for value in call.arguments.values())))
@example(Call("f", {"a": 'say "hello"'}))
@example(Call("f", {"a": "it's"}))
@example(Call("f", {"path": "größe"}))
def test_what_is_written_can_be_read_again(call: Call) -> None:
    again = parse_call(str(call))
    assert again == call
    assert all(same(again.arguments[name], value) for name, value in call.arguments.items())


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("fedavg", "fedavg", {}),
        ("fedavg()", "fedavg", {}),
        ("  sgd ( lr = 0.01 , momentum=9e-1 ) ", "sgd", {"lr": 0.01, "momentum": 0.9}),
        (
            "f(a=1, b=-2, c=+3, d=.5, e=5., g=1e3, h=-2.5E-1)",
            "f",
            {"a": 1, "b": -2, "c": 3, "d": 0.5, "e": 5.0, "g": 1000.0, "h": -0.25},
        ),
        ("f(a=True, b=FALSE, c=none)", "f", {"a": True, "b": False, "c": None}),
        ('f(a="true", b="1", c="")', "f", {"a": "true", "b": "1", "c": ""}),
        ("f(a='two words', b=one-word)", "f", {"a": "two words", "b": "one-word"}),
        ("f(a=[], b=[1, [two, 'three']])", "f", {"a": [], "b": [1, ["two", "three"]]}),
        ("my.package:Net(width=3)", "my.package:Net", {"width": 3}),
        ("npz(path=data/my-file.npz)", "npz", {"path": "data/my-file.npz"}),
    ],
)
def test_reading_by_hand(text: str, name: str, arguments: dict[str, Any]) -> None:
    call = parse_call(text)
    assert call == Call(name, arguments)
    assert [type(value) for value in call.arguments.values()] == [
        type(value) for value in arguments.values()
    ]


def test_a_sum_keeps_its_order() -> None:
    assert [str(call) for call in parse_parts("wsm+fedprox(mu=0.1) + fedavg")] == [
        "wsm",
        "fedprox(mu=0.1)",
        "fedavg",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected a name, found its end"),
        ("   ", "expected a name, found its end"),
        ("fedavg+", "expected a name, found its end"),
        ("+fedavg", "expected a name, found +"),
        ("fedavg++wsm", "expected a name, found +"),
        ("fedavg wsm", "unexpected 'wsm'"),
        ("fedavg)", "unexpected ')'"),
        ("3", "expected a name, found 3"),
        ("f(mu=1, 0.1)", "expected an option such as mu=0.1, found 0.1"),
        ("f(mu)", "options are written name=value; mu has no value"),
        ("f(mu=)", "expected a value, found )"),
        ("f(mu=1", "expected a comma or a closing bracket, found its end"),
        ("f(mu=1 nu=2)", "expected a comma or a closing bracket, found nu"),
        ("f(mu=1,)", "expected an option such as mu=0.1, found )"),
        ("f(mu=1, mu=2)", "mu is given twice"),
        ("f(a=[1, 2)", "expected a comma or a closing bracket, found )"),
        ("f(a=[1,])", "expected a value, found ]"),
        ("f(a=[[[[[1]]]]])", "lists are nested too deeply"),
        ("f(a='open)", 'at "\'open)"'),
        ("f(a=1.2.3)", "at '1.2.3)'"),
        ("f(a=3x)", "at '3x)'"),
        ("f(a=print('hello'))", "expected a comma or a closing bracket, found ("),
        ("f(a={1})", "at '{1})'"),
        ("f(a=1);g", "at ';g'"),
    ],
)
def test_every_mistake_has_a_sentence_that_shows_the_text(text: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_parts(text)
    assert complaint in str(caught.value)
    assert repr(text) in str(caught.value)


@given(st.text(st.sampled_from("fa_1.e-+=,()[]\"' \n\\é\x00"), max_size=30))
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        calls = parse_parts(text)
    except InputError:
        return
    assert calls
    assert all(isinstance(call, Call) for call in calls)


def test_one_call_is_not_a_sum() -> None:
    with pytest.raises(InputError, match=r"'sgd\+adam' is a sum"):
        parse_call("sgd+adam")


def test_a_very_long_expression_is_refused() -> None:
    assert parse_call("a" * LONGEST).name == "a" * LONGEST
    with pytest.raises(InputError, match="2001 characters is too long"):
        parse_call("a" * (LONGEST + 1))


def test_a_number_that_no_float_holds_is_refused() -> None:
    """1e999 would become infinity, which is written as the word inf."""
    with pytest.raises(InputError):
        parse_call("sgd(lr=1e999)")


def build(
    *given: Any,
    rate: float = 0.5,
    count: int = 1,
    word: str = "a",
    flag: bool = False,
    maybe: int | None = 7,
    sizes: tuple[int, ...] = (),
    perhaps: tuple[float, ...] | None = None,
) -> dict[str, Any]:
    return dict(locals())


def demand(*, alpha: float, beta: int, gamma: float = 1.0) -> tuple[float, int, float]:
    return alpha, beta, gamma


def bare() -> str:
    return "bare"


TABLE = {"build": build, "demand": demand, "bare": bare}


def make(text: str, *given: Any) -> Any:
    return instantiate(parse_call(text), TABLE, "thing", *given)


@pytest.mark.parametrize(
    ("text", "option", "expected"),
    [
        ("build(rate=1)", "rate", 1.0),
        ("build(rate=0.25)", "rate", 0.25),
        ("build(count=3)", "count", 3),
        ("build(count=3.0)", "count", 3),
        ("build(count=1e3)", "count", 1000),
        ("build(word=b)", "word", "b"),
        ("build(word=200)", "word", "200"),
        ("build(flag=true)", "flag", True),
        ("build(maybe=none)", "maybe", None),
        ("build(maybe=4)", "maybe", 4),
        ("build(sizes=[1, 2])", "sizes", (1, 2)),
    ],
)
def test_values_become_what_the_constructor_asks_for(text: str, option: str, expected: Any) -> None:
    made = make(text)[option]
    assert made == expected
    assert type(made) is type(expected)


def test_options_left_out_keep_their_defaults_and_given_ones_come_first() -> None:
    made = make("build(count=2)", "shape", 10)
    assert made["given"] == ("shape", 10)
    assert (made["rate"], made["count"], made["maybe"]) == (0.5, 2, 7)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("biuld", "unknown thing 'biuld': did you mean build?"),
        ("build(cuont=1)", "thing 'build' has no option 'cuont': did you mean count?"),
        ("bare(count=1)", "thing 'bare' has no option 'count': it takes none"),
        ("build(count=2.5)", "thing 'build': count must be a whole number, not 2.5"),
        ("build(count=true)", "thing 'build': count must be a whole number, not true"),
        ("build(rate=fast)", "thing 'build': rate must be a number, not fast"),
        ("build(rate=none)", "thing 'build': rate must be a number, not none"),
        ("build(rate=[1])", "thing 'build': rate must be a number, not [1]"),
        ("build(flag=1)", "thing 'build': flag must be true or false, not 1"),
        ("build(word=false)", "thing 'build': word must be a word, not false"),
        ("build(maybe=x)", "thing 'build': maybe must be a whole number, not x"),
        ("demand", "thing 'demand' needs alpha and beta: write demand(alpha=..., beta=...)"),
        ("demand(alpha=1)", "thing 'demand' needs beta: write demand(beta=...)"),
    ],
)
def test_wrong_names_and_values_have_a_sentence(text: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        make(text)
    assert str(caught.value) == complaint


@pytest.mark.parametrize("option", ["rate", "count"])
def test_a_whole_number_beyond_float_is_refused_or_kept(option: str) -> None:
    """400 digits fit a Python int but no float: the answer is a sentence, or the number itself
    where a whole one was asked for.
    """
    digits = "1" + "0" * 400
    try:
        made = make(f"build({option}={digits})")[option]
    except InputError:
        return
    assert made == int(digits)


def test_a_list_is_asked_for_where_the_constructor_has_one() -> None:
    with pytest.raises(InputError, match="sizes must be"):
        make("build(sizes=5)")
    with pytest.raises(InputError, match="sizes must be"):
        make("build(sizes=none)")


def test_the_items_of_a_list_are_checked_too() -> None:
    with pytest.raises(InputError, match="sizes"):
        make("build(sizes=[1, two])")
    with pytest.raises(InputError, match="sizes"):
        make("build(sizes=[true])")


def test_a_list_that_may_be_none_can_be_given() -> None:
    assert make("build(perhaps=none)")["perhaps"] is None
    assert make("build(perhaps=[1, 2.5])")["perhaps"] == (1, 2.5)


def test_options_are_the_keyword_only_arguments() -> None:
    options = options_of(demand)
    assert list(options) == ["alpha", "beta", "gamma"]
    assert options["gamma"] == Option("gamma", float, 1.0, names_nothing=True)

    class Net:
        def __init__(self, shape: tuple[int, ...], *, width: int = 3):
            self.shape, self.width = shape, width

    assert list(options_of(Net)) == ["width"]
    made = instantiate(parse_call("net(width=5)"), {"net": Net}, "model", (4,))
    assert (made.shape, made.width) == ((4,), 5)
