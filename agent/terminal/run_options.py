"""The checked options of `adaptdl-run`: what a command line means, and whether it is valid."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated

from adaptdl_elastic import _own_python
from adaptdl_elastic.agent.machine import slurm
from adaptdl_elastic.agent.terminal.run_parser import OptionError, parser
from adaptdl_elastic.agent.terminal.torchrun_options import WITHOUT_MEANING
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.rendezvous.schema.keys import check_name
from adaptdl_elastic.rendezvous.schema.records import MOST_REPLICAS, MOST_SLOTS, POSITIVE, JobSpec, decode
from adaptdl_elastic.rendezvous.schema.submissions import Submission
from adaptdl_elastic.rendezvous.store.local_socket import is_local, socket_path
from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError, parse_endpoints

_MANY_REPLICAS = 64 * MOST_SLOTS  # stands for "as many replicas as the nodes have slots"


@dataclass(frozen=True)
class MeetingPoint:
    """The address at which the user wants replicas to meet: `--master-addr` and `--master-port`.

    Attributes:
        host: None: the address of the node of rank 0.
        port: the port.
    """

    host: str | None
    port: int

    def __str__(self) -> str:
        """Return the options as given on the command line."""
        address = f"--master-addr={self.host} " if self.host is not None else ""
        return f"{address}--master-port={self.port}"


_CONFIG = ConfigDict(extra="ignore", allow_inf_nan=False)
_OFF_AT_ZERO = Field(ge=0, description="must be a finite, positive number of seconds; 0 switches it off")


@validated(frozen=True, kw_only=True, config=_CONFIG)
class RunOptions(JobSpec):
    """A checked command line: the job as it describes it, and what belongs to this node."""

    run: str = ""  # a run is named when an agent begins it
    mode: str = "script"  # "script", "module" or "exec"
    slots: int = 1
    standalone: bool = False
    endpoint: str | None = None
    etcd_api: str = "auto"
    etcd_ca: str | None = None
    etcd_cert: str | None = None
    etcd_key: str | None = None
    etcd_user: str | None = None
    etcd_timeout: Annotated[float | None, POSITIVE] = None
    cluster: str = "default"
    node_name: str | None = None
    node_type: str | None = None
    local_addr: str | None = None
    meeting_point: MeetingPoint | None = None  # at which generations meet, if the user asks for one
    port_range: tuple[int, int] | None = None
    checkpoint_interval: Annotated[float, _OFF_AT_ZERO] = 30.0
    once: bool = False
    anew: bool = False
    extend: bool = False
    follows: str = ""
    hang_timeout: Annotated[float | None, _OFF_AT_ZERO] = None
    event_log: Path | None = None
    summary: bool | None = None  # None: only on a terminal
    log_dir: Path | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: frozenset[int] | None = None
    line_prefix: str | None = None  # template of what stands before lines of replicas; None: not given
    role: str = "default"
    cores: int = 0  # divided among the replicas of the node; 0: the environment sets OMP_NUM_THREADS
    virtual_local_rank: bool = False
    allocation: slurm.Allocation | None = None  # of Slurm, if this is a task of a step
    signals: tuple[signal.Signals, ...] = ()  # signals at which the agent saves and leaves
    directory: Path = Path()  # that the script's path is relative to
    notes: tuple[str, ...] = ()  # one line each, to print for the user
    typed: tuple[str, ...] = ()  # the arguments as they were given
    version: str = ""  # of this program that the job's agents have; "": this one

    @property
    def of_step(self) -> bool:
        """Whether the first task of a step of Slurm serves the store."""
        return self.allocation is not None and self.endpoint is None and not self.standalone

    @property
    def of_one_machine(self) -> bool:
        """Whether the store is in the memory of a process of this machine, and ends with that process."""
        return self.standalone or (self.endpoint is not None and is_local(self.endpoint))


def parse(
    arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ, look: bool = True
) -> RunOptions:
    """Return the checked options.

    Node services give the job as a file: `--spec FILE`, and options of the node without a script. What the
    file says counts before options and variables of torchrun.

    Args:
        arguments: The command line; None: that of this process.
        environ: Variables that stand for options.
        look: Whether the script of a file has to be there.

    Raises:
        OptionError: an option is invalid.
        SystemExit: for --help.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed[:1] != ["--spec"] or len(typed) == 1:
        args, given = parser().parse(typed)
        found = _within_slurm(args, given, environ)
        return replace(check(args, given, environ, allocation=found), typed=tuple(typed))
    try:
        job = decode(Submission, Path(typed[1]).read_text(), typed[1])
    except (OSError, ValueError) as error:
        raise OptionError(f"--spec: {error}") from None
    args, given = parser().parse([*typed[2:], "--no-python", sys.executable])
    args.nnodes, args.module = f"1:{job.max_nodes}", False
    if look:
        args.no_python, args.module = job.mode == "exec", job.mode == "module"
        args.training_script = job.command[0]
    return replace(check(args, given, environ), typed=tuple(typed), **vars(job))


def _within_slurm(
    args: argparse.Namespace, given: set[str], environ: Mapping[str, str]
) -> slurm.Allocation | None:
    """Set the options that were not given to what Slurm has given to this task, and return that."""
    if args.standalone:
        return None
    words = given | {name for name in vars(args) if environ.get(f"PET_{name.upper()}")}
    if args.etcd or environ.get(environment.ETCD):
        words |= {"rdzv_endpoint"}
    try:
        found = slurm.allocation(environ, len(os.sched_getaffinity(0)), words)
    except slurm.SlurmError as error:
        raise OptionError(str(error)) from None
    if found is None:
        return None
    path = Path(found.directory, ".adaptdl", args.rdzv_id if "rdzv_id" in words else found.job)
    defaults = {
        "nnodes": f"1:{found.max_nodes}",
        "nproc_per_node": f"1:{found.slots}",
        "rdzv_id": found.job,
        "node_name": found.node,
        "checkpoint_path": environ.get(environment.CHECKPOINT_PATH) or str(path),
    }
    vars(args).update({name: value for name, value in defaults.items() if name not in words})
    return found


def check(
    args: argparse.Namespace,
    given: set[str],
    environ: Mapping[str, str],
    slots_of: Any = None,
    allocation: slurm.Allocation | None = None,
) -> RunOptions:
    """Return the checked options of a namespace. The only I/O is to look at the files that it names."""
    mode = _mode(args)
    job = _job(args)
    min_nodes, max_nodes = parse_range("--nnodes", args.nnodes)
    min_slots, slots = parse_slots(args.nproc_per_node, slots_of or count_devices)
    notes = list(_notes_on_ignored(given, environ))
    if _is_c10d_alone(args, max_nodes):
        notes = _notes_on_c10d(args, notes)
        args = argparse.Namespace(**{**vars(args), "standalone": True, "rdzv_endpoint": ""})
        given = given - {"rdzv_endpoint"}
    endpoint = args.etcd or args.rdzv_endpoint or environ.get(environment.ETCD) or None
    if args.etcd and args.rdzv_endpoint and args.etcd != args.rdzv_endpoint:
        raise OptionError(f"--etcd {args.etcd} and --rdzv-endpoint {args.rdzv_endpoint} differ: give one")
    if args.standalone and max_nodes > 1:
        raise OptionError(
            f"--standalone is for one node and --nnodes={args.nnodes} asks for more: give --rdzv-endpoint "
            f"HOST:PORT of an etcd instead of --standalone"
        )
    standalone = bool(args.standalone) or (endpoint is None and max_nodes == 1)
    if endpoint is None and not standalone and allocation is None:
        raise OptionError(
            f"--nnodes={args.nnodes} needs an etcd that all nodes reach: --rdzv-endpoint HOST:PORT"
        )
    if endpoint is not None and not standalone:
        _check_endpoint(endpoint, max_nodes)
    if args.once + args.anew + args.extend > 1:
        raise OptionError("--once, --anew and --extend exclude each other: give the one that is meant")
    point = _meeting_point(args, given, environ, max_nodes)
    path = args.checkpoint_path or environ.get(environment.CHECKPOINT_PATH) or str(Path(".adaptdl") / job)
    if "://" not in path:
        path = str(Path(path).absolute())
    replicas = parse_range("--replicas", args.replicas) if args.replicas else None
    fewest = min_nodes * min_slots
    cores = allocation.cores if allocation else len(os.sched_getaffinity(0))
    if replicas is not None and replicas[0] < fewest:
        notes.append(
            f"--replicas={args.replicas} never means fewer than {fewest} replicas, also after a death: "
            f"--nproc-per-node={args.nproc_per_node} is the fewest of a node (1:{slots} lets them be fewer)"
        )
    # without --replicas: the least that a node takes is in its own registration
    least, most = replicas or (min_nodes, slots if max_nodes == 1 else _MANY_REPLICAS)
    checked = {
        "command": (args.training_script, *args.training_script_args),
        "mode": mode,
        "job": job,
        "min_nodes": min_nodes,
        "max_nodes": max_nodes,
        "min_slots": min_slots,
        "slots": slots,
        "min_replicas": least,
        "max_replicas": most,
        "standalone": standalone,
        "endpoint": None if standalone else endpoint,
        "cluster": check_option("--cluster", args.cluster or environ.get(environment.CLUSTER) or "default"),
        "node_name": check_option("--node-name", args.node_name) if args.node_name else None,
        "node_type": _node_type(args.node_type or environ.get(environment.NODE_TYPE) or None),
        "meeting_point": point,
        "port_range": parse_ports(args.port_range) if args.port_range else None,
        "checkpoint_path": path,
        "autoscale": not args.no_autoscale,
        "preemptible": not args.no_preempt,
        "log_dir": Path(args.log_dir) if args.log_dir else None,
        "local_ranks_filter": _ranks(args.local_ranks_filter),
        "line_prefix": args.log_line_prefix_template or None,
        "cores": 0 if "OMP_NUM_THREADS" in environ else cores,
        "allocation": allocation,
        "signals": parse_signals(args.signals_to_handle),
        "notes": (*notes, *_notes(args, given, point is not None, slots)),
    }
    try:
        return RunOptions(**{**vars(args), **checked})
    except ValidationError as error:
        first = error.errors()[0]
        name, value = str(first["loc"][0]), first["input"]
        must = RunOptions.__pydantic_fields__[name].description  # type: ignore[attr-defined]
        said = f"{value:g}" if isinstance(value, float) else value
        raise OptionError(f"--{name.replace('_', '-')}={said} {must or first['msg']}") from None


def _check_endpoint(endpoint: str, max_nodes: int) -> None:
    """Check the form of an endpoint, and that a socket of this machine is asked to serve one node only."""
    try:
        if not is_local(endpoint):
            parse_endpoints(endpoint)
            return
        socket_path(endpoint)
    except StoreOptionError as error:
        raise OptionError(str(error)) from None
    if max_nodes > 1:
        raise OptionError(
            f"--rdzv-endpoint {endpoint} is a socket of this machine, and --nnodes allows {max_nodes} nodes: "
            f"give --nnodes=1, or HOST:PORT of an etcd"
        )


def _is_c10d_alone(args: argparse.Namespace, max_nodes: int) -> bool:
    """Return whether torchrun would serve the store itself, for this machine alone.

    This stands for --standalone, as in `--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0`.
    """
    host = (args.rdzv_endpoint or "").rpartition(":")[0]
    here = host in ("localhost", "127.0.0.1", "[::1]")
    return here and max_nodes == 1 and args.rdzv_backend == "c10d" and not args.etcd


def _notes_on_c10d(args: argparse.Namespace, notes: list[str]) -> list[str]:
    kept = [note for note in notes if "RDZV_BACKEND" not in note and "--rdzv-backend" not in note]
    if args.rdzv_endpoint.endswith(":0") or args.standalone:
        return kept
    return [
        *kept,
        f"--rdzv-endpoint={args.rdzv_endpoint} has no effect with --rdzv-backend=c10d and one node, which "
        f"is --standalone; if it is an etcd, leave --rdzv-backend away",
    ]


_TORCHS_PORT = 29500


def _meeting_point(
    args: argparse.Namespace, given: set[str], environ: Mapping[str, str], max_nodes: int
) -> MeetingPoint | None:
    """Return --master-addr and --master-port if torchrun would use them."""
    # torchrun, too, ignores the variables with --standalone: images set them, and two jobs would share a port
    named = "master_addr" in given or bool(environ.get(environment.PET_MASTER_ADDR) and not args.standalone)
    address = args.master_addr.strip("[]") if named else None
    port = args.master_port if "master_port" in given or not args.standalone else None
    if port is None and address is not None and max_nodes > 1 and not args.standalone:
        port = _TORCHS_PORT
    if port is None:
        return None
    if not 1 <= port <= 65535:
        raise OptionError(f"--master-port={port} is not a port: give a number between 1 and 65535")
    return MeetingPoint(address, port)


def _mode(args: argparse.Namespace) -> str:
    if args.no_python and args.module:
        raise OptionError("--no-python and --module exclude each other: a module needs Python")
    if args.module:
        top = args.training_script.partition(".")[0]
        # A replica's first folder of modules is the current one.
        if not (top and (PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top))):
            raise OptionError(f"there is no module {top!r} in {Path.cwd()}, and none is installed")
        return "module"
    if args.no_python and not getattr(args, "run_path", False):
        if shutil.which(args.training_script) is None:
            raise OptionError(f"{args.training_script!r} is not a program that can be executed from here")
        return "exec"
    script = Path(args.training_script)
    try:
        there = script.exists()
    except OSError as error:  # for example below a directory that this user may not enter
        raise OptionError(f"the script {args.training_script!r} cannot be read: {error.strerror}") from None
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise OptionError(f"{args.training_script!r} is a directory without a __main__.py: name a script")
    if not there:
        raise OptionError(f"there is no script {args.training_script!r} in {Path.cwd()}: give its path")
    return "script"


def _job(args: argparse.Namespace) -> str:
    if args.rdzv_id and args.rdzv_id != "none":
        return check_option("--rdzv-id", args.rdzv_id)
    stem = args.training_script.rpartition(".")[2] if args.module else Path(args.training_script).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "job"


def check_option(option: str, name: str) -> str:
    """Return a name that can be part of a key in the store; OptionError if it cannot."""
    try:
        return check_name(option, name)
    except ValueError as error:
        raise OptionError(str(error)) from None


def _node_type(name: str | None) -> str | None:
    """Return the name of a node's type; OptionError if it is not one."""
    if name is not None and (not re.fullmatch(r"[\w .()/-]{1,64}", name) or not name.strip()):
        raise OptionError(
            f"--node-type={name!r}: give up to 64 letters, digits, spaces and ( ) . / - _, such as slow-cpu"
        )
    return name


def parse_range(option: str, text: str) -> tuple[int, int]:
    """Parse `N` or `MIN:MAX` with 1 <= MIN <= MAX."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise OptionError(f"{option}={text} is neither a number nor MIN:MAX, as in {option}=1:8")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 1 <= low <= high <= MOST_REPLICAS:
        raise OptionError(
            f"{option}={text}: MIN must be at least 1 and not more than MAX (at most 1e9), as in {option}=1:8"
        )
    return low, high


_DEVICES = ("auto", "cpu", "gpu", "xpu")
_COUNT = "from torch.distributed import run; print(run.determine_local_world_size(sys.argv[1]))"


def parse_slots(text: str, count: Any) -> tuple[int, int]:
    """Return (min_slots, slots); `N` and words such as `gpu` set both."""
    if re.fullmatch(r"-?[\d:]+", text):
        return parse_range("--nproc-per-node", text)
    low, colon, high = text.partition(":")
    if colon and low.isdigit() and high in _DEVICES:
        slots = count(high)
        return parse_range("--nproc-per-node", f"{low}:{slots}")
    slots = count(text)
    return parse_range("--nproc-per-node", str(slots))


def count_devices(word: str) -> int:
    """Return the number of devices that torchrun's `auto`, `cpu`, `gpu` or `xpu` stands for.

    Another process asks torch, which would stay in this one's memory.
    """
    asked = subprocess.run(_own_python.code(_COUNT, word), capture_output=True, text=True)
    if asked.returncode:
        error = asked.stderr.strip().rpartition("\n")[2].removeprefix("ValueError: ").rstrip(".")
        why = f": {error}; " if word in _DEVICES else ": "
        raise OptionError(f"--nproc-per-node={word}{why}give a number, MIN:MAX, auto, gpu or cpu")
    return int(asked.stdout)


def parse_ports(text: str) -> tuple[int, int]:
    """Parse `LOW:HIGH` (or `LOW-HIGH`), both included."""
    match = re.fullmatch(r"(\d+)[:-](\d+)", text)
    if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65535:
        raise OptionError(f"--port-range={text} is not LOW:HIGH between 1024 and 65535, as in 29500:29600")
    return int(match[1]), int(match[2])


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Return the signals of a list of names, as in SIGTERM,SIGUSR1."""
    found = []
    for name in text.split(","):
        number = signal.Signals.__members__.get(name.strip())
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise OptionError(
                f"--signals-to-handle={text}: {name.strip()!r} is not a signal that can be handled; give "
                "names separated by commas, as in SIGTERM,SIGINT,SIGHUP,SIGQUIT"
            )
        found.append(number)
    return tuple(dict.fromkeys(found))


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--local-ranks-filter={text} is not a list of numbers, as in 0,1") from None


_OF_AN_ETCD = ("rdzv_endpoint", "etcd", "etcd_api", "etcd_user", "etcd_ca", "etcd_cert", "etcd_key")


def _notes_on_ignored(given: set[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Return notes about torchrun's options that have no effect, also when set by environment variables."""
    for declaration, why in WITHOUT_MEANING.items():
        option = declaration.split()[0]
        name = option[2:].replace("-", "_")
        if name in given:
            yield f"{option} has no effect: {why}"
        elif environ.get(f"PET_{name.upper()}"):
            yield f"PET_{name.upper()} has no effect: {why}"


def _notes(args: argparse.Namespace, given: set[str], meets: bool, slots: int) -> Iterator[str]:
    if "master_addr" in given and not meets:
        yield "--master-addr has no effect without --master-port: replicas meet at any free port"
    if args.standalone:
        for name in _OF_AN_ETCD:
            if name in given:
                option = name.replace("_", "-")
                yield f"--{option}={getattr(args, name)} has no effect with --standalone"
    shown = _ranks(args.local_ranks_filter)
    if shown is not None and not any(rank < slots for rank in shown):
        yield (
            f"--local-ranks-filter={args.local_ranks_filter} shows nothing: "
            f"local ranks here are 0 to {slots - 1}"
        )
