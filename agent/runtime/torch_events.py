"""Record the events of torchrun's agent for the handler that `--event-log-handler` names.

A thread records them in order: for every event torch looks up this host's name, and the agent must not wait
for DNS.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, Worker, WorkerGroup
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.events.handlers import get_logging_handler

logger = logging.getLogger(__name__)

NO_HANDLER = "null"
_CLOSE_SECONDS = 10.0  # time for recording the remaining events at the end


def is_known(handler: str) -> bool:
    """Return whether torch knows an event handler of that name."""
    try:
        get_logging_handler(handler)
    except KeyError:
        return False
    return True


@dataclass(frozen=True)
class _Moment:
    """A copy of the fields that torch's `_construct_event` reads from an agent."""

    _worker_group: WorkerGroup
    _remaining_restarts: int
    _total_execution_time: int


class TorchEvents(threading.Thread):
    """Records the events of one agent. Without a handler it does nothing, and its thread does not run."""

    def __init__(self, handler: str) -> None:
        super().__init__(name="torch-events", daemon=True)
        self._handler = handler
        self._queue: queue.SimpleQueue[partial[Any] | None] = queue.SimpleQueue()
        if handler != NO_HANDLER:
            self.start()

    def send(
        self, agent: SimpleElasticAgent, state: str, worker: Worker | None = None, **fields: object
    ) -> None:
        """Record an event of the agent, or of one of its workers.

        Args:
            agent: the agent.
            state: the event's name, e.g. START.
            worker: the worker that the event belongs to; None: it belongs to the agent.
            fields: further arguments of torch's `_construct_event`.
        """
        if self._handler == NO_HANDLER:
            return
        group = copy.copy(agent.get_worker_group())
        moment = _Moment(group, agent._remaining_restarts, agent._total_execution_time)
        source = EventSource.AGENT if worker is None else EventSource.WORKER
        # a method of torch's agent, called with a copy of the fields that it reads
        make = partial(SimpleElasticAgent._construct_event, moment)  # type: ignore[arg-type]
        self._queue.put(partial(make, state, source, copy.copy(worker), **fields))

    def rendezvous(self, agent: SimpleElasticAgent, met_ms: float, assigned_ms: float) -> None:
        """Record how long the nodes took to meet, and the agent to assign ranks to its workers."""
        self.send(agent, "RENDEZVOUS", duration_ms=met_ms)
        self.send(agent, "ASSIGN_WORKER_RANKS", duration_ms=assigned_ms)

    def started(self, agent: SimpleElasticAgent, workers: Iterable[Worker]) -> None:
        """Record that workers have been started."""
        for worker in workers:
            self.send(agent, "START", worker)

    def run(self) -> None:
        """Record the queued events until `close`."""
        while (make := self._queue.get()) is not None:
            try:
                record(make(), self._handler)
            except Exception as error:  # a handler may raise any error
                logger.warning("an event could not be handed to %r: %r", self._handler, error)

    def close(self) -> None:
        """Record the remaining events within a time limit, and end the thread."""
        self._queue.put(None)
        if self.is_alive():
            self.join(_CLOSE_SECONDS)
