"""Run commands on nodes by the user's own `ssh`, with its configuration and agent, and no password."""

from __future__ import annotations

import secrets
import shlex
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_CONNECT_SECONDS = 15
_AT_A_TIME = 16  # most nodes on which an action runs at the same time
_SSH_FAILED = 255  # exit code by which ssh reports its own errors

# $0: the marker line, which stands before and after what the command writes: ~/.bashrc may write, too
_FRAMED = 'mark() { echo "$0"; echo "$0" >&2; }; mark; "$@"; code=$?; mark; exit $code'


class ProvisionError(Exception):
    """A node cannot be used, or refuses; the message is one line with the remedy."""


class UnreachableError(ProvisionError):
    """ssh does not get as far as to run a command on the node."""


@dataclass(frozen=True)
class Ssh:
    """How nodes are reached.

    Attributes:
        config: Configuration file for `ssh -F`; "": the user's own.
    """

    config: str = ""

    def run(self, node: str, command: Sequence[str], data: bytes = b"", seconds: float = 120.0) -> str:
        """Run a command on a node, and return what it wrote to stdout.

        Args:
            node: Name of the node, as `ssh` knows it.
            command: The command and its arguments.
            data: What the command reads from stdin.
            seconds: How long it may take.

        Raises:
            UnreachableError: the node cannot be reached.
            ProvisionError: the command fails.
        """
        marker = f"adaptdl-{secrets.token_hex(8)}"
        # -T: a terminal would change what is sent and answered
        line = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
        if self.config:
            line += ["-F", self.config]
        line += ["--", node, shlex.join(["sh", "-c", _FRAMED, marker, *command])]
        try:
            done = subprocess.run(line, input=data, capture_output=True, timeout=seconds, check=False)
        except FileNotFoundError:
            raise ProvisionError("ssh is not installed here: install OpenSSH's client") from None
        except subprocess.TimeoutExpired:
            raise ProvisionError(f"{node}: `{command[0]}` has not ended after {seconds:g} s") from None
        answer, errors = (_framed(text, marker) for text in (done.stdout, done.stderr))
        unframed = done.stderr.decode(errors="replace").replace(marker, "")
        # ssh itself writes outside of the frame
        said = _last_line(unframed if errors is None or done.returncode == _SSH_FAILED else errors)
        if done.returncode == _SSH_FAILED:
            raise UnreachableError(
                f"{node}: ssh cannot log in: {said or 'it says nothing'}; `ssh {node} true` has to work "
                f"without a password (a key and its agent)"
            )
        if done.returncode:
            raise ProvisionError(f"{node}: {said or f'`{command[0]}` exits with {done.returncode}'}")
        if answer is None:
            raise unreadable(node, done.stdout.decode(errors="replace"))
        return answer


def unreadable(node: str, answer: str) -> ProvisionError:
    """Return the error of a node that answers something else than what it was asked."""
    return ProvisionError(
        f"{node}: its answer cannot be read: {answer.strip()[:200]!r}; look at its ~/.bashrc, which must not "
        f"end the shell, and at its Python, which must print nothing of its own"
    )


def _framed(data: bytes, marker: str) -> str | None:
    """Return what stands between two marker lines; None if there are no two."""
    parts = data.decode(errors="replace").replace("\r\n", "\n").split(f"{marker}\n")
    return parts[1] if len(parts) == 3 else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("adaptdl service: ") if lines else ""


def on_every(nodes: Iterable[str], action: Callable[[str], T]) -> dict[str, T]:
    """Do something for every node at the same time, and return the results by node.

    Raises:
        ProvisionError: it failed for at least one node; the message has one line for each of those.
    """
    names = list(nodes)
    results: dict[str, T] = {}
    problems: list[str] = []
    with ThreadPoolExecutor(max_workers=_AT_A_TIME) as pool:
        for node, future in [(node, pool.submit(action, node)) for node in names]:
            try:
                results[node] = future.result()
            except ProvisionError as error:
                problems.append(str(error))
    if problems:
        raise ProvisionError("\nadaptdl: ".join(problems))
    return results
