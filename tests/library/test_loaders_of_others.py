"""Samplers, batch samplers, streams with workers, loaders that are taken over: each sample exactly once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generations
import loader_runs
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic.torch._data.sampler import GivenSampler

KINDS = [
    ("sampler", {}),
    ("batch sampler", {"workers": 2}),
    ("loader", {}),
    ("stream", {"workers": 2}),
    ("drawn divided stream", {"workers": 3}),
    ("drawn stream", {}),
]


@pytest.fixture(autouse=True)
def _session_of_the_test() -> Iterator[None]:
    _session.reset()
    yield
    _session.reset()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_sample_once_through_restarts(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    loader_runs.restarts(tmp_path, kind=kind, **options)
    assert loader_runs.handed_out(tmp_path) == loader_runs.once(60)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_every_sample_once_through_changes_and_a_death(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    loader_runs.changes(tmp_path, kind=kind, **options)
    assert loader_runs.handed_out(tmp_path) == loader_runs.once(loader_runs.CHANGED)


@pytest.mark.processes
def test_a_batch_is_a_step_of_all_replicas(tmp_path: Path) -> None:
    loader_runs.run(tmp_path, 2, kind="batch sampler", size=20)
    steps: dict[int, list[int]] = {}
    for line in generations.records(tmp_path):
        assert line["window"] in (6, 2)
        steps.setdefault(line["index"], []).extend(line["samples"][: line["local"]])
    expected = [list(range(start, min(start + 6, 20))) for start in range(0, 20, 6)]
    assert sorted(map(sorted, steps.values())) == expected


@pytest.mark.slow
def test_a_stream_with_workers_is_autoscaled(tmp_path: Path) -> None:
    """A batch size that changes amid the pass loses nothing, on one replica and on two."""
    printed = loader_runs.run(
        tmp_path, 2, kind="divided stream", workers=2, size=4000, batch=4, autoscale=64, pace=0.004
    )
    assert loader_runs.handed_out(tmp_path) == loader_runs.once(4000), printed
    windows = {line["window"] for line in generations.records(tmp_path)}
    assert max(windows) > 4, f"the batch size never changed: {windows}"


@pytest.mark.processes
def test_a_weighted_sampler_draws_the_same_on_all_replicas(tmp_path: Path) -> None:
    """Of 60 draws with replacement each is handed out once, and another job of that seed draws them again."""
    for name in ("one", "again"):
        (tmp_path / name).mkdir()
        loader_runs.run(tmp_path / name, 3, kind="weighted")
    one, again = (loader_runs.handed_out(tmp_path / name) for name in ("one", "again"))
    assert one == again
    assert one.total() == 60
    assert len(one) < 60


def test_the_order_of_a_given_sampler_is_a_function_of_seed_epoch_and_pass() -> None:
    def drawn(seed: int, epoch: int, number: int = 0) -> list[int]:
        sampler = GivenSampler(range(40), RandomSampler(range(40)), batches=False)
        sampler.seed = seed
        assert sampler.size == 40
        sampler.set_epoch(epoch, 40 * number)
        return sampler.order().tolist()

    first = drawn(1, 0)
    torch.rand(3)
    before = torch.get_rng_state()
    assert drawn(1, 0) == first
    assert torch.equal(before, torch.get_rng_state()), "it has drawn from the script's stream"
    assert len({tuple(drawn(*where)) for where in [(1, 0), (2, 0), (1, 1), (1, 0, 1)]}) == 4


def test_a_sampler_may_have_a_length_of_its_own() -> None:
    sampler = SubsetRandomSampler([3, 5, 7], generator=torch.Generator())
    loader = adl.AdaptiveDataLoader(range(10), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    for _ in adl.remaining_epochs_until(2):
        batches = [batch.tolist() for batch in loader]
        assert [len(batch) for batch in batches] == [2, 1]
        assert sorted(itertools.chain(*batches)) == [3, 5, 7]
        assert len(loader) == 2


class Growing:
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 + self.epoch))


def test_passes_of_another_length_are_an_error() -> None:
    loader = adl.AdaptiveDataLoader(range(10), batch_size=2, sampler=Growing())  # type: ignore[arg-type]
    epochs = adl.remaining_epochs_until(2)
    assert next(epochs) == 0
    assert len(list(loader)) == 2
    assert next(epochs) == 1
    with pytest.raises(RuntimeError, match="Growing gave 4 samples in one pass and 5 in another"):
        list(loader)
    epochs.close()  # type: ignore[attr-defined]


class EveryNth:
    """A sampler that gives rank 0 its part, as those of timm and mmengine do."""

    def __init__(self, readers: int) -> None:
        self.num_replicas, self._rank = readers, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 4, self.num_replicas))


class Batches:
    """A batch sampler that is not torch's."""

    def __init__(self, sampler: EveryNth) -> None:
        self.base_sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return ([index] for index in self.base_sampler)


def test_a_sampler_that_divides_by_rank_may_be_made_for_one_reader() -> None:
    loader = adl.AdaptiveDataLoader(range(4), sampler=EveryNth(1))  # type: ignore[arg-type]
    assert [numbers(batch) for batch in loader] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": range(3), "batch_sampler": [[1]]}, "give one of them"),
        ({"sampler": range(3), "shuffle": True}, "decides about the order"),
        ({"batch_sampler": [[1]], "drop_last": True}, "decides about the batches"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "decides about the batches"),
        ({"sampler": DistributedSampler(range(4), 2, 0)}, "leave it out, and give shuffle=True"),
        (
            {"batch_sampler": BatchSampler(DistributedSampler(range(4), 2, 0), 2, False)},
            "DistributedSampler gives each rank a part",
        ),
        ({"sampler": EveryNth(2)}, "gives each rank a part.*num_replicas=1, rank=0"),
        ({"batch_sampler": Batches(EveryNth(2))}, "batch_sampler: EveryNth gives each rank a part"),
        ({"num_workers": 1, "in_order": False}, "the replicas could not tell which samples were used"),
    ],
)
def test_contradicting_loader_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adl.AdaptiveDataLoader(range(4), **options)  # type: ignore[arg-type]


def test_the_batches_of_a_sampler_are_not_autoscaled() -> None:
    loader = adl.AdaptiveDataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])  # type: ignore[arg-type]
    assert loader.batch_size == 2
    with pytest.raises(ValueError, match="whose batches are what they are"):
        loader.autoscale_batch_size(8)


@pytest.mark.parametrize("package", ["streaming", "webdataset"])
def test_streams_that_keep_their_own_position_are_refused_in_one_line(package: str) -> None:
    kind = type("Theirs", (IterableDataset,), {"__module__": f"{package}.base", "__iter__": iter})
    with pytest.raises(ValueError, match=r"Theirs in an .*: use datasets\.load_dataset") as error:
        adl.AdaptiveDataLoader(kind())
    assert "\n" not in str(error.value)


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch]


@pytest.mark.parametrize(
    ("options", "batch_size", "kind"),
    [
        ({"batch_size": 3}, 3, SequentialSampler),
        ({"batch_size": 3, "shuffle": True, "drop_last": True}, 3, RandomSampler),
        ({"batch_size": 3, "sampler": WeightedRandomSampler([1.0] * 7, 7)}, 3, WeightedRandomSampler),
        ({"batch_sampler": [[0, 1], [2, 3, 4], [5, 6]]}, 3, list),
    ],
)
def test_a_loader_is_taken_over(options: dict[str, Any], batch_size: int, kind: type) -> None:
    data = torch.arange(7)
    given: DataLoader[Any] = DataLoader(data, collate_fn=numbers, **options)  # type: ignore[arg-type]
    loader = adl.AdaptiveDataLoader.from_loader(given)
    assert loader.batch_size == batch_size
    assert loader.collate_fn is numbers
    assert loader.drop_last is options.get("drop_last", False)
    for _ in adl.remaining_epochs_until(1):
        count = Counter(number for batch in loader for number in batch)
    whole = 6 if options.get("drop_last") else 7
    assert count.total() == whole
    if kind is not WeightedRandomSampler:
        assert set(count.values()) == {1}
    assert adl.AdaptiveDataLoader.from_loader(loader) is loader


def test_a_loader_around_a_plain_batch_sampler_takes_another_batch_size() -> None:
    batches = BatchSampler(SequentialSampler(range(7)), 3, drop_last=True)
    given: DataLoader[Any] = DataLoader(torch.arange(7), batch_sampler=batches)  # type: ignore[arg-type]
    loader = adl.AdaptiveDataLoader.from_loader(given, batch_size=2)
    assert (loader.batch_size, loader.drop_last) == (2, True)
    for _ in adl.remaining_epochs_until(1):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_from_loader_refuses_other_objects_and_loaders_without_batches() -> None:
    with pytest.raises(TypeError, match=r"from_loader\(3\): give a torch.utils.data.DataLoader"):
        adl.AdaptiveDataLoader.from_loader(3)  # type: ignore[arg-type]
    unbatched: DataLoader[Any] = DataLoader(torch.arange(4), batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give from_loader a batch_size"):
        adl.AdaptiveDataLoader.from_loader(unbatched)
    assert adl.AdaptiveDataLoader.from_loader(unbatched, batch_size=2).batch_size == 2
