"""The secret that a job's agents share, and the secret of one run: see `adaptdl_elastic._secrets`."""

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
    """A secret that the agents of a job share."""

    value: bytes = field(repr=False)
    one_machine: bool  # only this user's agents on this machine have it

    def of_run(self, cluster: str, spec: JobSpec) -> str:
        """Return the secret that the replicas of this run inherit."""
        return _secrets.run_secret(self.value, cluster, spec.job, spec.run)

    def mark(self, cluster: str, spec: JobSpec) -> str:
        """Return the value of `JobSpec.secret_mark` of a run begun by an agent with this secret."""
        return _secrets.mark(self.of_run(cluster, spec))


def common_secret(environ: Mapping[str, str], store: Store, keys: Keys, confidential: bool) -> CommonSecret:
    """Return the secret of this node's agents; create one if there is none.

    Args:
        environ: this agent's environment.
        store: the cluster's store.
        keys: the keys of the cluster.
        confidential: whether only users who may write the store can read it, so that it may keep a secret:
            etcd with TLS and a password, or a socket of this user.

    Raises:
        RuntimeFileError: the file of this machine that would keep the secret cannot be used.
        StoreError: the store fails.
    """
    given = environ.get("ADAPTDL_SECRET")
    if given:
        return CommonSecret(given.encode(), one_machine=False)
    if not confidential:
        return CommonSecret(_secrets.machine_secret(), one_machine=True)
    found = store.get(keys.secret)
    if found is None:
        # has no effect if another agent has written one
        store.compare_and_swap(keys.secret, secrets.token_hex(32), 0)
        found = store.get(keys.secret)
    assert found is not None  # no program deletes this key
    return CommonSecret(found.value.encode(), one_machine=False)
