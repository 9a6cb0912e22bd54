"""Every command in README.md, docs and other pages of the root is one that its program accepts.

The real command line parses them; `run`, `compare` and `search` also check the experiment, without
training, and what ends at once is executed. Flower's commands are parsed by the parsers of the installed
package.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import typer

from remanence import api
from remanence.cli.main import app
from remanence.config import parse_experiment
from remanence.experiment.build import check_names
from remanence.sweeps.search import SearchSpace

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "AGENTS.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").glob("*.md"),
    ]
)
PROGRAMS = ("remanence", "flwr", "flower-superlink", "flower-supernode")
ONE_OF = "|".join(PROGRAMS)
PLACEHOLDERS = {"METHOD": "fedavg", "...": ""}


class Command(NamedTuple):
    page: str
    line: int
    words: tuple[str, ...]
    in_block: bool  # complete, not a mention in a sentence

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {' '.join(self.words)[:60]}"


def find_commands(page: Path) -> Iterator[Command]:
    """Commands in indented blocks, where `\\` continues a line, and between backticks."""
    lines = page.read_text(encoding="utf-8").split("\n")
    number = 0
    while number < len(lines):
        start, text = number, lines[number]
        number += 1
        if text.startswith("    ") and text.split()[:1] and text.split()[0] in PROGRAMS:
            while text.rstrip().endswith("\\"):
                text = text.rstrip()[:-1] + lines[number]
                number += 1
            yield Command(page.name, start + 1, split(text), True)
    text = "\n".join(lines)
    for found in re.finditer(rf"(?<!`)`((?:{ONE_OF}) [^`]+)`", text):
        line = text.count("\n", 0, found.start()) + 1
        yield Command(page.name, line, split(found[1].replace("\n", " ")), False)


def split(text: str) -> tuple[str, ...]:
    words = (PLACEHOLDERS.get(word, word) for word in shlex.split(text, comments=True))
    return tuple(word for word in words if word)


# what docs/data.md says to write into my_methods.py
OWN_METHOD = re.search(
    r"```python\n# my_methods\.py\n(.*?)```",
    (ROOT / "docs" / "data.md").read_text(encoding="utf-8"),
    re.DOTALL,
)
COMMANDS = [command for page in PAGES for command in find_commands(page)]
OURS = [command for command in COMMANDS if command.words[0] == "remanence"]
FLOWERS = [command for command in COMMANDS if command.words[0] != "remanence"]


def parse(root: click.Command, words: tuple[str, ...], complete: bool) -> None:
    """Parse a command line without running it. A mention in a sentence may leave out arguments."""
    command, rest = root, list(words[1:])
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    try:
        command.make_context(words[0], rest)
    except click.exceptions.Exit:  # --help and --version
        pass
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
        if complete:
            raise


def test_commands_are_found() -> None:
    assert len([command for command in OURS if command.in_block]) > 15
    assert {command.page for command in FLOWERS} == {"coming-from.md", "flower.md"}
    assert {command.words[0] for command in FLOWERS} == set(PROGRAMS) - {"remanence"}


@pytest.mark.parametrize("command", OURS, ids=str)
def test_the_command_line_accepts_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OWN_METHOD
    (tmp_path / "my_methods.py").write_text(OWN_METHOD[1])
    monkeypatch.syspath_prepend(tmp_path)
    parse(typer.main.get_command(app), command.words, command.in_block)
    name = command.words[1]
    if name in ("run", "compare", "search") and len(command.words) > 2:
        check_experiment(list(command.words[1:]), tmp_path, monkeypatch)
    elif name == "list" and len(command.words) == 3:
        app(list(command.words[1:]), standalone_mode=False)
    elif command.words[1:3] == ("data", "show") and "digits" in command.words:
        monkeypatch.chdir(tmp_path)
        app(list(command.words[1:]), standalone_mode=False)


def check_experiment(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command up to the API, and check the settings and names that it passes on."""
    checked: list[str] = []

    def run(base: Mapping[str, Any], **given: Any) -> Any:
        check_names(parse_experiment(base, given["set"]))
        checked.append("run")
        raise typer.Exit

    def compare(methods: str, **given: Any) -> Any:
        api._plan_points(given["experiment"], given["set"], methods, given["seeds"], given["grid"])
        checked.append("compare")
        raise typer.Exit

    def search(method: str, **given: Any) -> Any:
        experiment = given["experiment"]
        SearchSpace(experiment, given["set"], method, [0], given["key"], given["around"]).check()
        checked.append("search")
        raise typer.Exit

    monkeypatch.setattr(api, "run", run)
    monkeypatch.setattr(api, "search", search)
    monkeypatch.setattr(api, "compare", compare)
    monkeypatch.chdir(folder)
    for name in ("exp.toml", "experiment.toml"):
        Path(name).write_text("rounds = 2\n")
    if "--out" not in words:
        words = [*words, "--out", "out"]
    app(words, standalone_mode=False)
    assert checked


# Flower's own use of typer
@pytest.mark.filterwarnings("ignore:The 'is_flag':DeprecationWarning")
@pytest.mark.parametrize("command", FLOWERS, ids=str)
def test_flower_accepts_it(command: Command) -> None:
    pytest.importorskip("flwr", reason="the extra remanence[flower] is not installed")
    program, *words = command.words
    if program == "flwr":
        from flwr.cli.app import app as flower

        parse(typer.main.get_command(flower), command.words, command.in_block)
        return
    parser = flower_parser(program)
    with contextlib.redirect_stderr(None):
        given = parser.parse_args(words)
    assert given is not None


def flower_parser(program: str) -> ArgumentParser:
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    if program == "flower-superlink":
        return _parse_args_run_superlink()
    return _parse_args_run_supernode()


def test_an_unknown_option_of_flower_would_be_found() -> None:
    pytest.importorskip("flwr", reason="the extra remanence[flower] is not installed")
    for program in ("flower-superlink", "flower-supernode"):
        with pytest.raises(SystemExit):
            flower_parser(program).parse_args(["--no-such-option"])
    with pytest.raises(click.UsageError):
        parse(typer.main.get_command(app), ("remanence", "run", "--no-such-option", "1"), True)


def option_names(command: click.Command) -> set[str]:
    found = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    children = command.commands.values() if isinstance(command, click.Group) else ()
    return found.union({"--help"}, *map(option_names, children))


def test_an_option_that_a_page_mentions_exists() -> None:
    """Between backticks, without its command: `--sample 5`. Flower's are parsed above."""
    known = option_names(typer.main.get_command(app)) | {"--port"}
    mentioned = {
        (page.name, name)
        for page in PAGES
        for code in re.findall(r"(?<!`)`(--[^`]+)`", page.read_text(encoding="utf-8"))
        for name in re.findall(r"(?<!\S)--[a-z][a-z-]*", code)
    }
    assert len(mentioned) > 10
    assert not {(page, name) for page, name in mentioned if name not in known}


def test_supernodes_on_one_machine_have_ports_of_their_own() -> None:
    """A SuperNode without --port takes Flower's default, which a second one cannot take too."""
    pytest.importorskip("flwr", reason="the extra remanence[flower] is not installed")
    ports = [
        flower_parser("flower-supernode").parse_args(command.words[1:]).port
        for command in FLOWERS
        if command.words[0] == "flower-supernode"
    ]
    assert ports[0] == 9094
    assert len(set(ports)) == len(ports) >= 2


def test_the_files_in_the_flower_page_are_valid(tmp_path: Path) -> None:
    from remanence.flower.settings import read_site

    text = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
    site = block_after(text, "**4. Site: write")
    (tmp_path / "site.toml").write_text(site)
    assert read_site(tmp_path / "site.toml").settings.name == "ward-7"
    experiment = tomllib.loads(block_after(text, "**6. Coordinator: write"))
    check_names(parse_experiment(experiment))
    tomllib.loads(block_after(text, "Flower's commands need its address"))


def block_after(text: str, heading: str) -> str:
    """The first indented block after a heading, with the blank lines within it."""
    after = text[text.index(heading) :]
    lines = after[re.search(r"\n\n    ", after).end() - 4 :].split("\n")  # type: ignore[union-attr]
    end = next(n for n, line in enumerate(lines) if line and not line.startswith("    "))
    return "\n".join(line[4:] for line in lines[:end])
