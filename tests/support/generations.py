"""Scripts as real processes, one generation after another, started by hand as the docs say.

A fork server that has torch loaded makes starting one a matter of milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ports import free_port
from warm_agent import CONTEXT


class Ended(NamedTuple):
    """How a replica ended, and all that it printed."""

    code: int
    output: str


def run(
    script: Path,
    replicas: int,
    folder: Path,
    arguments: Sequence[str] = (),
    timeout: float = 200.0,
    **environment: str,
) -> list[Ended]:
    """Run `script` in so many replicas without a launcher, wait for all of them, and leave none behind."""
    port, processes = str(free_port()), []
    try:
        for rank in range(replicas):
            given = {**environment, "ADAPTDL_NUM_REPLICAS": str(replicas), "ADAPTDL_REPLICA_RANK": str(rank)}
            given |= {"ADAPTDL_MASTER_ADDR": "127.0.0.1", "ADAPTDL_MASTER_PORT": port}
            process = CONTEXT.Process(
                target=main, args=(str(script), given, str(folder / f"output-{rank}"), arguments)
            )
            process.start()
            processes.append(process)
        ended = []
        for rank, process in enumerate(processes):
            process.join(timeout)
            output = (folder / f"output-{rank}").read_text()
            assert process.exitcode is not None, f"rank {rank} still runs after {timeout} s:\n{output}"
            ended.append(Ended(process.exitcode, output))
        return ended
    finally:
        for process in processes:
            if process.is_alive():
                assert process.pid is not None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()


def run_alone(
    script: Path, folder: Path, *arguments: str, timeout: float = 200.0, **environment: str
) -> Ended:
    """Run `script` in `folder` as one process that no launcher has started, with its output in `output`."""
    output = folder / "output"
    process = CONTEXT.Process(
        target=_alone, args=(str(script), str(folder), environment, str(output), arguments)
    )
    process.start()
    process.join(timeout)
    if process.is_alive():
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    assert process.exitcode is not None
    return Ended(process.exitcode, output.read_text())


def _alone(
    script: str, folder: str, environment: dict[str, str], output: str, arguments: Sequence[str]
) -> None:
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith("ADAPTDL_")]:
        del os.environ[name]
    main(script, environment, output, arguments)


def run_settings(script: Path, replicas: int, folder: Path, code: int = 0, **settings: Any) -> str:
    """Run a script that takes settings as JSON in LOOP and writes into the folder OUT.

    Its checkpoints are in `folder`, so a further call goes on from them.

    Returns:
        What its replicas printed, all of which have ended with `code`.
    """
    ended = run(
        script,
        replicas,
        folder,
        LOOP=json.dumps(settings),
        OUT=str(folder),
        ADAPTDL_CHECKPOINT_PATH=str(folder / "checkpoints"),
    )
    printed = "\n".join(one.output for one in ended)
    assert [one.code for one in ended] == [code] * replicas, printed
    return printed


def main(script: str, environment: dict[str, str], output: str, arguments: Sequence[str] = ()) -> None:
    os.setsid()
    # what the server has imported is walked by no garbage collection, nor by what looks for objects
    gc.freeze()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    faulthandler.register(signal.SIGUSR1)  # where does it hang
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    multiprocessing.set_start_method("fork", force=True)  # as in a script started from a shell
    import torch

    torch.set_num_threads(1)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        sys.last_value = error  # as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    import atexit

    atexit._run_exitfuncs()  # multiprocessing's children do not
    os._exit(code)


def records(folder: Path) -> list[dict[str, Any]]:
    """What the replicas of all generations have written with `record`, by any order."""
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("record-*")):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    return lines
