"""The pages of the documentation that are made from the code: everything public has an entry."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import click
import pytest
import site_pages
import typer
from site_pages.docstrings import body, entries, prose, sections
from site_pages.project import in_docs_folder, in_project_folder
from site_pages.schemas import ENTRY, schemas
from site_pages.tables import (
    LIST_PAGES,
    MOMENT_MEANINGS,
    SPLIT_MEANINGS,
    metric_functions,
    metric_modules,
)

import remanence
from remanence import extend
from remanence.cli.listing import TABLES
from remanence.cli.listing import entries as list_entries
from remanence.cli.main import app
from remanence.config import FLAGS
from remanence.config.keys import all_settings
from remanence.core.expressions import options_of
from remanence.reports.table_columns import COLUMNS as REPORT_COLUMNS
from remanence.results.columns import COLUMNS
from remanence.results.ledger import MOMENTS, SPLITS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = site_pages.pages()


def rows(page: str, heading: str = "") -> dict[str, list[str]]:
    """The rows of the tables below a heading by the code in their first cell."""
    text = PAGES[f"reference/{page}.md"]
    if heading:
        text = re.split(r"^## ", text.partition(f"## {heading}\n")[2], flags=re.M)[0]
    tables = re.findall(r"^\|.*\n\| ---.*\n((?:\|.*\n)*)", text, re.M)  # without their headings
    lines = (re.split(r"(?<!\\)\|", line)[1:-1] for table in tables for line in table.splitlines())
    cells = [[cell.strip() for cell in line] for line in lines]
    return {line[0].strip("`").replace("\\|", "|"): line[1:] for line in cells}


@pytest.mark.parametrize(("module", "page"), [(remanence, "python"), (extend, "extend")])
def test_every_public_name_has_an_entry(module: ModuleType, page: str) -> None:
    text = PAGES[f"reference/{page}.md"]
    constants = rows(page, "Constants") if page == "extend" else {}
    for name in module.__all__:
        if name not in constants:
            assert re.search(rf"^## {name.strip('_')}\n", text, re.M), name
            assert f"{module.__name__}.{name}" in text, name


def test_every_argument_of_a_function_is_described() -> None:
    text = PAGES["reference/python.md"]
    entry = text.partition("## compare\n")[2].partition("\n## ")[0]
    for argument in ("methods", "experiment", "seeds", "grid", "select", "batch_runs"):
        assert re.search(rf"^- `{argument}`: \S", entry, re.M), argument


def test_fields_have_the_comments_of_the_source() -> None:
    fields = rows("extend", "Part")
    assert fields["payload_description"][1] == "what clients send besides the model, in words"
    assert fields["hyper"][0] == "`Mapping[str, float]`"
    assert rows("extend", "Functions of slots")["ClientWeights"][1].startswith("-> \\[k\\]; later")


def test_every_setting_has_its_default_flag_and_meaning() -> None:
    found, flags = rows("settings"), {key: name for name, key in FLAGS.items()}
    for key, field in all_settings().items():
        default, flag, meaning = found[key]
        assert meaning, key
        assert (default == "") == (field.default is None), key
        assert flag.strip("`") == (f"--{flags[key].replace('_', '-')}" if key in flags else "")
    assert found["rounds"][0] == "`20`"
    assert found["record.local"][0] == "`false`"
    assert found["data.augment"][0] == "`[]`"


def test_the_file_of_defaults_is_an_experiment() -> None:
    import tomllib

    from remanence.config import Experiment, parse_experiment

    text = PAGES["reference/settings.md"].partition("```toml\n")[2].partition("```")[0]
    assert parse_experiment(tomllib.loads(text)) == Experiment()


@pytest.mark.parametrize("name", LIST_PAGES)
def test_every_entry_of_a_list_has_its_options(name: str) -> None:
    text = PAGES[f"reference/{name}.md"]
    for entry in list_entries(name):
        assert f"\n## {entry['name']}\n" in text
        constructor = TABLES.get(name, {}).get(entry["name"])
        options = options_of(constructor) if constructor else {}
        found = rows(name, entry["name"])
        assert set(options) == set(found)
        assert [option for option in options if not found[option][1]] == []


def test_every_command_has_its_options() -> None:
    text = PAGES["reference/commands.md"]

    def check(command: click.Command, name: str) -> int:
        children = getattr(command, "commands", {})
        if children:
            return sum(check(child, f"{name} {key}") for key, child in children.items())
        assert f"\n## {name}\n" in text
        entry = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for option in command.params:
            if option.param_type_name == "option":
                assert f"`{', '.join([*option.opts, *option.secondary_opts])}`" in entry
        return 1

    assert check(typer.main.get_command(app), "remanence") > 20


def test_every_measure_has_a_meaning() -> None:
    found = rows("measures")
    headings = [
        re.split(r"(?<!\\)\|", line)[1].strip()
        for line in PAGES["reference/measures.md"].split("\n")
        if line[:1] == "|"
    ]
    assert [column.heading for column in REPORT_COLUMNS if column.heading not in headings] == []
    for name in (*COLUMNS, *MOMENTS, *SPLITS):
        assert found[name][-1], name
    assert set(MOMENT_MEANINGS) == set(MOMENTS)
    assert set(SPLIT_MEANINGS) == set(SPLITS)
    text = PAGES["reference/measures.md"]
    functions = [name for module in metric_modules() for name in metric_functions(module)]
    assert "local_forgetting" in functions
    assert [name for name in functions if f".{name}(" not in text] == []


def test_every_page_can_be_reached_from_the_front_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.glob("*.md")}
    pages |= {str(Path(path).with_suffix("")) for path in PAGES}
    listed = set(re.findall(r"^(?:.*<)?([\w/-]+)>?$", index, re.M))
    assert pages - listed == {"index"}


def test_links_between_the_root_and_the_site() -> None:
    text = "[a](docs/flower.md#security) [b](LICENSE) [c](SECURITY.md) [d](https://example.org)"
    assert in_project_folder(text) == (
        "[a](../flower.md#security) b [c](../project/security.md) [d](https://example.org)"
    )
    assert in_docs_folder("[a](../SECURITY.md#versions) [b](x.md)") == (
        "[a](project/security.md#versions) [b](x.md)"
    )


def test_docstrings_as_markdown() -> None:
    text = """First line.

    Second paragraph with `a_b` and 2 * x.

    Args:
        name: its text
            in two lines.
        **flags: others.

    Returns:
        Something.
    """
    found = sections(text)
    assert list(found) == ["", "Args", "Returns"]
    assert entries(found["Args"]) == {"name": "its text in two lines.", "**flags": "others."}
    assert prose("`a*b` and 2 * <x>") == "`a*b` and 2 \\* \\<x>"
    assert body(">>> 1 + 1\n2") == "```pycon\n>>> 1 + 1\n2\n```"


def test_lists_follow_their_schema() -> None:
    kinds = {
        bool: "boolean",
        int: "number",
        float: "number",
        str: "string",
        list: "array",
        tuple: "array",
        type(None): "null",
    }
    allowed = ENTRY["properties"]["options"]["additionalProperties"]["type"]
    for name in LIST_PAGES:
        for entry in list_entries(name):
            assert set(ENTRY["required"]) <= set(entry) <= set(ENTRY["properties"])
            assert {kinds[type(value)] for value in entry["options"].values()} <= set(allowed)


def test_the_schema_of_an_experiment_has_every_setting() -> None:
    schema = schemas()["experiment.schema.json"]
    for key in all_settings():
        section, _, name = key.rpartition(".")
        where = schema["properties"]
        if section:
            title = where[section]["$ref"].rpartition("/")[2]
            where = schema["$defs"][title]["properties"]
        assert where[name].get("description"), key
