"""Compare the speeds of the replicas while they train.

Each replica measures the parts of its steps (`step_clock`). After every `EVERY` steps it sends medians over
its last `WINDOW` steps to rank 0 as a control message, for which no replica waits. When rank 0 has the
reports of all replicas about the same steps, it decides which replica lags (`lag`).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch

from adaptdl_elastic._session import Session
from adaptdl_elastic.protocol.environment import HERE
from adaptdl_elastic.protocol.hints import Straggler
from adaptdl_elastic.torch._runtime.step_clock import StepClock, StepParts
from adaptdl_elastic.torch._tuning.lag import LagJudge, NetworkJudge, Report

logger = logging.getLogger(__name__)

KIND = "step parts"
"""Kind of the control messages that carry a replica's times."""

NETWORK = "network changed"
"""Kind of the control messages by which rank 0 tells that the network has changed."""

WINDOW = 7
"""Steps whose median is reported."""

EVERY = 5
"""Steps from one report to the next."""

SKIPPED = 3
"""Steps that are not measured after a change of replicas or batch size."""

STEADY = 3
"""Successive reports whose shortest time counts for a node, so that a short disturbance does not."""

_PENDING = 8  # incomplete comparisons that are kept

State = tuple[int, ...]
"""Generation, local batch, accumulation steps: times of different states are not compared."""


class ReplicaSpeed:
    """Report this replica's times; on rank 0, compare those of all replicas. One per session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.clock = StepClock()
        self._host = socket.gethostname()
        self._node = HERE.node
        self._state: State = ()
        self._recent: deque[StepParts] = deque(maxlen=WINDOW)
        self._steps = 0  # in this state
        # on rank 0
        self._lock = threading.Lock()
        self._judged: int | None = None  # generation of the verdicts
        self._judge = LagJudge()
        self._waiting: dict[tuple[State, int], dict[int, Report]] = {}
        self._computed: list[tuple[State, Iterable[Report]]] = []  # the last reports about one state
        self._network: tuple[State, NetworkJudge] = (), NetworkJudge()
        session.consensus.listen(KIND, self._take)
        session.consensus.listen(NETWORK, lambda _, __, body: session.metrics.network_changed(*body))

    def step_ended(self, counts: bool, batch: tuple[int, int]) -> None:
        """Record that a step has ended.

        Args:
            counts: Whether its time is that of a full step.
            batch: Samples of this replica in a full batch, and accumulation steps.
        """
        session = self._session
        state = (session.generation, *batch)
        if state != self._state:
            self._state, self._steps = state, 0
            self._recent.clear()
            if session.rank == 0 and session.generation != self._judged:
                self._begin_generation()
        found = self.clock.finish()
        if not counts:
            return
        self._steps += 1
        if self._steps <= SKIPPED:
            return
        self._recent.extend(found)
        if self._steps % EVERY == 0 and len(self._recent) >= 2:
            medians = [median(column) for column in zip(*self._recent, strict=True)]
            body = [list(state), self._host, medians, self._crowded(), self._node]
            if session.replicas == 1:
                self._take(0, self._steps, body)
            elif session.reducer is not None:
                session.reducer.send_control(0, (KIND, self._steps, body))

    def _compare_nodes(self, state: State, reports: Iterable[Report]) -> None:
        """Report how long each of the job's nodes computes for a pass, once that is known."""
        last = [one for one in (*self._computed, (state, reports)) if one[0] == state][-STEADY:]
        self._computed = last
        if len(last) == STEADY:
            found = [(one.parts.compute / (state[2] + 1), one.node) for _, told in last for one in told]
            # the shortest time of a node comes last
            times = {node: seconds for seconds, node in sorted(found, reverse=True)}
            self._session.metrics.set_node_times(state[1], times)

    def _crowded(self) -> bool:
        """Return whether the replicas of this host compute on its cores and leave none of them free."""
        local = HERE.local_replicas
        busy = local * torch.get_num_threads() >= len(os.sched_getaffinity(0))
        return local > 1 and busy and not self.clock.on_gpu

    def _begin_generation(self) -> None:
        """Forget the verdicts about an earlier generation, whose ranks were others."""
        with self._lock:
            lags, self._judge = self._judge.lags, LagJudge()
            self._judged = self._session.generation
            self._waiting.clear()
        for rank in lags:
            self._session.metrics.report_problem(_about(rank), None)
        self._session.metrics.set_stragglers(())

    def _take(self, sender: int, number: int, body: Any) -> None:
        """Take a replica's report. Runs on rank 0, in the thread that receives control messages."""
        state, host, medians, crowded, node = body
        key = tuple(state), number
        if key[0][0] != self._session.generation:
            return
        with self._lock:
            reports = self._waiting.setdefault(key, {})
            reports[sender] = Report(str(host), StepParts(*medians), bool(crowded), str(node))
            while len(self._waiting) > _PENDING:
                del self._waiting[next(iter(self._waiting))]
            if len(reports) < self._session.replicas:
                return
            del self._waiting[key]
            before = set(self._judge.lags)
            if len(reports) > 1:
                self._judge.judge(reports)
            self._compare_nodes(key[0], reports.values())
            now = dict(self._judge.lags)
            if self._network[0] != key[0]:
                self._network = key[0], NetworkJudge()
            clock, (_, atomic, accumulation) = time.monotonic(), key[0]
            # the first reports are of too few steps, and of those that warm up
            changed = self._network[1].judge(reports.values(), clock) if number >= 3 * EVERY else None
        if changed is not None and self._session.nodes > 1 and self._session.reducer is not None:
            logger.info("the network between the nodes has changed: step times are measured again")
            busy = max(report.parts.own for report in reports.values()) / (accumulation + 1)
            for rank in reports:  # any of them may become rank 0
                self._session.reducer.send_control(rank, (NETWORK, number, [clock - changed, atomic, busy]))
        metrics = self._session.metrics
        if not before and not now:
            return
        for rank in before - set(now):
            metrics.report_problem(_about(rank), None, every_time=True)
        for rank in set(now) - before:
            metrics.report_problem(_about(rank), now[rank].message, every_time=True)
        metrics.set_stragglers(
            tuple(Straggler(lag.rank, lag.host, lag.part, lag.ratio) for lag in now.values())
        )


def _about(rank: int) -> str:
    return f"the speed of replica {rank}"
