"""`remanence flower check`: what a site would send in an experiment, printed before it joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remanence.core import pytree
from remanence.core.errors import RemanenceError
from remanence.flower.deployment import (
    build_coordinator,
    check_deployable,
    describe_examples,
    site_config,
)
from remanence.flower.experiment_check import NamesFileOrCode, read_at_site
from remanence.flower.policy import check_evaluation, sends_exactly
from remanence.flower.refusals import Declined
from remanence.flower.settings import Policy, read_site
from remanence.flower.site import Site
from remanence.flower.site_data import SiteTask
from remanence.flower.site_work import check_sizes
from remanence.flower.wire import WireMessage
from remanence.training.task import TrainingTask


def check_site(site_path: Path, experiment_path: Path) -> list[str]:
    """Describe what a site would send.

    Args:
        site_path: A site.toml.
        experiment_path: The experiment it would take part in.

    Returns:
        Sentences; the last one begins with `declines` if the site would decline.
    """
    site = Site(read_site(site_path))
    try:
        config = check_deployable(read_at_site(experiment_path, site.policy.code))
    except NamesFileOrCode as error:
        return [f"declines (policy): {error}"]
    experiment, _ = build_coordinator(config)
    header = {
        "kind": "ping",
        "run": "preflight",
        "experiment": site_config(experiment.config),
        "examples": describe_examples(experiment),
    }
    message = WireMessage(header, {})
    try:
        site.handle(message)
    except RemanenceError as error:  # in full, because nothing leaves the site here
        code = error.code if isinstance(error, Declined) else "setup"
        return [f"declines ({code}): {error}"]
    except Exception as error:  # of a function that site.toml names
        return [f"declines (failed): {type(error).__name__}: {error}"]
    info = site.answer(message).header
    site_task = next(iter(site.tasks.values()))
    lines = [
        *_describe_sizes(info),
        *_describe_reply(experiment.task, site.policy),
        _describe_evaluation(site, site_task),
    ]
    try:
        check_sizes(site.policy, site_task.task, [*site.file.clients])
    except Declined as declined:
        lines.append(f"declines to train ({declined.code}): {declined.reason}")
    return lines


def _describe_sizes(info: dict[str, Any]) -> list[str]:
    lines = [f"site {info['site']} sends its name, its clients and their numbers of examples"]
    for client, steps in info["sizes"].items():
        (train, valid), test = steps[0], steps[-1][0]
        lines.append(
            f"  client {client}: {train} training, {valid} validation and {test} test examples"
        )
    return lines


def _describe_reply(task: TrainingTask, policy: Policy) -> list[str]:
    initial = task.model.initial
    model = {
        "params": pytree.select_keys(initial.params, task.communicated_params()),
        "buffers": pytree.select_keys(initial.buffers, task.communicated_buffers()),
    }
    exactly = sends_exactly(policy, task.method)
    loss = (
        ", the number of examples and the mean loss" if exactly else " and the number of examples"
    )
    lines = [
        f"in a round it sends, for each client: {pytree.nbytes(model)} bytes of trained"
        f" parameters{loss}"
    ]
    for p in task.method.parts:
        for path, x in pytree.flatten(task.payload_spec().get(p.name, {})).items():
            leaf = f"{p.name}{pytree.SEPARATOR}{path}".replace(pytree.SEPARATOR, ".")
            reveals = p.disclosure(path).reveals.replace("_", " ")
            lines.append(f"  {leaf}: {x.numel()} numbers, which reveal {reveals}")
    return lines


def _describe_evaluation(site: Site, site_task: SiteTask) -> str:
    policy = site.policy
    try:
        noised = check_evaluation(policy, site_task.task.method, site_task.own_statistics)
    except Declined as declined:
        return f"it sends no counts of predictions: {declined.reason}"
    suppress = f", those below {policy.suppress} as 0" if policy.suppress else ""
    if not noised:
        return (
            f"it sends exact counts of correct and wrong predictions by class{suppress}, and"
            " summed losses"
        )
    return (
        f"it sends counts of correct and wrong predictions by class, with noise{suppress}: epsilon"
        f" {policy.epsilon:g} for each model and client, until {policy.budget:g} is spent on a"
        " client"
    )
