"""Files of the project that no program here runs: workflows, hooks, images, citation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from remanence.cli.main import EXIT_CODES, app
from remanence.version import __version__

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def pins(text: str) -> dict[str, str]:
    """Versions by name, without a local label such as +cpu."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.M)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_targets_that_workflows_and_hooks_call_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.M))
    files = [*WORKFLOWS, ROOT / ".pre-commit-config.yaml"]
    called = {
        name
        for path in files
        for name in re.findall(
            r"(?:run|entry): make (?:\w+=\w+ )*([\w-]+)$", path.read_text(), re.M
        )
    }
    assert called == {"test", "test-all", "test-witnesses", "docs", "lint", "types", "doctests"}
    assert called <= targets


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_keeps_no_credentials(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert "secrets." not in text


def test_every_supported_python_is_tested() -> None:
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: Python :: 3." in c]
    matrix = re.search(r"python: \[(.*)\]", read(".github/workflows/tests.yml"))
    assert matrix is not None
    assert re.findall(r'"([\d.]+)"', matrix[1]) == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_lock_file_of_the_images_has_the_tested_versions_and_hashes() -> None:
    text, tested = read("docker/requirements.lock"), pins(read("constraints.txt"))
    locked = pins(text)
    assert {"torch", "flwr", "pydantic", "hatchling"} <= set(locked)
    wrong = {name for name, version in locked.items() if tested.get(name, version) != version}
    assert wrong == set()
    requirements = re.split(r"\n(?=\S)", re.sub(r"^[#-].*\n", "", text, flags=re.M).strip())
    assert [line for line in requirements if "--hash=sha256:" not in line] == []


@pytest.mark.parametrize("name", ["simulation", "site"])
def test_an_image_installs_by_hash_and_runs_without_privileges(name: str) -> None:
    text = read(f"docker/{name}.Dockerfile")
    assert "--require-hashes --no-deps --requirement /build/requirements.lock" in text
    assert re.search(r"^USER 1000$", text, re.M)
    copied = set(re.findall(r"^COPY (.*) \S+$", text, re.M))
    ignored = set(re.findall(r"^!(\S+)$", read(".dockerignore"), re.M))
    assert {path for paths in copied for path in paths.split()} == ignored


def test_agents_know_which_commands_print_json() -> None:
    listed = read("AGENTS.md").partition("These commands have it:")[2].partition("\n- ")[0]

    def with_json(command: Any, name: str = "") -> set[str]:
        children = getattr(command, "commands", {})
        if children:
            return set().union(*(with_json(c, f"{name} {key}") for key, c in children.items()))
        return {name.strip()} if any("--json" in o.opts for o in command.params) else set()

    assert set(re.findall(r"`([\w ]+)`", listed)) == with_json(typer.main.get_command(app))


def test_agents_know_every_exit_code() -> None:
    codes = re.findall(r"\b(\d+)\b", EXIT_CODES)
    text = read("AGENTS.md").partition("**Exit codes**:")[2].partition("\n- ")[0]
    assert re.findall(r"\b(\d+)\b", text) == codes


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in read("CITATION.cff")


def test_the_pins_of_the_site_do_not_contradict_those_of_the_package() -> None:
    shared = set(pins(read("docs/constraints.txt"))) & set(pins(read("constraints.txt")))
    assert shared == set()
