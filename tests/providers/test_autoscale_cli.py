from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from moto_process import Moto, make_group

from adaptdl_elastic.autoscaler.cli import CommandError, Place, Where
from adaptdl_elastic.autoscaler.commands.autoscale import autoscale
from adaptdl_elastic.autoscaler.providers.ec2.ownership import OWNER_TAG
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("test")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    memory = MemoryStore()
    monkeypatch.setattr(Where, "locate", lambda self, job: Place("unix:/x", "test"))
    monkeypatch.setattr(Where, "open", lambda self, place: memory)
    monkeypatch.setattr(MemoryStore, "__exit__", lambda *_: None)
    yield memory
    memory.close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(autoscale, arguments)


@pytest.mark.processes
def test_a_dry_run_prints_what_it_would_do(moto: Moto, store: MemoryStore) -> None:
    make_group(moto, "workers")
    spec = records.JobSpec("train", "run", min_nodes=2, max_nodes=4, min_replicas=2, max_replicas=4)
    store.put(KEYS.job("train", "spec"), records.encode(spec))
    done = run("--asg", "workers", "--price", "g5.xlarge=1.006", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "would request: pool workers, desired 2" in done.output
    assert moto.group()["DesiredCapacity"] == 0
    as_json = run("--asg", "workers", "--price", "g5.xlarge=1.006", "--dry-run", "--json")
    target, line = (json.loads(text) for text in as_json.output.splitlines())
    assert (target["event"], target["target"]) == ("target", 2)
    assert (line["event"], line["pool"], line["desired"]) == ("would request", "workers", 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --asg NAME (an auto-scaling group) or --provider NAME"),
        (("--asg", "workers", "--provider", "toy"), "give one of --asg and --provider"),
        (("--asg", "workers", "--price", "g5.xlarge"), "write TYPE=PRICE"),
        (("--asg", "workers", "--price", "g5.xlarge=cheap"), "not a price per hour"),
        (("--asg", "", "--price", "g5.xlarge=1"), "--asg '': give the name"),
        (("--asg", "workers", "--min-nodes", "3", "--max-nodes", "1"), "--min-nodes 3"),
        (("--asg", "workers", "--zone=a"), "no option 'zone' (-o); there are: groups, region"),
        (
            ("--asg", "workers", "--zone"),
            "--zone: there is no such option, and one of the provider has a value",
        ),
        (("--asg", "workers", "zone=a"), "zone: there is no such option"),
        (("--asg", "workers", "--utilisation", "high"), "LOW:HIGH"),
        (("--asg", "workers", "--utilisation", "2:1"), "band"),
        (("--asg", "workers", "--deadline", "soon"), "2h30m"),
        (("--asg", "workers", "--max-hourly-cost", "-1"), "--max-hourly-cost"),
        (("--asg", "workers", "--max-hourly-cost", "0"), "--max-hourly-cost"),
        (("--asg", "workers", "--max-hourly-cost", "nan"), "--max-hourly-cost"),
        (("--asg", "workers", "--hour-value", "-5"), "--hour-value -5"),
        (("--asg", "workers", "--hour-value", "nan"), "--hour-value"),
        (("--asg", "workers", "--hour-value", "inf"), "--hour-value"),
        (("--asg", "workers", "--boot-timeout", "0"), "--boot-timeout"),
        (("--asg", "workers", "--boot-timeout", "nan"), "--boot-timeout"),
        (("--asg", "workers", "--shrink-after", "-1"), "--shrink-after"),
        (("--asg", "workers", "--utilisation", "0.5:inf"), "band"),
        (("--asg", "workers", "--deadline", "1.2.3h"), "2h30m"),
        (("--asg", "workers", "--deadline", "=5h"), "2h30m"),
        (("--asg", "workers", "--job", "a b"), "a b"),
        *((("--asg", "workers", "--deadline", text), "2h30m") for text in ("", "train=", "2x", "5", "h")),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Where, "locate", lambda self, job: Place("unix:/x", "test"))
    monkeypatch.setattr(Where, "open", lambda self, place: MemoryStore())
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("value", ["nan", "inf", "-3"])
def test_a_number_that_is_none_names_its_option(value: str) -> None:
    done = run("--asg", "workers", "--interval", value)
    assert done.exit_code == 2
    assert f"Invalid value for '--interval': {float(value)}" in done.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--asg", "workers"), "--price g5.xlarge=PRICE"),
        (("--asg", "nothing", "--price", "g5.xlarge=1"), "no auto-scaling group 'nothing'"),
        (("--asg", "workers", "--region", "us-west-2", "--price", "g5.xlarge=1"), "in us-west-2"),
    ],
)
def test_an_error_that_only_the_cloud_can_tell_is_one_clear_line(
    moto: Moto, store: MemoryStore, arguments: tuple[str, ...], words: str
) -> None:
    make_group(moto, "workers")
    done = run(*arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, (CommandError, SystemExit, click.ClickException))
    text = done.output + str(done.exception)
    assert words in text
    assert "Traceback" not in text
    assert len(done.output.strip().splitlines()) == 1


def owned_by(moto: Moto, owner: str) -> None:
    tag = {"ResourceId": "workers", "ResourceType": "auto-scaling-group", "Key": OWNER_TAG, "Value": owner}
    moto.client("autoscaling").create_or_update_tags(Tags=[{**tag, "PropagateAtLaunch": False}])


@pytest.mark.processes
def test_the_group_of_another_cluster_is_refused_in_one_line(moto: Moto, store: MemoryStore) -> None:
    make_group(moto, "workers")
    owned_by(moto, "other/abc")
    ask = ("--asg", "workers", "--price", "g5.xlarge=1")
    done = run(*ask)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 1
    (line,) = done.output.strip().splitlines()
    for words in ("'workers'", "other/abc", "test/", "--take-over"):
        assert words in line
    dry = run(*ask, "--dry-run")
    assert dry.exit_code == 0
    assert "belongs to cluster other/abc" in dry.output
    store.put(KEYS.job("train", "spec"), records.encode(records.JobSpec("train", "run")))
    ended = records.JobStatus("train", "run", records.JobState.DONE)
    store.put(KEYS.job("train", "status"), records.encode(ended))
    taken = run(*ask, "--take-over", "--until-done", "--interval", "0.1")
    assert taken.exit_code == 0, taken.output
    group = moto.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"][0]
    assert group["Tags"] == []  # handed back at the orderly end


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h30m", ("*", 9100.0)),
        ("90s", ("*", 190.0)),
        ("train=1d", ("train", 86500.0)),
        ("train=1970-01-01T01:00:00+00:00", ("train", 3600.0)),
        ("1970-01-01T01:00:00Z", ("*", 3600.0)),
    ],
)
def test_deadlines(text: str, expected: Any) -> None:
    from adaptdl_elastic.autoscaler.scaling.setting_texts import parse_deadline

    assert parse_deadline(text, 100.0) == expected


@pytest.mark.processes
def test_a_deadline_that_has_passed_is_told(
    moto: Moto, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    make_group(moto, "workers")
    asked = ("--asg", "workers", "--price", "g5.xlarge=1", "--dry-run", "--deadline")
    assert run(*asked, "train=2h").exit_code == 0
    assert "has passed" not in caplog.text
    assert run(*asked, "train=1970-01-01T01:00:00Z").exit_code == 0
    assert "the --deadline of job 'train' has passed" in caplog.text
