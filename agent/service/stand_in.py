"""Register this node for a job that has no agent here."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from adaptdl_elastic.agent import taking_part
from adaptdl_elastic.agent.cluster import ended_run
from adaptdl_elastic.agent.cluster.job_joining import StoppingError, last_run
from adaptdl_elastic.agent.cluster.store_link import NameTakenError, Registration
from adaptdl_elastic.agent.own_records import new_run
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.agent.terminal.run_parser import OptionError
from adaptdl_elastic.protocol.environment import STAND_IN
from adaptdl_elastic.rendezvous.local.runtime_file import RuntimeFileError
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, NodeRecord, Plan, encode
from adaptdl_elastic.rendezvous.schema.submissions import Submission
from adaptdl_elastic.rendezvous.store.base import Lease, Store, StoreError, read_record
from adaptdl_elastic.storage import StorageError

logger = logging.getLogger(__name__)

_REFUSALS = (
    *(OptionError, ended_run.JoinError, StoreError, StorageError, taking_part.LaunchError, RuntimeFileError),
    NameTakenError,
)
_PASSING = StoreError, NameTakenError, StoppingError


class StandInError(Exception):
    """This node cannot take part in a job; the message says why.

    `passing` says that a later try may succeed.
    """

    def __init__(self, message: str, passing: bool) -> None:
        super().__init__(message)
        self.passing = passing


@dataclass(frozen=True)
class Membership:
    """A connection to the store, and the lease of what this node registers there."""

    store: Store
    lease: Lease


@dataclass(frozen=True)
class StandIn:
    """A job on this node, with all that its agent needs.

    Attributes:
        submission: Of the job.
        work: Its directory on this node.
        given: The job's own variables.
        options: Of the agent.
        variables: The agent's environment.
        membership: The store, and the lease of the registration.
        registration: The registration; None: the agent is to register by itself.
        number: `JobSpec.number` of the run that this node is registered for.
        version: Version of this program that the job's agents have; "": this one.
        python: Interpreter that has it.
    """

    submission: Submission
    work: Path
    given: Mapping[str, str] = field(repr=False)
    options: Sequence[str]
    variables: Mapping[str, str] = field(repr=False)
    membership: Membership
    registration: Registration | None = None
    number: int = 0
    version: str = ""
    python: str = sys.executable

    @property
    def job(self) -> str:
        """The job's name."""
        return self.submission.job

    @property
    def run(self) -> str:
        """The run that this node is registered for; "": it is not registered."""
        return "" if self.registration is None else self.registration.record.run

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the agent, which then takes over the registration."""
        if self.registration is None:
            return dict(self.variables)
        return {**self.variables, STAND_IN: self.registration.record.agent}

    def register(self) -> StandIn:
        """Register this node, and join the job's run or begin it; return the stand-in that is registered.

        Raises:
            JobEndedError: nothing is to be started.
            StandInError: this node cannot take part.
        """
        try:
            # the script is looked for by the agent, whose directory it may be relative to
            options = parse(self.options, self.variables, look=False)
            options = replace(options, directory=self.work, version=self.version)
            taking_part.check_checkpoint_path(options.checkpoint_path)
            store, keys = self.membership.store, Keys(options.cluster)
            _delete_ghost(store, keys.node(options.node_name or "", self.job))
            found = taking_part.take_part(
                options,
                options.local_addr or "127.0.0.1",
                taking_part.StoreAccess(options.endpoint or "", store, True, self.variables),
                keys,
                lambda text: logger.info("job %s: %s", self.job, text),
                self.membership.lease,
            )
        except _REFUSALS as error:
            raise StandInError(str(error), isinstance(error, _PASSING)) from None
        return replace(self, registration=found.registration, number=found.spec.number)

    def is_named(self, plan: Plan) -> bool:
        """Return whether a plan has replicas on this node, by this registration."""
        assert self.registration is not None
        record = self.registration.record
        named = {placement.agent for placement in plan.placements if placement.node == record.node}
        return plan.run == record.run and not named.isdisjoint(("", record.agent))

    def withdraw(self) -> bool:
        """Delete the registration, unless an agent has taken it over; return False if the store fails."""
        try:
            if self.registration is not None:
                self.registration.close()
        except StoreError as error:
            logger.warning("job %s: %s", self.job, error)
            return False
        return True


def _delete_ghost(store: Store, key: str) -> None:
    """Delete a registration that this process has written and could not delete since."""
    item = store.get(key)
    record = read_record(NodeRecord, item)
    if item is not None and record is not None and record.pid == os.getpid():
        store.compare_and_swap(key, None, item.mod_revision)


def record_failure(store: Store, keys: Keys, submission: Submission, reason: str, ended: str) -> None:
    """Write that a job has failed before any agent could run it.

    Its command line is not parsed: that may be what no node can do.

    Args:
        store: The store.
        keys: Keys of the cluster.
        submission: Of the job.
        reason: Why.
        ended: The run that was to be followed by another one; "": none.

    Raises:
        StoreError: the store fails.
    """
    job, key = submission.job, keys.job(submission.job, "spec")
    found, number = last_run(store, key)
    spec = read_record(JobSpec, found)
    if spec is None or spec.run == ended:
        own = {"run": new_run(), "created": time.time(), "number": number}
        spec = JobSpec(**{**vars(submission.of_agents), **own})
        if store.compare_and_swap(key, encode(spec), found.mod_revision if found else 0) is None:
            return  # another node does the same
    ended_run.fail(store, keys, job, spec.run, reason, time.time())
