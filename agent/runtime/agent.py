"""The elastic agent: carries out what `core.decisions` decides, for one node and one job.

Every replica has its own handle. One loop waits for messages, exits, the store, signals and timers. Nothing
here imports torch.
"""

from __future__ import annotations

import logging
import select
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from adaptdl_elastic.agent.cluster.coordinator_host import (
    SETTLED_AFTER,
    CoordinatorChild,
    CoordinatorHost,
    Holder,
)
from adaptdl_elastic.agent.cluster.link_probe import LinkWatch
from adaptdl_elastic.agent.cluster.node_reporter import NodeReporter
from adaptdl_elastic.agent.cluster.store_link import (
    Connection,
    ConnectionMonitor,
    Registration,
    UserLine,
    Watcher,
    Writer,
)
from adaptdl_elastic.agent.cluster.store_view import StoreView
from adaptdl_elastic.agent.core import decisions, states
from adaptdl_elastic.agent.core.pending_notice import PendingNotice
from adaptdl_elastic.agent.machine.devices import DevicesSeen
from adaptdl_elastic.agent.machine.interruption import Notice
from adaptdl_elastic.agent.runtime import failure_reports
from adaptdl_elastic.agent.runtime.agent_config import AgentConfig
from adaptdl_elastic.agent.runtime.code_version import CodeVersion
from adaptdl_elastic.agent.runtime.decision_recorder import DecisionRecorder
from adaptdl_elastic.agent.runtime.event_loop import Loop, Signalled, StopRequests
from adaptdl_elastic.agent.runtime.failure_reporter import FailureReporter
from adaptdl_elastic.agent.runtime.fork_server import Exited, ForkServer, Spawned
from adaptdl_elastic.agent.runtime.generation_store import GenerationStore, NoStoreError
from adaptdl_elastic.agent.runtime.replica_handle import ReplicaHandle
from adaptdl_elastic.agent.runtime.replica_starter import ReplicaStarter
from adaptdl_elastic.agent.terminal.event_recorder import EventRecorder
from adaptdl_elastic.agent.terminal.replica_output import NoOutputError, Output
from adaptdl_elastic.protocol import messages
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.protocol.messages import Ping, ReplicaMessage, SaveCheckpoint, Stop, WithdrawPlan
from adaptdl_elastic.rendezvous.local.addresses import NoPortError
from adaptdl_elastic.rendezvous.schema.held import GenerationEnd, Held, PeerLoss
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    CHANGED_CODE,
    CheckpointRecord,
    JobRequest,
    JobState,
    JobStatus,
    MasterRecord,
    Plan,
    Transition,
)
from adaptdl_elastic.rendezvous.store.base import Change, Snapshot, Store
from adaptdl_elastic.rendezvous.text import pluralize

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 10.0  # time for the last writes to the store
_LAPSED_SECONDS = 0.5  # between two looks whether a lapsed registration is renewed


class NodeAgent:
    """One node's agent. `run` returns when the job, or this node's part in it, is over."""

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        keys: Keys,
        registration: Registration,
        fork_server: ForkServer,
        output: Output,
        recorder: EventRecorder,
        say: Callable[[str], None],
        restart_fork_server: Callable[[], ForkServer],
    ) -> None:
        self._plan: Plan | None = None  # plan of the held generation
        self._config, self._keys = config, keys
        self._registration, self._fork_server, self._output = registration, fork_server, output
        self._recorder, self._say, self._restart_fork_server = recorder, say, restart_fork_server
        self.state = states.State(me=config.me)
        self.decisions = DecisionRecorder(output.directory)
        self.exit_code, self.exit_reason = 1, ""
        self._loop = Loop()
        self._registration.monitor = ConnectionMonitor(self._loop.post)
        self._writer = Writer(self._loop.post, self._registration.monitor)
        self._reporter = NodeReporter(store, keys, self._writer, config.me)
        self._view = StoreView(keys, config.me.spec.job, config.me.node)
        self._watchers = [Watcher(store, prefix, self._loop.post) for prefix in self._view.prefixes]
        self._replicas: dict[int, ReplicaHandle] = {}  # by their number at the fork server
        self._starter = ReplicaStarter(config, output)
        self.code = CodeVersion(
            config.options,
            config.me,
            lambda changed: self._writer.submit(partial(registration.update, changed=changed)),
            lambda text: self._loop.post(UserLine(text)),
        )
        self._links = LinkWatch(config.measure_links, registration, self._loop.post, self._writer.submit)
        self._generation_store = GenerationStore(config.host, config.options.port_range, fork_server)
        log, holder = output.directory / "coordinator.log", Holder(config.me.node, config.me.agent)
        self._coordinator = CoordinatorHost(
            holder,
            keys,
            lambda: CoordinatorChild(config.coordinator, log, lambda text: self._loop.post(UserLine(text))),
            lambda key, other: self._writer.submit(partial(registration.claim, key, str(holder), other)),
            lambda key: self._writer.submit(partial(registration.release, key, str(holder))),
            time.monotonic() + SETTLED_AFTER,
            *(time.monotonic, config.me.on_demand),
        )
        self._signals = StopRequests()
        self._asked = JobRequest()  # the last one that was carried out
        self._loss: PeerLoss | None = None  # the last one that was reported
        self._failures = FailureReporter(
            output, recorder, say, config.me.spec.max_restarts, config.options.checkpoint_path
        )
        self._pending_notice = PendingNotice()
        self._last_exits: list[tuple[ReplicaHandle, int]] = []

    @property
    def post(self) -> Callable[[object], None]:
        """Return a function that hands an event to the agent from any thread."""
        return self._loop.post

    @property
    def job_done(self) -> bool:
        """Whether the job itself is done, not only this node's part in it."""
        status = self.state.status
        return self.exit_code == 0 and status is not None and status.state is JobState.DONE

    @property
    def job_ended(self) -> JobStatus | None:
        """The last status of the job if the job itself has ended, else None."""
        status = self.state.status
        return status if status is not None and status.state.ended else None

    def run(self) -> None:
        """Run until this node's part is over, and end what the agent has started."""
        try:
            self._run()
        finally:
            self._close()

    def _run(self) -> None:
        self._loop.on_signals(self._config.options.signals)
        self._loop.add(self._fork_server, self._on_fork_server)
        self._writer.start()
        for watcher in self._watchers:
            watcher.start()
        while not self.state.exiting:
            try:
                for event in self._loop.wait(self._next_time()):
                    self._handle(event)
                if not self.state.exiting:
                    self._decide(states.Tick())
            except (NoPortError, NoOutputError, NoStoreError) as error:
                self._decide(states.Unfit(str(error)))
            if (due := self._recorder.due()) is not None and time.time() >= due:
                self._recorder.flush()
            if any(due is not None and time.monotonic() >= due for due in self._check_times):
                self._check_requests()

    def _close(self) -> None:
        self._coordinator.close()
        for watcher in self._watchers:
            watcher.close()
        if self._writer.is_alive():
            self._writer.close(_FLUSH_SECONDS)
        self._fork_server.close()
        for handle in self._replicas.values():
            handle.close()
        self._replicas.clear()
        self._generation_store.close()
        self.decisions.close(write=self.exit_code not in (0, STOPPED))
        self._loop.close()

    # Events

    def _next_time(self) -> float | None:
        times = [decisions.deadline(self.state), *self._check_times]
        if (due := self._recorder.due()) is not None:
            times.append(time.monotonic() + max(0.0, due - time.time()))
        if self.state.lapsed:
            times.append(time.monotonic() + _LAPSED_SECONDS)
        return min((t for t in times if t is not None), default=None)

    @property
    def _check_times(self) -> tuple[float | None, ...]:
        return self._coordinator.due, self._pending_notice.due, self._links.due

    def _handle(self, event: object) -> None:
        match event:
            case Snapshot() | Change():
                if isinstance(event, Snapshot) and (lost := self._view.lost_records(event)):
                    self._say("the store has lost records of this job: this node writes back what it knows")
                    self._reporter.restore({item.key: item.value for item in lost})
                    items = {item.key: item for item in (*event.items, *lost)}
                    event = replace(event, items=tuple(items.values()))
                if isinstance(event, Snapshot):
                    self._reporter.repeat()
                for change in self._view.apply(event):
                    self._decide(change)
                self._check_requests()
            case Signalled(number):
                self._on_signal(signal.Signals(number))
            case Notice():
                self._on_notice(event)
            case DevicesSeen(unusable, new):
                for line in new:
                    self._say(f"not usable on this node: {line}")
                self._recorder.emit("devices", node=self._config.me.node, unusable=list(unusable))
                self._writer.submit(partial(self._registration.update, unusable=unusable))
            case UserLine(text):
                self._say(text)
                self._check_requests()  # the message may be the last one of a coordinator that has failed
            case Connection(up, why, refused):
                self._say(str(event))
                state = "back" if up else "refused" if refused else "away"
                self._recorder.emit("store", state=state, message=why)
                self._decide(states.StoreBack() if up else states.StoreAway(refused))
                if up:
                    self._check_requests()
            case partial():
                event()
            case _:
                self._decide(event)  # type: ignore[arg-type]

    def _decide(self, event: states.Event) -> None:
        state = replace(self.state, lapsed=self._registration.lapsed)
        self.state, actions = self.decisions.decide(state, event, time.monotonic())
        for action in actions:
            self._act(action)

    def _on_signal(self, number: signal.Signals) -> None:
        match self._signals.count(time.monotonic()):
            case 1:
                self._say(f"{number.name}: saving and stopping; once more stops at once")
                self._leave(number.name, None)
            case many if many > 1:
                self._decide(states.LeaveNow(f"{number.name} twice"))

    def _leave(self, reason: str, deadline: float | None) -> None:
        if self.state.departure is None:
            self._recorder.emit("drain", node=self._config.me.node, deadline=deadline, reason=reason)
        self._decide(states.Leave(reason, deadline))

    def _on_notice(self, notice: Notice) -> None:
        """Handle a notice of the cloud about this machine."""
        if notice.drain:
            self._say(f"this node will be gone: {notice.reason}")
            self._leave(notice.reason, notice.deadline)
        else:
            self._writer.submit(lambda: self._registration.update(at_risk=True))

    def _check_requests(self) -> None:
        """Handle requests in the store other than the plan: drains, a job's request, coordinators' keys."""
        view, me = self._view, self._config.me
        drain = view.drain if self.state.departure is None else None
        if drain is not None and drain.concerns(self._registration.record.instance):
            self._leave(drain.reason, drain.deadline)
        asked = view.request
        if asked is not None and asked.run in ("", me.spec.run):
            before, self._asked = self._asked, asked
            for handle in self._replicas.values() if asked.checkpoint > before.checkpoint else ():
                if handle.rank == 0 and handle.library:
                    handle.send(SaveCheckpoint(asked.checkpoint))
            if asked.decisions > before.decisions:
                self._output.keep = True
                self.decisions.write()
                self._writer.submit(partial(self._registration.update, decisions=self.decisions.place))
        if (why := self._pending_notice.notice(self.state.status, time.monotonic())) is not None:
            self._say(why)
        if self.state.plan is None and (why := self._coordinator.broken) is not None:
            self._reporter.cannot_be_planned(why)
        self._coordinator.update(view.host, view.second, view.leader)
        idle = self.state.held is None and self.state.departure is None
        self._links.look(view.agents, self.state.plan, self.state.status, idle, time.monotonic())

    # Actions

    def _act(self, action: states.Action) -> None:
        match action:
            case states.OpenMaster(generation):
                self._open_master(generation)
            case states.StartReplicas():
                self._start(action)
            case states.TellPlan(plan, master):
                self._tell_plan(plan, master)
            case states.Withdraw(plan, reason):
                self._withdraw(plan, reason)
            case states.Adopt(plan):
                self._adopt(plan)
            case states.AskToStop(local_ranks, plain, reason):
                self._ask_to_stop(local_ranks, plain, reason)
            case states.Ping(local_ranks):
                for handle in self._held(local_ranks):
                    handle.send(Ping(handle.number))
            case states.Kill(local_ranks, reason):
                self._kill(local_ranks, reason)
            case states.WriteHeld(held):
                self._write_held(held)
            case states.Lost(generation, failure):
                self._failures.survived(generation, failure)
            case states.Ended(end):
                self._ended(end)
            case states.WriteDraining(reason, when):
                self._writer.submit(partial(self._registration.update, draining=True, deadline=when))
            case states.Say(text):
                self._say(text)
            case states.Exit(code, reason):
                self.exit_code, self.exit_reason = code, reason

    def _open_master(self, generation: int) -> None:
        # while replicas of the previous generation run, they may still use the port that the user asked for
        wanted = self._config.options.meeting_point if self.state.held is None else None
        record = self._generation_store.open(generation, wanted)
        if wanted is not None and wanted.host not in (None, record.host):
            self._say(f"{wanted} is not here, where rank 0 is: replicas meet at {record.host}:{record.port}")
        record = replace(record, code=dict(self.code.files))
        self._reporter.master(record)
        self._decide(states.MasterSeen(record))

    def _start(self, start: states.StartReplicas) -> None:
        if not start.join or not self._replicas:
            self._last_exits.clear()
            self._plan = start.plan
        if self.code.refuse(start, bool(self._replicas), time.time(), self.post):
            return
        if not start.join:
            self._generation_store.forget(start.plan.generation)
            self._failures.starts_again(start.plan, self._view.checkpoint)
        self.code.starts()
        for local_rank in start.local_ranks:
            handle = self._starter.start(self._fork_server, start, local_rank, self._view.checkpoint)
            self._replicas[handle.number] = handle
            self._loop.add(handle, partial(self._read_channel, handle))

    def _tell_plan(self, plan: Plan, master: MasterRecord) -> None:
        """Tell every replica of the held generation its new rank and the address of the new store."""
        if self._plan is None:
            return
        for handle in self._replicas.values():
            handle.send(self._starter.plan_message(handle, self._plan, plan, master, self._view.checkpoint))
            if plan.transition is Transition.RECOVER:
                handle.switched, handle.early_step = False, None

    def _withdraw(self, plan: Plan, reason: str) -> None:
        newcomers = self._ended_in(plan.generation)
        self._failures.withdrawn(plan, newcomers, reason, stopping=self._is_to_stop)
        for handle in self._replicas.values():
            if handle.generation != plan.generation:
                handle.send(WithdrawPlan(plan.generation, reason))

    @property
    def _is_to_stop(self) -> bool:
        """Whether the replicas here are about to stop: the node leaves, or the newest plan ends them."""
        newest = self.state.plan
        ends = newest is not None and newest.transition in (Transition.RESTART, Transition.ABORT)
        return self.state.departure is not None or ends

    def _adopt(self, plan: Plan) -> None:
        """Update the handles of replicas that have switched to a new generation."""
        ranks = plan.rank_by_slot(self._config.me.node)
        before = -1 if self._plan is None else self._plan.generation
        members = [handle for handle in self._replicas.values() if handle.local_rank in ranks]
        # a replica that died after others had switched is a member, too: its loss belongs to this generation
        gone = ranks.keys() - {handle.local_rank for handle in members}
        members += [h for h in self._ended_in(before) if h.local_rank in gone]
        for handle in members:
            handle.generation, handle.rank = plan.generation, ranks[handle.local_rank]
            handle.first_step = None
        self._plan = plan
        self._output.renumber(ranks)
        if plan.transition is Transition.RECOVER:
            size = pluralize(plan.replicas, "replica")
            self._say(f"training goes on with {size}, without a restart: {plan.reason}")
        self._generation_store.forget(plan.generation)
        self._all_started(plan, members)
        self._recorder.hello()
        for handle in members:
            early, handle.early_step, handle.switched = handle.early_step, None, False
            if early is not None:
                self._on_step(handle, early)

    def _held(self, local_ranks: tuple[int, ...]) -> list[ReplicaHandle]:
        return [h for h in self._replicas.values() if h.local_rank in local_ranks]

    def _ask_to_stop(self, local_ranks: tuple[int, ...], plain: tuple[int, ...], reason: str) -> None:
        interrupted = getattr(self.state.departure, "reason", "") == signal.SIGINT.name
        for handle in self._held((*local_ranks, *plain)):
            # a replica whose channel is closed is about to end
            handle.send(Stop(reason, interrupted and handle.rank == 0))
        for handle in self._held(plain):  # after the message, because `channel.say_finished` looks for it
            self._fork_server.signal(handle.number, signal.SIGTERM)

    def _kill(self, local_ranks: tuple[int, ...], reason: str) -> None:
        logger.info("killing local ranks %s: %s", local_ranks, reason)
        for handle in self._held(local_ranks):
            self._fork_server.signal(handle.number, signal.SIGKILL)

    def _write_held(self, held: Held) -> None:
        if held.loss is not None and held.loss != self._loss:
            self._recorder.emit("peers_lost", generation=held.loss.generation)
        self._loss = held.loss
        self._reporter.held(held, self._recorder.last_step)

    def _ended(self, end: GenerationEnd) -> None:
        if self._plan is None or end.generation == self._plan.generation:
            self._recorder.ended()
        if self.state.held is None:
            self._recorder.emit("ended", generation=end.generation, outcome=end.outcome.value)
        alone = self._plan is None or self._plan.nodes <= 1
        used = 0 if self.state.status is None else self.state.status.restarts_used
        self._failures.ended(end, self._ended_in(end.generation), used, alone=alone)

    def _ended_in(self, generation: int) -> list[ReplicaHandle]:
        return [handle for handle, _ in self._last_exits if handle.generation == generation]

    def _on_fork_server(self) -> None:
        news = self._fork_server.receive()
        if news is None:
            self._fork_server_died()
            return
        for item in news:
            handle = self._replicas.get(item.id)
            if handle is None:
                if isinstance(item, Exited) and (line := self._generation_store.exited(item.id)):
                    self._say(line)
            elif isinstance(item, Spawned):
                self._spawned(handle, item.pid)
            else:
                self._exited(handle, item.exit_code, item.signalled, item.time)

    def _fork_server_died(self) -> None:
        """Start another fork server; the kernel has killed the replicas with the old one."""
        self._say("the fork server died and its replicas with it; starting another")
        self._loop.remove(self._fork_server)
        self._fork_server.close()
        self._fork_server = self._restart_fork_server()
        self._loop.add(self._fork_server, self._on_fork_server)
        self._generation_store.served_by(self._fork_server)
        for handle in list(self._replicas.values()):
            self._exited(handle, -signal.SIGKILL)

    def _spawned(self, handle: ReplicaHandle, pid: int) -> None:
        handle.pid = pid
        plan = self._plan
        living = [h for h in self._replicas.values() if h.generation == handle.generation]
        mine = [*living, *self._ended_in(handle.generation)]  # some have ended before the last has started
        if plan is not None and plan.generation == handle.generation and all(h.pid is not None for h in mine):
            self._all_started(plan, mine)

    def _all_started(self, plan: Plan, members: list[ReplicaHandle]) -> None:
        pids = {h.rank: h.pid for h in members if h.pid is not None}
        self._recorder.started(plan, pids, self._view.last_step_before(plan))

    def _exited(
        self, handle: ReplicaHandle, code: int, signalled: bool = True, when: float | None = None
    ) -> None:
        # what replicas have said by now comes before the end of this one: survivors may be ready for it
        for replica in list(self._replicas.values()):
            self._read_channel(replica)
        while select.select([handle], [], [], 0)[0] and self._read_channel(handle):
            pass
        self._loop.remove(handle)
        self._replicas.pop(handle.number, None)
        handle.close()
        self._last_exits.append((handle, code))
        message, evidence, failed = handle.broken, states.Evidence(), code not in (0, STOPPED)
        if failed and handle.newcomer and (why := self.code.refusal(True)):
            message, evidence = why, states.Evidence(CHANGED_CODE)
        elif failed and not message:
            message, evidence = failure_reports.examine(
                code, handle.error_file, self._config.options.command[0]
            )
        generation, local_rank, when = handle.generation, handle.local_rank, when or time.time()
        self._decide(states.ReplicaExited(generation, local_rank, code, when, message, signalled, evidence))

    def _read_channel(self, handle: ReplicaHandle) -> bool:
        received = handle.receive()
        if notice := handle.notice(float("inf") if received is None else time.monotonic()):
            self._say(notice)
        if received is None:
            self._loop.remove(handle)
            return False
        for message in received:
            self._on_message(handle, message)
        if handle.broken:
            self._fork_server.signal(handle.number, signal.SIGKILL)
        return True

    def _on_message(self, handle: ReplicaHandle, message: ReplicaMessage) -> None:
        match message:
            case messages.StepFinished():
                self._on_step(handle, message)
                return
            case messages.Event(event, when, fields):
                self._recorder.emit(event, when, **fields)
                if event == "metrics":
                    self._reporter.script_reported(
                        {name: value for name, value in fields.items() if name != "epoch"}
                    )
                return
            case messages.Hints(hints):
                if self._reporter.hints(hints):
                    self._recorder.goodput(hints)
                return
            case messages.Saved():
                self._on_saved(handle, message)
                return
            case messages.Hello():
                handle.library = True
                self._recorder.hello()
            case messages.CodeLoaded(files):
                self.code.trained(files, handle.started)
                return
            case messages.NetworkChanged():
                self._links.measure(self._view.agents, self.state.plan)
                return
            case messages.Ready() if why := self.code.refusal(True):
                handle.broken = why  # it may have read what has changed since it was started
                return
            case messages.Switched(generation, last_step):
                handle.newcomer = False
                # newcomers belong to their generation from the start
                handle.switched = self._plan is None or self._plan.generation != generation
                self._recorder.last_step_was(last_step)
            case messages.Resilient(_, why_not):
                self._failures.resilience(why_not)
                if why_not:
                    return
            case messages.PeerLost(_, reason):
                logger.info("replica %d: others are gone: %s", handle.rank, reason)
        generation = getattr(message, "generation", handle.generation)
        self._decide(states.FromReplica(generation, handle.local_rank, message))

    def _on_step(self, handle: ReplicaHandle, message: messages.StepFinished) -> None:
        # a step of a generation that this agent has not adopted yet
        if handle.switched and handle.first_step is not None:
            handle.early_step = handle.early_step or message
            return
        self._recorder.step(message.time)
        if handle.first_step is None:
            handle.first_step = message.time
        self._decide(states.FromReplica(handle.generation, handle.local_rank, message))

    def _on_saved(self, handle: ReplicaHandle, saved: messages.Saved) -> None:
        record = CheckpointRecord(saved.id, saved.path, handle.generation, saved.step, time.time())
        # set at once, so that the next replica on this node does not wait for the watch
        self._view.saved(record)
        self._reporter.checkpoint(record)
