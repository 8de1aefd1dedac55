"""Give each person a user of the cluster's etcd, which is deleted when the person is revoked."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.etcd_gateway import EtcdError, EtcdGateway
from adaptdl_elastic.rendezvous.services.service_config import ETCD_USER
from adaptdl_elastic.rendezvous.store.base import StoreError
from adaptdl_elastic.rendezvous.store.store_options import read_password


def user_of(person: str) -> str:
    """Return the name of a person's user of etcd."""
    return f"person:{person}"


def add(context: ClusterContext, person: str) -> str:
    """Give a person a user, or the user another password, and return the password.

    Raises:
        ProvisionError: etcd does not answer, or refuses it.
    """
    password, user = secrets.token_hex(24), user_of(person)
    with _as_root(context) as gateway:
        gateway.must("user/add", name=user, password=password)
        gateway.must("user/changepw", name=user, password=password)  # where there was one
        gateway.must("user/grant", user=user, role=ETCD_USER)
    return password


def remove(context: ClusterContext, person: str) -> None:
    """Delete a person's user, if there is one; etcd lets the person in no more.

    Raises:
        ProvisionError: etcd does not answer, or refuses it.
    """
    with _as_root(context) as gateway:
        status, said = gateway.ask("user/delete", name=user_of(person))
        if status != 200 and "not found" not in said:
            raise EtcdError(f"etcd refuses user/delete: {said}")


@contextmanager
def _as_root(context: ClusterContext) -> Iterator[EtcdGateway]:
    try:
        with EtcdGateway(context.endpoint, context.store_options()) as gateway:
            gateway.log_in("root", read_password(context.directory / "root-password"))
            yield gateway
    except (EtcdError, StoreError) as error:
        raise ProvisionError(f"{next(iter(context.nodes), context.name)}: {error}") from None
