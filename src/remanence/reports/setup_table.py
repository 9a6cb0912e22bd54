"""The section "Setup" of a report: what was run, in words, and all settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from remanence.config import optimizer_call
from remanence.metrics.cached import ledger_of
from remanence.metrics.groups import Group, primary_model
from remanence.results.ledger import GLOBAL
from remanence.results.run import Run

# settings that must be equal for methods to be comparable
EXPERIMENT = (
    "data.name",
    "data.partition",
    "clients.count",
    "clients.sample",
    "clients.sampling",
    "model",
    "rounds",
    "drift.schedule",
    "drift.time_steps",
    "drift.concepts",
    "peers.topology",
    "local.epochs",
    "local.steps",
    "local.batch_size",
    "local.optimizer",
    "local.lr",
)
# added to the number of clients, by kind of sampling
SAMPLING = {"fixed": "", "poisson": " on average, each client sampled independently"}
# paths and addresses of the user's machines are left out of the page, which may be shared
PRIVATE = ("data.dir", "ray.address")


def describe(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Texts with a heading; where methods differ, with the methods that each text is about."""
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("Data", lambda run: str(run.metadata.get("data") or run.config.data.name)),
        ("Clients", _describe_clients),
        ("Model", _describe_model),
        ("Local training", _describe_training),
        ("Rounds", _describe_rounds),
        ("Drift", _describe_drift),
        ("Attack", _describe_attack),
        ("Evaluation", partial(_describe_evaluation, {})),
        (
            "Engine",
            lambda run: (
                f"{run.metadata.get('engine') or run.config.engine}; device {run.config.device},"
                f" precision {run.config.precision}"
            ),
        ),
        ("Versions", _describe_versions),
    ]
    seeds = (
        "Seeds",
        _merge(
            groups,
            lambda group: ", ".join(str(run.config.seed) for run in group.runs) or "none yet",
        ),
    )
    texts = [(heading, _merge_runs(groups, describe_run)) for heading, describe_run in rows]
    return [(heading, text) for heading, text in (*texts[:6], seeds, *texts[6:]) if text]


def list_settings(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Every setting by its dotted name."""
    configs = {
        run: _flatten(run.config.model_dump(mode="json")) for group in groups for run in group.runs
    }
    keys = dict.fromkeys(key for config in configs.values() for key in config if key not in PRIVATE)

    def value_of(key: str, run: Run) -> str:
        return _write(configs[run].get(key))

    return [(key, _merge_runs(groups, partial(value_of, key))) for key in keys]


def differences(groups: Sequence[Group]) -> list[str]:
    """Settings of the experiment in which results from several folders differ."""
    if len({group.home for group in groups}) < 2:
        return []
    configs = [
        _flatten(run.config.model_dump(mode="json")) for group in groups for run in group.runs
    ]
    return [key for key in EXPERIMENT if len({_write(config.get(key)) for config in configs}) > 1]


def _describe_clients(run: Run) -> str:
    config = run.config
    count = run.metadata.get("clients") or config.clients.count
    sample = "all of them every round"
    if config.clients.sample is not None:
        sample = (
            f"{config.clients.sample} of them every round"
            if isinstance(config.clients.sample, int)
            else f"{config.clients.sample:.0%} of them every round"
        )
    sample += SAMPLING.get(config.clients.sampling, f", sampling {config.clients.sampling}")
    kept = (
        f"; {config.data.validation:.0%} of each client's examples held out for validation"
        if config.data.validation
        else ""
    )
    if run.metadata.get("clusters") and config.drift.source == "pools":
        return f"{count}, {sample}; examples drawn from a pool for each cluster"
    named = config.data.partition  # the data of sites are as they are
    return f"{count}, {sample}{f'; partition {named}' if named else ''}{kept}"


def _describe_attack(run: Run) -> str:
    if run.config.attack.strip() in ("", "none"):
        return ""
    return f"{run.config.attack}, by clients {run.metadata.get('attackers', 'unknown')}"


def _describe_model(run: Run) -> str:
    parameters = run.metadata.get("parameters")
    return (run.config.model or "the default for the data") + (
        f", {parameters:,} parameters" if isinstance(parameters, int) else ""
    )


def _describe_training(run: Run) -> str:
    local = run.config.local
    amount, unit = (local.steps, "step") if local.steps else (local.epochs, "epoch")
    with run.settings_named():
        optimizer = optimizer_call(run.config)
    return (
        f"{amount} {unit}{'' if amount == 1 else 's'} a round, batches of {local.batch_size},"
        f" {optimizer}, schedule {local.schedule}"
    )


def _describe_rounds(run: Run) -> str:
    steps = len(run.metadata.get("clusters") or ())
    return (
        f"{run.config.rounds} in each of {steps} time steps"
        if steps > 1
        else str(run.config.rounds)
    )


def _describe_drift(run: Run) -> str:
    """The drift schedule and the data of each cluster; empty without drift."""
    if not run.metadata.get("clusters"):
        return ""
    held = "; ".join(
        f"cluster {index}: {concept}"
        for index, concept in enumerate(run.metadata.get("concepts") or ())
    )
    notes = "".join(f"; {note}" for note in run.metadata.get("drift_notes") or ())
    return f"{run.config.drift.schedule}{f' ({held})' if held else ''}{notes}"


def _describe_interval(rounds: int) -> str:
    return "every round" if rounds == 1 else f"every {rounds} rounds and after the last"


def _describe_evaluation(sizes: dict[str, int], run: Run) -> str:
    """Which model is evaluated on what; `sizes` caches the size of the test set by data."""
    data = run.config.data.name
    if data not in sizes:
        sizes[data] = _count_test_examples(run)
    size = f" of {sizes[data]:,} examples" if sizes[data] else ""
    record = run.config.record
    every = f"after round {record.first}, " * (record.first > 0) + _describe_interval(record.every)
    if record.local and record.local_every:
        every += f"; the clients' models after round 1, {_describe_interval(record.local_every)}"
    also = (
        "; and on the validation examples of all clients"
        if record.validation and run.config.data.validation
        else ""
    )
    if primary_model(run) == "personal":
        own = (
            ", each on test examples of its own cluster"
            if run.metadata.get("clusters")
            else " on the whole test set"
        )
        return f"the clients' own models, the best on validation so far{own}, {every}"
    each = (
        ", by cluster and weighted by the clients in each" if run.metadata.get("clusters") else ""
    )
    return f"the global model on the whole test set{size}{each}, {every}{also}"


def _count_test_examples(run: Run) -> int:
    ledger = ledger_of(run)
    if ledger is None:  # the size is unknown
        return 0
    records = ledger.select(split="test", model=GLOBAL)
    return int(records["total"][-1].sum()) if len(records) else 0


def _describe_versions(run: Run) -> str:
    return (
        ", ".join(
            f"{name} {run.metadata[name]}"
            for name in ("remanence", "torch", "numpy", "python")
            if name in run.metadata
        )
        or "not recorded"
    )


def _merge_runs(groups: Sequence[Group], describe_one: Callable[[Run], str]) -> str:
    """One text for all groups, or a text for each; runs of a group differ only in their seed."""
    return _merge(
        [group for group in groups if group.runs],
        lambda group: "; ".join(dict.fromkeys(describe_one(run) for run in group.runs)),
    )


def _merge(groups: Sequence[Group], describe_one: Callable[[Group], str]) -> str:
    """One text for all groups, or each text with the labels of its groups if it is no label."""
    labels_of: dict[str, list[str]] = {}
    for group in groups:
        labels_of.setdefault(describe_one(group), []).append(group.label)
    if len(labels_of) == 1:
        return next(iter(labels_of))
    return "; ".join(
        text if labels == [text] else f"{text} ({', '.join(labels)})"
        for text, labels in labels_of.items()
    )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            _flatten(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{name}": value}
        )
    return flat


def _write(value: Any) -> str:
    """A value as text."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
