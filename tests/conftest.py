"""What all tests share: an environment that is nobody's, and a check that no process is left behind."""

from __future__ import annotations

import atexit
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from moto_process import Moto

# How long an example takes is the machine's affair. The same examples everywhere: what fails, fails again;
# `--hypothesis-profile=explore` looks for others.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")

# torch's and our variables of a surrounding run would decide what the tests see
_FOREIGN = ("ADAPTDL_", "TORCHELASTIC_", "AWS_", "SLURM_")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# begun in the background of a shell (`make test &`) all that tests start would be deaf to Ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# jobs of other tests, and of this user, leave their notes elsewhere; short, because sockets lie there
_RUNTIME = tempfile.mkdtemp(prefix="adt-", dir="/tmp")
atexit.register(shutil.rmtree, _RUNTIME, ignore_errors=True)
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME


# The process group of an AdaptiveDataParallel that is thrown away is not freed (five descriptors), and
# hundreds of tests make one in one process. An ordinary user's process may have 1,024 descriptors unless
# it asks for more.
_SOFT, _HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(_SOFT, min(_HARD, 16384)), _HARD))


# tests make many objects and few cycles; with Python's thresholds a tenth of their time goes to searches
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    # modules and collected tests stay: no search has to look at them
    gc.freeze()
    # several processes run tests on the same cores, where threads that wait for each other would spin
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    # clusters that this user has brought up are no affair of the tests
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))
    for name in list(os.environ):
        if name.startswith(_FOREIGN) or name in _TORCHRUN:
            monkeypatch.delenv(name)
    monkeypatch.setenv(
        "ADAPTDL_METRICS_PORT", "off"
    )  # coordinators of several tests would want the same ports


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    # `cli.main` ignores signals at its end, and every process that a later test starts would inherit that
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def _moto_server() -> Iterator[Moto]:
    # it imports boto3, which most tests do not need
    from moto_process import running_moto

    with running_moto() as server:
        yield server


@pytest.fixture
def moto(_moto_server: Moto, monkeypatch: pytest.MonkeyPatch) -> Moto:
    """A server with nothing in it, which every client of this test talks to."""
    _moto_server.reset()
    for name, value in _moto_server.environment.items():
        monkeypatch.setenv(name, value)
    return _moto_server


@pytest.fixture
def bucket(moto: Moto) -> Any:
    """Return a client of a server where there is an empty bucket."""
    from moto_process import made_bucket

    client = moto.client("s3")
    made_bucket(moto, client)
    return client
