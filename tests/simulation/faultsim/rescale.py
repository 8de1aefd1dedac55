"""A change of size in place, as a replica goes through it: a model of `torch/_elastic/rescale.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adaptdl_elastic.protocol import messages
from adaptdl_elastic.protocol.channel import CAN_NOT_JOIN
from faultsim import threads
from faultsim.mesh import NotFormed, PeerLost
from faultsim.node import MeetingPoint

if TYPE_CHECKING:
    from faultsim.replica import Replica

PATIENCE_SECONDS = 20.0
FORM_SECONDS = 0.2  # that torch takes to form a group
LOOK_SECONDS = 0.02  # between two looks into a store that a replica waits on


class _Plan:
    def __init__(self, message: messages.ChangePlan) -> None:
        self.message, self.generation = message, message.generation
        self.newcomers = list(message.newcomers)
        self.attempt = 0
        self.called_off = False
        self.tried = threads.Event()


class Rescaler:
    """A survivor's or leaver's side, and a newcomer's."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._plans: dict[int, _Plan] = {}

    # -- what the agent says

    def on_plan(self, message: messages.ChangePlan) -> None:
        """A change is planned."""
        replica, plan = self._replica, _Plan(message)
        self._plans[message.generation] = plan
        replica.ring()
        if replica.rank == 0:
            replica.spawn(lambda: self._lead(plan), f"generation {message.generation}")

    def on_withdrawal(self, generation: int) -> None:
        """It is off."""
        plan = self._plans.get(generation)
        if plan is not None:
            plan.called_off = True
            plan.tried.set()
            self._replica.ring()

    def _wanted(self, plan: _Plan) -> bool:
        return not plan.called_off and self._replica.generation < plan.generation

    def _point(self, plan: _Plan) -> MeetingPoint:
        return self._replica.connect(plan.message.master_addr, plan.message.master_port)

    def _lead(self, plan: _Plan) -> None:
        """Rank 0, beside the training: wait for the newcomers, then have the change agreed on."""
        control = self._replica.control
        try:
            point = self._point(plan)
        except NotFormed:
            return
        while self._wanted(plan):
            plan.tried.clear()
            command = {"generation": plan.generation, "attempt": plan.attempt}
            if plan.newcomers:
                control.request({**command, "kind": "preview"})
                keys = [f"arrived/{plan.attempt}/{rank}" for rank in plan.newcomers]
                while not all(self._replica.reads(point, key) for key in keys):
                    self._replica.kernel.sleep(LOOK_SECONDS)
                    if not self._wanted(plan) or not point.answers:
                        return
            control.request({**command, "kind": "switch"})
            plan.tried.wait()
            plan.attempt += 1

    # -- at agreed boundaries

    def execute(self, command: dict[str, Any], position: int) -> None:
        """A preview or the switch."""
        replica, generation = self._replica, int(command["generation"])
        plan = self._plans.get(generation)
        if command["kind"] == "preview":
            if replica.rank == 0 and plan is not None and self._wanted(plan):
                plan_point = replica.world.points.get((plan.message.master_addr, plan.message.master_port))
                if plan_point is not None and plan_point.answers:
                    replica.writes(plan_point, f"step/{plan.attempt}", {"preview": replica.step})
            return
        mesh = replica.mesh
        assert mesh is not None
        go = replica.rank == 0 and plan is not None and self._wanted(plan)
        attempt = mesh.gather(("switch", generation, position), command["attempt"] if go else None)[0]
        if attempt is None:
            if plan is not None:
                plan.tried.set()
            return
        self._switch(generation, attempt, position)

    def _switch(self, generation: int, attempt: int, position: int) -> None:
        replica, mesh = self._replica, self._replica.mesh
        assert mesh is not None
        replica.wait_for(lambda: generation in self._plans, PATIENCE_SECONDS)
        plan = self._plans.get(generation)
        if plan is None:
            replica.recover(f"the agent has not told this replica of generation {generation}")
            return
        mesh.gather(("leave", generation, position), None)
        rank = plan.message.ranks[replica.rank]
        if rank is None:
            mesh.leave(replica)
            replica.send(messages.Switched(generation, replica.last_step_time))
            replica.kernel.exit(0, "(leaves)")
        mesh.leave(replica)
        replica.mesh = None
        replica.become(plan.message, rank)
        try:
            replica.kernel.sleep(replica.draw(FORM_SECONDS))
            point = self._point(plan)
            if replica.rank == 0:
                replica.writes(point, f"step/{attempt + 1}", {"go": True})
            replica.form(point, PATIENCE_SECONDS, lambda: plan.called_off or replica.newer())
            states = replica.formed.gather("state", (replica.step, replica.chain))
            replica.world.truth.hand_over(replica, states, plan.newcomers)
            replica.finish_switch()
        except (NotFormed, PeerLost) as error:
            replica.recover(str(error), again=True)
        plan.tried.set()
        self._plans = {g: p for g, p in self._plans.items() if g > generation}

    # -- a newcomer

    def join(self) -> None:
        """From a newcomer's start until it is one of the others."""
        replica, environ = self._replica, self._replica.environ
        point = replica.connect(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
        attempt, seen = 0, self._next(point, 0)
        while True:
            if "refused" in seen:
                replica.kernel.exit(CAN_NOT_JOIN, "(refused)")
            if "go" in seen:
                break
            replica.kernel.sleep(replica.draw(replica.script.start_seconds / 2))
            replica.writes(point, f"arrived/{attempt}/{replica.rank}", True)
            replica.send(messages.Ready(replica.generation))
            attempt += 1
            seen = self._next(point, attempt)
        replica.form(point, PATIENCE_SECONDS, lambda: False)
        values = replica.formed.gather("state", None)
        replica.step, replica.chain = next(value for value in values.values() if value is not None)
        replica.joining = False
        replica.finish_switch()

    def _next(self, point: MeetingPoint, attempt: int) -> dict[str, Any]:
        replica, key = self._replica, f"step/{attempt}"
        while not replica.reads(point, key):
            if not (point.owner.alive and point.machine.up) or point.closed:
                replica.kernel.exit(1, "(the store of its generation is gone)")
            replica.kernel.sleep(LOOK_SECONDS)
        found: dict[str, Any] = point.values[key]
        return found
