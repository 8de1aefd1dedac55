"""Real replicas for tests: processes with a gloo group, made by a fork server that has torch loaded."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from warm_agent import CONTEXT

from adaptdl_elastic import _session


def run(
    function: Callable[..., Any], replicas: int, *args: Any, timeout: float = 250.0, dies: int | None = None
) -> list[Any]:
    """`function(*args)` in that many processes of one gloo group; what each returned, by rank.

    The replica `dies` is meant to, and returns None.

    `function` must be importable (a module of tests/support). Raises AssertionError with the traceback
    of the first replica that failed; leaves no process behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        try:
            for rank in range(replicas):
                ours, theirs = CONTEXT.Pipe(duplex=False)
                process = CONTEXT.Process(
                    target=_main, args=(function, rank, replicas, folder, theirs, args), daemon=True
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            results = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(timeout), f"rank {rank} did not answer within {timeout} s"
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    if rank == dies:
                        results.append(None)
                        continue
                    raise AssertionError(f"rank {rank} died") from None
                assert ok, f"rank {rank} failed:\n{value}"
                results.append(value)
            return results
        finally:
            for process in processes:
                process.join(60)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def each(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call `function` with each of these arguments, in a session of its own; what replicas may run."""
    found = []
    for case in cases:
        _session.reset()
        found.append(function(*case))
    return found


def _main(
    function: Callable[..., Any], rank: int, replicas: int, folder: str, pipe: Any, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["ADAPTDL_REPLICA_RANK"] = str(rank)
    os.environ["ADAPTDL_NUM_REPLICAS"] = str(replicas)
    os.environ["ADAPTDL_EVENT_LOG"] = f"{folder}/events"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=replicas,
            timeout=timedelta(seconds=200),
        )
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        answer = (True, result)
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # not torch's pickler: its tensors die with the sender
    pipe.close()
