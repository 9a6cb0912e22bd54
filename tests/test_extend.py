"""The names for authors, and the rule that no other module lists names of methods."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from remanence import extend
from remanence.core.declarations import REPLY
from remanence.core.types import Reply
from remanence.methods import METHODS, PARTS

SOURCE = Path(__file__).parents[1] / "src" / "remanence"
# where parts are defined, and where experiments and benchmark jobs that use them are
# or checks of them
NAMES_ALLOWED = (
    *("methods", "losses", "aggregators", "privacy", "peers", "recipes", "bench/jobs.py"),
    "testing/toy_task.py",
)
# names of parts that are ordinary words elsewhere: a moment of a round, a kind of peer schedule
ORDINARY_WORDS = {"local", "random", "oracle", "median"}


def test_every_name_is_there() -> None:
    for name in extend.__all__:
        assert getattr(extend, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = extend.no_such_name


def test_every_method_is_named_on_the_pages() -> None:
    root = SOURCE.parents[1]
    pages = ("docs/methods.md", "docs/drift.md")  # the second one has those without a server
    text = "".join((root / page).read_text(encoding="utf-8") for page in pages)
    # `fedavgm` does not name fedavg
    assert [name for name in METHODS if not re.search(rf"`{name}[`(]", text)] == []


def test_remanence_does_not_import_it() -> None:
    code = "import sys, remanence; sys.exit('remanence.extend' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_of_the_docstring_works() -> None:
    text = (extend.__doc__ or "").partition("\n\n    ")[2].rpartition("\n\n`check_method")[0]
    scope: dict[str, object] = {}
    exec("\n".join(line.removeprefix("    ") for line in ("    " + text).splitlines()), scope)
    extend.check_method(scope["pull"]())  # type: ignore[operator]


def compared_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Names of parts that are compared with, looked up or listed, with their lines."""
    found = []
    for node in ast.walk(tree):
        literals: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            literals = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            literals = [node.slice]
        elif isinstance(node, ast.Dict):
            literals = list(node.keys)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            literals = list(node.elts)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            literals = list(node.args)
        elif isinstance(node, ast.MatchValue):
            literals = [node.value]
        found += [
            (item.lineno, item.value)
            for item in literals
            if isinstance(item, ast.Constant) and item.value in set(PARTS) - ORDINARY_WORDS
        ]
    return found


def test_a_compared_name_is_found() -> None:
    for line in (
        'p.name == "fedwavg"',
        'x in ("wsm", "tce")',
        'state["flashback"]',
        'table.get("dp_sgd")',
        '{"scaffold": 1}',
    ):
        assert compared_names(ast.parse(line)), line


def test_no_module_lists_names_of_methods() -> None:
    offenders = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not str(path.relative_to(SOURCE)).startswith(NAMES_ALLOWED)
        for line, name in compared_names(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not offenders, "\n".join(offenders)


def test_every_field_of_a_reply_declares_what_it_reveals() -> None:
    assert set(Reply._fields) - set(REPLY) == {"client_state"}


@pytest.mark.parametrize("name", PARTS)
def test_our_parts_declare_all_that_they_send(name: str) -> None:
    from remanence.core import pytree
    from remanence.core.declarations import UNDECLARED
    from remanence.testing.toy_task import fast_config, small_experiment

    if name in ("krum", "multi_krum", "trimmed_mean", "median", "geometric_median", "norm_clip"):
        assert PARTS[name]().payload is None
        return
    task = small_experiment(fast_config(name)).task
    for part, tree in task.payload_spec().items():
        p = next(p for p in task.method.parts if p.name == part)
        assert all(p.disclosure(path) is not UNDECLARED for path in pytree.flatten(tree)), part
