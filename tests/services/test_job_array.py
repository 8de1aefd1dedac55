"""Which jobs `adaptdl submit --array` makes."""

from __future__ import annotations

import pytest

from adaptdl_elastic.autoscaler.commands.job_array import MOST_JOBS, ArrayError, Member, expand
from adaptdl_elastic.rendezvous.schema.keys import check_name


def test_without_an_array_there_is_one_job() -> None:
    assert expand("train", ["train.py", "{lr}"], []) == [Member("train", ("train.py", "{lr}"))]


def test_a_value_is_put_where_its_name_stands_or_appended() -> None:
    assert expand("train", ["train.py"], ["lr=1e-3,1e-2"]) == [
        Member("train-lr-1e-3", ("train.py", "--lr=1e-3")),
        Member("train-lr-1e-2", ("train.py", "--lr=1e-2")),
    ]
    (only,) = expand("train", ["train.py", "-l", "{lr}", "out/{lr}", "{other}"], ["lr={seed}"])
    assert only.command == ("train.py", "-l", "{seed}", "out/{seed}", "{other}")


def test_several_arrays_make_every_combination() -> None:
    made = expand("t", ["t.py", "{seed}"], ["lr=1,2", "seed=7,8"])
    assert [(one.name, one.command) for one in made] == [
        ("t-lr-1-seed-7", ("t.py", "7", "--lr=1")),
        ("t-lr-1-seed-8", ("t.py", "8", "--lr=1")),
        ("t-lr-2-seed-7", ("t.py", "7", "--lr=2")),
        ("t-lr-2-seed-8", ("t.py", "8", "--lr=2")),
    ]


@pytest.mark.parametrize("values", ["a/b,a:b,../x,é,a b", "x" * 200 + "," + "x" * 201])
def test_names_can_be_used_and_differ(values: str) -> None:
    names = [one.name for one in expand("train", ["train.py"], [f"path={values}"])]
    assert len(set(names)) == len(names)
    assert [check_name("job", name) for name in names] == names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["lr"], "give NAME=VALUE"),
        (["lr="], "give NAME=VALUE"),
        (["lr=1,,2"], "give NAME=VALUE"),
        (["=1"], "give NAME=VALUE"),
        (["lr=1,1"], "a value stands there twice"),
        (["lr=1", "lr=2"], "is given twice"),
        ([f"n={','.join(map(str, range(MOST_JOBS + 1)))}"], f"{MOST_JOBS} may be submitted at once"),
    ],
)
def test_a_malformed_job_array_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ArrayError, match=message):
        expand("train", ["train.py"], given)
