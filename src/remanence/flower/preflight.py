"""`remanence flower check`: what a site would say and give away in an experiment, told before
it joins.
"""

from __future__ import annotations

from pathlib import Path

from remanence.config import parse_experiment, read_file
from remanence.core import pytree
from remanence.flower.coordinator import (
    build_coordinator,
    check_deployable,
    describe_examples,
    describe_spec,
)
from remanence.flower.settings import read_site
from remanence.flower.site import Site
from remanence.flower.wire import WireMessage


def check_site(site_path: Path, experiment_path: Path) -> list[str]:
    """-> sentences; the last one begins with `declines` where the site would say no"""
    site = Site(read_site(site_path))
    experiment, description = build_coordinator(
        check_deployable(parse_experiment(read_file(experiment_path)))
    )
    preamble = {
        "run": "inspection",
        "spec": describe_spec(experiment.config),
        "data": describe_examples(experiment, description),
    }
    told = site.answer(WireMessage({**preamble, "kind": "hello"}, {})).header
    if told["kind"] == "declined":
        return [f"declines ({told['code']}): {told['reason']}"]
    policy, task = site.policy, experiment.task
    lines = [f"site {told['site']}: tells its name, its clients and how many rows they have"]
    for client, steps in told["sizes"].items():
        (train, valid), test = steps[0], steps[-1][0]
        lines.append(
            f"  client {client}: {train} training, {valid} validation and {test} test rows"
        )
    initial = task.model.initial
    model = {
        "params": pytree.select_keys(initial.params, task.communicated_params()),
        "buffers": pytree.select_keys(initial.buffers, task.communicated_buffers()),
    }
    lines.append(
        f"a round sends up, for each client: {pytree.nbytes(model)} bytes of trained"
        " parameters, its number of rows, its mean loss"
    )
    for p in task.method.parts:
        for path, x in pytree.flatten(task.payload_spec().get(p.name, {})).items():
            leaf = f"{p.name}{pytree.SEPARATOR}{path}".replace(pytree.SEPARATOR, ".")
            reveals = p.disclosure(path).reveals.replace("_", " ")
            lines.append(f"  {leaf}: {x.numel()} numbers, which reveal {reveals}")
    if not policy.evaluate:
        lines.append("gives no counts of right and wrong predictions")
    else:
        how = f", those below {policy.suppress} as 0" if policy.suppress else ""
        noise = f", with noise of epsilon {policy.epsilon:g} an answer" if policy.epsilon else ""
        lines.append(
            f"sends up counts of right and wrong predictions by class{how}{noise}, and summed"
            " losses"
        )
    return lines
