"""What an agent works with on its machine: its loop, its fork server, channels, and stores to meet at.

These take the places of `agent.loop.Loop`, `forkserver.ForkServer`, `replica.ReplicaHandle`,
`meeting.Meeting`, `output.Output`, and of `subprocess` and `os` in `coordinator_host`. They are the edge of
the simulation: what lies inside, the whole of the agent included, is the product's own code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adaptdl_elastic.agent.runtime.fork_server import Exited, Spawned
from adaptdl_elastic.agent.runtime.replica_handle import ReplicaHandle
from adaptdl_elastic.protocol.messages import (
    AgentMessage,
    ReplicaMessage,
    decode_order,
    decode_report,
    encode,
)
from adaptdl_elastic.rendezvous.schema.records import MasterRecord
from faultsim import threads
from faultsim.client import Line, SimClient
from faultsim.etcd import Etcd
from faultsim.files import Path
from faultsim.kernel import Kernel, Process

if TYPE_CHECKING:
    from faultsim.world import World

CHANNEL_SECONDS = 0.0005  # from one end of a channel to the other, on average
FORK_SECONDS = 0.02  # until a replica is there, on average
DEATH_SECONDS = 0.05  # until the kernel has killed the replicas of an agent that died, at most


@dataclass(eq=False)
class Machine:
    """One node: it has a name, slots, files, a clock and a line to the store, and it can crash."""

    world: World
    name: str
    slots: int
    clock_offset: float = 0.0
    wall_offset: float = 0.0
    up: bool = True
    troubled_at: float = float("-inf")  # when it was last stopped or cut off
    line: Line = field(default_factory=Line)
    processes: list[Process] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)  # by path

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of its GPUs, one for each slot."""
        return tuple(f"{self.name}.gpu{number}" for number in range(self.slots))

    @property
    def host(self) -> str:
        return f"{self.name}.host"

    def process(self, name: str) -> Process:
        """Start a process here."""
        process = Process(self.world.kernel, f"{self.name}:{name}", self.clock_offset, self.wall_offset)
        self.processes = [one for one in self.processes if one.alive]
        self.processes.append(process)
        return process

    def client(self, process: Process) -> SimClient:
        """A connection to the store for one of its processes."""
        return SimClient(self.world.etcd, self.line, process, self.world.before_write)

    def crash(self) -> None:
        """The machine loses its power: nobody is told, connections stay open on the other side."""
        self.up = False
        for process in list(self.processes):
            self.world.kernel.kill(process, -9, "(its machine)")
        self.processes.clear()


class Loop:
    """As `agent.loop.Loop`: what was posted, what can be read, and one timer."""

    def __init__(self) -> None:
        self._posted: deque[object] = deque()
        self._sources: dict[Any, Callable[[], object]] = {}
        self._changed = threads.Event()
        threads.kernel().running().process.loop = self  # type: ignore[attr-defined]

    def post(self, event: object) -> None:
        self._posted.append(event)
        self._changed.set()

    def add(self, source: Any, readable: Callable[[], object]) -> None:
        self._sources[source] = readable
        source.on_readable = self._changed.set
        if source.readable:
            self._changed.set()

    def remove(self, source: Any) -> None:
        self._sources.pop(source, None)
        source.on_readable = lambda: None

    def on_signals(self, numbers: Iterable[int]) -> None:
        """Signals are posted by whoever sends them (`agents.Agent.signal`)."""

    def wait(self, until: float | None) -> list[object]:
        clock = threads.Time.monotonic
        threads.kernel().comes_round()
        while not self._posted and not any(source.readable for source in self._sources):
            left = None if until is None else until - clock()
            if left is not None and left <= 0:
                break
            self._changed.clear()
            self._changed.wait(left)
        threads.kernel().running()
        for source, readable in list(self._sources.items()):
            if source.readable and source in self._sources:
                readable()
        events = list(self._posted)
        self._posted.clear()
        return events

    def close(self) -> None:
        self._sources.clear()


class OneWay:
    """Messages in one direction, in order, each after a moment."""

    def __init__(self, kernel: Kernel, receive: Callable[[Any], None]) -> None:
        self._kernel, self._receive, self._arrival = kernel, receive, 0.0

    def send(self, message: object, seconds: float = CHANNEL_SECONDS) -> None:
        delay = seconds * self._kernel.random.expovariate(1.0)
        self._arrival = max(self._arrival, self._kernel.now + delay)
        self._kernel.at(self._arrival, self._receive, message)


class Wire:
    """The channel between an agent and a replica: the agent's end, and what the replica sees of it."""

    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number
        self.to_agent: deque[ReplicaMessage] = deque()
        self.hung_up = False  # the replica has
        self.on_readable: Callable[[], None] = lambda: None
        self.replica_hears: Callable[[AgentMessage], None] = lambda message: None
        self.replica_alive = True
        self._down = OneWay(kernel, lambda line: self.replica_hears(decode_order(line)))

    def down(self, message: AgentMessage) -> bool:
        """From the agent; False where nobody is there any more."""
        if not self.replica_alive:
            return False
        self._down.send(encode(message))
        return True

    def up(self, message: ReplicaMessage | None) -> None:
        """From the replica; None: it has gone. It can be read at once, as from a socket."""
        if message is None:
            self.hung_up = True
        else:
            self.to_agent.append(decode_report(encode(message)))
        delay = CHANNEL_SECONDS * self.kernel.random.expovariate(1.0)
        self.kernel.after(delay, lambda: self.on_readable())


class Handle(ReplicaHandle):
    """The product's handle with a simulated channel."""

    def __init__(self, number: int, generation: int, local_rank: int, rank: int, error_file: str) -> None:
        super().__init__(number, generation, local_rank, rank, error_file)
        self.channel.close()
        self.theirs.close()
        kernel = threads.kernel()
        self.wire = Wire(kernel, next(kernel.numbers))
        kernel.running().process.wires[self.wire.number] = self.wire  # type: ignore[attr-defined]
        self.theirs = _Theirs(self.wire.number)  # type: ignore[assignment]
        self._closed = False

    @property
    def readable(self) -> bool:
        return bool(self.wire.to_agent) or self.wire.hung_up

    @property
    def on_readable(self) -> Callable[[], None]:
        return self.wire.on_readable

    @on_readable.setter
    def on_readable(self, call: Callable[[], None]) -> None:
        self.wire.on_readable = call

    def receive(self) -> list[ReplicaMessage] | None:
        messages = list(self.wire.to_agent)
        self.wire.to_agent.clear()
        if not messages and self.wire.hung_up:
            return None
        return messages

    def send(self, message: AgentMessage) -> bool:
        return self.wire.down(message)

    def close(self) -> None:
        self.wire.on_readable = lambda: None


class _Theirs:
    """In place of the socket that a replica inherits."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        pass


class Select:
    """In place of the module `select` in the agent."""

    @staticmethod
    def select(
        read: list[Handle], write: list[Any], error: list[Any], timeout: float
    ) -> tuple[list[Any], ...]:
        return [one for one in read if one.readable], [], []


class Forks:
    """As `forkserver.ForkServer`: starts replicas, kills them, and tells of their ends."""

    def __init__(self, machine: Machine, agent: Process, launch: Callable[..., Process]) -> None:
        self._machine, self._agent, self._launch = machine, agent, launch
        self._kernel = machine.world.kernel
        self._news: deque[Spawned | Exited] = deque()
        self._replicas: dict[int, Process] = {}
        self._signalled: set[int] = set()
        self.on_readable: Callable[[], None] = lambda: None
        self._pipe = OneWay(self._kernel, self._arrive)
        self._requests = OneWay(self._kernel, lambda request: request[0](*request[1:]))
        self._closed = self.died = False
        agent.at_end.append(self._agent_died)

    @property
    def readable(self) -> bool:
        return bool(self._news) or self.died

    def _arrive(self, news: Spawned | Exited) -> None:
        self._news.append(news)
        self.on_readable()

    def spawn(self, number: int, command: Any, stdout: object, stderr: object, channel: int) -> None:
        if self.died:
            raise BrokenPipeError("the fork server is gone")
        wire = self._agent.wires[channel]  # type: ignore[attr-defined]
        self._requests.send((self._fork, number, dict(command.env), wire), FORK_SECONDS)

    def _fork(self, number: int, environ: dict[str, str], wire: Wire) -> None:
        if self._closed or not self._machine.up or not self._agent.alive:
            return
        process = self._launch(self._machine, self._agent, environ, wire)
        self._replicas[number] = process
        process.at_end.append(lambda: self._ended(number, process))
        self._pipe.send(Spawned(number, next(self._kernel.numbers)))

    @property
    def running(self) -> list[Process]:
        """The replicas."""
        return [process for process in self._replicas.values() if process.alive]

    def _ended(self, number: int, process: Process) -> None:
        assert process.exit_code is not None
        if self.died:
            return
        self._replicas.pop(number, None)
        self._pipe.send(Exited(number, process.exit_code, number in self._signalled, threads.Time.time()))

    def signal(self, number: int, what: int) -> None:
        self._requests.send((self._deliver, number, int(what)))

    def _deliver(self, number: int, what: int) -> None:
        process = self._replicas.get(number)
        if process is not None:
            self._signalled.add(number)
            process.signal(what)  # type: ignore[attr-defined]

    def die(self) -> None:
        """The server ends, and the kernel kills its replicas; the agent finds their socket closed."""
        self.died = self._closed = True
        self._agent_died()
        self._kernel.after(DEATH_SECONDS * self._kernel.random.random(), lambda: self.on_readable())

    def receive(self) -> list[Spawned | Exited] | None:
        if self.died and not self._news:
            return None
        news = list(self._news)
        self._news.clear()
        return news

    def tell_death(self, number: int) -> None:
        """Tell of the death of a child that is no replica."""
        self._pipe.send(Exited(number, -9, False, threads.Time.time()))

    def close(self, timeout: float = 0.0) -> None:
        """Kill what still runs."""
        self._closed = True
        for process in list(self._replicas.values()):
            self._kernel.kill(process, -9, "(its agent ends)")

    def _agent_died(self) -> None:
        delay = DEATH_SECONDS * self._kernel.random.random()
        for process in list(self._replicas.values()):
            self._kernel.after(delay, self._kernel.kill, process, -9, "(its agent died)")


@dataclass
class Destination:
    """Where a replica writes."""

    stdout: None = None
    stderr: None = None
    error_file: str = ""

    def close(self) -> None:
        pass


class Output:
    """As `output.Output`: nothing that replicas write is kept."""

    directory = Path("/logs")

    def open(self, generation: int, local_rank: int, rank: int, *, joining: bool = False) -> Destination:
        number = next(threads.kernel().numbers)
        return Destination(error_file=f"/logs/{number}/error.json")

    def keeps_tracebacks(self, local_rank: int) -> bool:
        return False

    def shows_errors(self, local_rank: int) -> bool:
        return False

    def renumber(self, ranks: dict[int, int]) -> None:
        pass


class MeetingPoint:
    """A TCPStore that an agent keeps for one generation."""

    def __init__(self, kernel: Kernel, owner: Process, machine: Machine, generation: int) -> None:
        self.kernel, self.owner, self.machine = kernel, owner, machine
        self.generation = generation
        self.closed = False
        self.values: dict[str, Any] = {}
        self.meshes: dict[Any, Any] = {}  # groups that have been formed here

    @property
    def answers(self) -> bool:
        return not self.closed and self.owner.alive and not self.owner.stopped and self.machine.up

    def die(self) -> None:
        """The process that serves it dies, and replicas that meet here find their connections broken."""
        self.closed = True
        for mesh in self.meshes.values():
            mesh.store_gone()


class Meeting:
    """As `generation_store.GenerationStore`."""

    def __init__(self, host: str, ports: tuple[int, int] | None, forks: Forks) -> None:
        self._host = host
        self._kernel = threads.kernel()
        self._process = self._kernel.running().process
        self._machine: Machine = self._process.machine  # type: ignore[attr-defined]
        self._points: dict[int, MeetingPoint] = {}
        self._ports: dict[int, int] = {}
        self._process.meeting = self  # type: ignore[attr-defined]

    def open(self, generation: int, wanted: object = None) -> MasterRecord:
        self._ports[generation] = port = next(self._kernel.numbers)
        self._serve(generation)
        return MasterRecord(generation, self._host, port, 0)

    def _serve(self, generation: int) -> None:
        point = MeetingPoint(self._kernel, self._process, self._machine, generation)
        self._points[generation] = self._machine.world.points[self._host, self._ports[generation]] = point

    def served_by(self, forks: Forks) -> None:
        for generation, point in self._points.items():
            point.die()
            self._serve(generation)

    def die(self) -> int | None:
        """The child that serves the newest store dies; return its number at the fork server."""
        living = [generation for generation, point in self._points.items() if not point.closed]
        if not living:
            return None
        self._points[max(living)].die()
        return -1 - max(living)

    def exited(self, number: int) -> str:
        if (generation := -1 - number) not in self._points:
            return ""
        self._serve(generation)
        return f"another process serves the store of generation {generation}"

    def end(self, generation: int) -> None:
        if (point := self._points.pop(generation, None)) is not None:
            point.closed = True

    def forget(self, before: int) -> None:
        for generation in [g for g in self._points if g < before]:
            self.end(generation)

    def close(self) -> None:
        self.forget(max(self._points, default=0) + 1)


# -- the coordinator's process, as an agent starts it --------------------------------------------------------


class Pipes:
    """In place of `os` in `coordinator_host`: pipes whose other end sees that they are closed."""

    devnull = "/dev/null"

    def __init__(self) -> None:
        self.open: dict[int, _Pipe] = {}

    def pipe(self) -> tuple[int, int]:
        kernel = threads.kernel()
        pipe = _Pipe()
        read, write = next(kernel.numbers), next(kernel.numbers)
        self.open[read] = self.open[write] = pipe
        pipe.write = write
        kernel.running().process.at_end.append(pipe.close)
        return read, write

    def close(self, descriptor: int) -> None:
        pipe = self.open.pop(descriptor)
        if descriptor == pipe.write:
            pipe.close()


class _Pipe:
    def __init__(self) -> None:
        self.write = -1
        self.closed = threads.Event()

    def close(self) -> None:
        self.closed.set()


class Popen:
    """In place of `subprocess.Popen` in `coordinator_host`."""

    def __init__(self, command: list[str], *, pass_fds: tuple[int, ...], **rest: Any) -> None:
        kernel = threads.kernel()
        machine: Machine = kernel.running().process.machine  # type: ignore[attr-defined]
        pipe = machine.world.pipes.open[pass_fds[0]]
        self._ended = threads.Event()
        self.pid = next(kernel.numbers)
        self._process = machine.world.start_coordinator(machine, pipe.closed)
        self._process.at_end.append(self._ended.set)

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise Subprocess.TimeoutExpired
        assert self._process.exit_code is not None
        return self._process.exit_code

    def kill(self) -> None:
        threads.kernel().kill(self._process, -9, "(its agent closes it)")


class Subprocess:
    """In place of the module `subprocess`."""

    class SubprocessError(Exception):
        """As the real one."""

    class TimeoutExpired(SubprocessError):
        """As the real one."""

    Popen, DEVNULL = Popen, -3


__all__ = ["Etcd", "Forks", "Handle", "Loop", "Machine", "Meeting", "MeetingPoint", "Output", "suppress"]
