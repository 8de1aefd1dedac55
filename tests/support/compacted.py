"""Make a store forget its history: one in memory, as etcd does when it compacts, or an etcd."""

from __future__ import annotations

import json
import urllib.request

from adaptdl_elastic.rendezvous.store.memory import MemoryStore


def compact(store: MemoryStore) -> None:
    """A watch that is not up to date raises CompactedError from now on."""
    with store.shared.changed:
        store.shared.compacted = store.shared.revision
        store.shared.history.clear()


def compact_etcd(endpoint: str, revision: int) -> None:
    """Make an etcd without TLS forget the history before `revision`."""
    asked = json.dumps({"revision": str(revision), "physical": True}).encode()
    with urllib.request.urlopen(f"http://{endpoint}/v3/kv/compaction", asked, timeout=60) as answer:
        answer.read()
