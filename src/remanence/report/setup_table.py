"""What was run: the conditions of the experiments behind a report, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from remanence.config import optimizer_call
from remanence.core.errors import InputError
from remanence.metrics.groups import Group, primary_model
from remanence.results.ledger import GLOBAL, Ledger
from remanence.results.run import LEDGER, Run

EXPERIMENT = (
    "data.name", "data.partition", "clients.count", "clients.sample", "model", "rounds",
    "drift.schedule", "drift.time_steps", "drift.concepts", "peers.topology", "local.epochs", "local.steps", "local.batch_size", "local.optimizer", "local.lr",
)  # fmt: skip
# where somebody's disks and machines are is nobody's business in a page that gets passed on
PRIVATE = ("data.dir", "ray.address")


def describe(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Facts with a heading; where runs differ, who had which."""
    facts: list[tuple[str, Callable[[Run], str]]] = [
        ("Data", lambda run: str(run.metadata.get("data") or run.config.data.name)),
        ("Clients", _describe_clients),
        ("Model", _describe_model),
        ("Local training", _describe_training),
        ("Rounds", _describe_rounds),
        ("Drift", _describe_drift),
        ("Attack", _describe_attack),
        ("Evaluated", partial(_describe_evaluation, {})),
        (
            "Computed",
            lambda run: (
                f"{run.metadata.get('engine') or run.config.engine}; device {run.config.device},"
                f" precision {run.config.precision}"
            ),
        ),
        ("Versions", _describe_versions),
    ]
    seeds = (
        "Seeds",
        _agree(
            groups,
            lambda group: ", ".join(str(run.config.seed) for run in group.runs) or "none yet",
        ),
    )
    told = [(heading, _agree_on_runs(groups, tell)) for heading, tell in facts]
    return [(heading, text) for heading, text in (*told[:6], seeds, *told[6:]) if text]


def list_settings(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Every key of the specs, by its dotted name."""
    specs = {
        run: _flatten(run.config.model_dump(mode="json")) for group in groups for run in group.runs
    }
    keys = dict.fromkeys(key for spec in specs.values() for key in spec if key not in PRIVATE)

    def tell(key: str, run: Run) -> str:
        return _write(specs[run].get(key))

    return [(key, _agree_on_runs(groups, partial(tell, key))) for key in keys]


def differences(groups: Sequence[Group]) -> list[str]:
    """Keys that make results from several folders different experiments."""
    if len({group.home for group in groups}) < 2:
        return []
    specs = [_flatten(run.config.model_dump(mode="json")) for group in groups for run in group.runs]
    return [key for key in EXPERIMENT if len({_write(spec.get(key)) for spec in specs}) > 1]


def _describe_clients(run: Run) -> str:
    spec = run.config
    count = run.metadata.get("clients") or spec.clients.count
    sample = "all of them every round"
    if spec.clients.sample is not None:
        sample = (
            f"{spec.clients.sample} of them every round"
            if isinstance(spec.clients.sample, int)
            else f"{spec.clients.sample:.0%} of them every round"
        )
    if spec.clients.sampling == "poisson":
        sample += " on average, each by a coin of its own"
    kept = (
        f"; {spec.data.validation:.0%} of each client's rows kept for validation"
        if spec.data.validation
        else ""
    )
    if run.metadata.get("clusters") and spec.drift.rows == "pools":
        return f"{count}, {sample}; rows drawn from a pool for each cluster"
    return f"{count}, {sample}; partition {spec.data.partition}{kept}"


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
    return (
        f"{amount} {unit}{'' if amount == 1 else 's'} a round, batches of {local.batch_size},"
        f" {optimizer_call(run.config)}, schedule {local.schedule}"
    )


def _describe_rounds(run: Run) -> str:
    steps = len(run.metadata.get("clusters") or ())
    return (
        f"{run.config.rounds} in each of {steps} time steps"
        if steps > 1
        else str(run.config.rounds)
    )


def _describe_drift(run: Run) -> str:
    """The schedule and what each cluster holds; empty, and so left out, where nothing drifts."""
    if not run.metadata.get("clusters"):
        return ""
    held = "; ".join(
        f"cluster {index}: {concept}"
        for index, concept in enumerate(run.metadata.get("concepts") or ())
    )
    notes = "".join(f"; {note}" for note in run.metadata.get("drift_notes") or ())
    return f"{run.config.drift.schedule}{f' ({held})' if held else ''}{notes}"


def _describe_evaluation(sizes: dict[str, int], run: Run) -> str:
    """`sizes` remembers test sets by data, so that of many runs on the same data one ledger is
    read.
    """
    data = run.config.data.name
    if data not in sizes:
        sizes[data] = _count_test_examples(run)
    size = f" of {sizes[data]:,} examples" if sizes[data] else ""
    every = (
        "every round"
        if run.config.record.every == 1
        else f"every {run.config.record.every} rounds and after the last"
    )
    also = (
        "; and on the validation rows of all clients"
        if run.config.record.validation and run.config.data.validation
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
    try:
        records = Ledger.read(run.folder / LEDGER).select(split="test", model=GLOBAL)
    except InputError:  # a run without a ledger still has its metrics
        return 0
    return int(records["total"][-1].sum()) if len(records) else 0


def _describe_versions(run: Run) -> str:
    return (
        ", ".join(
            f"{name} {run.metadata[name]}"
            for name in ("remanence", "torch", "numpy", "python")
            if name in run.metadata
        )
        or "not written down"
    )


def _agree_on_runs(groups: Sequence[Group], tell: Callable[[Run], str]) -> str:
    """What the runs of every group agree on; runs of one group differ in their seed alone."""
    return _agree(
        [group for group in groups if group.runs],
        lambda group: "; ".join(dict.fromkeys(tell(run) for run in group.runs)),
    )


def _agree(groups: Sequence[Group], tell: Callable[[Group], str]) -> str:
    who: dict[str, list[str]] = {}
    for group in groups:
        who.setdefault(tell(group), []).append(group.label)
    if len(who) == 1:
        return next(iter(who))
    return "; ".join(f"{text} ({', '.join(labels)})" for text, labels in who.items())


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
    """A setting as people write it."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
