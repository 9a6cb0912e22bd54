"""`remanence flower`: real federations. Thin, like `main.py`; Flower and torch are imported only
by commands that need them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remanence.core.errors import InputError

app = typer.Typer(
    help="Real federations: sites that keep their data, carried by Flower.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="the app to write")],
    experiments: Annotated[
        list[Path],
        typer.Option("--config", help="an experiment file; several are run one after the other"),
    ],
    name: Annotated[str, typer.Option("--name", help="of the app; default: the folder's")] = "",
) -> None:
    """Write a ready Flower app around an experiment file: flwr run it, and again to go on with
    it.
    """
    from remanence.flower.app_files import write_app

    for path in write_app(folder, experiments, name):
        print(path)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option("--out", help="the folder for everything it writes")] = Path(
        "flower-quickstart"
    ),
    method: Annotated[
        str, typer.Option("--method", help="any method that needs no public set")
    ] = "fedavg+wsm",
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 3,
    sites: Annotated[int, typer.Option("--sites", help="each with two clients")] = 2,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="without TLS and authentication: on loopback alone, to see what they cost",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an earlier quickstart in that folder")
    ] = False,
) -> None:
    """Start a coordinator and sites on this machine, with certificates and registered keys,
    train on digits, and end everything.
    """
    require_flower()
    from remanence.cli.summary import print_summary
    from remanence.flower.quickstart import run_quickstart

    print_summary(
        run_quickstart(
            out,
            method,
            rounds,
            sites,
            not insecure,
            overwrite,
            lambda line: print(line, flush=True),
        ),
        False,
        False,
    )


@app.command()
def certificates(
    folder: Annotated[
        Path,
        typer.Argument(
            help="where they are written; an authority that is there already is used again"
        ),
    ],
    host: Annotated[
        list[str],
        typer.Option(
            "--host",
            help="a name or address under which sites reach the coordinator; may be repeated",
        ),
    ],
) -> None:
    """Make an authority and a certificate for the coordinator. ca.crt goes to every site;
    ca.key is needed again for the next certificate only.
    """
    require_flower()
    from remanence.flower.certificates import make_certificates

    make_certificates(folder, host)
    print(
        f"{folder}: ca.crt for every site, server.crt and server.key for the SuperLink; keep"
        " ca.key elsewhere"
    )


@app.command()
def key(
    folder: Annotated[Path, typer.Argument(help="where it is written, at the site")],
    name: Annotated[str, typer.Option("--name", help="of the site")],
) -> None:
    """Make a site's key pair, at the site. Its public half is registered at the coordinator:
    flwr supernode register NAME.key.pub.
    """
    require_flower()
    from remanence.flower.certificates import make_site_key

    private = make_site_key(folder, name)
    print(f"{private} stays here; register {private}.pub at the coordinator")


@app.command()
def check(
    site: Annotated[Path, typer.Argument(help="a site.toml")],
    experiment: Annotated[Path, typer.Argument(help="the experiment file it would take part in")],
) -> None:
    """Say, before a site joins, what it would tell and give away in an experiment, or why it
    would decline.
    """
    from remanence.flower.preflight import check_site

    lines = check_site(site, experiment)
    print("\n".join(lines))
    if lines[-1].startswith("declines"):
        raise typer.Exit(2)


def require_flower() -> None:
    """Refuse before any work where the package is missing."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise InputError(
            f'a federation needs the package flwr ({error}): pip install "remanence[flower]"'
        ) from error
