"""`remanence flower audit`: what a site answers to every message, by its own code.

The site answers in this process, with a temporary state folder: nothing is sent, nothing is spent
from its budget, and nothing is written to its state folder.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from remanence.config import Experiment, parse_experiment
from remanence.core import pytree
from remanence.core.compose import ComposedMethod
from remanence.core.declarations import (
    AT_CLIENT,
    EXAMPLE,
    LABEL_COUNTS,
    MODEL,
    REPLY,
    RESPONSE_HEADER,
)
from remanence.core.errors import InputError
from remanence.core.safe_path import SafePath
from remanence.data.dataset import ArrayDataset, DatasetSplit
from remanence.experiment.build import BuiltExperiment, build
from remanence.flower.budget_file import BUDGET, write_spent
from remanence.flower.deployment import build_coordinator, check_deployable
from remanence.flower.experiment_check import read_at_site
from remanence.flower.sample_requests import make_requests
from remanence.flower.settings import SIMULATED_SHARE, Policy, SiteFile, read_site
from remanence.flower.site import Site
from remanence.flower.site_files import load_client
from remanence.flower.wire import NOISED, WireMessage
from remanence.methods import METHODS

logger = logging.getLogger("remanence")
CLIENTS = 12  # of an experiment that is made up, unless the site has higher numbers
PUBLIC, EXAMPLES = 16, 16  # examples of the coordinator and of a client


class AuditRow(NamedTuple):
    """How one field of one answer leaves the site."""

    method: str
    message: str
    field: str
    reveals: str  # one of `core.declarations.REVEALS`; "": a declined message has no fields
    leaves: str  # "as it is", "noised ...", "withheld" or "declined ..."


def audit(site_path: Path, experiment_path: Path | None) -> list[AuditRow]:
    """Send every message to a site's answering code.

    Args:
        site_path: A site.toml.
        experiment_path: An experiment; None: every registered method, in a small experiment with
            examples like the site's.

    Returns:
        What leaves and what does not.
    """
    file = read_site(site_path)
    level, found = logger.level, list[AuditRow]()
    logger.setLevel(logging.CRITICAL)  # the site's own log of what it declines
    try:
        for name, experiment in _experiments(file, experiment_path):
            if isinstance(experiment, InputError):
                found.append(AuditRow(name, "", "", "", f"not audited: {experiment}"))
            else:
                found += _audit_method(file, name, experiment)
    finally:
        logger.setLevel(level)
    return found


def group_rows(found: list[AuditRow]) -> list[tuple[str, ...]]:
    """Rows of a table: one for all messages of a method in which a field leaves alike, and for all
    methods of which that is true.
    """
    messages: dict[tuple[str, ...], dict[str, None]] = {}
    for row in found:
        messages.setdefault((row.method, *row[2:]), {})[row.message] = None
    methods: dict[tuple[str, ...], list[str]] = {}
    for (method, *cells), names in messages.items():
        methods.setdefault((", ".join(names), *cells), []).append(method)
    every = list(dict.fromkeys(row.message for row in found if row.message))
    audited = list(dict.fromkeys(row.method for row in found if row.message))
    return [
        (
            _shorten(messages.split(", "), every),
            *cells,
            _shorten(names, audited),
        )
        for (messages, *cells), names in methods.items()
    ]


def _shorten(names: list[str], every: list[str]) -> str:
    """The names, or those that are missing where these are fewer."""
    missing = [name for name in every if name not in names]
    if len(missing) < len(names) and len(names) > 1:
        return f"all but {', '.join(missing)}" if missing else "all"
    return ", ".join(names)


def _audit_method(file: SiteFile, name: str, experiment: BuiltExperiment) -> Iterator[AuditRow]:
    method, own = experiment.task.method, list(file.clients)
    foreign = next(n for n in range(experiment.task.info.num_clients + 1) if n not in own)
    with tempfile.TemporaryDirectory(prefix="remanence-audit-") as folder:
        site = Site(_with_copied_state(file, Path(folder)))
        for message, request in make_requests(experiment, own, foreign).items():
            _copy_budget(file, site.folder)  # no answer is declined for what another one spent
            answer = site.answer(request)
            for field, reveals, leaves in _describe(answer, method, site.policy):
                yield AuditRow(name, message, field, reveals, leaves)


def _describe(
    answer: WireMessage, method: ComposedMethod, policy: Policy
) -> Iterator[tuple[str, str, str]]:
    """The fields of an answer, what each reveals and how it leaves."""
    header = answer.header
    if header["kind"] == "declined":
        yield "", "", f"declined ({header['code']}): {header['reason']}"
    for name in sorted(header):
        yield name, RESPONSE_HEADER[name].reveals, "as it is"
    for name in sorted({_leaf(path) for path in answer.arrays}):
        yield name, *_describe_array(name, method, policy)
    for name in header.get("withheld", ()):
        yield name, {**RESPONSE_HEADER, **REPLY}[name].reveals, "withheld"


def _leaf(path: str) -> str:
    """A row for each leaf of a payload, and for all parameters or buffers together."""
    return path if path.startswith("payload") else path.partition(pytree.SEPARATOR)[0]


def _describe_array(name: str, method: ComposedMethod, policy: Policy) -> tuple[str, str]:
    root, _, path = name.partition(pytree.SEPARATOR)
    reveals = REPLY[root].reveals
    if root == NOISED:
        noise = f"noised: epsilon {policy.epsilon:g} a model and client"
        return reveals, f"{noise}, of a budget of {policy.budget:g} a client"
    if root == "payload":
        owner, _, leaf = path.partition(pytree.SEPARATOR)
        part = next(p for p in method.parts if p.name == owner)
        reveals = part.disclosure(leaf).reveals
        if part.protects(leaf):
            return reveals, f"noised by {owner}"
    covering = {LABEL_COUNTS: LABEL_COUNTS, "model": MODEL}.get(reveals)
    for part, mechanism in method.mechanisms:
        where = mechanism.unit, mechanism.drawn_at, mechanism.covers
        if where == (EXAMPLE, AT_CLIENT, covering) and mechanism.noise > 0:
            return reveals, f"noised by {part.name}"
    return reveals, "as it is"


def _experiments(
    file: SiteFile, experiment_path: Path | None
) -> Iterator[tuple[str, BuiltExperiment | InputError]]:
    """By method; an error where a method cannot be used in the small experiment."""
    if experiment_path is not None:
        config = check_deployable(read_at_site(experiment_path, file.settings.policy.code))
        experiment, _ = build_coordinator(config)
        yield config.method, experiment
        return
    config = _small_config(file)
    simulated = SIMULATED_SHARE in file.clients.values()
    source = None
    if not simulated:
        like = load_client(file, config, min(file.clients))
        source = _placeholder(like, PUBLIC + EXAMPLES * (config.clients.count or CLIENTS))
    for name in METHODS:
        if METHODS[name]().centralized:
            continue
        try:
            yield name, build(config.model_copy(update={"method": name}), source=source)
        except InputError as error:
            yield name, error


def _small_config(file: SiteFile) -> Experiment:
    policy = file.settings.policy
    settings = {
        "method": "fedavg",
        "engine": "sequential",
        "device": "cpu",
        "data.name": "digits",
        "data.public": PUBLIC,
        "data.partition": "iid",
        "clients.count": max(CLIENTS, max(file.clients) + 2),
        "local.steps": max(2, policy.min_steps),
        "local.batch_size": 8,
    }
    return parse_experiment({}, settings)


def _placeholder(like: ArrayDataset, count: int) -> ArrayDataset:
    """A coordinator's dataset, of zeros, with examples like the site's."""
    x = np.zeros((count, *like.shape), dtype=like.train.x.dtype)
    split = DatasetSplit(x, np.arange(count, dtype=np.int64) % len(like.classes))
    return ArrayDataset("placeholder", like.kind, like.classes, split, split)


def _with_copied_state(file: SiteFile, folder: Path) -> SiteFile:
    """The same site with another state folder."""
    settings = file.settings.model_copy(update={"state": str(folder)})
    return SiteFile(file.path, settings)


def _copy_budget(file: SiteFile, folder: Path) -> None:
    """Make the copy of the state know as much about the spent epsilon as the state does."""
    used, copy = SafePath(file.state), SafePath(folder) / BUDGET
    try:
        copy.write((used / BUDGET).read())
    except FileNotFoundError:
        if used.list_names():
            copy.delete()
        else:
            write_spent(folder, {})
