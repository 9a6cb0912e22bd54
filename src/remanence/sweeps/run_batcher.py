"""Several runs that train in one stack: seeds and numeric hyper-parameters of one method.

Every run has its own thread, with an `EngineProxy` in place of an engine. A request to the proxy
waits until every run has made one. Requests that can be joined are then computed as one, the others
one after the other, and all runs continue. The results of a run are those that it has alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from remanence.core.errors import Stopped
from remanence.core.signals import sigterm_as_interrupt
from remanence.engines.vectorized import VectorizedEngine
from remanence.experiment.build import BuiltExperiment
from remanence.sweeps.compatibility import can_batch
from remanence.sweeps.shared_engine import EngineProxy, Request, compute, group_requests


class EngineGroup(NamedTuple):
    """Runs that can share a stack; the engine is that of the first of them."""

    lead: BuiltExperiment
    engine: VectorizedEngine


class RunBatcher:
    """Runs several runs at once and serves their requests.

    Args:
        make: Builds the engine of a group of runs.
    """

    def __init__(self, make: Callable[[BuiltExperiment], VectorizedEngine]):
        self.make = make
        self.change = threading.Condition()
        self.groups: list[EngineGroup] = []
        self.proxies: list[EngineProxy] = []
        self.running = 0  # threads that have not ended
        self.stop: BaseException | None = None

    def run(self, runs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all of them, each of which takes its engine from `attach`.

        Returns:
            What the runs return, or the exceptions that ended them.
        """
        results: list[Any] = [None] * len(runs)
        self.running = len(runs)
        try:
            with sigterm_as_interrupt():
                for index, run in enumerate(runs):
                    arguments = (run, index, results)
                    threading.Thread(target=self._run_one, args=arguments, daemon=True).start()
                while self.running:
                    try:
                        self._serve()
                    # `request` raises it in every run, which saves its state and ends
                    except KeyboardInterrupt as stop:
                        with self.change:
                            self.stop = stop
                            self.change.notify_all()
        finally:
            for group in self.groups:
                group.engine.close()
        return results

    def _run_one(self, run: Callable[[], Any], index: int, results: list[Any]) -> None:
        try:
            results[index] = run()
        except BaseException as error:  # the caller of `run` handles it
            results[index] = error
        failed = isinstance(results[index], BaseException)
        with self.change:
            self.running -= 1
            if failed and not isinstance(results[index], Stopped) and self.stop is None:
                # one run has failed: the others save their states and end
                self.stop = KeyboardInterrupt()
            self.change.notify_all()

    def attach(self, experiment: BuiltExperiment) -> EngineProxy:
        """The engine of a run that is about to begin."""
        with self.change:
            group = next((g for g in self.groups if can_batch(g.lead, experiment)), None)
            if group is None:
                group = EngineGroup(experiment, self.make(experiment))
                self.groups.append(group)
            proxy = EngineProxy(self, group.engine, experiment.task)
            self.proxies.append(proxy)
        return proxy

    def detach(self, proxy: EngineProxy) -> None:
        with self.change:
            self.proxies.remove(proxy)
            self.change.notify_all()

    def request(self, proxy: EngineProxy, request: Request) -> Any:
        """Called by a run's thread; returns when its request is computed."""
        with self.change:
            proxy.request = request
            self.change.notify_all()
            self.change.wait_for(lambda: proxy.request is None or self.stop is not None)
            if proxy.request is not None and self.stop is not None:
                proxy.request = None
                raise type(self.stop)
        if isinstance(proxy.answer, BaseException):
            raise proxy.answer
        return proxy.answer

    def _serve(self) -> None:
        """Wait until every run waits, and answer all of them."""
        with self.change:
            self.change.wait_for(self._all_wait)
            waiting = [proxy for proxy in self.proxies if proxy.request is not None]
        for proxies in group_requests(waiting):
            try:
                answers = compute(proxies)
            except Exception as error:  # `request` raises it in each of these runs
                answers = [error] * len(proxies)
            for proxy, answer in zip(proxies, answers, strict=True):
                proxy.answer = answer
        with self.change:
            for proxy in waiting:
                proxy.request = None
            self.change.notify_all()

    def _all_wait(self) -> bool:
        """Does every run that has not ended wait? After a stop: have all ended?"""
        if self.stop is not None:
            return self.running == 0
        return sum(proxy.request is not None for proxy in self.proxies) == self.running
