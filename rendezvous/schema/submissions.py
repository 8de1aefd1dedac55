"""The records of a cluster that has node services: the services, and the jobs submitted to them.

A submission is signed by the person who made it, because everybody with the store's password can write the
store. A node service checks the signature before it acts on a submission.
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from adaptdl_elastic.rendezvous.schema.keys import NAME_PATTERN
from adaptdl_elastic.rendezvous.schema.records import MOST_SLOTS, RECORD_CONFIG, JobSpec

PERSON_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
"""Regular expression of the names of people."""

# names become parts of keys, of paths and of command lines, and are shown in terminals
_Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
_Person = Annotated[str, Field(pattern=f"^{PERSON_PATTERN}$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

# what a person may ask; the names of fields of JobSpec
_ASKED = (
    *("job", "command", "min_replicas", "max_replicas", "gpus_per_replica", "max_restarts", "weight"),
    "checkpoint_path",
)

OWNER_HEADER = "ADAPTDL.owner"
"""Global header of an archive of a working directory. Its value is the name of the person who packed it."""

STACK_OWNER = "stack"
"""The person in archives of `adaptdl cloud up`."""

STACK_COMMAND = ".adaptdl/command"
"""The file in such an archive with the script and its arguments."""

MOST_PRIORITY = 1000
"""Largest absolute value of a submission's priority."""


@dataclass(frozen=True, config=RECORD_CONFIG)
class ServiceRecord:
    """The registration of one node's service."""

    node: _Name
    host: str  # address at which the service listens
    port: Annotated[int, Field(ge=0, le=65535)]
    slots: Annotated[int, Field(ge=0, le=MOST_SLOTS)]  # how many replicas fit
    gpus: int = 0
    gpu_model: str = ""
    version: str = ""  # of adaptdl-elastic
    problems: dict[str, str] = field(default_factory=dict)  # job → why this node cannot run it
    given_up: tuple[str, ...] = ()  # jobs that this node does not try to start any more


@dataclass(frozen=True, kw_only=True, config=RECORD_CONFIG)
class Submission(JobSpec):
    """What a person asked for with `adaptdl submit`: a job, and what node services need to begin it.

    The store holds no file and no variable of the job: only the digests by which node services fetch them
    from each other. A `checkpoint_path` of "" stands for a directory of each node.
    """

    job: _Name
    run: str = ""  # a run is named when a node begins it
    owner: _Person
    mode: Literal["script", "module", "exec"]
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    bundle: _Digest  # of the working directory's archive
    environment: _Digest | None = None  # of the archive of variables
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    after: tuple[_Name, ...] = ()  # jobs that have to be done first
    replaces: float | None = None  # `created` of the submission of this name that it replaces
    follows: str = ""  # JobSpec.run with which that submission ended; "": it had none
    python: str = ""  # interpreter whose packages it uses; "": the cluster's
    requirements: str = ""  # file with its packages, in its directory; "": the usual ones, if it has some
    nodes: tuple[_Name, ...] = ()  # where it may run; (): on any node
    has: tuple[str, ...] = ()  # it runs only on nodes where these paths exist

    @property
    def folder(self) -> str:
        """The name of the directory into which the archive is unpacked."""
        return self.job if self.replaces is None else f"{self.job}@{self.bundle[:16]}"

    @property
    def of_agents(self) -> Submission:
        """The submission as agents take it: a field that `adaptdl submit` does not set has its default.

        Otherwise a record that was made by hand could keep slots that belong to other jobs.
        """
        others = (one for one in fields(JobSpec) if one.name not in _ASKED and one.default is not MISSING)
        unasked: dict[str, Any] = {one.name: one.default for one in others}
        return replace(self, **{**unasked, "max_nodes": self.max_replicas})

    @property
    def least_slots(self) -> int:
        """How many slots its fewest replicas take up on nodes with GPUs."""
        return self.min_replicas * self.gpus_per_replica


@dataclass(frozen=True, config=RECORD_CONFIG)
class Cancellation:
    """The wish of a person that a submitted job ends, or does not begin."""

    job: _Name
    person: _Person
    created: float = 0.0
    submitted: float | None = None  # `created` of the submission that it is for


@dataclass(frozen=True, config=RECORD_CONFIG)
class Resumption:
    """The wish of a person that a submitted job that was stopped or has failed goes on.

    It is for one run only: when the job is stopped or fails again, the record has no effect any more.
    """

    job: _Name
    person: _Person
    run: str  # JobSpec.run of the run that has ended
    created: float = 0.0
    number: int = 0  # JobSpec.number of that run


@dataclass(frozen=True, config=RECORD_CONFIG)
class Signed:
    """A record as text, and the signature of the person who wrote it."""

    text: str
    person: str
    signature: str
