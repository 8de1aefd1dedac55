"""Play scripts of an agent's decisions: events of the agent `agent-1` on node `here`, and its actions.

Each line of a script is `events -> expected`; semicolons part the events, and the actions that are expected
after them. A line without events goes on with what the line before it expects. A line without `->` expects
nothing in particular:

    run 2; plan 1 here*1 left=here:0 -> stop 0,1 - why
    0,1 exits <143|0> -> ended 0 <stopped exit_code=143|done>; ...

A script with `<alternatives|in such brackets>` is played with the first one of every pair of brackets, then
with the second one, and so on.

| event | what happens |
|---|---|
| `plan 1 here*2 there:0,3 left=there:0 inplace` | a plan: replicas or slots by node, who is to be gone |
| `1 ready`, `0,1 step step=8` | replicas (by slot) send a message, named as on the wire |
| `0 exits 1 "a reason"`, `0 dies` | replicas end; `dies`: by SIGKILL from outside |
| `nodes here=agent-1`, `leave SIGTERM` | one of `_EVENTS` |
| any other | a method of `Agent` |

An action is its name, the values of its fields in their order, and the fields that differ from their default;
`-` is an empty value. Dots stand for any text of an action, or for any actions. `nothing` is no action.

A report of what the node holds is told by what is new in it: `ended 0 done` (143: it never started),
`running 0`, `ready 1`, `broken 0 lost=1`.

| expected | of the agent |
|---|---|
| `due=60` | when it wants to be woken |
| `held=1` | the generation that runs |
| `ranks=1:0,0:1` | slot and rank of each replica of that generation |
| `alive=0,1` | the slots of the processes that have not exited |
| `exiting=True`, `acted=1` | a field of its state |
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from script_words import literal_or_text

from adaptdl_elastic.agent.core import states as d
from adaptdl_elastic.agent.core.decisions import alive, deadline, decide
from adaptdl_elastic.protocol.messages import VERSION, Hello, ReplicaMessage, report_from_dict
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.held import GenerationEnd, Held, Left, LeftEnd, PeerLoss
from adaptdl_elastic.rendezvous.schema.records import Leaving, Placement, Plan, Transition

ME = d.AgentIdentity("here", "agent-1", records.JobSpec("job", "run"), hang_timeout=0.0)
HELLO = Hello("1", 100)

_VERBS: dict[type[d.Action], str] = {
    **{d.OpenMaster: "open", d.StartReplicas: "start", d.TellPlan: "tell", d.Withdraw: "withdraw"},
    **{d.Adopt: "adopt", d.AskToStop: "stop", d.Kill: "kill", d.Ping: "ping", d.Say: "say", d.Exit: "exit"},
    **{d.Lost: "lost", d.WriteDraining: "draining"},
}
_EVENTS: dict[str, Callable[..., d.Event]] = {
    **{"spec": d.SpecSeen, "unfit": d.Unfit, "leave": d.Leave, "leave_now": d.LeaveNow},
    **{"store_away": d.StoreAway, "store_back": d.StoreBack},
    "nodes": lambda holder="", **agents: d.NodesSeen(agents, holder),
    "status": lambda state, run="run", **values: d.StatusSeen(
        records.JobStatus("job", run, records.JobState(state), **values)
    ),
}
# what messages say if a script does not; each takes the fields that it has
_SAID: dict[str, Any] = {
    **{"version": "1", "pid": 100, "id": 0, "waiting": False, "step": 7, "time": 0.0},
    **{"last_step": None, "finished": True, "reason": ""},
}
_OF_AN_END = ("generation", "outcome", "exit_code", "failure", "unsaved")
_VARIANTS = re.compile(r"<([^<>]*)>")
_PLACE = re.compile(r"(?:(\w+)@)?(\w+)(?:\*(\d+)|:([\d,]+))")


def said(local_rank: int, message: ReplicaMessage, generation: int = 0) -> d.FromReplica:
    """Return the event of a message, about the generation that it names, else the given one."""
    return d.FromReplica(getattr(message, "generation", generation), local_rank, message)


def agent_of(node: str) -> str:
    """Return the name of the agent on a node."""
    return ME.agent if node == ME.node else f"agent-{node}"


def plan(generation: int, *words: str, left: str = "", **changes: Any) -> Plan:
    """Return a plan: `words` are places (`here*2`, `here:0,3`) and the transition."""
    how, places, leaving = Transition.RESTART, list[Placement](), list[Leaving]()
    for word in words:
        if found := _PLACE.fullmatch(word):
            agent, node, count, slots = found.groups()
            numbers = tuple(map(int, slots.split(","))) if slots else ()
            places.append(Placement(node, int(count or len(numbers)), agent or agent_of(node), numbers))
        else:
            how = Transition(word)
    for word in filter(None, left.split(",")):
        agent, _, node = word.partition(":")[0].rpartition("@")
        leaving.append(Leaving(node, 1, agent or agent_of(node), int(word.partition(":")[2])))
    made = Plan(
        "job", "run", generation, tuple(places), records.Cause.POLICY, how, "why", leaving=tuple(leaving)
    )
    return replace(made, **changes)


def master(generation: int) -> d.MasterSeen:
    return d.MasterSeen(records.MasterRecord(generation, "127.0.0.1", 1, 2))


def play(script: str) -> None:
    """Play each variant of a script on an agent of its own."""
    groups = [group.split("|") for group in _VARIANTS.findall(script)]
    for number in range(max(map(len, groups), default=1)):
        variant = _VARIANTS.sub(lambda found, number=number: found[1].split("|")[number], script)
        agent = Agent()
        for line in re.sub(r"\n\s*->", " ->", variant.strip()).splitlines():
            agent.play_line(line.strip())


def _text(value: Any) -> str:
    match value:
        case Plan():
            return str(value.generation)
        case Enum():
            return str(value.value)
        case float():
            return f"{value:g}"
        case tuple() | None:
            return ",".join(map(_text, value or ())) or "-"
    return " ".join(_words(value)) if is_dataclass(value) else str(value)


def _words(record: Any) -> list[str]:
    """Return the values of the fields without a default, and the others that differ from it."""
    words = []
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name == "node":
            assert value == ME.node, record
        elif field.name == "master":
            assert value == master(record.plan.generation).master, record
        elif field.default is MISSING:
            words.append(_text(value))
        elif value != field.default:
            words.append(field.name if value is True else f"{field.name}={_text(value)}")
    return words


class Agent:
    """Feeds events to an agent, and checks what it decides."""

    def __init__(self) -> None:
        self.state = d.State(me=ME)
        self.now = 0.0
        self.actions: list[str] = []
        self.generations: dict[int, int] = {}  # of the processes, by slot
        self.plans: dict[int, Plan] = {}
        self.told = Held(ME.node, ME.agent)  # what the node said last that it holds
        self(d.NodesSeen({"here": "agent-1", "there": "agent-there"}))

    def __call__(self, event: d.Event) -> list[d.Action]:
        self.state, actions = decide(self.state, event, self.now)
        return actions

    @property
    def alive(self) -> tuple[d.Replica, ...]:
        """The processes that have not exited."""
        return () if self.state.held is None else alive(self.state.held)

    def play_line(self, line: str) -> None:
        """Let the events of a line happen, and check what it expects."""
        events, _, expected = line.partition("->")
        self.actions = []
        for event in events.split(";"):
            self._happen(*shlex.split(event))
        patterns = []
        for word in filter(None, map(str.strip, re.split("->|;", expected))):
            name, _, text = word.partition("=")
            if name.isidentifier() and name != word:
                assert self._fact(name) == text, f"{line}: {name}={self._fact(name)}"
            else:
                dots = ".*" if word == "..." else "[^;]*"
                patterns.append(dots.join(map(re.escape, word.split("..."))))
        found = "; ".join(self.actions) or "nothing"
        assert not patterns or re.fullmatch("; ".join(patterns), found), f"{line}: {found}"

    def _fact(self, name: str) -> str:
        held = self.state.held
        members = () if held is None else held.replicas
        facts = {
            "due": deadline(self.state),
            "held": None if held is None else held.generation,
            "ranks": tuple(f"{r.local_rank}:{r.rank}" for r in members),
            "alive": tuple(r.local_rank for r in self.alive),
        }
        return _text(facts[name] if name in facts else getattr(self.state, name))

    def _described(self, action: Any) -> Iterator[str]:
        if isinstance(action, d.WriteHeld):
            yield from self._news(action.held)
        elif not isinstance(action, d.Ended):  # for the user; a report follows it
            if hasattr(action, "plan"):
                assert action.plan is self.plans[action.plan.generation], action
            yield f"{_VERBS[type(action)]} {_text(action)}"

    def _news(self, now: Held) -> Iterator[str]:
        """Yield what a report says that the one before it has not said."""
        before, self.told = self.told, now
        assert now.sequence == before.sequence + 1
        for end in now.ends:
            if end not in before.ends:
                if end.lost and not end.ran:
                    yield f"broken {_text(PeerLoss(end.generation, end.lost, end.failure))}"
                if end.outcome is records.Outcome.STOPPED:  # the failure is that of a loss
                    end = replace(end, failure=None)
                yield f"ended {_text(GenerationEnd(*(getattr(end, name) for name in _OF_AN_END)))}"
        for generation in sorted(self._counts_on_us()):
            left = not before.has_left(generation, ME.agent) and now.has_left(generation, ME.agent)
            if left and now.end_of(generation) is None:
                yield f"ended {generation} stopped exit_code=143"
        said = [one.runs >= 0 and (one.runs, one.library, one.survives) for one in (before, now)]
        if said[1] and said[0] != said[1]:
            flags = [*(["library"] if now.library else []), *([] if now.survives is None else ["resilient"])]
            yield " ".join(("running", str(now.runs), *flags, *map(_text, now.survives or ())))
        if now.ready and not before.ready:
            yield f"ready {now.to if now.to >= 0 else now.generation}"
        if now.loss is not None and now.loss != before.loss:
            yield f"broken {_text(now.loss)}"

    def _counts_on_us(self) -> set[int]:
        """Return the generations that a plan has placed here, or waits for."""
        found = {g for g, made in self.plans.items() for one in made.placements if one.agent == ME.agent}
        return found | {
            one.generation for made in self.plans.values() for one in made.leaving if one.agent == ME.agent
        }

    # -- events

    def _happen(self, subject: str, *rest: str) -> None:
        named = {
            word.partition("=")[0]: literal_or_text(word.partition("=")[2]) for word in rest if "=" in word
        }
        given = [literal_or_text(word) for word in rest if "=" not in word]
        if subject in _EVENTS:
            self._feed(_EVENTS[subject](*given, **named))
        elif not subject[0].isdigit():
            getattr(self, subject)(*given, **named)
        for slot in map(int, subject.split(",") if subject[0].isdigit() else ()):
            if given[0] in ("exits", "dies"):
                getattr(self, given[0])(slot, *given[1:], **named)
            else:
                self._send(slot, given[0], **named)

    def _feed(self, event: d.Event) -> None:
        for action in self(event):
            self.actions += self._described(action)
            match action:
                case d.StartReplicas(made, _, slots):
                    self.generations.update(dict.fromkeys(slots, made.generation))
                case d.Adopt(made):
                    members = self.generations.keys() & set(made.slots(ME.node))
                    self.generations.update(dict.fromkeys(members, made.generation))

    def _send(self, slot: int, kind: str, **values: Any) -> None:
        """Let a replica send a message: about the newest plan if it follows that, else its generation."""
        follows = kind in ("ready", "switched")
        generation = max(self.plans) if follows else self.generations[slot]
        message = {"v": VERSION, "type": kind, **_SAID, "generation": generation, **values}
        self._feed(said(slot, report_from_dict(message), self.generations[slot]))

    def exits(self, slot: int, code: int, message: str = "why", **about: Any) -> None:
        """Let a replica exit (at `time`, before the agent's signal with `arrived=False`)."""
        time, arrived = about.pop("time", 5.0), about.pop("arrived", True)
        known = (code, time, message, arrived, d.Evidence(**about))
        self._feed(d.ReplicaExited(self.generations[slot], slot, *known))

    def dies(self, slot: int) -> None:
        """Let a replica be killed from outside."""
        self.exits(slot, -9, "SIGKILL")

    def run(self, count: int, how: str = "") -> None:
        """Run replicas in generation 0: `plain` ones without the library, or `resilient` ones."""
        self._happen("plan", "0", f"here*{count}")
        self.master()
        for kind in {"plain": [], "": ["hello"], "resilient": ["hello", "resilient"]}[how]:
            self._happen(",".join(map(str, range(count))), kind)
        self.actions = []

    def plan(self, generation: int, *words: str, **changes: Any) -> None:
        """Let a plan be written."""
        made = plan(generation, *words, **changes)
        self.plans.setdefault(generation, made)
        self._feed(d.PlanSeen(made))

    def master(self, generation: int | None = None) -> None:
        """Let the store of a generation be served: of the newest, if none is given."""
        self._feed(master(max(self.plans) if generation is None else generation))

    def ended(self, generation: int, node: str, how: str) -> None:
        """Let another node report that a generation has ended there."""
        if node == ME.node:
            end = GenerationEnd(generation, records.Outcome(how))
            self.state = replace(self.state, ends=(*self.state.ends, end))
            return
        known = self.state.left.get(node, Left(node, agent_of(node)))
        ends = (*known.ends, LeftEnd(generation, records.Outcome(how)))
        self._feed(d.LeftSeen(replace(known, ends=ends)))

    def left(self, *values: Any, **named: Any) -> None:
        """Let the agent see what a node has left."""
        self._feed(d.LeftSeen(Left(*values, **named)))

    def later(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self._feed(d.Tick())

    def me(self, **changes: Any) -> None:
        """Let the agent be another one."""
        self.state = replace(self.state, me=replace(self.state.me, **changes))

    def knows(self, **changes: Any) -> None:
        """Let the agent know something else."""
        self.state = replace(self.state, **changes)
