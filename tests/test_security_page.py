"""SECURITY.md promises nothing that no test shows, and what it and the workflows name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
WHO = ("stranger's file", "hostile client", "curious coordinator", "hostile coordinator", "network", "co-tenant")  # fmt: skip

# Names that run code from a file. Each is allowed in the modules that are listed.
CODE = {
    "eval": (),
    "exec": (),
    "pickle": ("data/restricted_pickle.py",),
    "cloudpickle": ("engines/ray/serialization.py",),
    "marshal": (),
    "shelve": (),
    "dill": (),
    "joblib": (),
    "yaml": (),
    "allow_pickle=True": (),
    "torch.load": (),
    "import_module": (
        "__init__.py",  # the names of the package
        "engines/ray/serialization.py",  # between our own workers
        "core/imports.py",  # import paths and entry points, with --allow-code
        "flower/site_files.py",  # a function that a site's own file names
    ),
}


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 40
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or name not in functions_of(ROOT / path)
    ]
    assert not missing
    assert all(name.startswith("test_") for _, name in named)


def test_the_threat_model_names_everyone_with_a_test() -> None:
    lines = [line for line in section("Threat model").splitlines() if line.startswith("| **")]
    assert len(lines) == len(WHO)
    for who, line in zip(WHO, lines, strict=True):
        cells = line.strip("|").split(" | ")
        assert len(cells) == 5
        assert all(cell.strip() for cell in cells)
        assert who in cells[0].lower()
        assert TEST.search(cells[3]), who


def test_every_guarantee_names_its_tests() -> None:
    guarantees = re.split(r"\n(?=\*\*)", section("What we guarantee"))[1:]
    assert len(guarantees) >= 8
    for guarantee in guarantees:
        shown = re.search(r"<!-- shown by\n(.*?)-->", guarantee, re.DOTALL)
        assert shown, guarantee[:80]
        assert all(TEST.fullmatch(line) for line in shown[1].split()), guarantee[:80]


def names_of_code(tree: ast.Module) -> set[str]:
    """The names in `CODE` that a module calls or imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load"):
                found.add(called)
            if called.split(".")[-1] == "import_module" or called == "__import__":
                found.add("import_module")
            if any(
                k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords
            ):
                found.add("allow_pickle=True")
        elif isinstance(node, ast.Attribute) and node.attr == "import_module":
            found.add("import_module")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {part for module in modules for part in module.split(".")} & set(CODE)
    return found


def test_no_module_evaluates_code_or_unpickles() -> None:
    source = ROOT / "src" / "remanence"
    found = {name: set[str]() for name in CODE}
    for path in sorted(source.rglob("*.py")):
        for name in names_of_code(ast.parse(path.read_text(encoding="utf-8"))):
            found[name].add(path.relative_to(source).as_posix())
    assert found == {name: set(modules) for name, modules in CODE.items()}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("eval(text)", "eval"),
        ("import pickle", "pickle"),
        ("from torch import nn, pickle", "pickle"),
        ("np.load(path, allow_pickle=flag)", "allow_pickle=True"),
        ("torch.load(path)", "torch.load"),
        ("__import__(name)", "import_module"),
    ],
)
def test_code_that_would_run_is_found(line: str, name: str) -> None:
    assert names_of_code(ast.parse(line)) == {name}
    assert names_of_code(ast.parse("np.load(path, allow_pickle=False); model.eval()")) == set()


def workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.name)
def test_a_workflow_is_valid_and_what_it_names_exists(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    required = {"name", True, "permissions", "jobs"}  # YAML 1.1 reads `on` as true
    assert required <= set(workflow) <= required | {"concurrency"}
    assert workflow["permissions"] == {"contents": "read"}
    triggers = workflow[True]
    for entry in triggers.get("schedule", []):
        minute, hour, _, _, day = entry["cron"].split()
        assert 0 <= int(minute) < 60
        assert 0 <= int(hour) < 24
        assert day == "*" or 0 <= int(day) < 7
    for event in ("push", "pull_request"):
        paths = (triggers.get(event) or {}).get("paths", [])
        assert all((ROOT / name).is_file() for name in paths)
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360  # after that GitHub ends a job itself
        for step in job["steps"]:
            assert len({"uses", "run"} & set(step)) == 1
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v[\d.]+|[0-9a-f]{40})", step["uses"])
            else:
                files = re.findall(r"[\w./-]+\.(?:txt|toml)", step["run"])
                assert all((ROOT / name).is_file() for name in files)


def test_the_pins_are_checked_every_week() -> None:
    text = (ROOT / ".github" / "workflows" / "advisories.yml").read_text(encoding="utf-8")
    assert "pip_audit --strict --no-deps --disable-pip --requirement constraints.txt" in text
    # pip-audit without pip reads exact versions only
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", line) for line in pins)
