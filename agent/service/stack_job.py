"""`python -m adaptdl_elastic.agent.service.stack_job JOB CODE FOLDER OPTION...`: run the job of an EC2 stack.

The code of a stack may be replaced while its job runs. Replicas with different code do not fit together. So a
node of a run that has not ended takes the code that the run was begun with; CODE is for a new run. Both are
archives that `adaptdl cloud up` has written, with the script, its requirements and its command.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from adaptdl_elastic import _own_python
from adaptdl_elastic.agent.cluster.ended_run import of_status
from adaptdl_elastic.agent.service.archives import unpack
from adaptdl_elastic.agent.service.blobs import BlobError
from adaptdl_elastic.protocol.environment import CLUSTER, CODE, ETCD
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, JobStatus
from adaptdl_elastic.rendezvous.schema.submissions import STACK_COMMAND, STACK_OWNER
from adaptdl_elastic.rendezvous.store.base import Store, StoreError, read_record
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect

_NAME = re.compile(r"(?P<place>s3://[^/]+/.+)-(?P<digest>[0-9a-f]{64})\.tar\.gz")


def choose(store: Store, keys: Keys, job: str, own: str) -> str:
    """Return the archive to run: that of the run that has not ended, else the stack's own.

    Args:
        store: The stack's store.
        keys: Keys of its cluster.
        job: Name of the job.
        own: URL of the stack's archive. Archives of other places are never taken.

    Raises:
        StoreError: the store cannot be read.
    """
    spec = read_record(JobSpec, store.get(keys.job(job, "spec")))
    status = read_record(JobStatus, store.get(keys.job(job, "status")))
    if spec is None or of_status(spec, status) is not None:
        return own
    ours, theirs = _NAME.fullmatch(own), _NAME.fullmatch(spec.code)
    return spec.code if ours and theirs and ours["place"] == theirs["place"] else own


def fetch(code: str, folder: Path, s3: Any) -> Path:
    """Unpack an archive and install its requirements, once; return its directory.

    Args:
        code: URL of the archive, whose name ends with its SHA-256.
        folder: Where archives are unpacked.
        s3: A boto3 client.

    Raises:
        BlobError: the archive is not what its name says, or cannot be unpacked, or its requirements cannot
            be installed.
    """
    name = _NAME.fullmatch(code)
    if name is None:
        raise BlobError(f"{code!r} is no archive of adaptdl cloud up")
    directory, archive = folder / name["digest"], folder / "code.tar.gz"
    installed = folder / f"{name['digest']}.installed"
    if installed.exists():
        return directory
    bucket, _, key = code.removeprefix("s3://").partition("/")
    s3.download_file(bucket, key, str(archive))
    if hashlib.sha256(archive.read_bytes()).hexdigest() != name["digest"]:
        raise BlobError(f"{code} is not what was uploaded: its SHA-256 is another one")
    unpack(archive, directory, STACK_OWNER)
    if (directory / "requirements.txt").exists():
        pip = _own_python.module("pip", "install", "--disable-pip-version-check")
        done = subprocess.run([*pip, "-r", "requirements.txt"], cwd=directory, capture_output=True, text=True)
        if done.returncode:
            raise BlobError(f"requirements.txt cannot be installed:\n{done.stdout}{done.stderr}")
    installed.touch()
    return directory


def main(arguments: list[str]) -> str:
    """Become the job's agent; return why that is not possible, and leave it in the bucket."""
    job, own, folder, *options = arguments
    environ, s3 = os.environ, boto3.client("s3")
    keys = Keys(environ.get(CLUSTER) or Keys().cluster)
    try:
        with connect(environ[ETCD], options=StoreOptions.from_environment(environ)) as store:
            code = choose(store, keys, job, own)
        directory = fetch(code, Path(folder), s3)
        command = shlex.split((directory / STACK_COMMAND).read_text())
    except (Boto3Error, BotoCoreError, ClientError) as error:
        return f"adaptdl: {own} cannot be read: {error}"
    except (BlobError, StoreError, OSError) as error:
        bucket, stack = own.split("/")[2:4]
        with suppress(BotoCoreError, ClientError):
            key = f"{stack}/boot-failures/{socket.gethostname()}-{job}.log"
            s3.put_object(Bucket=bucket, Key=key, Body=str(error).encode())
        return f"adaptdl: {error}"
    os.chdir(directory)
    agent = _own_python.module("adaptdl_elastic.agent", f"--rdzv-id={job}", *options, *command)
    os.execve(sys.executable, agent, {**environ, CODE: code})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
