from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.response import StreamingBody
from moto_process import Moto
from torch.utils.data import DataLoader

from adaptdl_elastic.torch import s3_dataset
from adaptdl_elastic.torch.s3_dataset import S3Dataset, S3DatasetError

pytestmark = pytest.mark.processes

Put = Callable[[dict[str, bytes]], Any]


@pytest.fixture
def s3(moto: Moto) -> Any:
    client = moto.client("s3")
    client.create_bucket(Bucket="data", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    for index in range(12):
        client.put_object(Bucket="data", Key=f"train/{index:04d}.bin", Body=bytes([index]) * (index + 1))
    client.put_object(Bucket="data", Key="train/", Body=b"")
    client.put_object(Bucket="data", Key="train/notes.txt", Body=b"no sample")
    client.put_object(Bucket="data", Key="other/0.bin", Body=b"elsewhere")
    return client


class Counting:
    """A client that counts its reads, and fails as it is told."""

    def __init__(self, client: Any, failures: list[Any] | None = None) -> None:
        self._client = client
        self.reads: list[str | None] = []
        self.failures = failures or []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get_object(self, **arguments: Any) -> Any:
        self.reads.append(arguments.get("Range"))
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        answer = self._client.get_object(**arguments)
        if failure is not None:
            body = answer["Body"].read()[:failure]
            answer["Body"] = StreamingBody(io.BytesIO(body), len(body))
        return answer


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there are fewer CPUs
def test_the_example_of_the_page_reads_what_is_in_a_bucket(
    moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "ec2.md").read_text()
    (text,) = re.findall(r"^```python test=test_s3_dataset\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    client = moto.client("s3")
    client.create_bucket(Bucket="my-bucket", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    for number in range(3):
        data = io.BytesIO()
        torch.save(torch.full((2,), float(number)), data)
        client.put_object(Bucket="my-bucket", Key=f"images/{number}.pt", Body=data.getvalue())
    names: dict[str, Any] = {}
    exec(text.replace("/tmp/images", str(tmp_path)), names)
    assert [names["dataset"][index].tolist() for index in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert names["loader"].batch_size is not None


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_dataset, "RETRY_SECONDS", 0.0)


def first(data: bytes, key: str) -> int:
    return data[0]


def test_every_object_under_the_prefix_in_order(s3: Any) -> None:
    dataset = S3Dataset("s3://data/train/", first, suffix=".bin")
    assert len(dataset) == 12
    assert [dataset[i] for i in range(12)] == list(range(12))
    assert dataset[-1] == 11
    with pytest.raises(IndexError):
        dataset[12]


class SmallPages:
    """A client that lists five objects at a time."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get_paginator(self, name: str) -> Any:
        paginator = self._client.get_paginator(name)
        plain = paginator.paginate
        paginator.paginate = lambda **arguments: plain(**arguments, PaginationConfig={"PageSize": 5})
        return paginator


def test_more_objects_than_a_page(s3: Any) -> None:
    dataset = S3Dataset[bytes]("s3://data/train/", suffix=".bin", client=lambda: SmallPages(s3))
    assert [entry.key for entry in dataset.objects] == [f"train/{index:04d}.bin" for index in range(12)]


def test_what_was_read_is_kept_and_shared(s3: Any, tmp_path: Path) -> None:
    reads = Counting(s3)
    for _ in range(2):
        dataset = S3Dataset("s3://data/train/", first, suffix=".bin", cache=tmp_path, client=lambda: reads)
        assert [dataset[i] for i in range(12)] == list(range(12))
    assert len(reads.reads) == 12
    assert not list(tmp_path.rglob(".*"))


def test_a_damaged_file_is_read_again(s3: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = S3Dataset("s3://data/train/", first, suffix=".bin", cache=tmp_path)
    dataset[7]
    (kept,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    kept.write_bytes(b"half")
    assert dataset[7] == 7
    assert "damaged" in caplog.text
    assert kept.read_bytes() == bytes([7]) * 8


def test_a_cache_that_can_not_be_written_is_no_error(
    s3: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    dataset = S3Dataset("s3://data/train/", first, suffix=".bin", cache=tmp_path / "file" / "cache")
    assert dataset[3] == 3
    assert "could not keep" in caplog.text


def test_large_objects_come_in_ranges(s3: Any) -> None:
    body = bytes(range(256)) * 40
    s3.put_object(Bucket="data", Key="large", Body=body)
    reads = Counting(s3)
    dataset = S3Dataset[bytes]("s3://data/large", part_bytes=1000, parallel=3, client=lambda: reads)
    assert dataset[0] == body
    assert sorted(reads.reads, key=str)[0] == "bytes=0-999"
    assert len(reads.reads) == 11
    assert "bytes=10000-10239" in reads.reads


def test_an_empty_object_is_a_sample(s3: Any) -> None:
    s3.put_object(Bucket="data", Key="empty", Body=b"")
    assert S3Dataset[bytes]("s3://data/empty")[0] == b""


def test_broken_reads_are_tried_again(s3: Any) -> None:
    flaky = Counting(
        s3,
        [
            EndpointConnectionError(endpoint_url="http://s3"),
            2,  # a body that ends early
            ClientError(
                {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "GetObject"
            ),
        ],
    )
    dataset = S3Dataset("s3://data/train/", first, suffix=".bin", client=lambda: flaky)
    assert dataset[9] == 9
    assert len(flaky.reads) == 4


def test_what_never_works_is_said(s3: Any) -> None:
    broken = Counting(s3, [ConnectionResetError("reset")] * 99)
    dataset = S3Dataset("s3://data/train/", first, suffix=".bin", client=lambda: broken)
    with pytest.raises(S3DatasetError, match=r"s3://data/train/0000.bin in 5 attempts: reset"):
        dataset[0]


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_an_object_that_changes_under_us_is_an_error(s3: Any, change: str) -> None:
    dataset = S3Dataset("s3://data/train/", first, suffix=".bin")
    if change == "replace":
        s3.put_object(Bucket="data", Key="train/0003.bin", Body=b"other")
    else:
        s3.delete_object(Bucket="data", Key="train/0003.bin")
    with pytest.raises(S3DatasetError, match="since the dataset was made"):
        dataset[3]
    assert dataset[4] == 4


def test_worker_processes_have_clients_of_their_own(s3: Any) -> None:
    dataset = S3Dataset("s3://data/train/", first, suffix=".bin")
    assert dataset[0] == 0
    again = pickle.loads(pickle.dumps(dataset))
    assert again.clients == {}
    loader = DataLoader(again, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert [x for batch in loader for x in batch.tolist()] == list(range(12))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data/train", "s3://bucket/prefix"),
        ("s3://", "s3://bucket/prefix"),
        ("s3://data/nothing/", "holds no object"),
        ("s3://absent/x", "cannot list s3://absent/x"),
    ],
)
def test_bad_places(s3: Any, url: str, words: str) -> None:
    with pytest.raises(S3DatasetError, match=words):
        S3Dataset(url)
    with pytest.raises(S3DatasetError, match="positive"):
        S3Dataset("s3://data/train/", parallel=0)
