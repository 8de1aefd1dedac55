"""moto's HTTP server as a process of its own, and what a test needs to have in it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import boto3
from botocore.loaders import create_loader
from ports import free_port

REGION = "eu-central-1"
BUCKET = "checkpoints"
IMAGE = "ami-03cf127a"  # one that moto knows from the start
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Moto:
    """A running server. `environment` points boto3, in this process or another, at it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._session = boto3.session.Session("testing", "testing", region_name=REGION)
        self._clients: dict[str, Any] = {}

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}

    def client(self, service: str) -> Any:
        """Return the one client of a service."""
        if service not in self._clients:
            self._clients[service] = self._session.client(service, endpoint_url=self.endpoint)
        return self._clients[service]

    def group(self, name: str = "workers") -> dict[str, Any]:
        """Return how an auto-scaling group is described."""
        answer = self.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
        return dict(answer["AutoScalingGroups"][0])

    def queue(self) -> str:
        """Make a queue for notices; return its address."""
        return str(self.client("sqs").create_queue(QueueName="notices")["QueueUrl"])

    def reset(self) -> None:
        """Forget everything."""
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=100).close()


def made_bucket(moto: Moto, client: Any) -> None:
    """Forget everything, and make an empty bucket."""
    moto.reset()
    client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})


@contextlib.contextmanager
def running_moto() -> Iterator[Moto]:
    port = free_port()
    # all sessions share what they read of services: it takes 0.2 s of CPU time for EC2
    shared = patch("botocore.session.create_loader", functools.cache(create_loader))
    with shared, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
        )
        try:
            moto = Moto(f"http://127.0.0.1:{port}")
            _wait(process, moto, 200)
            yield moto
        finally:
            process.kill()  # it holds nothing that is to be kept
            process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], moto: Moto, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"moto's server exited with {process.returncode}")
        try:
            urllib.request.urlopen(f"{moto.endpoint}/moto-api/", timeout=20).close()
        except OSError:
            try:  # the kernel tells when somebody listens; there is nothing to be notified of
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        else:
            return
    raise TimeoutError("moto's server does not answer")


def make_group(
    moto: Moto,
    name: str,
    *,
    low: int = 0,
    high: int = 4,
    desired: int = 0,
    types: tuple[str, ...] = ("g5.xlarge",),
    spot: bool = False,
    mixed: Mapping[str, object] | None = None,
    weight: str | None = None,
    **more: object,
) -> None:
    """An auto-scaling group and its launch template. `mixed`: an InstancesDistribution."""
    ec2, autoscaling = moto.client("ec2"), moto.client("autoscaling")
    data: dict[str, object] = {"ImageId": IMAGE, "InstanceType": types[0]}
    if spot and mixed is None:
        data["InstanceMarketOptions"] = {"MarketType": "spot"}
    ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
    pointer = {"LaunchTemplateName": name, "Version": "$Latest"}
    launch: dict[str, object] = {"LaunchTemplate": pointer}
    if mixed is not None:
        weights = {} if weight is None else {"WeightedCapacity": weight}
        overrides = [{"InstanceType": kind, **weights} for kind in types]
        launch = {
            "MixedInstancesPolicy": {
                "LaunchTemplate": {"LaunchTemplateSpecification": pointer, "Overrides": overrides},
                "InstancesDistribution": dict(mixed),
            }
        }
    autoscaling.create_auto_scaling_group(
        AutoScalingGroupName=name,
        MinSize=low,
        MaxSize=high,
        DesiredCapacity=desired,
        AvailabilityZones=[f"{REGION}a"],
        **launch,
        **more,
    )


def make_hook(moto: Moto, name: str) -> None:
    """Let instances of the group `workers` wait for a minute before they end."""
    moto.client("autoscaling").put_lifecycle_hook(
        AutoScalingGroupName="workers",
        LifecycleHookName=name,
        LifecycleTransition="autoscaling:EC2_INSTANCE_TERMINATING",
        HeartbeatTimeout=60,
    )
