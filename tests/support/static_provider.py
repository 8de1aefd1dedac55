"""Bare metal: a fixed set of nodes, which register by themselves and are neither bought nor released."""

from __future__ import annotations

from adaptdl_elastic.autoscaler.providers.base import (
    Capacity,
    Provider,
    UnknownInstanceError,
    UnknownPoolError,
)


class StaticProvider(Provider):
    """A provider without pools and instances."""

    name = "static"

    def capacity(self) -> Capacity:
        """Return no pools."""
        return Capacity()

    def request(self, pool: str, desired: int) -> None:
        """Raise an error: there are no pools."""
        raise UnknownPoolError(
            f"no pool {pool!r}: a static cluster has the nodes that register, and no others"
        )

    def release(self, instance: str, replace: bool = False) -> None:
        """Raise an error: there are no instances."""
        raise UnknownInstanceError(f"{instance!r} cannot be released: a static cluster owns no instances")
