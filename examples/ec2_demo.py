"""What `make ec2-demo` runs: an auto-scaling group on spot, without an account.

moto's HTTP server, a process of its own, plays EC2; the autoscaler talks to it through boto3 as it
would to AWS. For every instance that moto says is running, a real agent (`adaptdl-run`) is started
here, with a strict fake of the instance's metadata service. What moto can not do is thin and faked:
the spot price, which this program moves.

The story: the group is empty; a job is expected; one node is bought, the job measures itself and a
second node is worth its price; EC2 announces that it takes one back; it is drained and replaced; the
spot price jumps, two nodes are more than the budget bears and one is let go; the job ends and the
group is empty again.

Everything it writes goes to .demo/ec2/; it exits with 1 when something of that did not happen.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / ".demo" / "ec2"
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
from adaptdl_elastic.rendezvous.server import EtcdServer  # noqa: E402
from adaptdl_elastic.rendezvous.store import Store  # noqa: E402

GROUP, TYPE, ZONE, JOB = "workers", "p4d.24xlarge", "eu-central-1a", "images"
ON_DEMAND, CHEAP, DEAR = 32.77, 0.6, 32.0  # dollars per hour; the spot price moves between the last two
HOUR_VALUE, BUDGET = 8.0, 40.0  # dollars: what an hour of the job's time is worth, and the most per hour
NOTICE = 25.0  # seconds; AWS gives 120, the demonstration has less time
LIMIT = 215.0  # seconds for the story
TRAINING = 130.0  # seconds that one replica would train: long enough for everything to happen
KEYS = Keys("default")


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
    nodes: int
    replicas: int
    hourly: float
    goodput: float | None


@dataclass
class Story:
    """What happened, for the table and the picture."""

    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    autoscaler: list[tuple[float, str, Mapping[str, Any]]] = field(default_factory=list)

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def mark(self, text: str) -> None:
        self.marks.append((self.now, text))
        print(f"{self.now:6.1f} s  {text}", flush=True)

    def say(self, event: str, fields: Mapping[str, Any]) -> None:
        """The autoscaler's events."""
        self.autoscaler.append((self.now, event, fields))
        what = fields.get("message") or ", ".join(
            f"{name} {fields[name]}"
            for name in ("pool", "desired", "instance", "node", "reason")
            if fields.get(name)
        )
        print(f"{self.now:6.1f} s  autoscaler: {event}: {what}", flush=True)


class Machines:
    """Keeps one agent and one metadata service for every instance that moto says is running."""

    def __init__(
        self, moto: Moto, command: Callable[[str], list[str]], environment: Mapping[str, str]
    ) -> None:
        self._autoscaling = moto.client("autoscaling")
        self._command, self._environment = command, environment
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.metadata: dict[str, FakeImds] = {}
        self.codes: dict[str, int] = {}

    def follow(self) -> None:
        """Start what is missing, pull the plug of what moto has terminated."""
        answer = self._autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])
        members = answer["AutoScalingGroups"][0]["Instances"]
        running = {m["InstanceId"] for m in members if m["LifecycleState"] == "InService"}
        for instance in running - set(self.metadata):
            imds = self.metadata[instance] = FakeImds(instance, TYPE, ZONE, "spot")
            environ = {
                **os.environ,
                **self._environment,
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.endpoint,
                "AWS_EC2_METADATA_DISABLED": "false",
            }
            with (OUT / f"{instance}.log").open("wb") as log:
                self.agents[instance] = subprocess.Popen(
                    self._command(instance), env=environ, stdout=log, stderr=log, start_new_session=True
                )
        for instance in set(self.agents) - running:
            self.unplug(instance)
        for instance, agent in self.agents.items():
            if agent.poll() is not None:
                self.codes[instance] = agent.returncode

    def unplug(self, instance: str) -> None:
        """The machine is gone, and everything on it."""
        agent = self.agents.pop(instance)
        if agent.poll() is not None:
            self.codes[instance] = agent.returncode
        else:
            _end(agent, 3.0)
        self.metadata[instance].close()

    def close(self) -> None:
        for instance in list(self.agents):
            self.unplug(instance)


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """SIGTERM, and SIGKILL to the whole session when that did not do."""
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Watcher:
    """Reads what the store says, as `adaptdl status` would."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _get(self, kind: type[Any], *parts: str) -> Any:
        item = self._store.get(KEYS.job(JOB, *parts))
        return None if item is None else records.decode(kind, item.value, item.key)

    def state(self) -> records.JobState | None:
        status = self._get(records.JobStatus, "status")
        return None if status is None else records.JobState(status.state)

    def replicas(self) -> int:
        """Of the plan in force, once they have taken their first step."""
        plan: records.Plan | None = self._get(records.Plan, "plan")
        if plan is None:
            return 0
        items = self._store.range(KEYS.generation(JOB, plan.generation, "running", "")).items
        started = [records.decode(records.RunningRecord, item.value, item.key) for item in items]
        return plan.replicas if sum(r.first_step is not None for r in started) >= plan.nodes else 0

    def generation(self) -> int:
        plan: records.Plan | None = self._get(records.Plan, "plan")
        return -1 if plan is None else plan.generation

    def uses(self, node: str) -> bool:
        """Whether the plan in force has replicas on it."""
        plan: records.Plan | None = self._get(records.Plan, "plan")
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

    def __init__(self, store: Store, moto: Moto, machines: Machines, spot: Spot) -> None:
        self.watcher, self.moto, self.machines, self.spot = Watcher(store), moto, machines, spot
        self.story = Story()
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
        self.ruler = Autoscaler(store, KEYS, self.provider, self.settings, options, self.story.say)

    def rule(self) -> None:
        """The autoscaler's thread."""
        try:
            self.ruler.run()
        except BaseException as error:
            self.failure = error

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Look twice a second; moto and the store are polled, as there is nobody else to tell us."""
        waiter = threading.Event()
        while not condition():
            if self.failure is not None:
                raise self.failure
            if self.story.now > LIMIT:
                raise TimeoutError(f"still waiting until {what}")
            if self.watcher.state() is records.JobState.FAILED:
                raise RuntimeError(f"the job failed before {what}")
            self.look()
            waiter.wait(0.5)
        self.story.mark(what)

    def look(self) -> None:
        self.machines.follow()
        bill = self.watcher.bill()
        hourly = bill.hourly_cost if bill is not None else 0.0
        self.story.samples.append(
            Sample(
                self.story.now,
                len(self.watcher.nodes()),
                self.watcher.replicas(),
                hourly,
                self.watcher.goodput(),
            )
        )

    def tell(self) -> None:
        see = self.watcher
        self.story.mark("the group is empty; a job is expected")
        self.until("the first node trains", lambda: see.replicas() == 1)
        self.until("a second node was worth its price and trains, too", lambda: see.replicas() == 2)
        # on two busy cores the second one may turn out not to pay; the story holds on to it
        self.ruler.change(replace(self.settings, min_nodes=2))
        self.pause(8.0)
        victim = next(iter(see.nodes()))
        before, notice = see.generation(), self.story.now
        end = self.machines.metadata[victim].spot(NOTICE)
        self.story.mark(f"EC2 announces the end of {victim} in {NOTICE:.0f} s")
        self.until("a plan without it is published", lambda: see.generation() > before)
        # its replacement may be in the very next generation
        self.until("training goes on without it", lambda: see.replicas() > 0 and not see.uses(victim))
        self.story.mark(f"it took {self.story.now - notice:.1f} s from the notice")
        if victim in self.machines.agents and time.time() < end:
            self.until(f"{victim} is drained and given back", lambda: victim not in self.machines.agents)
        self.until("its replacement has joined", lambda: see.replicas() == 2 and victim not in see.nodes())
        self.pause(8.0)
        self.ruler.change(self.settings)
        self.spot.price = DEAR
        self.story.mark(f"the spot price jumps from ${CHEAP} to ${DEAR}")
        self.until("a node is let go", lambda: see.replicas() == 1)
        self.until("the job is done", lambda: see.state() is records.JobState.DONE)

    def pause(self, seconds: float) -> None:
        """Train for a while, so that there is something to see."""
        end = self.story.now + seconds
        self.until(f"trained for {seconds:.0f} s", lambda: self.story.now >= end)


def agent_command(endpoint: str, epochs: int) -> Callable[[str], list[str]]:
    """What an instance's user-data would start."""

    def command(instance: str) -> list[str]:
        return [
            *(sys.executable, "-m", "adaptdl_elastic.agent", f"--etcd={endpoint}", f"--rdzv-id={JOB}"),
            *(
                "--nnodes=1:2",
                "--nproc-per-node=1",
                f"--node-name={instance}",
                "--checkpoint-interval=10",
                "--rescale=restart",
            ),
            *(f"--checkpoint-path={OUT / 'checkpoint'}", f"--event-log={OUT / instance}.jsonl"),
            *(str(HERE / "image_classification.py"), f"--epochs={epochs}"),
        ]

    return command


def epochs_for(seconds: float) -> int:
    """How many epochs one replica trains in so long on this machine: three are run to find out."""
    log = OUT / "calibration.jsonl"
    environ = {
        **os.environ,
        "ADAPTDL_EVENT_LOG": str(log),
        "ADAPTDL_CHECKPOINT_PATH": str(OUT / "calibration"),
    }
    script = [sys.executable, str(HERE / "image_classification.py"), "--epochs=3"]
    subprocess.run(script, env=environ, stdout=subprocess.DEVNULL, check=True)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return max(10, int(seconds / min(e["seconds"] for e in events if e["event"] == "epoch")))


def table(bill: records.AutoscalerStatus) -> str:
    """What was bought, and what it cost."""
    lines = [f"{'group':<12}{'instances':>10}{'node hours':>12}{'cost':>10}"]
    for pool, instances, hours, cost in bill.bought:
        lines.append(f"{pool:<12}{instances:>10}{hours:>12.4f}{cost:>9.4f}$")
    lines.append(f"{'all':<12}{sum(b[1] for b in bill.bought):>10}{'':>12}{bill.cost_so_far:>9.4f}$")
    return "\n".join(lines)


def picture(story: Story, path: Path) -> None:
    """Nodes, price and goodput over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times = [s.time for s in story.samples]
    figure, axes = plt.subplots(3, 1, figsize=(10, 7), sharex=True, constrained_layout=True)
    axes[0].step(times, [s.nodes for s in story.samples], where="post", label="nodes")
    axes[0].step(
        times, [s.replicas for s in story.samples], where="post", label="replicas at work", alpha=0.7
    )
    axes[0].legend(loc="upper right")
    axes[0].set_yticks([0, 1, 2, 3])
    axes[1].step(times, [s.hourly for s in story.samples], where="post", color="tab:red")
    axes[1].set_ylabel("$ per hour")
    known = [(s.time, s.goodput) for s in story.samples if s.goodput is not None]
    axes[2].plot([t for t, _ in known], [g for _, g in known], color="tab:green")
    axes[2].set_ylabel("goodput, samples/s")
    axes[2].set_xlabel("seconds")
    for moment, text in story.marks:
        for axis in axes:
            axis.axvline(moment, color="grey", linewidth=0.5, linestyle=":")
        axes[1].annotate(
            text[:44], (moment, 0.02), rotation=90, fontsize=6, xycoords=("data", "axes fraction")
        )
    figure.suptitle("A job on an auto-scaling group of spot instances")
    figure.savefig(path, dpi=110)


def main() -> int:
    """Tell the story, and say what is where."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else epochs_for(TRAINING)
    print(f"the job: {epochs} epochs of examples/image_classification.py", flush=True)
    with running_moto() as moto, EtcdServer() as etcd, connect(etcd.endpoint) as store:
        os.environ.update({**moto.environment, "AWS_EC2_METADATA_DISABLED": "true"})
        make_group(moto, GROUP, high=2, types=(TYPE,), spot=True)
        coordinator = subprocess.Popen(
            [
                *(sys.executable, "-m", "adaptdl_elastic.autoscaler", "coordinator"),
                *("--etcd", etcd.endpoint, "--interval", "3"),
            ],
            stdout=(OUT / "coordinator.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        machines = Machines(moto, agent_command(etcd.endpoint, epochs), moto.environment)
        demo = Demo(store, moto, machines, Spot())
        ruling = threading.Thread(target=demo.rule, daemon=True)
        try:
            ruling.start()
            demo.tell()
            demo.until("the group is empty again", lambda: not ruling.is_alive())
        except (TimeoutError, Exception) as error:
            print(f"ec2-demo: {error}; logs are in {OUT}", file=sys.stderr)
            return 1
        finally:
            demo.ruler.stop()
            ruling.join(10)
            machines.close()
            _end(coordinator, 5.0)
        bill = demo.watcher.bill()
        assert bill is not None
        (OUT / "timeline.json").write_text(json.dumps([vars(s) for s in demo.story.samples]))
        picture(demo.story, OUT / "timeline.png")
        print(f"\n{table(bill)}\n\n{demo.story.now:.0f} s in all; picture: {OUT / 'timeline.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
