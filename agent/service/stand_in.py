"""Register this node for a job that has no agent here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from adaptdl_elastic.agent import launch
from adaptdl_elastic.agent.cluster.ended_run import JoinError
from adaptdl_elastic.agent.cluster.store_link import Registration
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.agent.terminal.run_parser import OptionError
from adaptdl_elastic.protocol.environment import STAND_IN
from adaptdl_elastic.rendezvous.local.runtime_file import RuntimeFileError
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Plan
from adaptdl_elastic.rendezvous.schema.submissions import Submission
from adaptdl_elastic.rendezvous.store.base import Lease, Store, StoreError
from adaptdl_elastic.storage import StorageError

logger = logging.getLogger(__name__)

_REFUSALS = (OptionError, JoinError, StoreError, StorageError, launch.LaunchError, RuntimeFileError)
_MODES = {"script": [], "module": ["--module"], "exec": ["--no-python"]}


class StandInError(Exception):
    """This node cannot take part in a job; the message says why."""


@dataclass(frozen=True)
class Membership:
    """A connection to the store, and the lease of what this node registers there."""

    store: Store
    lease: Lease


@dataclass(frozen=True)
class StandIn:
    """The registration of this node for a job.

    Attributes:
        job: Name of the job.
        work: Its directory on this node.
        given: The job's own variables.
        arguments: Of the agent.
        environment: Of the agent.
        membership: With which the registration was made.
        registration: The registration.
    """

    job: str
    work: Path
    given: Mapping[str, str] = field(repr=False)
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    membership: Membership
    registration: Registration

    @classmethod
    def make(
        cls,
        submission: Submission,
        options: Sequence[str],
        work: Path,
        given: Mapping[str, str],
        environment: Mapping[str, str],
        membership: Membership,
    ) -> StandIn:
        """Register this node, and join the job's run or begin it.

        Args:
            submission: Of the job.
            options: Of the agent.
            work: The job's directory on this node.
            given: The job's own variables.
            environment: Of the agent.
            membership: The store, and the lease of the registration.

        Raises:
            JobEndedError: nothing is to be started.
            StandInError: this node cannot take part.
        """
        program, *rest = submission.command
        try:
            # the script is looked for by the agent, whose directory it may be relative to
            parsed = parse([*options, "--no-python", sys.executable], environment)
            launch.check_checkpoint_path(parsed.checkpoint_path)
            parsed = replace(parsed, script=program, script_args=tuple(rest), mode=submission.mode)
            parsed = replace(parsed, directory=work)
            found = launch.take_part(
                parsed,
                parsed.local_addr or "127.0.0.1",
                launch.StoreAccess(parsed.endpoint or "", membership.store, True, environment),
                Keys(parsed.cluster),
                lambda text: logger.info("job %s: %s", submission.job, text),
                membership.lease,
            )
        except _REFUSALS as error:
            raise StandInError(str(error)) from None
        return cls(
            submission.job,
            work,
            given,
            [*options, *_MODES[submission.mode], *submission.command],
            {**environment, STAND_IN: found.registration.record.agent},
            membership,
            found.registration,
        )

    def is_named(self, plan: Plan) -> bool:
        """Return whether a plan has replicas on this node, by this registration."""
        record = self.registration.record
        named = {placement.agent for placement in plan.placements if placement.node == record.node}
        return plan.run == record.run and not named.isdisjoint(("", record.agent))

    def withdraw(self) -> None:
        """Delete the registration, unless an agent has taken it over."""
        try:
            self.registration.close()
        except StoreError as error:
            # it vanishes with the lease
            logger.warning("job %s: %s", self.job, error)
