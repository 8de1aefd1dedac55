"""Whose a group is: two clusters that are told to rule the same one find out, over HTTP against moto."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from moto_process import Moto, make_group

from adaptdl_elastic.autoscaler.providers.base import NotOursError
from adaptdl_elastic.autoscaler.providers.ec2.ownership import OWNER_TAG, tags_of
from adaptdl_elastic.autoscaler.providers.ec2.provider import RULED_TAG, Ec2Provider
from adaptdl_elastic.autoscaler.scaling.autoscaler_loop import Autoscaler, LoopOptions, identity
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

PRICES = {"g5.xlarge": 1.0}


def provider(owner: str, *groups: str, seize: bool = False) -> Ec2Provider:
    return Ec2Provider(groups or ("workers",), PRICES, owner=owner, seize=seize)


def test_a_cluster_is_known_by_more_than_its_name() -> None:
    one, other = MemoryStore(), MemoryStore()
    keys = Keys("default")
    assert identity(one, keys, create=False) == ""
    mine = identity(one, keys)
    assert mine.startswith("default/")
    assert identity(one, keys) == identity(one, keys, create=False) == mine
    assert identity(other, keys) != mine


@pytest.mark.essential
def test_another_cluster_is_refused_and_nothing_is_changed(moto: Moto) -> None:
    make_group(moto, "mine")
    make_group(moto, "workers")
    with provider("one/1") as first:
        assert tags_of(moto.group())[OWNER_TAG] == "one/1"
        second = provider("two/2", "mine", "workers")
        with pytest.raises(NotOursError, match="'workers' belongs to cluster one/1, and this one is two/2"):
            second.take_over()
        second.hand_back()
        assert tags_of(moto.group("mine")) == {}
        assert moto.group("mine")["SuspendedProcesses"] == []
        assert set(tags_of(moto.group())) == {OWNER_TAG, RULED_TAG}
        assert any("belongs to cluster one/1" in text for text in second.capacity().warnings)
        first.capacity()
    assert tags_of(moto.group()) == {}
    second.take_over()  # free again
    second.capacity()


def test_the_same_cluster_goes_on_after_a_crash(moto: Moto) -> None:
    make_group(moto, "workers")
    provider("one/1").take_over()  # and dies
    with provider("one/1") as again:
        again.capacity()
    assert tags_of(moto.group()) == {}


def test_a_seizing_autoscaler_takes_over_and_the_other_finds_out(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    first, second = provider("one/1"), provider("two/2", seize=True)
    first.take_over()
    instance = first.capacity().instances[0].id
    second.take_over()
    for attempt in (first.capacity, lambda: first.request("workers", 2), lambda: first.release(instance)):
        with pytest.raises(NotOursError, match="taken over by cluster two/2"):
            attempt()
    first.hand_back()  # leaves alone what is another's
    now = moto.group()
    assert tags_of(now)[OWNER_TAG] == "two/2"
    assert [process["ProcessName"] for process in now["SuspendedProcesses"]] == ["AZRebalance"]
    assert now["DesiredCapacity"] == 1
    with pytest.raises(NotOursError):
        first.take_over()  # without being told to
    second.hand_back()
    after = moto.group()
    assert tags_of(after) == {}
    assert after["SuspendedProcesses"] == []  # by the note of the first one


def test_of_two_that_begin_in_the_same_moment_one_ends(moto: Moto) -> None:
    make_group(moto, "workers")
    first, second = provider("one/1"), provider("two/2")
    both_have_read = threading.Barrier(2)

    def late(ours: Ec2Provider) -> Callable[[str, str, str], None]:
        tag = ours.tag

        def wait(name: str, key: str, value: str) -> None:
            if key == OWNER_TAG:
                both_have_read.wait(60)
            tag(name, key, value)

        return wait

    ruling = []
    for ours in (first, second):
        ours.tag = late(ours)  # type: ignore[method-assign]
        ruling.append(threading.Thread(target=ours.take_over))
        ruling[-1].start()
    for thread in ruling:
        thread.join()
    refused = []
    for ours in (first, second):
        try:
            ours.capacity()
        except NotOursError:
            refused.append(ours)
    assert len(refused) == 1


def test_an_autoscaler_whose_groups_are_taken_ends(moto: Moto) -> None:
    make_group(moto, "workers")
    store, keys = MemoryStore(), Keys("one")
    looked = threading.Event()

    class Watched(Ec2Provider):
        def capacity(self) -> Any:
            found = super().capacity()
            looked.set()
            return found

    said: list[Mapping[str, Any]] = []
    ours = Watched(("workers",), PRICES, owner=identity(store, keys))
    ruler = Autoscaler(
        store, keys, ours, ScalingSettings(), LoopOptions(interval=0.1), lambda _, f: said.append(f)
    )
    ended: list[BaseException] = []

    def run() -> None:
        try:
            ruler.run()
        except NotOursError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert looked.wait(60)
        provider("two/2", seize=True).take_over()
        thread.join(60)
    finally:
        ruler.stop()
        thread.join()
    (error,) = ended
    assert "taken over by cluster two/2" in str(error)
    assert tags_of(moto.group())[OWNER_TAG] == "two/2"
    assert store.get(keys.autoscaler_leader) is None
