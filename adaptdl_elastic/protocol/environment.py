"""Name the environment variables of replicas, agents and tools, and hold the settings of a replica.

All that write or read such a variable use this one list. A test finds names that stand elsewhere.
docs/reference/variables.md explains the variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import ClassVar, Generic, TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)

# of replicas: names that others than `ReplicaSettings` use
RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
WORLD_SIZE = "WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ADAPTDL_MASTER_PORT = "ADAPTDL_MASTER_PORT"
NODE_TYPE = "ADAPTDL_NODE_TYPE"
CHECKPOINT_PATH = "ADAPTDL_CHECKPOINT_PATH"
CHECKPOINT_WAIT = "ADAPTDL_CHECKPOINT_WAIT"
SHARE_PATH = "ADAPTDL_SHARE_PATH"
SECRET = "ADAPTDL_SECRET"
AGENT_FD = "ADAPTDL_AGENT_FD"
JOIN = "ADAPTDL_JOIN"
EVENT_LOG = "ADAPTDL_EVENT_LOG"

FORK_SERVER = "ADAPTDL_FORK_SERVER"
"""Of an agent that a node service starts: the descriptor of a connection to its fork server."""

STAND_IN = "ADAPTDL_STAND_IN"
"""Of an agent that a node service starts: the id under which the service has registered the node."""

CODE = "ADAPTDL_CODE"
"""Of an agent on a node of an EC2 stack: the URL of the archive that it runs."""

# of agents and tools
LOG_LEVEL = "ADAPTDL_LOGLEVEL"
PRELOAD = "ADAPTDL_PRELOAD"
"""Of a fork server: further modules to import, separated by commas."""

LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
METRICS_PORT = "ADAPTDL_METRICS_PORT"
METRICS_HOST = "ADAPTDL_METRICS_HOST"
PET_MASTER_ADDR = "PET_MASTER_ADDR"

# of an instance of EC2; the last two are named by boto3 and the AWS SDKs
INSTANCE_ID = "ADAPTDL_INSTANCE_ID"
INSTANCE_TYPE = "ADAPTDL_INSTANCE_TYPE"
ZONE = "ADAPTDL_ZONE"
PREEMPTIBLE = "ADAPTDL_PREEMPTIBLE"
METADATA_ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
METADATA_DISABLED = "AWS_EC2_METADATA_DISABLED"

ETCD = "ADAPTDL_ETCD"
CLUSTER = "ADAPTDL_CLUSTER"
STORE_OPTIONS = {
    ETCD: ("HOST:PORT", "etcd of the cluster"),
    f"{ETCD}_CA": ("PEM", "CA of etcd's certificate"),
    f"{ETCD}_CERT": ("PEM", "client certificate"),
    f"{ETCD}_KEY": ("PEM", "key of the client certificate"),
    f"{ETCD}_USER": ("NAME", f"user of etcd; {ETCD}_PASSWORD_FILE names the file with the password"),
    CLUSTER: ("NAME", "name of the cluster, where several share an etcd [default: default]"),
}
"""The variables that stand for an option of the agent and of `adaptdl`: what its help has."""


def option_of(variable: str) -> str:
    """Return the option that sets the same as a variable."""
    return f"--{variable.removeprefix('ADAPTDL_').lower().replace('_', '-')}"


OF_TORCHRUN = frozenset({RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT})
"""Variables of torchrun without a common prefix."""

PREFIXES = ("ADAPTDL_", "TORCHELASTIC_", "GROUP_", "ROLE_")
"""Prefixes of all other variables."""


def describes_replica(name: str) -> bool:
    """Return whether a variable says which replica a process is. No other process may inherit it."""
    return name in OF_TORCHRUN or name.startswith(PREFIXES)


class EnvironmentVariableError(ValueError):
    """Raised if an environment variable has an invalid value."""

    # scripts know it as a name of `adaptdl_elastic.env`
    __module__ = "adaptdl_elastic.env"


class Variable(Generic[T]):
    """A setting of a replica: which variables hold it, and how their text is read.

    Args:
        parse: Returns the value that a text stands for. It raises ValueError if there is none.
        default: The value if no variable is set, or is empty.
        names: The variables. All are written. The first one that is set and not empty is read.
        by_agent: Whether only an agent sets those of AdaptDL, for its replicas.
    """

    of_agents: ClassVar[set[str]] = {AGENT_FD, JOIN}
    """Variables that only an agent sets, for its replicas."""

    def __init__(self, parse: Callable[[str], T], default: T, *names: str, by_agent: bool = False) -> None:
        self._parse, self._default, self._names = parse, default, names
        if by_agent:
            self.of_agents.update(name for name in names if name.startswith("ADAPTDL_"))

    def __get__(self, settings: ReplicaSettings, owner: object = None) -> T:
        """Return the value; EnvironmentVariableError if the text is invalid."""
        for name in self._names:
            if text := settings.environ.get(name):
                try:
                    return self._parse(text)
                except ValueError as error:
                    raise EnvironmentVariableError(f"{name}={text}: {error}") from None
        return self._default

    def __set__(self, settings: ReplicaSettings, value: T) -> None:
        """Write the value; None: leave the variables as they are."""
        if value is not None:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            settings.environ.update(dict.fromkeys(self._names, text))


def _number(
    kind: Callable[[str], N], what: str, least: int, most: float = sys.float_info.max
) -> Callable[[str], N]:
    def parse(text: str) -> N:
        with suppress(ValueError):
            value = kind(text)
            if least <= value <= most:
                return value
        raise ValueError(f"{what} is needed")

    return parse


def _count(minimum: int) -> Callable[[str], int]:
    return _number(int, f"a whole number of at least {minimum}", minimum)


_port = _number(int, "a port from 0 to 65535", 0, 65535)
_seconds = _number(float, "a number of seconds, 0 or more,", 0)


def _word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{', '.join(words[:-1])} or {words[-1]} is needed")
        return text

    return parse


class ReplicaSettings:
    """The settings of a replica, as the variables of an environment hold them.

    A value is parsed when it is read: the environment of a process changes with the generation.
    """

    job = Variable(str, None, "ADAPTDL_JOB_ID", "TORCHELASTIC_RUN_ID", by_agent=True)
    rank = Variable(_count(0), 0, "ADAPTDL_REPLICA_RANK", RANK, by_agent=True)
    replicas = Variable(_count(1), 1, "ADAPTDL_NUM_REPLICAS", WORLD_SIZE, by_agent=True)
    nodes = Variable(_count(1), 1, "ADAPTDL_NUM_NODES", "GROUP_WORLD_SIZE", by_agent=True)
    restarts = Variable(_count(0), 0, "ADAPTDL_NUM_RESTARTS", "TORCHELASTIC_RESTART_COUNT", by_agent=True)
    generation = Variable(_count(0), None, "ADAPTDL_GENERATION", by_agent=True)
    local_rank = Variable(_count(0), None, "ADAPTDL_LOCAL_RANK", by_agent=True)
    master_host = Variable(str, "127.0.0.1", "ADAPTDL_MASTER_ADDR", MASTER_ADDR, by_agent=True)
    # the port of the library's collectives
    master_port = Variable(_port, None, ADAPTDL_MASTER_PORT, by_agent=True)

    # only as torchrun sets them
    torch_local_rank = Variable(_count(0), 0, LOCAL_RANK)
    torch_port = Variable(_port, 0, MASTER_PORT)
    local_replicas = Variable(_count(1), 1, LOCAL_WORLD_SIZE)
    node_number = Variable(_count(0), 0, "GROUP_RANK")
    role = Variable(str, "", "ROLE_NAME")
    role_rank = Variable(_count(0), 0, "ROLE_RANK")
    role_replicas = Variable(_count(1), 1, "ROLE_WORLD_SIZE")
    max_restarts = Variable(_count(0), 0, "TORCHELASTIC_MAX_RESTARTS")
    agent_store = Variable(str, "", "TORCHELASTIC_USE_AGENT_STORE")
    error_file = Variable(str, "", ERROR_FILE)

    # of AdaptDL or of this project alone
    node = Variable(str, "", "ADAPTDL_NODE", by_agent=True)
    node_type = Variable(str, "", NODE_TYPE)
    # names of the generation's nodes, separated by commas; "": one node, or more than `hints.MOST_NAMED`
    placement = Variable(str, "", "ADAPTDL_PLACEMENT", by_agent=True)
    # newest generation when a link between these nodes was found to have changed
    links_since = Variable(int, -1, "ADAPTDL_LINKS_SINCE", by_agent=True)
    memory_limit = Variable(_count(1), None, "ADAPTDL_MEMORY_LIMIT", by_agent=True)
    batch_size_limit = Variable(_count(1), None, "ADAPTDL_BATCH_SIZE_LIMIT", by_agent=True)
    checkpoint_path = Variable(str, None, CHECKPOINT_PATH)
    checkpoint_id = Variable(str, None, "ADAPTDL_CHECKPOINT_ID", by_agent=True)
    checkpoint_interval = Variable(_seconds, 30.0, "ADAPTDL_CHECKPOINT_INTERVAL")
    checkpoint_timeout = Variable(_seconds, 120.0, "ADAPTDL_CHECKPOINT_TIMEOUT")
    checkpoint_keep = Variable(_count(1), 3, "ADAPTDL_CHECKPOINT_KEEP")
    checkpoint_wait = Variable(_seconds, 0.0, CHECKPOINT_WAIT)
    options_from = Variable(_word("checkpoint", "script"), "checkpoint", "ADAPTDL_OPTIONS_FROM")
    hang_timeout = Variable(_seconds, None, "ADAPTDL_HANG_TIMEOUT")
    rescale = Variable(_word("auto", "inplace", "restart"), "auto", "ADAPTDL_RESCALE")
    report_interval = Variable(_seconds, 2.0, "ADAPTDL_REPORT_INTERVAL")
    share_path = Variable(str, None, SHARE_PATH)
    secret = Variable(str, None, SECRET)
    scheduler_version = Variable(str, None, "ADAPTDL_SCHED_VERSION")
    supervisor_url = Variable(str, None, "ADAPTDL_SUPERVISOR_URL")

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self.environ = environ


HERE = ReplicaSettings(os.environ)
"""The settings of this process."""


def drop_those_of_agents(environ: MutableMapping[str, str]) -> list[str]:
    """Remove the variables that only an agent sets, for its replicas; return their names."""
    return [name for name in sorted(Variable.of_agents) if environ.pop(name, None) is not None]
