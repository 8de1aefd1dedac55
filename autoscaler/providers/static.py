"""Bare metal: the nodes that register are the nodes there are. Nothing can be had, nothing released."""

from __future__ import annotations

from adaptdl_elastic.autoscaler.providers.base import (
    Capacity,
    Provider,
    UnknownInstanceError,
    UnknownPoolError,
)


class StaticProvider(Provider):
    """A cluster that is what it is."""

    name = "static"

    def capacity(self) -> Capacity:
        """No pools: no capacity can be asked for."""
        return Capacity()

    def request(self, pool: str, desired: int) -> None:
        """Always refused."""
        raise UnknownPoolError(
            f"no pool {pool!r}: a static cluster has the nodes that register, and no others"
        )

    def release(self, instance: str, replace: bool = False) -> None:
        """Always refused."""
        raise UnknownInstanceError(f"{instance!r} can not be released: a static cluster owns no instances")
