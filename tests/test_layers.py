"""The order of the packages: a package imports only from packages below it, and from itself.

The test reads the source with `ast` and imports nothing. Imports inside functions count; only those
under `TYPE_CHECKING` do not.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "remanence"

# From the top to the bottom. Packages of one line do not import each other.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("__init__", "extend"),
    ("api",),
    ("analysis",),
    ("bench", "flower", "recipes"),
    ("testing",),
    ("diagnosis", "exports"),
    ("reports",),
    ("sweeps",),
    ("rounds",),
    ("metrics",),
    ("results",),
    ("experiment",),
    ("engines",),
    ("attacks",),
    ("training",),
    ("methods",),
    ("aggregators", "losses", "optimizers", "peers", "privacy"),
    ("config",),
    ("data", "kernels", "models"),
    ("core",),
    ("version",),
)
HEIGHT = {package: -number for number, layer in enumerate(LAYERS) for package in layer}
MODULES_AT_ROOT = 8

Import = tuple[str, str, int]  # importing module, imported module, line


def list_modules() -> dict[str, Path]:
    """Dotted name without the leading `remanence.` -> file; a package is named by its folder."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


MODULES = list_modules()


def walk_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield from walk_imports(node)


def imported_modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.level == 0, "relative imports hide the layer they cross"
        module = node.module or ""
        package = module.removeprefix("remanence").removeprefix(".")
        inside = [a.name for a in node.names if f"{package}.{a.name}".lstrip(".") in MODULES]
        names = [f"{module}.{name}" for name in inside]
        names += [module] if len(inside) < len(node.names) else []
    for name in names:
        if name == "remanence" or name.startswith("remanence."):
            yield name.removeprefix("remanence").removeprefix(".") or "__init__"


def find_imports(source: str, module: str) -> list[Import]:
    return [
        (module, target, node.lineno)
        for node in walk_imports(ast.parse(source))
        for target in imported_modules(node)
        if target != module
    ]


def all_imports() -> list[Import]:
    return [
        found
        for name, path in MODULES.items()
        for found in find_imports(path.read_text(encoding="utf-8"), name)
    ]


def package_of(module: str) -> str:
    return module.partition(".")[0]


def points_upward(found: Import) -> bool:
    source, target = package_of(found[0]), package_of(found[1])
    return source != target and HEIGHT[target] >= HEIGHT[source]


def test_every_package_has_a_layer() -> None:
    assert {package_of(name) for name in MODULES} <= set(HEIGHT)


def test_no_import_points_upward() -> None:
    upward = [f"{a}:{line} imports {b}" for a, b, line in filter(points_upward, all_imports())]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize(
    "statement",
    [
        "from remanence.rounds.loop import start_run",
        "import remanence.rounds.loop",
        "from remanence.rounds import loop",
        "def late():\n    from remanence.rounds.loop import start_run",
    ],
)
def test_an_upward_import_is_found(statement: str) -> None:
    assert any(map(points_upward, find_imports(statement, "losses.wsm")))
    assert not any(map(points_upward, find_imports(statement, "api")))


def test_an_import_for_type_checking_alone_does_not_count() -> None:
    source = "if TYPE_CHECKING:\n    from remanence.rounds.loop import start_run"
    assert not find_imports(source, "losses.wsm")


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target, _ in all_imports():
        graph[source].add(target)

    def reach(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    circular = [name for name in list(graph) if name in reach(name)]
    assert not circular


def test_the_root_holds_packages_and_few_modules() -> None:
    files = [path.name for path in SOURCE.iterdir() if path.suffix == ".py"]
    assert len(files) <= MODULES_AT_ROOT, files


PACKAGES = sorted({path.parent for path in MODULES.values()} - {SOURCE})


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_a_package_names_its_modules(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    missing = [name for name in sorted(modules) if not re.search(rf"\b{name}\b", docstring)]
    assert not missing


def test_every_package_has_a_docstring() -> None:
    for folder in [SOURCE, *PACKAGES]:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))), folder


def is_type_variable(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("TypeVar", "ParamSpec")
    )


def type_names(node: ast.stmt) -> list[str]:
    """Public classes, type aliases and type variables that a statement defines."""
    if isinstance(node, ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign) and (
        isinstance(node.value, ast.Subscript | ast.BinOp) or is_type_variable(node.value)
    ):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        names = [name for name in names if name[:1].isupper() and not name.isupper()]
    else:
        names = []
    return [name for name in names if not name.startswith("_")]


def test_a_public_type_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for name in type_names(node):
                homes[name].append(module)
    shared = {name: where for name, where in homes.items() if len(where) > 1}
    assert not shared, shared


def test_functions_and_files_are_short() -> None:
    too_long = []
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if (length := len(text.splitlines())) > 400:
            too_long.append(f"{module}: {length} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 60:
                    too_long.append(f"{module}.{node.name}: {length} lines")
    assert not too_long, "\n".join(too_long)


# Words with a field's word in their place (see docs/glossary.md); in two pieces, so that this file
# has none of them.
REPLACED = [
    *("l" + "ent", "L" + "ent", "j" + "udge", "c" + "rowd", "C" + "rowd", "t" + "old"),
    *("M" + "eeting", "S" + "eat", "f" + "ronts", "S" + "tart"),
]


def test_replaced_words_do_not_come_back() -> None:
    pattern = re.compile(rf"\b({'|'.join(REPLACED)})\b")
    root = SOURCE.parents[1]
    found = [
        f"{path.relative_to(root)}: {line}"
        for folder, kinds in (("src", "py toml"), ("tests", "py"), ("docs", "md"))
        for kind in kinds.split()
        for path in sorted((root / folder).rglob(f"*.{kind}"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)
