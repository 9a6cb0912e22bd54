"""A site's Flower ClientApp: passes every message to the site's daemon and returns its response.

Flower starts a new process for every message, so this file imports nothing heavy. The daemon
(`site_daemon.py`) does the work, unless site.toml has `daemon = false`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remanence.core.errors import RemanenceError
from remanence.flower.refusals import Declined, refuse
from remanence.flower.settings import SiteFile, read_site
from remanence.flower.transport import from_record, to_record
from remanence.flower.wire import WireError, WireMessage


def make_client_app() -> Any:
    """A Flower ClientApp for any site."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def answer(message: Any, context: Any) -> Any:
        response = answer_message(message.content, dict(context.node_config))
        return Message(to_record(response), reply_to=message)

    for register in (app.train, app.evaluate, app.query):
        register()(answer)
    return app


def answer_message(content: Any, node_config: dict[str, Any]) -> WireMessage:
    """The site's response. A mistake in the site's settings is a response too, so that the
    coordinator can log that there is one; its text stays in the SuperNode's log.
    """
    try:
        try:
            request = from_record(content)
        except WireError as error:  # it follows from the message alone
            raise Declined("malformed", str(error)) from None
        return handle(find_site(node_config), request)
    except RemanenceError as error:
        return refuse(error, "message")


def find_site(node_config: dict[str, Any]) -> SiteFile:
    """The settings of the site that the SuperNode was started for."""
    path = node_config.get("site")
    if not isinstance(path, str) or not path:
        raise Declined(
            "setup",
            "this SuperNode was started without a site file: add --node-config"
            " 'site=\"/path/to/site.toml\"'",
        )
    return read_site(Path(path))


def handle(site: SiteFile, request: WireMessage) -> WireMessage:
    """Handle a message in the site's daemon or, with `daemon = false`, in this process."""
    if site.settings.compute.daemon:
        from remanence.flower.daemon_client import call_daemon

        return call_daemon(site, request)
    from remanence.core.files import lock
    from remanence.flower.site import Site

    with lock(site.make_state()):
        return Site(site).answer(request)
