"""What leaves a site in place of an answer: a code and a sentence. Imports nothing heavy.

`refuse` decides what the sentence says. The text of a `Declined` was written to be sent: it follows
from the message, the policy and the numbers of clients. The text of any other error may contain
what the site's files contain, so it stays in the site's log.
"""

from __future__ import annotations

import logging

from remanence.core.errors import RemanenceError
from remanence.flower.wire import WireMessage

logger = logging.getLogger("remanence")
SETUP = "the site could not build the experiment; see the site's log"


class Declined(RemanenceError):
    """A site declines a message.

    Args:
        code: For programs, as in a rejection by the gate.
        reason: A sentence for users, which is sent: no content of the site's files.
        detail: A sentence for the site's own log, in place of the reason; never sent.
    """

    def __init__(self, code: str, reason: str, detail: str = ""):
        super().__init__(detail or reason)
        self.code, self.reason = code, reason


def refuse(error: Exception, kind: object) -> WireMessage:
    """The response to a message that a site cannot or may not handle; logs the full text.

    Args:
        error: What was raised.
        kind: The kind of the message.
    """
    if isinstance(error, Declined):
        logger.warning("declined %s: %s (%s)", kind, error, error.code)
        return decline(error.code, error.reason)
    if isinstance(error, RemanenceError):
        logger.warning("cannot %s: %s", kind, error)
        return decline("setup", SETUP)
    logger.error("%s failed", kind, exc_info=error)
    return decline("failed", f"{type(error).__name__}; see the site's log")


def decline(code: str, reason: str) -> WireMessage:
    """A response that declines a message."""
    return WireMessage({"kind": "declined", "code": code, "reason": reason}, {})
