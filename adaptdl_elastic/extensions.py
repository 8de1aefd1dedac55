"""Let other packages provide implementations by name, at extension points.

An extension point is a group of entry points (Python packaging, `importlib.metadata`). This package's own
implementations are listed in the code. Those of other installed distributions are found by their entry points
and imported at their first use. CONTRIBUTING.md has a paragraph "To add one" for each extension point.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any


class ExtensionError(Exception):
    """Raised if an extension does not exist or cannot be used; the message says what to do."""


@dataclass(frozen=True)
class ExtensionPoint:
    """Find the implementations of one extension point.

    Attributes:
        kind: Name of the kind of extension in messages, e.g. "provider".
        group: Group of the entry points, e.g. "adaptdl_elastic.providers".
        builtin: This package's own implementations: name → "module:attribute".
    """

    kind: str
    group: str
    builtin: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return all names: this package's own in the given order, then those of other distributions."""
        return [*self.builtin, *(name for name in sorted(self._entries()) if name not in self.builtin)]

    def __contains__(self, name: str) -> bool:
        return name in self.builtin or name in self._entries()

    def origin(self, name: str) -> str:
        """Return the distribution that provides `name`; empty for this package's own implementations."""
        entry = None if name in self.builtin else self._entries().get(name)
        return entry.dist.name if entry is not None and entry.dist is not None else ""

    def load(self, name: str) -> Any:
        """Import and return the implementation called `name`.

        This package's own implementations cannot be replaced: their names are looked up first.

        Raises:
            ExtensionError: there is no implementation of that name, or its import fails.
        """
        target = self.builtin.get(name)
        if target is not None:
            module, _, attribute = target.partition(":")
            return getattr(importlib.import_module(module), attribute)
        entry = self._entries().get(name)
        if entry is None:
            known = ", ".join(self.names()) or "none"
            raise ExtensionError(
                f"there is no {self.kind} {name!r}; there are: {known}. "
                f"Other packages add one by an entry point in the group {self.group!r}"
            )
        try:
            return entry.load()
        except Exception as error:  # the import of another distribution may raise anything
            where = self.origin(name) or entry.value
            raise ExtensionError(
                f"the {self.kind} {name!r} of {where} cannot be imported: {error!r}"
            ) from error

    def _entries(self) -> dict[str, metadata.EntryPoint]:
        return {entry.name: entry for entry in metadata.entry_points(group=self.group)}
