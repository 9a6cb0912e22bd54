"""Inside Jupyter: one progress bar in the output of a cell."""

from __future__ import annotations

import sys
import time
from collections import deque
from html import escape
from typing import Any

PAUSE = 0.3  # seconds between two updates; a browser draws each of them
LAST_LINES = 20  # messages below the bar


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookCell:
    """The bar and the messages below it, drawn at most once in `PAUSE` seconds."""

    def __init__(self) -> None:
        self.messages: deque[str] = deque(maxlen=LAST_LINES)
        self.text, self.done, self.total = "", 0, 0
        self.drawn = float("-inf")
        self.handle: Any = None

    def show(self, now: bool = False) -> None:
        """Draw, if the last time is long enough ago.

        Args:
            now: In any case.
        """
        if not now and time.monotonic() - self.drawn < PAUSE:
            return
        from IPython.display import HTML, display

        self.drawn = time.monotonic()
        content = HTML(self.render())
        if self.handle is None:
            self.handle = display(content, display_id=True)
        else:
            self.handle.update(content)

    def render(self) -> str:
        """As HTML; names of methods are untrusted."""
        bar = f'<progress value="{self.done}" max="{max(1, self.total)}"></progress>'
        lines = "".join(f"<div>{escape(text)}</div>" for text in self.messages)
        return f"<div>{bar if self.total else ''} {escape(self.text)}</div>{lines}"
