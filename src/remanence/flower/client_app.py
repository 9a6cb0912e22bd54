"""A site's end of a Flower app: hands every message to the site's own process and brings its answer
back.

Flower starts a fresh process for every message. So this file imports nothing heavy: a process of
the site that stays does the work (`site_daemon.py`), unless the site says `resident = false`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remanence.core.errors import InputError, RemanenceError
from remanence.flower.settings import SiteFile, read_site
from remanence.flower.transport import from_record, to_record
from remanence.flower.wire import WireMessage


def make_client_app() -> Any:
    """A Flower ClientApp for any site."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def answer(message: Any, context: Any) -> Any:
        return Message(
            to_record(answer_message(message.content, dict(context.node_config))), reply_to=message
        )

    for register in (app.train, app.evaluate, app.query):
        register()(answer)
    return app


def answer_message(content: Any, node_config: dict[str, Any]) -> WireMessage:
    """What this site says; a mistake in its own settings is an answer too, so that the
    coordinator can name it.
    """
    try:
        request = from_record(content)
        site = find_site(node_config)
        return hand_over(site, request)
    except RemanenceError as error:
        return WireMessage({"kind": "declined", "code": "setup", "reason": str(error)}, {})


def find_site(node_config: dict[str, Any]) -> SiteFile:
    path = node_config.get("site")
    if not isinstance(path, str) or not path:
        raise InputError(
            "this SuperNode was started without a site file: add --node-config"
            " 'site=\"/path/to/site.toml\"'"
        )
    return read_site(Path(path))


def hand_over(site: SiteFile, request: WireMessage) -> WireMessage:
    """To the process that stays, or to this one."""
    if site.settings.compute.daemon:
        from remanence.flower.daemon_client import call_worker

        return call_worker(site, request)
    from remanence.core.files import lock
    from remanence.flower.site import Site

    with lock(site.make_state()):
        return Site(site).answer(request)
