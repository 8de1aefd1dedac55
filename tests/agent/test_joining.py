"""How an agent comes into a job, against a store in memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from adaptdl_elastic.agent.cluster import job_joining
from adaptdl_elastic.agent.cluster.ended_run import NO_OPTIONS, JobEndedError, StartOptions
from adaptdl_elastic.agent.cluster.job_joining import StoppingError
from adaptdl_elastic.rendezvous.local import addresses
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    CheckpointRecord,
    JobRequest,
    JobSpec,
    JobState,
    JobStatus,
    NodeRecord,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("test")
NODE = NodeRecord("here", "job", "run-1", "agent-1", "127.0.0.1", 1, version="1.0")


def spec(run: str) -> JobSpec:
    return JobSpec("job", run)


def join(
    store: MemoryStore, run: str, version: str = "1.0", options: StartOptions = NO_OPTIONS
) -> tuple[str, list[str]]:
    said: list[str] = []
    return job_joining.join_job(store, KEYS, spec(run), version, said.append, options).run, said


def ended(store: MemoryStore, run: str, state: JobState) -> None:
    store.put(KEYS.job("job", "status"), encode(JobStatus("job", run, state)))


def test_the_first_agent_makes_the_run_and_others_join_it(store: MemoryStore) -> None:
    assert join(store, "run-1") == ("run-1", [])
    job_joining.register(store, KEYS, NODE, exact=True)
    assert join(store, "run-2") == ("run-1", [])


def test_the_number_of_a_run_grows_whatever_the_clocks_say_and_the_store_forgets(store: MemoryStore) -> None:
    """Names of runs begin with the time of the node that begins them: here each clock is behind the last."""
    numbers = []
    for turn in range(4):
        key = KEYS.job("job", "spec")
        fresh = JobSpec("job", f"20240101-00{9 - turn}000", created=-600.0 * turn)
        numbers.append(job_joining.join_job(store, KEYS, fresh, "1.0", lambda _: None).number)
        assert decode(JobSpec, store.get(key).value).number == numbers[-1]  # type: ignore[union-attr]
        if turn == 1:  # long after the job has ended
            store.delete(key)
        elif turn == 2:  # written back to a store that has lost everything
            store, numbers = MemoryStore(), [*numbers, numbers[-1] + 1000]
            store.put(key, encode(JobSpec("job", "run", number=numbers[-1])))
    assert numbers == sorted(set(numbers))


def test_agents_that_start_at_the_same_moment_are_of_one_run(store: MemoryStore) -> None:
    job_joining.register(store, KEYS, NODE, exact=True)
    job_joining.register(store, KEYS, replace(NODE, node="there", run="run-2", agent="agent-2"), exact=True)
    assert join(store, "run-1")[0] == "run-1"
    assert join(store, "run-2") == ("run-1", []), "it has an agent, who is about to begin"


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("state", [JobState.STOPPED, JobState.FAILED])
def test_a_stopped_or_failed_job_goes_on_as_another_run(
    store: MemoryStore, state: JobState, anew: bool
) -> None:
    join(store, "run-1")
    job_joining.register(store, KEYS, NODE, exact=True)  # an agent that is on its way out
    store.put(KEYS.job("job", "checkpoint"), encode(CheckpointRecord("id", "path")))
    ended(store, "run-1", state)
    run, (line,) = join(store, "run-2", options=StartOptions(anew=anew))
    assert run == "run-2"
    assert f"(run run-1) has {state.value}: " in line
    assert ("another run begins" in line) == anew
    kept = store.get(KEYS.job("job", "checkpoint")) is not None
    assert kept != anew, "only another run begins with fresh weights"


def test_a_done_job_stays_done_without_anew(store: MemoryStore) -> None:
    join(store, "run-1")
    ended(store, "run-1", JobState.DONE)
    with pytest.raises(JobEndedError, match=r"'job' is done.*run-1.*--anew") as caught:
        join(store, "run-2")
    assert caught.value.exit_code == 0
    run, (line,) = join(store, "run-2", options=StartOptions(anew=True))
    assert run == "run-2"
    assert "(run run-1) is done: another run begins" in line


def test_anew_joins_a_run_that_is_under_way(store: MemoryStore) -> None:
    join(store, "run-1")
    job_joining.register(store, KEYS, NODE, exact=True)
    run, (line,) = join(store, "run-2", options=StartOptions(anew=True))
    assert run == "run-1"
    assert line.startswith("--anew has no effect")


@pytest.mark.parametrize(
    ("state", "code"), [(JobState.DONE, 0), (JobState.STOPPED, 143), (JobState.FAILED, 1)]
)
def test_once_is_once(store: MemoryStore, state: JobState, code: int) -> None:
    once = StartOptions(once=True)
    assert join(store, "run-1", options=once)[0] == "run-1"
    ended(store, "run-0", state)
    assert join(store, "run-2", options=once)[0] == "run-2", "an earlier run's end is not this one's: it died"
    ended(store, "run-2", state)
    with pytest.raises(JobEndedError, match=f"has {state.value}|is {state.value}") as caught:
        join(store, "run-3", options=once)
    assert caught.value.exit_code == code


def test_a_run_whose_agents_are_all_gone_is_taken_up(store: MemoryStore) -> None:
    join(store, "run-1")
    run, said = join(store, "run-2")
    assert run == "run-2"
    assert "no agent any more" in said[0]


def test_a_node_service_begins_no_run_behind_one_that_is_being_stopped(store: MemoryStore) -> None:
    """The last agent of a run may have left before the run's status says that it was stopped."""
    once, request = StartOptions(once=True), KEYS.job("job", "request")
    join(store, "run-1")
    store.put(request, encode(JobRequest(stop=True, run="run-1")))
    with pytest.raises(StoppingError, match="'job' is being stopped"):
        join(store, "run-2", options=once)
    assert join(store, "run-2")[0] == "run-2", "a person starts the job again"
    assert join(store, "run-3", options=once)[0] == "run-3", "the request was for an earlier run"


def test_a_status_of_an_older_run_does_not_end_the_present_one(store: MemoryStore) -> None:
    join(store, "run-1")
    job_joining.register(store, KEYS, NODE, exact=True)
    ended(store, "run-0", JobState.DONE)
    assert join(store, "run-2")[0] == "run-1"


def test_agents_of_different_versions_refuse_each_other(store: MemoryStore) -> None:
    join(store, "run-1")
    registration = job_joining.register(store, KEYS, NODE, exact=True)
    with pytest.raises(job_joining.JoinError) as refused:
        join(store, "run-2", version="2.0")
    assert str(refused.value) == (
        "job job runs adaptdl-elastic 1.0 on node here, this node 2.0: with the same on all, "
        "adaptdl stop job, then adaptdl resume job"
    )
    registration.close()
    assert join(store, "run-2", version="2.0")[0] == "run-2", "without agents any version takes it over"


@pytest.mark.parametrize(
    ("command", "key", "words"),
    [
        (("train.py", "--lr", "2"), "b", ["`train.py --lr 1`", "`train.py --lr 2`", "environment variables"]),
        (("train.py", "--lr", "1"), "b", ["another version of `train.py --lr 1`", "same script"]),
    ],
)
def test_agents_of_different_commands_refuse_each_other(
    store: MemoryStore, command: tuple[str, ...], key: str, words: list[str]
) -> None:
    first = replace(spec("run-1"), command=("train.py", "--lr", "1"), profile_key="a")
    registration = job_joining.register(store, KEYS, NODE, exact=True)
    job_joining.join_job(store, KEYS, first, "1.0", print)
    second = replace(first, run="run-2", command=command, profile_key=key)
    with pytest.raises(job_joining.JoinError) as caught:
        job_joining.join_job(store, KEYS, second, "1.0", print)
    for word in (*words, "--rdzv-id"):
        assert word in str(caught.value)
    elsewhere = replace(first, run="run-2", command=("/elsewhere/train.py", "--lr", "1"))
    assert job_joining.join_job(store, KEYS, elsewhere, "1.0", print).run == "run-1"
    registration.close()
    assert job_joining.join_job(store, KEYS, second, "1.0", print).run == "run-2", "nobody runs the other"


def test_agents_that_give_a_replica_another_number_of_gpus_refuse_each_other(store: MemoryStore) -> None:
    registration = job_joining.register(store, KEYS, NODE, exact=True)
    two = replace(spec("run-1"), gpus_per_replica=2)
    job_joining.join_job(store, KEYS, two, "1.0", print)
    with pytest.raises(job_joining.JoinError, match="runs with --gpus-per-replica=2: give it here, too"):
        join(store, "run-2")
    registration.close()
    assert join(store, "run-2")[0] == "run-2"


def test_garbage_where_the_specification_should_be_is_named(store: MemoryStore) -> None:
    store.put(KEYS.job("job", "spec"), "garbage")
    with pytest.raises(job_joining.JoinError, match="--cluster"):
        join(store, "run-1")


def test_a_default_name_that_is_taken_gets_a_suffix(store: MemoryStore) -> None:
    names = [
        job_joining.register(store, KEYS, replace(NODE, agent=f"agent-{i}"), exact=False).record.node
        for i in range(3)
    ]
    assert names == ["here", "here-2", "here-3"]


def test_a_given_name_waits_for_the_lease_of_its_former_agent(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_joining, "LEASE_SECONDS", 200.0)  # the timer may be late on a busy machine
    before = job_joining.register(store, KEYS, NODE, exact=True)
    threading.Timer(0.2, before.close).start()
    after = job_joining.register(store, KEYS, replace(NODE, agent="agent-2"), exact=True)
    assert after.record.node == "here"


def test_an_agent_is_told_which_of_its_options_have_no_effect(store: MemoryStore) -> None:
    job_joining.register(store, KEYS, NODE, exact=True)
    first = replace(spec("run-1"), min_nodes=1, max_nodes=8)
    job_joining.join_job(store, KEYS, first, "1.0", pytest.fail)
    job_joining.join_job(store, KEYS, replace(first, run="run-2"), "1.0", pytest.fail)
    other = replace(first, run="run-2", min_nodes=2, max_nodes=4, max_restarts=9, autoscale=False, weight=3.0)
    said: list[str] = []
    assert job_joining.join_job(store, KEYS, other, "1.0", said.append).run == "run-1"
    assert said == [
        "--nnodes 2:4 has no effect: job 'job' runs with 1:8, as its first agent said",
        f"--max-restarts 9 has no effect: job 'job' runs with {first.max_restarts}, as its first agent said",
        "--weight 3 has no effect: job 'job' runs with 1, as its first agent said",
        "--no-autoscale has no effect: job 'job' was started without it",
    ]
    said.clear()
    first_says = replace(spec("run-3"), job="other", autoscale=False)
    job_joining.register(store, KEYS, replace(NODE, job="other", run="run-3"), exact=True)
    job_joining.join_job(store, KEYS, first_says, "1.0", pytest.fail)
    job_joining.join_job(store, KEYS, replace(first_says, autoscale=True), "1.0", said.append)
    assert said == ["job 'other' runs with --no-autoscale, as its first agent said"]


HERE, THERE = ("boot-a", "127.0.0.1"), ("boot-b", "192.0.2.7")


def host_beside(own: tuple[str, str], *others: tuple[str, str], given: bool = False) -> str:
    """Return the address that a node named "late" gets beside others, each with its network and address."""
    made = [replace(NODE, node=f"n{i}", network=n, host=h) for i, (n, h) in enumerate(others)]
    late = replace(NODE, node="late", network=own[0], host=own[1])
    return job_joining.reachable_host(late, [*made, late], given)


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_node_whose_address_only_it_reaches_refuses_the_others(loopback: str) -> None:
    with pytest.raises(
        job_joining.JoinError, match=rf"node n1 .* address {loopback}, .* node late .*start n1"
    ):
        host_beside(THERE, ("boot-b", "192.0.2.8"), ("boot-a", loopback))
    with pytest.raises(job_joining.JoinError, match=r"node late .* at which node n0 .*start late with"):
        host_beside(("boot-a", loopback), THERE, given=True)


@pytest.mark.parametrize("other", ["192.0.2.7", "2001:db8::7"])
def test_a_loopback_address_that_was_not_given_gives_way(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    routes = {"192.0.2.7": "192.0.2.9", "2001:db8::7": "2001:db8::9"}
    monkeypatch.setattr(
        addresses, "local_addresses", lambda url: [routes[str(addresses.urlsplit(url).hostname)]]
    )
    assert host_beside(HERE, ("boot-b", other)) == routes[other]


@pytest.mark.parametrize("network", ["boot-a", ""])
def test_agents_of_one_machine_may_use_its_loopback_interface(network: str) -> None:
    """So may those of which it is not known."""
    assert host_beside((network, "127.0.0.1"), HERE, ("", "127.0.0.1")) == "127.0.0.1"


def test_the_network_of_a_process_is_known() -> None:
    assert addresses.network() == addresses.network() != ""
