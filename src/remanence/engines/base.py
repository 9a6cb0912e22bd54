"""What engines share of the protocol `core.engine.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from remanence.core.engine import ClientWork, Engine, PairCounts, Rejection, Result


class BaseEngine(Engine):
    """The defaults of an engine in one process; a subclass trains, scores and predicts.

    Attributes:
        name: Under which users select the engine.
        execution: How local steps run, as in `Engine`; "eager" by default.
        degraded_reasons: Why the engine is slower than requested; none by default.
    """

    execution = "eager"

    def __init__(self) -> None:
        self.degraded_reasons: list[str] = []

    @property
    def degraded_reason(self) -> str:
        return "; ".join(self.degraded_reasons)

    def add_degraded_reasons(self, reasons: Iterable[str]) -> None:
        """Add the reasons of engines inside this one, each once."""
        for reason in reasons:
            if reason not in self.degraded_reasons:
                self.degraded_reasons.append(reason)

    def score_personal(self, work: ClientWork) -> PairCounts:
        raise NotImplementedError(f"the clients of engine {self.name} are not remote")

    def pop_declined(self) -> list[Rejection]:
        return []

    def run_exclusive(self, function: Callable[[Engine], Result]) -> Result:
        return function(self)

    def close(self) -> None:
        pass
