"""What commands say of a job that was submitted and that no coordinator knows yet."""

from __future__ import annotations

import pytest

from adaptdl_elastic.autoscaler.cli import CommandError
from adaptdl_elastic.autoscaler.cluster_view import ClusterCache, view_of
from adaptdl_elastic.autoscaler.commands.tables import find_job
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services.submitted import Submitted, waits_because
from adaptdl_elastic.rendezvous.store.base import Change
from adaptdl_elastic.rendezvous.store.memory import MemoryStore


def test_a_job_that_waits_is_told_from_one_that_does_not_exist() -> None:
    keys, store = Keys("lab"), MemoryStore()
    store.put(keys.submission("waits"), "signed")
    view = view_of(keys, store.range(keys.root), 0.0, 0.0)
    with pytest.raises(CommandError, match="'waits' was submitted and has not begun: adaptdl ls --all"):
        find_job(view, "waits", "lab")
    with pytest.raises(CommandError, match="there is no job 'other' in cluster 'lab', and no other"):
        find_job(view, "other", "lab")


def test_a_job_that_waits_names_the_nodes_of_another_version() -> None:
    nodes = {"a": ServiceRecord("a", "h", 1, 2, version="2"), "b": ServiceRecord("b", "h", 1, 1, version="1")}
    why = waits_because("none is registered for this job", Submitted(nodes, (), {}), "job")
    assert why.endswith("job; not on b: has adaptdl-elastic 1, most slots 2: adaptdl cluster up")


def test_submissions_are_followed() -> None:
    keys, store, cache = Keys("lab"), MemoryStore(), ClusterCache(Keys("lab"))
    store.put(keys.submission("a"), "signed")
    cache.take(store.range(keys.root), 0.0)
    cache.take(Change("put", keys.submission("b"), "signed", 3), 0.0)
    assert cache.view(0.0, 0.0).submitted == {"a", "b"}
    cache.take(Change("delete", keys.submission("a"), None, 4), 0.0)
    assert cache.view(0.0, 0.0).submitted == {"b"}
    cache.take(MemoryStore().range(keys.root), 0.0)
    assert cache.view(0.0, 0.0).submitted == frozenset()
