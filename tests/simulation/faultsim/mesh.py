"""The connections between the replicas of one generation: collectives, and how deaths are noticed.

A replica that dies is noticed by the others within moments, because its connections break. One whose
machine has crashed, or that is stopped, is not noticed at all: the others wait for it in a collective. A
collective ends on each replica at a moment of its own, so that a death may come when some have its result
and others have not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from faultsim.kernel import Kernel

if TYPE_CHECKING:
    from faultsim.replica import Replica

NOTICE_SECONDS = 0.05  # until the others notice that a connection has broken, at most
SPREAD_SECONDS = 0.004  # between the first and the last replica that has a collective's result, at most
CONTROL_SECONDS = 0.001  # that a control message takes, on average


class PeerLost(Exception):
    """Another replica of the generation is gone."""


class NotFormed(Exception):
    """A generation did not come about."""


class _Collective:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.delivered: set[int] = set()


class Mesh:
    """One generation's replicas, as they are connected with each other."""

    def __init__(self, kernel: Kernel, size: int, generation: int) -> None:
        self.kernel, self.size, self.generation = kernel, size, generation
        self.label = f"generation {generation}"
        self.number = next(kernel.numbers)
        self.formed_at = kernel.now
        self.members: dict[int, Replica] = {}
        self.left: set[int] = set()  # ranks that have said goodbye
        self._arrivals: dict[tuple[int, int], float] = {}
        self._collectives: dict[Hashable, _Collective] = {}

    def enter(
        self, replica: Replica, rank: int, patience: float | None, cancelled: Callable[[], bool]
    ) -> None:
        """Connect; return when all are connected and live.

        Raises:
            NotFormed: not all have come within `patience` seconds, or `cancelled()` meanwhile, or one of
                those that had come has died.
        """
        other = self.members.get(rank)
        if other is not None and other.alive and other is not replica:
            self.kernel.defect(f"{replica.name} and {other.name} both are rank {rank} of {self.label}")
        self.members[rank] = replica
        replica.mesh, replica.mesh_rank, replica.lost = self, rank, ""
        for one in self.members.values():
            one.ring()
        fine = replica.wait_for(
            lambda: self._all_reach(replica) or bool(replica.lost) or cancelled(), patience
        )
        if not fine or replica.lost or cancelled():
            raise NotFormed(replica.lost or ("there is another plan" if cancelled() else "not all have come"))
        try:
            self.gather("formed", None)
        except PeerLost as error:
            raise NotFormed(str(error)) from None

    def _all_reach(self, replica: Replica) -> bool:
        connects, name = replica.world.network.connects, replica.machine.name
        return len(self.members) == self.size and all(
            connects(name, one.machine.name) for one in self.members.values()
        )

    def gather(self, tag: Hashable, value: Any) -> dict[int, Any]:
        """What every replica has put in, by rank, as soon as all have; PeerLost when one is gone first."""
        replica = self.kernel.running().process
        rank = replica.mesh_rank  # type: ignore[attr-defined]
        found = self._collectives.setdefault(tag, _Collective())
        if replica.lost:  # type: ignore[attr-defined]
            raise PeerLost(replica.lost)  # type: ignore[attr-defined]
        found.values[rank] = value
        if len(found.values) == self.size:
            for member in self.members.values():
                delay = SPREAD_SECONDS * self.kernel.random.random()
                self.kernel.after(delay, self._deliver, found, member)
        replica.wait_for(lambda: rank in found.delivered or bool(replica.lost), None)  # type: ignore[attr-defined]
        if rank in found.delivered:
            return found.values
        raise PeerLost(replica.lost)  # type: ignore[attr-defined]

    def _deliver(self, found: _Collective, member: Replica) -> None:
        if member.mesh is not self or member.lost:
            return
        network, name = member.world.network, member.machine.name
        others = (one.machine.name for one in self.members.values())
        away = next((other for other in others if not network.connects(other, name)), None)
        if away is not None:
            network.deliver(away, name, lambda: self._deliver(found, member))
        else:
            found.delivered.add(member.mesh_rank)
            member.ring()

    def tell(self, sender: Replica, rank: int, call: Callable[[Replica], None]) -> None:
        """Have `call` done by a member's control thread, if it still is one by then."""
        member = self.members.get(rank)
        if member is not None:
            delay = CONTROL_SECONDS * self.kernel.random.expovariate(1.0)
            line = sender.mesh_rank, rank
            arrival = max(self._arrivals.get(line, 0.0), self.kernel.now + delay)  # none overtakes another
            self._arrivals[line] = arrival
            self.kernel.at(arrival, self._between(sender, member, lambda: member.inbox.put((self, call))))

    def leave(self, replica: Replica) -> None:
        """Say goodbye: its end is no loss."""
        self.left.add(replica.mesh_rank)

    def broken_off(self, replica: Replica) -> None:
        """The connections of a member have broken, by its death or because it hangs up."""
        rank = replica.mesh_rank
        if self.members.get(rank) is not replica or rank in self.left:
            return
        self.left.add(rank)
        for other in self.members.values():
            if other is not replica:
                delay = NOTICE_SECONDS * self.kernel.random.random()
                self.kernel.after(delay, self._between(replica, other, self._tell_loss(other, rank)))

    def reset(self, sides: tuple[frozenset[str], frozenset[str]]) -> None:
        """Break the connections between two sides, as a firewall does: members of both find a peer gone."""
        for one, other in (sides, sides[::-1]):
            far = [rank for rank, member in self.members.items() if member.machine.name in other]
            for member in self.members.values():
                if far and member.machine.name in one and far[0] not in self.left:
                    delay = NOTICE_SECONDS * self.kernel.random.random()
                    self.kernel.after(delay, self._tell_loss(member, far[0]))

    def store_gone(self) -> None:
        """The store is gone at which members meet. Those that are connected do not need it."""
        formed = self._collectives.get("formed")
        if formed is None or len(formed.values) < self.size:
            for member in self.members.values():
                delay = NOTICE_SECONDS * self.kernel.random.random()
                self.kernel.after(delay, member.on_lost, self, "the store of the generation is gone")

    def _tell_loss(self, member: Replica, rank: int) -> Callable[[], None]:
        return lambda: member.on_lost(self, f"rank {rank} is gone")

    def _between(self, sender: Replica, receiver: Replica, call: Callable[[], None]) -> Callable[[], None]:
        machines = sender.machine.name, receiver.machine.name
        return lambda: receiver.world.network.deliver(*machines, call)
