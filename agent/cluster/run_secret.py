"""The secret that the agents of a job have in common, and that of one run. See `adaptdl_elastic._secrets`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from adaptdl_elastic import _secrets
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec
from adaptdl_elastic.rendezvous.store.base import Store

REMEDY = "set the same ADAPTDL_SECRET for the agents of all nodes (openssl rand -hex 24)"


@dataclass(frozen=True)
class CommonSecret:
    """What the agents of a job have in common."""

    value: bytes = field(repr=False)
    one_machine: bool  # only agents of this user on this machine have it

    def of_run(self, cluster: str, spec: JobSpec) -> str:
        """Return what the replicas of this run inherit."""
        return _secrets.run_secret(self.value, cluster, spec.job, spec.run)

    def mark(self, cluster: str, spec: JobSpec) -> str:
        """Return `JobSpec.secret_mark` as it is where an agent with this secret began the run."""
        return _secrets.mark(self.of_run(cluster, spec))


def common_secret(environ: Mapping[str, str], store: Store, keys: Keys, confidential: bool) -> CommonSecret:
    """Find the secret of this node's agents; make it where there is none.

    Args:
        environ: This agent's environment.
        store: The cluster's.
        keys: The cluster's.
        confidential: Only who may write the store reads it, so it may keep a secret: etcd with TLS and a
            password, or a socket of this user's.

    Raises:
        RuntimeFileError: It would have to be in a file of this machine, which cannot be used.
        StoreError: The store fails.
    """
    given = environ.get("ADAPTDL_SECRET")
    if given:
        return CommonSecret(given.encode(), one_machine=False)
    if not confidential:
        return CommonSecret(_secrets.machine_secret(), one_machine=True)
    found = store.get(keys.secret)
    if found is None:
        store.compare_and_swap(keys.secret, secrets.token_hex(32), 0)  # or another agent's is there now
        found = store.get(keys.secret)
    assert found is not None  # nothing deletes it
    return CommonSecret(found.value.encode(), one_machine=False)
