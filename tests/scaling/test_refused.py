"""An autoscaler whose store refuses it, on a real etcd with TLS and users."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded_etcd import GuardedEtcd
from scaling_cluster import KEYS, Cluster

from adaptdl_elastic.rendezvous.store.connect import connect

pytestmark = pytest.mark.etcd


def test_an_autoscaler_says_that_it_is_refused_and_goes_on_when_it_is_let_in_again(tmp_path: Path) -> None:
    with (
        GuardedEtcd(tmp_path, root=KEYS.root) as guarded,
        connect(guarded.etcd.endpoint, options=guarded.options()) as ours,
        connect(guarded.etcd.endpoint, options=guarded.admin_options()) as admin,
    ):
        cluster = Cluster(ours)  # type: ignore[arg-type]
        cluster.store = admin  # type: ignore[assignment]

        def look(first: bool = False) -> bool:
            cluster.now += 10
            return cluster.ruler.attempt(first)

        cluster.submit("first")
        assert not look(first=True)
        assert len(cluster.instances) == 1
        cluster.submit("second", nodes=2)
        guarded.change_password("second-password")
        for _ in range(2):
            assert not look()
        (warning,) = cluster.events("warning")
        assert warning["message"].startswith("the store refuses us: etcd refused the login")
        assert len(cluster.instances) == 1
        guarded.write_password("second-password")
        assert not look()
        assert len(cluster.instances) == 3
