"""Play scripts of the autoscaler's decisions in a `World`: events, and what has come of them.

The first line names the pools and gives settings; each line after it is `events -> expected`:

    demand spot max_nodes=6
    outage spot "no capacity"; want 5; run 300 -> demand=5 spot=0 launched=5

An event is a method of the world or of its provider, an assignment to the world (`broken=True`), a set of
instances or jobs of it (`stuck demand-1 demand-2`; `unsettled`: none), or one of the functions below.

| expected | |
|---|---|
| `demand=3` | the desired number of the pool |
| `running=2`, `running=demand-1,demand-2` | instances that run: their number, or their names |
| `launched<=4`, `there=3`, `interrupted=1` | instances that were launched, are there, were interrupted |
| `drained=spot-1`, `released=`, `held>=3` | instances of these actions so far, or how many there were |
| `leaving=spot-1`, `replaced=` | instances that are remembered as leaving; released to be replaced |
| `cost<=2.5`, `deadline=119` | the price of an hour at any tick; seconds to that of the last drain |
| `"asked to drain"` | part of a warning of the last tick |
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scaling_world import World, waiting
from script_words import literal_or_text

from adaptdl_elastic.autoscaler.providers.base import Pool
from adaptdl_elastic.autoscaler.scaling import scaling_types
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings

_COMPARE = {"=": operator.eq, "<=": operator.le, ">=": operator.ge}
_ACTIONS = {name: name.title().replace("_", "") for name in ("drain", "release", "let_go", "hold")}
_DONE = {"drained": "drain", "released": "release", "let_go": "let_go", "held": "hold"}


def play(pools: Mapping[str, Pool], text: str) -> None:
    """Play a script with the pools of `pools` that its first line names."""
    first, *lines = text.strip().splitlines()
    named = dict(word.split("=") for word in first.split() if "=" in word)
    more = {name: literal_or_text(value) for name, value in named.items()}
    of_world = {name: more.pop(name) for name in ("boot", "hooks") if name in more}
    chosen = [pools[word] for word in first.split() if "=" not in word]
    world = World(*chosen, settings=ScalingSettings(**more), **of_world)
    for line in lines:
        events, _, expected = line.partition("->")
        for event in filter(str.strip, events.split(";")):
            _happen(world, *shlex.split(event))
        for word in re.findall(r'"[^"]*"|\S+', expected):
            assert _holds(world, word), (line.strip(), word, world.running, world.desired, world.last)


def _happen(world: World, event: str, *rest: str) -> None:
    name, assigned, text = event.partition("=")
    given = [literal_or_text(word) for word in rest]
    match name:
        case _ if assigned:
            setattr(world, name, literal_or_text(text))
        case "stuck" | "hidden" | "at_risk" | "unsettled":
            setattr(world, name, frozenset(rest))
        case "jobs":
            world.of_jobs(*(waiting(*map(literal_or_text, word.split(":"))) for word in rest))
        case "set":
            world.settings = replace(world.settings, **{given[0]: given[1]})
        case "outage" | "true_price":
            getattr(world.provider, name)[rest[0]] = given[1]
        case "dead":
            world.provider.dead_on_arrival = set(rest)
        case "recovered":
            world.provider.outage.clear()
        case "knows":
            world.draining[rest[0]] = world.now + given[1]
        case "until_gone":
            world.until(lambda: rest[0] not in world.running)
        case "until_acted":
            world.until(lambda: bool(_acted(world, rest[0])))
        case _:
            getattr(world if hasattr(world, name) else world.provider, name)(*given)


def _acted(world: World, action: str) -> list[Any]:
    return world.of(getattr(scaling_types, _ACTIONS[action]))


def _holds(world: World, word: str) -> bool:
    assert world.last is not None
    if word.startswith('"'):
        return any(word.strip('"') in warning for warning in world.last.warnings)
    name, compare, text = re.split(r"(<=|>=|=)", word)
    found: Any
    match name:
        case "running":
            found = world.running
        case "there":
            found = len(world.provider.capacity().instances)
        case "leaving":
            found = [name for name, known in world.memory.known.items() if known.leaving]
        case "replaced":
            found = [action.instance for action in _acted(world, "release") if action.replace]
        case "launched":
            found = world.provider.launched
        case "interrupted":
            found = sum(pool.interruptions for pool in world.memory.pools.values())
        case "cost":
            found = world.dearest
        case "deadline":
            found = round(_acted(world, "drain")[-1].deadline - world.now)
        case _ if name in _DONE:
            found = [action.instance for action in _acted(world, _DONE[name])]
        case _:
            found = world.desired[name]
    if isinstance(found, list):
        found = len(found) if text.isdecimal() else ",".join(sorted(set(found)))
    return bool(_COMPARE[compare](found, text if isinstance(found, str) else float(text)))
