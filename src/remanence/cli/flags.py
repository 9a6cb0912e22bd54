"""The flags of an experiment: one table, added to every command that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from remanence import config

# name: type, help
HELP: dict[str, tuple[Any, str]] = {
    "method": (str, 'parts joined by +, such as "fedprox(mu=0.1)+wsm"'),
    "data": (str, "a source such as digits, an .npz file or a folder of images"),
    "data_dir": (str, "where data sets lie; default: the variable REMANENCE_DATA"),
    "model": (str, "mlp, cnn, lenet, resnet18 ... or package.module:Class"),
    "clients": (int, "how many clients there are"),
    "partition": (str, 'who gets which rows, such as "dirichlet(alpha=0.1)"'),
    "sample": (str, "clients a round: a number, or a fraction such as 0.1"),
    "availability": (str, 'who answers when, such as "random(offline=0.1)"'),
    "drift": (str, 'who is in which cluster when, such as "random(clusters=2)"'),
    "time_steps": (int, "how often the data may change; rounds are counted per time step"),
    "concepts": (str, "what each cluster's data are, such as \"label(groups='0 1|2 3')\""),
    "samples": (int, "training rows a client draws at a time step"),
    "topology": (str, 'who can reach whom without a server, such as "ring(neighbors=2)"'),
    "patience": (int, "rounds without gain after which a client without a server stops"),
    "epochs": (int, "local passes over a client's data in a round"),
    "steps": (int, "local steps instead of epochs"),
    "batch_size": (int, "examples a step"),
    "lr": (float, "learning rate of the clients"),
    "optimizer": (str, 'sgd, adam or adamw, such as "sgd(momentum=0.9)"'),
    "schedule": (str, 'learning rate over rounds, such as "exponential(decay=0.99)"'),
    "buffers": (str, "statistics of batch norm: average, local or frozen"),
    "rounds": (int, "rounds to train"),
    "seed": (int, "of everything that is random"),
    "validation": (float, "share of each client's rows kept for validation"),
    "public": (int, "training rows held out for the server"),
    "min_replies": (int, "with fewer good replies a round is abandoned"),
    "record_every": (int, "rounds between evaluations"),
    "record_local": (bool, "also evaluate every client's model"),
    "attack": (str, 'hostile clients, such as "sign_flip(fraction=0.1)"'),
    "engine": (str, "auto, loop, stacked, processes or ray"),
    "device": (str, "auto, cpu or cuda"),
    "precision": (str, "fp32, fp64, tf32 or bf16"),
    "deterministic": (bool, "the same bits on CUDA every time"),
}


def with_flags(
    without: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the flags of an experiment to a command that takes them as `**flags`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        added = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    kind | None,
                    typer.Option(
                        "--" + name.replace("_", "-"),
                        help=text,
                        show_default=False,
                        rich_help_panel="Experiment",
                    ),
                ],
            )
            for name, (kind, text) in HELP.items()
            if name not in without
        ]

        def call(**arguments: Any) -> None:
            mine = {p.name: arguments.pop(p.name) for p in own}
            command(**mine, flags=read_flags(arguments))

        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*(p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != "flags"), *added]
        )
        call.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        own[:] = [p for p in own if p.name != "flags"]
        return call

    return decorate


def read_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags by the key they stand for; --sample is a number or a fraction."""
    if flags.get("sample") is not None:
        flags["sample"] = config.parse_value(flags["sample"])
    return config.changes_from_flags(flags)
