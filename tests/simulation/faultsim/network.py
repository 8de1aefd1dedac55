"""The network between machines, over which replicas and the stores that they meet at are connected.

It can be split into two sides. What is sent from one to the other waits, as TCP sends again what nobody has
acknowledged, and arrives when the split is over. The line to the etcd is another one (`client.Line`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

from faultsim.kernel import Kernel

AFTERMATH_SECONDS = 45.0  # after a split, in which failures may still come of it


class Network:
    """Connections between pairs of machines, by their names."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._cut: dict[frozenset[str], int] = {}  # pair → splits that are in its way
        self._held: list[tuple[str, str, Callable[[], object]]] = []
        self._troubled_at = float("-inf")
        self.on_mend: Callable[[], None] = lambda: None

    @property
    def troubled(self) -> bool:
        """Whether what fails now may fail because of a split."""
        return bool(self._cut) or self._kernel.now - self._troubled_at < AFTERMATH_SECONDS

    def connects(self, one: str, other: str) -> bool:
        """Whether what is sent between two machines arrives."""
        return not self._cut or frozenset((one, other)) not in self._cut

    def deliver(self, sender: str, receiver: str, call: Callable[[], object]) -> None:
        """Do what a message makes its receiver do, as soon as it can arrive."""
        if self.connects(sender, receiver):
            call()
        else:
            self._held.append((sender, receiver, call))

    def split(self, side: Iterable[str], other_side: Iterable[str]) -> Callable[[], None]:
        """Cut all connections between two sides; return what mends them."""
        pairs = [frozenset(pair) for pair in product(sorted(side), sorted(other_side))]
        for pair in pairs:
            self._cut[pair] = self._cut.get(pair, 0) + 1

        def mend() -> None:
            for pair in pairs:
                self._cut[pair] -= 1
                if not self._cut[pair]:
                    del self._cut[pair]
            self._mended()

        return mend

    def mend_all(self) -> None:
        """End every split; what would have ended one of them must not be called any more."""
        self._cut.clear()
        self._mended()

    def _mended(self) -> None:
        self._troubled_at = self._kernel.now
        held, self._held = self._held, []
        for sender, receiver, call in held:
            self._kernel.after(0.0, self.deliver, sender, receiver, call)
        self.on_mend()
