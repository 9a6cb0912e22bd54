"""Names what goes wrong in training, in the round in which it happens and once a run: training
diverges, local training changes nothing, no reply can be used, every client has stopped.

What follows from the settings alone is named before the first round (`experiment/hints.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remanence.config import optimizer_call
from remanence.experiment.build import BuiltExperiment
from remanence.experiment.hints import count_one_class_clients, parts_needing_classes
from remanence.results.outcome import DivergenceDetector, why_nothing_learned


class RoundChecks:
    """Checks the lines of metrics.jsonl as they are written."""

    def __init__(self, experiment: BuiltExperiment):
        self.experiment, self.named = experiment, set[str]()
        self.divergence = DivergenceDetector(experiment.adversary.clients.tolist())
        flat = parts_needing_classes(experiment)
        # these have been named before the first round
        self.expected_unmoved = count_one_class_clients(experiment) if flat else 0

    def check(self, line: dict[str, Any]) -> list[str]:
        """The sentences about a round that no earlier round had."""
        found = {kind: text for kind, text in self._find(line) if kind not in self.named}
        self.named |= set(found)
        return [f"round {line['round']}: {text}" for text in found.values()]

    def _find(self, line: dict[str, Any]) -> Iterator[tuple[str, str]]:
        config, clients = self.experiment.config, self.experiment.task.info.num_clients
        if diverged := self.divergence.check(line):
            yield "diverged", f"training diverged, {diverged}: {self._cure()}"
        stopped, unmoved = line.get("early_stopped") == clients, line["unmoved"]
        if not (diverged or stopped or line["replies"]) and (why := why_nothing_learned([line])):
            yield "no reply", f"no update could be used: {why}"
        rate = self.experiment.optimizer_hparams(line["round"])["lr"]
        if rate and unmoved > self.expected_unmoved:
            yield (
                "unmoved",
                f"the local training of {unmoved} of {line['replies']} clients changed nothing: its"
                f" gradient is 0, or the learning rate {rate:.3g} is too small for the precision;"
                " raise local.lr, or change the loss or the data",
            )
        if stopped:
            until = " until their data change" if config.drift.time_steps > 1 else ""
            yield (
                "stopped",
                f"all {clients} clients have stopped early, and no model changes any more{until}:"
                f" raise peers.patience (now {config.peers.patience}) or lower rounds",
            )

    def _cure(self) -> str:
        server = self.experiment.task.method.part_filling("server_update")
        more = f", or that of {server.name}" if server is not None else ""
        if not self.experiment.is_decentralized:  # which cannot be combined with an aggregator
            more += ", or limit the updates with norm_clip or dp_sgd(noise=0)"
        return f"lower the learning rate (now {optimizer_call(self.experiment.config)}){more}"
