"""What `make ec2-demo` runs: an auto-scaling group on spot, without an account.

moto's HTTP server, a process of its own, plays EC2; the autoscaler talks to it through boto3 as it
would to AWS. For every instance that moto says is running, a real agent (`adaptdl-run`) is started
here, with a strict fake of the instance's metadata service, and killed when the instance is gone.
`STAGED` says what is not real.

The story: the group is empty; a job is expected; one node is bought, the job measures itself and a
second node is worth its price; EC2 announces that it takes one back; it is drained and replaced; the
spot price jumps, two nodes are more than the budget bears and one is let go; the job ends and the
group is empty again.

Everything it writes goes to .ec2-demo/; it exits with 1 when something of that did not happen. Nothing
that it starts outlives it: the kernel kills the agents, moto, etcd and the coordinator with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from demo_ending import UnmetError, complain, conclude, heed_signals
from ec2_demo_picture import picture, table
from ec2_demo_stage import Machines, Spot, agent_command, coordinator, left_behind
from ec2_demo_story import (
    BUDGET,
    CHEAP,
    DEAR,
    GROUP,
    HOUR_VALUE,
    JOB,
    KEYS,
    ON_DEMAND,
    OUT,
    TYPE,
    Sample,
    Story,
    Watcher,
)
from etcd_server import EtcdServer  # the stage has put the tests' support on the path
from moto_process import Moto, make_group, running_moto

from adaptdl_elastic.autoscaler.providers.ec2.provider import Ec2Provider
from adaptdl_elastic.autoscaler.scaling.autoscaler_loop import Autoscaler, LoopOptions
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.store.connect import connect

LIMIT = 1200.0  # seconds for all of it, which only a demo that goes wrong reaches: nothing else is timed
LOOK = 0.25  # seconds
ACCURACY = 0.85  # that some epoch must have reached: on a busy machine there are a dozen of them
STAGED = f"""staged: EC2 and Auto Scaling are moto; the metadata service is a fake; instances are processes of
this machine with one slot each; the prices (${CHEAP} and ${DEAR}), the moments of the notice and of the
price's jump are this program's; from the second node to the jump it forbids fewer than two nodes; waits
are shorter than the defaults (growing 2 s, shrinking 6 s); EC2 takes no node back
before its agent has left; the job trains until the story is told.
real: boto3 over HTTP, the autoscaler and its decisions, etcd, the coordinator, the agents, the training."""


class Demo:
    """The story, told step by step."""

    def __init__(self, store: Store, moto: Moto, machines: Machines, spot: Spot, story: Story) -> None:
        self.see, self.machines, self.spot, self.story = Watcher(store), machines, spot, story
        self.failure: BaseException | None = None
        self.provider = Ec2Provider(
            [GROUP],
            {TYPE: ON_DEMAND},
            slots=1,
            region=moto.environment["AWS_DEFAULT_REGION"],
            spot_prices=spot.prices,
        )
        self.provider.price_seconds = 1.0
        self.settings = ScalingSettings(
            hour_value=HOUR_VALUE,
            grow_after=2.0,
            shrink_after=6.0,
            max_nodes=2,
            boot_timeout=LIMIT,
            hysteresis=0.5,
            max_hourly_cost=BUDGET,
        )
        options = LoopOptions(interval=1.0, expected=(JOB,), until_done=True)
        self.ruler = Autoscaler(store, KEYS, self.provider, self.settings, options, story.say)
        self.ruling = threading.Thread(target=self._rule, daemon=True)

    def _rule(self) -> None:
        """The autoscaler's thread."""
        try:
            self.ruler.run()
        except BaseException as error:
            self.failure = error

    def until(self, what: str, condition: Callable[[], bool], tell: bool = True) -> None:
        """Wait for a state of the store or of moto, which are looked at again and again."""
        waiter = threading.Event()
        while not condition():
            self.look()
            state = self.see.state()
            if self.failure is not None:
                raise self.failure
            if self.story.now > LIMIT:
                raise UnmetError(f"expected: {what}; after {LIMIT:.0f} s {self.seen()}")
            if state is not None and state.ended and not self._end.exists():
                raise UnmetError(f"expected: {what}; before, the job has ended ({state.value})")
            waiter.wait(LOOK)
        self.look()
        if tell:
            self.story.mark(what)

    def seen(self) -> str:
        """In short, how far the story is."""
        last, epochs = self.story.samples[-1], len(accuracies())
        found = f"{last.instances} instance(s), {last.nodes} node(s), {last.replicas} replica(s)"
        return f"{found}, {epochs} epoch(s)"

    @property
    def _end(self) -> Path:
        return OUT / "end"

    def look(self) -> None:
        instances = self.machines.follow()
        bill = self.see.bill()
        state = self.see.state()
        over = state is not None and state.ended
        self.story.samples.append(
            Sample(
                self.story.now,
                instances,
                len(self.see.nodes()),
                0 if over else self.see.replicas(),
                self.spot.price,
                bill.hourly_cost if bill is not None else 0.0,
                self.see.goodput(),
            )
        )

    def tell(self) -> None:
        see = self.see
        self.ruling.start()
        self.story.mark("the group is empty, a job is expected")
        self.until("the first node trains", lambda: see.at_work(1))
        self.until("a second node is worth its price", lambda: self.machines.group()["DesiredCapacity"] == 2)
        # on two busy cores the second one may turn out not to pay; the story holds on to it
        self.ruler.change(replace(self.settings, min_nodes=2))
        self.until("both train", lambda: see.at_work(2))
        self.pause(8.0)
        self.interrupt()
        self.pause(8.0)
        self.ruler.change(self.settings)
        self.spot.move(DEAR)
        self.story.mark(
            f"the spot price jumps from ${CHEAP} to ${DEAR}, the budget is ${BUDGET:.0f} per hour"
        )
        self.until(
            "one node is let go, the job goes on", lambda: see.at_work(1) and self.machines.follow() == 1
        )
        self.pause(5.0)
        self.until(f"the accuracy is {ACCURACY}", lambda: max(accuracies().values(), default=0) >= ACCURACY)
        self._end.touch()
        self.until("the job is done", lambda: see.state() is records.JobState.DONE)
        self.until("the group is empty again", self.over)

    def interrupt(self) -> None:
        """EC2 takes the node of rank 0, whose memory the others cannot do without: by a checkpoint."""
        see, story = self.see, self.story
        plan = see.plan()
        assert plan is not None
        victim = plan.placements[0].node
        notice = time.time()
        self.machines.announce(victim)
        story.mark(f"EC2 announces the end of {victim}")
        self.until("a plan without it is there", lambda: not see.uses(victim))
        plan = see.plan()
        assert plan is not None
        planned = max(0.0, plan.created - notice)
        first = plan.generation
        self.until("training goes on without it", lambda: see.stepped(first) is not None)
        without = max(0.0, (see.stepped(first) or notice) - notice)
        story.mark(f"{planned:.1f} s from the notice to a plan, {without:.1f} s to the first step without it")
        self.until("it is drained and given back", lambda: victim not in self.machines.agents)
        code = self.machines.codes[victim]
        story.check(code == 0, f"the agent on {victim} did not leave by itself (exit code {code})")
        self.until("its replacement has joined", lambda: len(set(see.nodes()) - {victim}) == 2)
        enough = story.now + 30.0
        self.until("steady", lambda: see.at_work(2) or (see.at_work(1) and story.now >= enough), tell=False)
        both = (
            "both train again" if see.at_work(2) else "the policy finds one replica as good on this machine"
        )
        story.mark(both)

    def over(self) -> bool:
        group = self.machines.group()
        empty = not group["Instances"] and group["DesiredCapacity"] == 0
        return empty and not self.ruling.is_alive() and not self.machines.agents

    def pause(self, seconds: float) -> None:
        """Train for a while, so that there is something to see."""
        end = self.story.now + seconds
        self.until(f"{seconds:.0f} s of training", lambda: self.story.now >= end, tell=False)

    def audit(self) -> AutoscalerStatus:
        """What must be true of all of it; the autoscaler's bill."""
        story, check = self.story, self.story.check
        bill = self.see.bill()
        assert bill is not None
        self.machines.charge()
        own = sum(line.cost for line in story.bill.values())
        bought = sum(instances for _, instances, _, _ in bill.bought)
        check(
            bought == len(story.bill) == 3,
            f"{bought} instances are billed, {len(story.bill)} were there, not 3",
        )
        wrong = abs(bill.cost_so_far - own)
        story.mark(f"billed ${bill.cost_so_far:.4f}; the demo's own account: ${own:.4f}")
        # less than a cent, and less than a cent a dollar: the total may be below a dollar
        check(wrong < min(0.01, 0.01 * own), f"billed ${bill.cost_so_far:.4f}, not ${own:.4f}")
        check(not self.machines.group()["SuspendedProcesses"], "the group was not handed back")
        check(
            any("budget" in i.why or "max-hourly" in i.why for i in story.bill.values()),
            "no node went for its price",
        )
        check(not any(e["event"] == "failure" for e in events()), "replicas have failed")
        ends = sorted((e["epoch"], e["accuracy"]) for e in events() if e["event"] == "metrics")
        once = len({epoch for epoch, _ in ends})
        last = ends[-1][0] if ends else -1
        check(
            once == len(ends) == last + 1,
            f"expected each epoch once; {len(ends)} have ended, {once} different ones up to number {last}",
        )
        best = max(accuracies().values(), default=0.0)
        check(best >= ACCURACY, f"the best accuracy, {best:.3f}, is below {ACCURACY}")
        story.mark(f"{len(ends)} epochs, each once; best accuracy {best:.3f}")
        return bill


def events() -> Iterator[dict[str, Any]]:
    """What the agents have logged; a line that is being written is left for the next time."""
    for log in OUT.glob("i-*.jsonl"):
        with log.open() as lines:
            yield from (json.loads(line) for line in lines if line.endswith("\n"))


def accuracies() -> dict[int, float]:
    """Of every epoch that has ended."""
    return {e["epoch"]: e["accuracy"] for e in events() if e["event"] == "metrics"}


def run(story: Story) -> int:
    """Set the stage, tell the story, clear up; the exit code is 0."""
    spot = Spot()
    with running_moto() as moto, EtcdServer() as etcd, connect(etcd.endpoint) as store:
        os.environ.update({**moto.environment, "AWS_EC2_METADATA_DISABLED": "true"})
        make_group(moto, GROUP, high=2, types=(TYPE,), spot=True)
        machines = Machines(moto, agent_command(etcd.endpoint), story, spot)
        demo = Demo(store, moto, machines, spot, story)
        try:
            with coordinator(etcd.endpoint):
                demo.tell()
                bill = demo.audit()
        finally:
            demo.ruler.stop()
            machines.close()
            if demo.ruling.is_alive():
                demo.ruling.join(5)
    (OUT / "timeline.json").write_text(json.dumps([vars(s) for s in story.samples]))
    picture(story, OUT / "timeline.png")
    print(f"\n{table(bill, story.bill)}\n\n{story.now:.0f} s in all; picture: {OUT / 'timeline.png'}")
    return 0


def main() -> int:
    """Tell the story, and say what is where."""
    story = Story()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what an agent leaves behind comes to us
    heed_signals()
    print(f"{STAGED}\n", flush=True)
    code = conclude("ec2-demo", OUT, lambda: run(story))
    story.check(not (left := left_behind()), f"had to be killed at the end: {'; '.join(left)}")
    for text in story.shortcomings:
        complain("ec2-demo", text, OUT)
    return code or (1 if story.shortcomings else 0)


if __name__ == "__main__":
    sys.exit(main())
