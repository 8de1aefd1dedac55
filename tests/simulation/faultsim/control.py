"""How the replicas of a generation agree on a boundary to act at: a model of `torch/_runtime/consensus.py`.

Whoever wants something asks rank 0, which opens a round: every replica's control thread answers with the
last boundary its training has passed and holds it at the next one; rank 0 takes the latest, and all act at
the first boundary after that.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from adaptdl_elastic.protocol import messages
from faultsim.mesh import PeerLost

if TYPE_CHECKING:
    from faultsim.replica import Replica

Command = dict[str, Any]
_KEPT = ("stop", "checkpoint")  # what is still wanted after a replica has died


class Control:
    """One replica's side of every agreement; rank 0's also leads."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._position = -1
        self._round: int | None = None
        self._decision: tuple[int, list[Command]] | None = None
        self._asked: list[Command] = []
        self._wanted: list[Command] = []  # rank 0
        self._running: list[Command] | None = None  # rank 0: of the open round
        self._number = 0
        self._ready: dict[int, int] = {}
        self._executed: set[int] = set()
        self._between = True  # two generations
        self._clock = 0  # of the periodic checkpoints: which one is the newest

    # -- asking

    def request(self, command: Command) -> None:
        """Have something done on all replicas at a common boundary."""
        if command["kind"] in _KEPT:
            self._asked.append(command)
        self._to_leader(command)

    def _to_leader(self, command: Command) -> None:
        replica = self._replica
        if replica.rank == 0:
            self._want(command)
        elif replica.mesh is not None:
            replica.mesh.tell(replica, 0, lambda leader: leader.control._want(command))

    def _want(self, command: Command) -> None:
        known = [*self._wanted, *(self._running or ())]
        if not any(one == command or one["kind"] == command["kind"] == "stop" for one in known):
            self._wanted.append(command)
        self._open()

    # -- rank 0

    def _open(self) -> None:
        mesh = self._replica.mesh
        if self._running is not None or not self._wanted or self._between or mesh is None:
            return
        self._number += 1
        self._running, self._wanted = self._wanted, []
        self._ready, self._executed = {}, set()
        number = self._number
        for rank in range(mesh.size):
            mesh.tell(self._replica, rank, lambda member: member.control._prepare(number))

    def _prepare(self, number: int) -> None:
        self._round, self._decision = number, None
        rank, position, mesh = self._replica.rank, self._position, self._replica.mesh
        if mesh is not None:
            mesh.tell(self._replica, 0, lambda leader: leader.control._answered(number, rank, position))

    def _answered(self, number: int, rank: int, position: int) -> None:
        mesh = self._replica.mesh
        if number != self._number or mesh is None:
            return
        self._ready[rank] = position
        if len(self._ready) == mesh.size:
            after, commands = max(self._ready.values()), list(self._running or ())
            for member in range(mesh.size):
                mesh.tell(self._replica, member, lambda one: one.control._decide(number, after, commands))

    def _decide(self, number: int, after: int, commands: list[Command]) -> None:
        if self._round == number:
            self._decision = after, commands
            self._replica.ring()

    def _done(self, number: int, rank: int) -> None:
        mesh = self._replica.mesh
        if number == self._number and mesh is not None:
            self._executed.add(rank)
            if len(self._executed) == mesh.size:
                self._running = None
        self._open()

    def _tick(self, clock: int) -> None:
        replica, interval = self._replica, float(self._replica.environ["ADAPTDL_CHECKPOINT_INTERVAL"])
        while clock == self._clock and replica.rank == 0 and not replica.over and interval > 0:
            replica.kernel.sleep(interval)
            if clock == self._clock:
                self._want({"kind": "checkpoint"})

    # -- the training thread

    def boundary(self, position: int) -> None:
        """Pass a boundary, doing first what was agreed to be done there."""
        replica = self._replica
        if self._round is None:
            self._position = position
            return
        replica.wait_for(
            lambda: self._decision is not None or self._round is None or bool(replica.lost), None
        )
        if self._decision is None:
            if replica.lost:
                raise PeerLost(replica.lost)
            self._position = position
            return
        after, commands = self._decision
        if position <= after:
            self._position = position
            return
        number, self._round, self._decision = self._round, None, None
        self._position = position
        generation = replica.generation
        self._execute(commands, position)
        if replica.generation == generation and replica.mesh is not None and number is not None:
            rank = replica.rank
            replica.mesh.tell(replica, 0, lambda leader: leader.control._done(number, rank))

    def _execute(self, commands: list[Command], position: int) -> None:
        replica, mesh = self._replica, self._replica.mesh
        assert mesh is not None
        kinds = [command["kind"] for command in commands]
        if "stop" in kinds:
            mesh.gather(("sync", position, "stop"), None)
            saved = replica.rank > 0 or replica.save("stop")
            replica.report_step(force=True)
            replica.send(messages.Stopping("" if saved else "a later generation has saved"))
            with suppress(PeerLost):
                mesh.gather(("stop", position), None)
            mesh.leave(replica)
            replica.kernel.exit(replica.script.stop_exit_code, "(stops)")
        if "checkpoint" in kinds:
            mesh.gather(("sync", position, tuple(kinds)), None)
            self._asked[:] = [one for one in self._asked if one["kind"] != "checkpoint"]
            if replica.rank == 0:
                replica.spawn(lambda: replica.save("periodic"), "saves")
        for command in commands:
            if command["kind"] in ("preview", "switch"):
                replica.rescaler.execute(command, position)

    # -- generations

    def abandon(self) -> None:
        """What was to be agreed with a generation is over."""
        self._round = self._decision = None
        self._between = True
        self._clock += 1

    def renew(self, position: int, recovered: bool) -> None:
        """A new generation has begun, in which the boundary at `position` has been passed.

        With `recovered` the old generation broke off, and its changes of size with it.
        """
        self._between = False
        self._position = position
        if recovered:
            both = (*(self._running or ()), *self._wanted)
            self._wanted = [one for one in both if one["kind"] in _KEPT]
        self._running = None
        self._number += 1
        self._clock += 1
        clock = self._clock
        self._replica.spawn(lambda: self._tick(clock), "clock")
        for command in list(self._asked):
            self._to_leader(command)
        self._open()
