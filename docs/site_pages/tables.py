"""Reference pages of what users write and read: settings, parts, commands, measures."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import types
import typing
from typing import Any

import click
import tomli_w
import typer

from remanence import metrics
from remanence.cli.listing import TABLES
from remanence.cli.listing import entries as list_entries
from remanence.cli.main import EXIT_CODES, app
from remanence.cli.options import LISTS
from remanence.config import FLAGS, Experiment
from remanence.config.settings import Section
from remanence.core.expressions import options_of
from remanence.reports.table_columns import COLUMNS as REPORT_COLUMNS
from remanence.results.columns import COLUMNS
from remanence.results.ledger import MOMENTS, SPLITS
from site_pages.docstrings import cell, code_cell, entries, markdown, prose, sections, table

MOMENT_MEANINGS = {
    "before_drift": "the received model on the data of the time step before",
    "before": "the model that a client receives, before local training",
    "local": "after local training, at the client",
    "merged": "after aggregation; without a server, after averaging with peers",
    "refined": "after training at the server",
    "personal": "a client's personal model",
}
SPLIT_MEANINGS = {
    "test": "the test set",
    "valid": "the clients' validation examples",
    "train": "the clients' training examples",
    "public": "the public set",
}


# A list with one of these names, now or later, is shown by this page and not as a list.
OWN_PAGES = ("settings", "commands", "measures")
LIST_PAGES = [name for name in LISTS if name not in OWN_PAGES]


def pages() -> dict[str, str]:
    """Settings, commands, measures, and one page for each list."""
    found = {
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
        "reference/measures.md": measures_page(),
    }
    return found | {f"reference/{name}.md": list_page(name) for name in LIST_PAGES}


# settings


def settings_page() -> str:
    """Every key of an experiment, by section, and a file with all defaults."""
    parts = [
        "# All settings",
        "Every key of an experiment with its default. A key is written in a table of the"
        " [experiment file](../experiment-file.md), as `--set KEY=VALUE` on the command line, or in"
        ' `set={"KEY": VALUE}` in Python. Some keys also have a flag, which is a keyword argument'
        " of `rem.run` and `rem.compare`, too (`--batch-size` is `batch_size=`).",
        "## Top level",
        _settings_table(Experiment, ""),
    ]
    for name, field in Experiment.model_fields.items():
        if isinstance(field.default, Section):
            parts += [f"## {name}", prose((type(field.default).__doc__ or "").strip())]
            parts.append(_settings_table(type(field.default), f"{name}."))
    parts += ["## All defaults as a file", _default_file()]
    return "\n\n".join(parts) + "\n"


def _settings_table(section: type[Section], prefix: str) -> str:
    flags = {key: "--" + name.replace("_", "-") for name, key in FLAGS.items()}
    rows = []
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            continue
        key = prefix + name
        note = cell(field.description or "")
        choices = _choices(field.annotation)
        if choices:
            note += " One of " + ", ".join(f"`{c}`" for c in choices if c) + "."
        default = "" if field.default is None else toml_value(field.default)
        rows.append([code_cell(key), code_cell(default), code_cell(flags.get(key, "")), note])
    return table(["key", "default", "flag", "meaning"], rows)


def _choices(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return []


def toml_value(value: Any) -> str:
    """A value as it is written in TOML."""
    if isinstance(value, tuple):
        value = list(value)
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def _default_file() -> str:
    lines: list[str] = []
    tables: list[str] = []
    for name, field in Experiment.model_fields.items():
        if isinstance(field.default, Section):
            inner = type(field.default).model_fields.items()
            tables += ["", f"[{name}]", *(_default_line(key, f.default) for key, f in inner)]
        else:
            lines.append(_default_line(name, field.default))
    return "```toml\n" + "\n".join([*lines, *tables]) + "\n```"


def _default_line(name: str, default: Any) -> str:
    if default is None:
        return f"# {name}: not set"
    return f"{name} = {toml_value(default)}"


# lists


def list_page(name: str) -> str:
    """Every entry of one list, as `remanence list NAME` prints it, with each option."""
    parts = [
        f"# {name.capitalize()}",
        f"{name.capitalize()} {prose(LISTS[name])}. The same list in a terminal:"
        f" `remanence list {name}`.",
    ]
    for entry in list_entries(name):
        parts.append(f"## {entry['name']}\n\n```text\n{entry['call']}\n```")
        constructor = TABLES.get(name, {}).get(entry["name"])
        if constructor is None:
            parts.append(prose(entry["description"]))
            continue
        found = sections(inspect.getdoc(constructor))
        notes = entries(found.get("Args", ""))
        parts.append(markdown(found.get("", "")))
        rows = [
            [code_cell(option), code_cell(_option_default(o)), cell(notes.get(option, ""))]
            for option, o in options_of(constructor).items()
        ]
        if rows:
            parts.append(table(["option", "default", "meaning"], rows))
        if entry.get("payload"):
            parts.append(f"Clients send, besides the model: {prose(entry['payload'])}.")
        if entry.get("needs_public_data"):
            parts.append("Needs public data at the server: `--public N`.")
    return "\n\n".join(parts) + "\n"


def _option_default(option: Any) -> str:
    if option.default is inspect.Parameter.empty:
        return "required"
    value = option.default
    return (
        {True: "true", False: "false", None: "none"}.get(value, value)
        if (value is None or isinstance(value, bool))
        else str(value)
    )


# commands


def commands_page() -> str:
    """Every command of `remanence` with its arguments and options."""
    root = typer.main.get_command(app)
    parts = ["# Commands", prose(root.help or ""), prose(EXIT_CODES)]
    assert isinstance(root, click.Group)
    for name, command in _commands(root, "remanence"):
        parts.append(f"## {name}\n\n{_describe_command(command)}")
    return "\n\n".join(parts) + "\n"


def _commands(group: Any, prefix: str) -> list[tuple[str, Any]]:
    found = []
    for name, command in group.commands.items():
        full = f"{prefix} {name}"
        if hasattr(command, "commands"):
            found += _commands(command, full)
        else:
            found.append((full, command))
    return found


def _describe_command(command: Any) -> str:
    rows = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = parameter.make_metavar(click.Context(command)).strip("[]. ")
        else:
            name = ", ".join([*parameter.opts, *parameter.secondary_opts])
        default = parameter.default
        shown = "" if default in (None, False, ()) or callable(default) else default
        if parameter.required:
            shown = "required"
        rows.append([code_cell(name), code_cell(shown), cell(_plain(parameter.help))])
    text = prose(_plain(command.help))
    return (
        f"{text}\n\n{table(['argument or option', 'default', 'meaning'], rows)}" if rows else text
    )


def _plain(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


# measures


def measures_page() -> str:
    """Columns of a report and of metrics.jsonl, the ledger, and the functions of `metrics`."""
    report = [[cell(c.heading), code_cell(c.short), cell(c.explanation)] for c in REPORT_COLUMNS]
    columns = [[code_cell(name), cell(text)] for name, text in COLUMNS.items()]
    moments = [[code_cell(name), cell(MOMENT_MEANINGS[name])] for name in MOMENTS]
    splits = [[code_cell(name), cell(SPLIT_MEANINGS[name])] for name in SPLITS]
    parts = [
        "# All measures",
        "Each measure has one name and one definition. [Reading the report](../reading-the-report.md)"
        " explains the most important ones with an example.",
        "## Columns of a report's tables",
        table(["in the page", "in a terminal", "meaning"], report),
        "## Columns of metrics.jsonl",
        "One line for each round, split and kind of model: `run.curve(value=NAME)` returns a column"
        " over rounds. Columns that do not apply to a run are left out.",
        table(["column", "meaning"], columns),
        "## The ledger",
        "`ledger.bin` has the numbers of correct, all and predicted examples of each class, for"
        " each model, at each moment and on each split. `run.ledger` reads it.",
        table(["moment", "which model is evaluated"], moments),
        table(["split", "which examples"], splits),
        "## Functions of `remanence.metrics`",
        "They are pure functions of what a run recorded.",
    ]
    for module in metric_modules():
        functions = metric_functions(module)
        if not functions:
            continue
        short = module.__name__.removeprefix("remanence.")
        parts.append(f"### {short}\n\n{markdown(module.__doc__)}")
        for name, function in functions.items():
            head = f"{module.__name__}.{name}{inspect.signature(function)}"
            parts.append(f"::::{{py:function}} {head}\n{markdown(function.__doc__)}\n::::")
    return "\n\n".join(parts) + "\n"


def metric_modules() -> list[types.ModuleType]:
    """The modules whose functions define measures."""
    names = sorted(info.name for info in pkgutil.iter_modules(metrics.__path__))
    modules = [importlib.import_module(f"remanence.metrics.{name}") for name in names]
    return [module for module in modules if metric_functions(module)]


def metric_functions(module: types.ModuleType) -> dict[str, Any]:
    """The documented functions of a module of measures that have a doctest, which pins them."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and ">>>" in (value.__doc__ or "")
    }
