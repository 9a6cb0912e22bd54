"""`remanence flower`: federations of real sites. Commands import Flower only if they need it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from remanence.cli.options import AllowCode
from remanence.core.errors import InputError

app = typer.Typer(
    help="Federations of real sites that keep their data, over Flower.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the app to write.")],
    experiments: Annotated[
        list[Path],
        typer.Option(
            "--config", help="Experiment file. Repeated: experiments that run one after the other."
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", help="Name of the app. Default: the name of the folder.")
    ] = "",
    allow_code: AllowCode = False,
) -> None:
    """Write a Flower app that runs an experiment file. Launch it with flwr run; running it again
    continues the experiment.
    """
    from remanence.flower.app_files import write_app

    for path in write_app(folder, experiments, name, allow_code):
        print(path)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Output folder.")] = Path("flower-quickstart"),
    method: Annotated[
        str, typer.Option("--method", help="Method that needs no public data.")
    ] = "fedavg+wsm",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds to train.")] = 3,
    sites: Annotated[
        int, typer.Option("--sites", help="Number of sites, each with two clients.")
    ] = 2,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Use neither TLS nor authentication, to measure their cost. Loopback only.",
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier quickstart in the output folder."),
    ] = False,
) -> None:
    """Run a coordinator and sites on this machine, with certificates and registered keys,
    train on digits, and stop all of them. They open ports on the loopback network interface.
    """
    require_flower()
    from remanence.analysis.results import load
    from remanence.cli.summary import print_summary
    from remanence.flower.quickstart import run_quickstart

    done = load(
        run_quickstart(
            out,
            method,
            rounds,
            sites,
            not insecure,
            overwrite,
            lambda line: print(line, flush=True),
        )
    )
    print_summary(done, 0, False)


@app.command()
def certificates(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Output folder. A certificate authority that it already contains is reused."
        ),
    ],
    host: Annotated[
        list[str],
        typer.Option(
            "--host",
            help="Name or address at which sites reach the coordinator. May be repeated.",
        ),
    ],
) -> None:
    """Create a certificate authority and a certificate for the coordinator. Give ca.crt to every
    site; ca.key is only needed to create another certificate.
    """
    require_flower()
    from remanence.flower.certificates import make_certificates

    make_certificates(folder, host)
    print(
        f"{folder}: ca.crt for every site, server.crt and server.key for the SuperLink; keep"
        " ca.key in another place"
    )


@app.command()
def key(
    folder: Annotated[Path, typer.Argument(help="Output folder, at the site.")],
    name: Annotated[str, typer.Option("--name", help="Name of the site.")],
) -> None:
    """Create the key pair of a site, at the site. Register the public key at the coordinator:
    flwr supernode register NAME.key.pub.
    """
    require_flower()
    from remanence.flower.certificates import make_site_key

    private = make_site_key(folder, name)
    print(f"keep {private} at the site; register {private}.pub at the coordinator")


@app.command()
def check(
    site: Annotated[Path, typer.Argument(help="The site.toml of the site.")],
    experiment: Annotated[Path, typer.Argument(help="Experiment file.")],
) -> None:
    """Print what a site would reveal in an experiment, or why it would decline, before it joins."""
    from remanence.flower.preflight import check_site

    lines = check_site(site, experiment)
    print("\n".join(lines))
    if lines[-1].startswith("declines"):
        raise typer.Exit(2)


@app.command()
def audit(
    site: Annotated[Path, typer.Argument(help="The site.toml of the site.")],
    experiment: Annotated[
        Path | None,
        typer.Argument(help="Experiment file. Default: every method, with small settings."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one row a field.")] = False,
) -> None:
    """Send every message that a coordinator can make to a site's answering code, in this process,
    and print how each field of the answers leaves the site. The site's budget and state folder
    stay as they are.
    """
    from remanence.flower.audit import audit as audit_site
    from remanence.flower.audit import group_rows

    rows = audit_site(site, experiment)
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("message", "field", "reveals", "leaves", "method")
    for row in group_rows(rows):
        table.add_row(*row)
    Console().print(table)
    print("The site answered with a copy of its state: nothing was sent, spent or stored.")


def require_flower() -> None:
    """Raise `InputError` if the package flwr is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise InputError(
            f'a federation needs the package flwr ({error}): pip install "remanence-fl[flower]"'
        ) from error
