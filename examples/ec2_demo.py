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

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / ".ec2-demo"  # `make demo` removes .demo
sys.path.insert(0, str(HERE.parent / "tests" / "support"))  # the fakes are the tests' own

from fake_imds import FakeImds  # noqa: E402
from moto_process import Moto, make_group, running_moto  # noqa: E402

from adaptdl_elastic import sched_hints  # noqa: E402
from adaptdl_elastic.autoscaler.providers.ec2 import Ec2Provider  # noqa: E402
from adaptdl_elastic.autoscaler.scaling import ScalingSettings  # noqa: E402
from adaptdl_elastic.autoscaler.scaling_loop import Autoscaler, LoopOptions  # noqa: E402
from adaptdl_elastic.rendezvous import records  # noqa: E402
from adaptdl_elastic.rendezvous.connect import connect  # noqa: E402
from adaptdl_elastic.rendezvous.keys import Keys  # noqa: E402
from adaptdl_elastic.rendezvous.server import EtcdServer, tied  # noqa: E402
from adaptdl_elastic.rendezvous.store import Store  # noqa: E402

GROUP, TYPE, ZONE, JOB = "workers", "p4d.24xlarge", "eu-central-1a", "images"
ON_DEMAND, CHEAP, DEAR = 32.77, 0.6, 32.0  # dollars per hour; the spot price moves between the last two
HOUR_VALUE, BUDGET = 8.0, 40.0  # dollars: what an hour of the job's time is worth, and the most per hour
NOTICE = 120.0  # seconds, as AWS gives
PLANNED, TRAINING = 5.0, 60.0  # seconds from a notice to a plan, and to training on: no more are allowed
LIMIT = 225.0  # seconds for all of it
LOOK = 0.25  # seconds
ACCURACY = 0.9
KEYS = Keys("default")
STAGED = f"""staged: EC2 and Auto Scaling are moto; the metadata service is a fake; instances are processes of
this machine with one slot each; the prices (${CHEAP} and ${DEAR}), the moments of the notice and of the
price's jump are this program's; from the second node to the jump it forbids fewer than two nodes; waits
are shorter than the defaults (growing 2 s, shrinking 6 s); the job trains until the story is told.
real: boto3 over HTTP, the autoscaler and its decisions, etcd, the coordinator, the agents, the training."""


@dataclass
class Spot:
    """The market: a price that this program moves."""

    price: float = CHEAP

    def prices(self) -> Mapping[tuple[str, str], float]:
        return {(TYPE, ZONE): self.price}


@dataclass
class Sample:
    """One moment of the run."""

    time: float
    instances: int
    nodes: int
    replicas: int
    price: float
    hourly: float
    goodput: float | None


@dataclass
class Line:
    """One instance's line in the bill, kept by this program: the autoscaler's own is held against it."""

    began: float
    seconds: float = 0.0
    cost: float = 0.0
    ended: float | None = None
    why: str = ""


@dataclass
class Story:
    """What happened, for the table and the picture."""

    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    bill: dict[str, Line] = field(default_factory=dict)
    shortcomings: list[str] = field(default_factory=list)

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def mark(self, text: str) -> None:
        self.marks.append((self.now, text))
        print(f"{self.now:6.1f} s  {text}", flush=True)

    def check(self, fine: bool, text: str) -> None:
        if not fine:
            self.shortcomings.append(text)

    def say(self, event: str, fields: Mapping[str, Any]) -> None:
        """The autoscaler's events."""
        if event == "release" and fields["instance"] in self.bill:
            self.bill[fields["instance"]].why = fields["reason"]
        what = fields.get("message") or ", ".join(
            f"{name} {fields[name]}"
            for name in ("pool", "desired", "instance", "node", "reason")
            if fields.get(name)
        )
        print(f"{self.now:6.1f} s    autoscaler: {event}: {what}", flush=True)


class Machines:
    """Keeps one agent and one metadata service for every instance that moto says is running."""

    def __init__(self, moto: Moto, command: Callable[[str], list[str]], story: Story, spot: Spot) -> None:
        self._autoscaling = moto.client("autoscaling")
        self._moto, self._command, self._story, self._spot = moto, command, story, spot
        self._seen = time.monotonic()
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.metadata: dict[str, FakeImds] = {}
        self.ends: dict[str, float] = {}  # when EC2 takes it, seconds since the epoch
        self.codes: dict[str, int | None] = {}  # of agents; None: it had to be killed

    def group(self) -> dict[str, Any]:
        answer = self._autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])
        found: dict[str, Any] = answer["AutoScalingGroups"][0]
        return found

    def follow(self) -> int:
        """Start what is missing, pull the plug of what is gone; how many instances there are."""
        self._take_back()
        members = self.group()["Instances"]
        running = {m["InstanceId"] for m in members if m["LifecycleState"] == "InService"}
        self._account(running)
        for instance in running - set(self.metadata):
            self._boot(instance)
        for instance in set(self.agents) - running:
            self._unplug(instance)
        for instance, agent in self.agents.items():
            if agent.poll() is not None:
                self.codes[instance] = agent.returncode
        return len(running)

    def announce(self, instance: str) -> None:
        """The two-minute notice; at its end the machine is gone, whatever runs on it."""
        self.ends[instance] = self.metadata[instance].spot(NOTICE)

    def _take_back(self) -> None:
        for instance, end in self.ends.items():
            if instance in self.agents and time.time() >= end:
                self._kill(instance)
                self._autoscaling.terminate_instance_in_auto_scaling_group(
                    InstanceId=instance, ShouldDecrementDesiredCapacity=False
                )

    def _account(self, running: set[str]) -> None:
        now = time.monotonic()
        elapsed, self._seen = now - self._seen, now
        for instance in running:
            line = self._story.bill.setdefault(instance, Line(self._story.now, -elapsed))
            line.cost += max(0.0, elapsed if line.seconds >= 0 else 0.0) * self._spot.price / 3600
            line.seconds = max(0.0, line.seconds + elapsed)
        for instance, line in self._story.bill.items():
            if instance not in running and line.ended is None:
                line.ended = self._story.now

    def _boot(self, instance: str) -> None:
        imds = self.metadata[instance] = FakeImds(instance, TYPE, ZONE, "spot")
        environ = {
            **os.environ,
            **self._moto.environment,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.endpoint,
            "AWS_EC2_METADATA_DISABLED": "false",
        }
        with (OUT / f"{instance}.log").open("wb") as log:
            self.agents[instance] = subprocess.Popen(
                tied(self._command(instance)), env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def _unplug(self, instance: str) -> None:
        """The instance is terminated; an agent on its way out gets the seconds that a shutdown takes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agents[instance].wait(10.0)
        self._kill(instance)

    def _kill(self, instance: str) -> None:
        agent = self.agents.pop(instance)
        self.codes[instance] = agent.poll()
        agent.kill()  # its replicas end with it
        agent.wait()
        self.metadata[instance].close()

    def close(self) -> None:
        for instance in list(self.agents):
            self._kill(instance)


class Watcher:
    """Reads what the store says, as `adaptdl status` would."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._replicas = 0

    def _get(self, kind: type[Any], *parts: str) -> Any:
        item = self._store.get(KEYS.job(JOB, *parts))
        return None if item is None else records.decode(kind, item.value, item.key)

    def state(self) -> records.JobState | None:
        status = self._get(records.JobStatus, "status")
        return None if status is None else records.JobState(status.state)

    def plan(self) -> records.Plan | None:
        found: records.Plan | None = self._get(records.Plan, "plan")
        return None if found is None or found.claim else found

    def begun(self, plan: records.Plan) -> float | None:
        """When the last node of a plan took its first step; None: not all have."""
        items = self._store.range(KEYS.generation(JOB, plan.generation, "running", "")).items
        started = [records.decode(records.RunningRecord, item.value, item.key) for item in items]
        steps = [r.first_step for r in started if r.first_step is not None]
        return max(steps) if plan.nodes and len(steps) >= plan.nodes else None

    def stepped(self, generation: int) -> float | None:
        """When the first step of `generation`, or of one after it, was finished."""
        now = self.plan()
        for one in range(generation, -1 if now is None else now.generation + 1):
            items = self._store.range(KEYS.generation(JOB, one, "running", "")).items
            found = [records.decode(records.RunningRecord, item.value, item.key) for item in items]
            steps = [record.first_step for record in found if record.first_step is not None]
            if steps:
                return min(steps)
        return None

    def replicas(self) -> int:
        """How many train. While a change in place is under way, those before it do."""
        plan = self.plan()
        if plan is None:
            self._replicas = 0
        elif self.begun(plan) is not None:
            self._replicas = plan.replicas
        elif plan.transition is not records.Transition.INPLACE:
            self._replicas = 0
        return self._replicas

    def at_work(self, replicas: int) -> bool:
        plan = self.plan()
        return plan is not None and plan.replicas == replicas and self.begun(plan) is not None

    def uses(self, node: str) -> bool:
        """Whether the plan in force has replicas on it."""
        plan = self.plan()
        return plan is not None and len(plan.ranks(node)) > 0

    def nodes(self) -> dict[str, records.NodeRecord]:
        """By instance."""
        found = (
            records.decode(records.NodeRecord, i.value, i.key) for i in self._store.range(KEYS.nodes).items
        )
        return {record.instance: record for record in found if record.instance}

    def goodput(self) -> float | None:
        item = self._store.get(KEYS.job(JOB, "hints"))
        return None if item is None else sched_hints.decode(item.value).goodput

    def bill(self) -> records.AutoscalerStatus | None:
        item = self._store.get(KEYS.autoscaler_status)
        return None if item is None else records.decode(records.AutoscalerStatus, item.value, item.key)


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
            boot_timeout=90.0,
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

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for a state of the store or of moto, which are looked at again and again."""
        waiter = threading.Event()
        while not condition():
            self.look()
            state = self.see.state()
            if self.failure is not None:
                raise self.failure
            if self.story.now > LIMIT:
                raise TimeoutError(f"{LIMIT:.0f} s are over; still waiting until {what}")
            if state is not None and state.ended and not self._end.exists():
                raise RuntimeError(f"the job has ended ({state.value}) before {what}")
            waiter.wait(LOOK)
        self.look()
        self.story.mark(what)

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
        self.until("a second node was worth its price, both train", lambda: see.at_work(2))
        # on two busy cores the second one may turn out not to pay; the story holds on to it
        self.ruler.change(replace(self.settings, min_nodes=2))
        self.pause(8.0)
        self.interrupt()
        self.pause(8.0)
        self.ruler.change(self.settings)
        self.spot.price = DEAR
        self.story.mark(
            f"the spot price jumps from ${CHEAP} to ${DEAR}, the budget is ${BUDGET:.0f} per hour"
        )
        self.until(
            "one node is let go, the job goes on", lambda: see.at_work(1) and self.machines.follow() == 1
        )
        self.pause(5.0)
        self._end.touch()
        self.until("the job is done", lambda: see.state() is records.JobState.DONE)
        self.until("the group is empty again", self.over)

    def interrupt(self) -> None:
        """EC2 takes the node of rank 0, whose memory the others can not do without: by a checkpoint."""
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
        story.check(planned <= PLANNED, f"{planned:.1f} s to a plan are more than {PLANNED:g}")
        story.check(without <= TRAINING, f"{without:.1f} s to training on are more than {TRAINING:g}")
        self.until("it is drained and given back", lambda: victim not in self.machines.agents)
        code = self.machines.codes[victim]
        story.check(code == 0, f"the agent on {victim} did not leave by itself (exit code {code})")
        story.check(time.time() < self.machines.ends[victim], f"{victim} was not drained in time")
        self.until("its replacement has joined", lambda: len(set(see.nodes()) - {victim}) == 2)
        enough = story.now + 30.0
        self.until("training is steady", lambda: see.at_work(2) or (see.at_work(1) and story.now >= enough))
        story.marks.pop()
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
        self.until(f"{seconds:.0f} s of training", lambda: self.story.now >= end)
        self.story.marks.pop()

    def audit(self) -> records.AutoscalerStatus:
        """What must be true of all of it; the autoscaler's bill."""
        story, check = self.story, self.story.check
        bill = self.see.bill()
        assert bill is not None
        own = sum(line.cost for line in story.bill.values())
        bought = sum(instances for _, instances, _, _ in bill.bought)
        check(
            bought == len(story.bill) == 3,
            f"{bought} instances are billed, {len(story.bill)} were there, not 3",
        )
        # it looks once in one to three seconds, and bills the time since then at the price of the moment
        check(abs(bill.cost_so_far - own) <= 0.3 * own, f"billed ${bill.cost_so_far:.4f}, not ${own:.4f}")
        check(not self.machines.group()["SuspendedProcesses"], "the group was not handed back")
        check(
            any("budget" in i.why or "max-hourly" in i.why for i in story.bill.values()),
            "no node went for its price",
        )
        events = [json.loads(line) for log in OUT.glob("i-*.jsonl") for line in log.open()]
        check(not any(e["event"] == "failure" for e in events), "replicas have failed")
        ends = sorted((e["epoch"], e["accuracy"]) for e in events if e["event"] == "metrics")
        check(
            [epoch for epoch, _ in ends] == list(range(len(ends))),
            f"epochs were lost or trained twice: {[epoch for epoch, _ in ends]}",
        )
        last = ends[-1][1] if ends else 0.0
        check(last >= ACCURACY, f"the accuracy at the end, {last:.3f}, is below {ACCURACY}")
        story.mark(f"{len(ends)} epochs, each once; accuracy {last:.3f}")
        return bill


def agent_command(endpoint: str) -> Callable[[str], list[str]]:
    """What an instance's user-data would start."""

    def command(instance: str) -> list[str]:
        return [
            *(sys.executable, "-m", "adaptdl_elastic.agent", f"--etcd={endpoint}", f"--rdzv-id={JOB}"),
            *("--nnodes=1:2", "--nproc-per-node=1", f"--node-name={instance}", "--checkpoint-interval=10"),
            *(f"--checkpoint-path={OUT / 'checkpoint'}", f"--event-log={OUT / instance}.jsonl"),
            *(str(HERE / "ec2_demo_job.py"), str(OUT / "end")),
        ]

    return command


def table(bill: records.AutoscalerStatus, lines: Mapping[str, Line]) -> str:
    """What was bought, what it cost, and why it went."""
    rows = [f"{'instance':<21}{'from':>8}{'to':>9}{'billed':>10}{'cost':>11}  it went because"]
    for name, line in lines.items():
        end = "" if line.ended is None else f"{line.ended:.0f} s"
        rows.append(
            f"{name:<21}{line.began:>6.0f} s{end:>9}{line.seconds:>8.0f} s{line.cost:>10.4f}$  {line.why}"
        )
    for pool, instances, hours, cost in bill.bought:
        text = f"group {pool}: {instances}"
        rows.append(f"{text:<38}{hours * 3600:>8.0f} s{cost:>10.4f}$  by the autoscaler's own account")
    return "\n".join(rows)


def _apart(marks: Sequence[tuple[float, str]], gap: float) -> list[tuple[float, str]]:
    """The numbers of the marks, those of one moment together."""
    found: list[tuple[float, str]] = []
    for number, (moment, _) in enumerate(marks, 1):
        if found and moment - found[-1][0] < gap:
            found[-1] = (found[-1][0], f"{found[-1][1]},{number}")
        else:
            found.append((moment, str(number)))
    return found


def picture(story: Story, path: Path) -> None:
    """Nodes, price and goodput over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times = [s.time for s in story.samples]
    figure, axes = plt.subplots(4, 1, figsize=(11, 10), height_ratios=(3, 3, 3, 3.4), constrained_layout=True)
    nodes, price, goodput, key = axes
    nodes.step(times, [s.instances for s in story.samples], where="post", label="instances", color="tab:grey")
    nodes.fill_between(
        times, [s.replicas for s in story.samples], step="post", alpha=0.4, label="replicas at work"
    )
    nodes.set_yticks([0, 1, 2, 3])
    nodes.set_ylabel("nodes")
    price.step(times, [s.price for s in story.samples], where="post", color="tab:orange", label="spot price")
    price.step(times, [s.hourly for s in story.samples], where="post", color="tab:red", label="paid")
    price.axhline(BUDGET, color="black", linewidth=0.8, linestyle="--", label="budget")
    price.set_yscale("symlog", linthresh=1.0)
    price.set_yticks([0, CHEAP, 2 * CHEAP, DEAR], ["0", f"{CHEAP:g}", f"{2 * CHEAP:g}", f"{DEAR:g}"])
    price.minorticks_off()
    price.set_ylim(-0.15, 120)
    price.set_ylabel("$ per hour")
    known = [
        (s.time, s.goodput if s.replicas else float("nan")) for s in story.samples if s.goodput is not None
    ]
    goodput.plot([t for t, _ in known], [g for _, g in known], color="tab:green")
    goodput.set_ylim(bottom=0)
    goodput.set_ylabel("goodput, samples/s")
    goodput.set_xlabel("seconds")
    for moment, _ in story.marks:
        for axis in (nodes, price, goodput):
            axis.axvline(moment, color="grey", linewidth=0.5, linestyle=":")
    for level, (moment, text) in enumerate(_apart(story.marks, story.now / 40)):
        nodes.annotate(
            text, (moment, 1.02 + 0.08 * (level % 2)), xycoords=("data", "axes fraction"), fontsize=7
        )
    for axis in (nodes, price, goodput):
        axis.set_xlim(0, story.now)
    for axis in (nodes, price):
        axis.legend(loc="upper left", fontsize=8)
    key.axis("off")
    said = [f"{number:2d}  {moment:6.1f} s  {text}" for number, (moment, text) in enumerate(story.marks, 1)]
    key.text(0, 1, "\n".join(said), va="top", family="monospace", fontsize=8)
    figure.suptitle("A job on an auto-scaling group of spot instances (moto; instances are local agents)")
    figure.savefig(path, dpi=110)


@contextlib.contextmanager
def coordinator(endpoint: str) -> Iterator[None]:
    command = [sys.executable, "-m", "adaptdl_elastic.autoscaler", "coordinator", "--etcd", endpoint]
    with (OUT / "coordinator.log").open("wb") as log:
        process = subprocess.Popen(
            tied([*command, "--interval", "3"]), stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run(story: Story) -> None:
    """Set the stage, tell the story, clear up."""
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


def left_behind(seconds: float = 5.0) -> Sequence[str]:
    """End what still runs under this process, which orphans are given to, too; what had to be killed."""
    me = psutil.Process()
    _, alive = psutil.wait_procs(me.children(recursive=True), seconds)
    found = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            process.kill()
    psutil.wait_procs(alive, 5.0)
    return found


def _interrupted(number: int, frame: object) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # clearing up takes seconds
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    """Tell the story, and say what is where."""
    story = Story()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what an agent leaves behind comes to us
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _interrupted)
    print(f"{STAGED}\n", flush=True)
    code = 0
    try:
        run(story)
    except KeyboardInterrupt as error:
        print(f"ec2-demo: {error}: stopped", file=sys.stderr)
        code = 130
    except Exception as error:
        print(f"ec2-demo: {error}; logs are in {OUT}", file=sys.stderr)
        code = 1
    story.check(not (left := left_behind()), f"had to be killed at the end: {'; '.join(left)}")
    story.check(story.now < 240, f"{story.now:.0f} s are more than four minutes")
    for text in story.shortcomings:
        print(f"ec2-demo: {text}", file=sys.stderr)
    return code or (1 if story.shortcomings else 0)


if __name__ == "__main__":
    sys.exit(main())
