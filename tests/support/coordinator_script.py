"""Play scripts of the coordinator's transitions: events, and what is decided then.

Each line of a script is `events -> expected`; semicolons part the events, a line without events goes on with
what the line before it expects:

    n0 lose 0; decide -> +1 recover replica_lost n0:1 n1:0,1 restarts=0 "lost rank 0 (SIGKILL); 3 go on"

An event is a function of the test file or a method of the pump (`decide`, `later 61`, `ask a replicas=2`), a
method of the agent on a node (`n0 lose 0`; `all notice`) or assignments to it (`n0 holds_start=True`), or
one of the methods of `Script`.

| expected | of job `a` (`b/...`: of job `b`) |
|---|---|
| `+1` | generations since the line began |
| `recover`, `node_lost`, `running` | transition and cause of the plan, state of the job |
| `n0=2 n1=1`, `n0:0,1`, `nowhere` | all placements: replicas by node, or slots by node |
| `restarts=1` | a field of the plan, else of the status |
| `"lost n0..."` | the reason of the plan or of the status; dots stand for anything |
| `on:n0,n1` | the nodes whose replicas run in the newest generation |
| `exits=0,143` | the exit codes of all agents |
| `rank0=n1`, `placed_on=n0,n1`, `agents=n0-a-0` | node of the first placement, all nodes, all agents |
| `left=n0:1` | nodes and generations that the plan waits for |
| `limited_to=48`, `first_failure="boom"`, `fenced=True` | batch size; message; the fence is this leader's |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from coordinator_pump import Pump
from fake_agents import FakeAgent
from script_words import literal_or_text

from adaptdl_elastic.rendezvous.schema.held import MOST_ENDS, GenerationEnd, Held, PeerLoss
from adaptdl_elastic.rendezvous.schema.records import DrainRequest, Failure, Outcome, decode, encode

_WORD = re.compile(r'(?:\w+=)?"[^"]*"|[^\s;]+|;')
_SLOTS = re.compile(r"(\w+):([\d,]+)")


def play(pump: Pump, text: str, *functions: Callable[..., object]) -> None:
    """Play a script; `functions` are events of the test file."""
    script = Script(pump, {function.__name__: function for function in functions})
    for line in text.strip().splitlines():
        script.play_line(line.strip())


class Script:
    """A script that is played on a pump."""

    def __init__(self, pump: Pump, functions: dict[str, Callable[..., object]]) -> None:
        self.pump, self.functions = pump, functions
        self.away: dict[str, FakeAgent] = {}
        self.generations: dict[str, int] = {}

    def play_line(self, line: str) -> None:
        """Let the events of a line happen, and check what it expects."""
        events, _, expected = line.partition("->")
        if events:
            jobs = self.pump.view().jobs.items()
            self.generations = {name: job.plan.record.generation for name, job in jobs if job.plan}
        words = list[str]()
        for word in (*_WORD.findall(events), ";"):
            if word != ";":
                words.append(word)
            elif words:
                self._happen(*words)
                words = []
        of_jobs: dict[str, list[str]] = {}
        for word in re.findall(r'(?:\w+[=/])?"[^"]*"|\S+', expected):
            job, slash, rest = word.partition("/")
            other = bool(slash) and job in self.pump.view().jobs
            of_jobs.setdefault(job if other else "a", []).append(rest if other else word)
        for job, found in of_jobs.items():
            self._check(job, found, line)

    # -- events

    def _happen(self, subject: str, *rest: str) -> None:
        agents = self.pump.agents if subject == "all" else self._agents(subject)
        if agents and "=" in rest[0]:
            verbs: list[Any] = [agent.__dict__.update for agent in agents]
            assert all(hasattr(agents[0], word.partition("=")[0]) for word in rest), rest
        elif agents:
            verb, *rest = rest  # type: ignore[assignment]
            own = getattr(self, verb, None)
            verbs = [
                getattr(agent, verb) if own is None else partial(own, agent.node) for agent in list(agents)
            ]
        elif subject in self.functions:
            verbs = [partial(self.functions[subject], self.pump)]
        else:
            verbs = [getattr(self, subject, None) or getattr(self.pump, subject)]
        named = dict(word.split("=", 1) for word in rest if re.match(r"\w+=", word))
        given = [literal_or_text(word) for word in rest if not re.match(r"\w+=", word)]
        for verb in verbs:
            verb(*given, **{name: literal_or_text(text) for name, text in named.items()})

    def _agents(self, node: str) -> list[FakeAgent]:
        return [agent for agent in reversed(self.pump.agents) if agent.node == node][:1]

    def wait(self, seconds: float) -> None:
        """Let time pass without a decision."""
        self.pump.clock.now += seconds

    def later(self, seconds: float | str, more: float = 0.0) -> None:
        """Let time pass: so many seconds, or those of a setting (`later node_ttl -1`)."""
        named = getattr(self.pump.settings, seconds) if isinstance(seconds, str) else seconds
        self.pump.later(named + more)

    def reconnect(self) -> None:
        """Let the store be back after a break, only now."""
        self.pump.steady_since = self.pump.clock()

    def silence(self, node: str) -> None:
        """Let an agent do nothing any more; its lease has not run out."""
        agent = self.away[node] = self._agents(node)[0]
        self.pump.agents.remove(agent)

    def awake(self, node: str) -> None:
        """Let an agent go on that was silent."""
        self.pump.agents.append(self.away.pop(node))

    def expire(self, node: str) -> None:
        """Let the lease of a silent agent run out."""
        self.away[node].vanish()

    def drain(self, node: str) -> None:
        """Ask for a node."""
        self.pump.store.put(self.pump.keys.drain(node), encode(DrainRequest(node, "maintenance")))

    def undrain(self, node: str) -> None:
        """Withdraw that."""
        self.pump.store.delete(self.pump.keys.drain(node))

    def ended(
        self, node: str, back: int, outcome: str, code: int = 0, message: str = "", **failure: Any
    ) -> None:
        """Record that a node's replicas have ended, in the generation `back` from the newest."""
        rank, signal = failure.pop("rank", -1), failure.pop("signal", code)
        last_step = failure.pop("last_step", None)
        why = Failure(rank, signal, message, **failure) if message else None
        generation = self.pump.plan("a").generation + back
        end = GenerationEnd(generation, Outcome(outcome), code, why, last_step=last_step)
        held = self._held(node)
        gone = {"generation": -1} if held.generation == generation else {}
        kept = held.loss if held.loss is None or held.loss.generation != generation else None
        ran = bool(gone) and held.library
        first_step, survives = (held.first_step, held.survives) if gone else (None, None)
        end = replace(end, ran=bool(gone), library=ran, first_step=first_step, survives=survives)
        for agent in self._agents(node):
            agent.add_end(end)
            agent.running = None if agent.running == generation else agent.running
        self._write(replace(held, ends=(*held.ends, end)[-MOST_ENDS:], loss=kept, **gone))

    def broken(self, node: str, back: int, *slots: int) -> None:
        """Record that a node's replicas miss others, and which of its own have died."""
        loss = PeerLoss(self.pump.plan("a").generation + back, slots)
        for agent in self._agents(node):
            agent.loss = loss
        self._write(replace(self._held(node), loss=loss))

    def running(self, node: str, **fields: Any) -> None:
        """Record that a node's replicas run in the newest generation."""
        fields = {"library": False, "survives": None, "first_step": None, **fields}
        self._write(replace(self._held(node), generation=self.pump.plan("a").generation, **fields))

    def report(self, node: str, **changes: Any) -> None:
        """Let the agent on a node report that its job would gain from more replicas."""
        (agent,) = self._agents(node)
        agent.report(self.pump.plan(agent.job), **changes)

    def _held(self, node: str) -> Held:
        found = self.pump.store.get(self.pump.keys.held("a", node))
        return Held(node, f"{node}-a-0") if found is None else decode(Held, found.value)

    def _write(self, held: Held) -> None:
        self.pump.store.put(self.pump.keys.held("a", held.node), encode(held))
        self.pump.store.put(self.pump.keys.left("a", held.node), encode(held.left))

    # -- what is decided

    def _check(self, job: str, words: list[str], line: str) -> None:
        plan, status, agents = self.pump.plan(job), self.pump.status(job), self.pump.agents
        on = sorted(agent.node for agent in agents if agent.running == plan.generation)
        facts = {
            *(plan.transition.value, plan.cause.value, status.state.value),
            f"+{plan.generation - self.generations.get(job, -1)}",
            f"on:{','.join(on)}",
            f"exits={','.join(str(agent.exit_code) for agent in agents)}",
            f"agents={','.join(sorted(one.agent for one in plan.placements))}",
            f"fenced={plan.fence == self.pump.fence}",
            f"placed_on={','.join(sorted(one.node for one in plan.placements))}",
            f"left={','.join(f'{one.node}:{one.generation}' for one in plan.leaving)}",
            f"rank0={plan.placements[0].node if plan.placements else ''}",
            f"limited_to={plan.limit and plan.limit.batch_size}",
            f'first_failure="{status.failures[0].message if status.failures else ""}"',
            "" if plan.placements else "nowhere",
        }
        places: dict[str, int] = {}
        for word in words:
            name, _, text = word.partition("=")
            if word in facts:
                continue
            if word.startswith('"'):
                pattern = ".*".join(map(re.escape, word.strip('"').split("...")))
                reasons = plan.reason, status.reason
                assert any(re.fullmatch(pattern, one) for one in reasons), (line, reasons)
            elif found := _SLOTS.fullmatch(word):
                slots = tuple(map(int, found[2].split(",")))
                assert plan.slots(found[1]) == slots, (line, plan)
                places[found[1]] = len(slots)
            elif hasattr(plan, name) or hasattr(status, name):
                value = getattr(plan if hasattr(plan, name) else status, name)
                assert value == literal_or_text(text), (line, value)
            else:
                assert text.isdecimal(), (line, facts)
                places[name] = int(text)
        assert self.pump.placed(job) == (places or self.pump.placed(job)), line
