"""The checks of `adaptdl doctor`: this node, the store, the cluster. Every finding names a remedy.

Each check is a function that returns findings. It raises no errors for the problems that it looks for.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import resource
import secrets
import shutil
import socket
import ssl
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import urllib3

from adaptdl_elastic import _program
from adaptdl_elastic._private import RuntimeFileError, private_directory
from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.protocol import self_test
from adaptdl_elastic.rendezvous.local.addresses import address_towards
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import Store, StoreAuthError, StoreError
from adaptdl_elastic.rendezvous.store.connection_error import NO_ETCD, TryAgainError
from adaptdl_elastic.rendezvous.store.http import Http, HttpStatusError
from adaptdl_elastic.rendezvous.store.local_socket import is_local
from adaptdl_elastic.rendezvous.store.store_options import (
    DEFAULT_PORT,
    STORES,
    StoreOptions,
    foreign_scheme,
    parse_endpoints,
)

MIN_FILES = 4096
MIN_FREE = 1 << 30  # free bytes in the checkpoint directory, below which it is reported
MIN_SHM = 64 << 20
FRESH = 900.0  # seconds for which another node's mark in the checkpoint directory is valid


class Level(str, Enum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # works, but not as well as it could
    ERROR = "error"  # will not work


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    detail: str
    remedy: str = ""


def ok(check: str, detail: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, Level.OK, detail)


def warning(check: str, detail: str, remedy: str) -> Finding:
    """Return a finding about a problem that does not prevent work."""
    return Finding(check, Level.WARNING, detail, remedy)


def error(check: str, detail: str, remedy: str) -> Finding:
    """Return a finding about a problem that prevents work."""
    return Finding(check, Level.ERROR, detail, remedy)


# This node


def check_versions() -> list[Finding]:
    """Check that Python, torch and this package are installed; report their versions."""
    found = [ok("python", platform.python_version())]
    for name in ("adaptdl-elastic", "torch"):
        try:
            found.append(ok(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(error(name, "is not installed for this Python", f"pip install {name}"))
    return found


def check_limits() -> list[Finding]:
    """Check the limits of open files and of shared memory."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [
        ok("open files", f"limit {files}")
        if files >= MIN_FILES
        else warning(
            "open files",
            f"limit {files}: data loaders and many replicas may want more",
            f"ulimit -n {MIN_FILES}, or LimitNOFILE={MIN_FILES} in the systemd unit",
        )
    ]
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        found.append(
            ok("/dev/shm", f"{size >> 20} MiB")
            if size > MIN_SHM
            else warning(
                "/dev/shm",
                f"only {size >> 20} MiB: data loader workers share tensors there",
                "docker run --shm-size=1g, or --ipc=host",
            )
        )
    return found


def check_self_test(driver: Path = Path("/proc/driver/nvidia/version")) -> list[Finding]:
    """Report the newest verdict of NCCL's self-test; nothing if there is none and no driver of NVIDIA."""
    name = "NCCL self-test"
    kept: list[tuple[float, str]] = []
    with suppress(OSError, RuntimeFileError):
        kept = [(path.stat().st_mtime, str(path)) for path in private_directory().glob(self_test.FILES)]
    for when, path in sorted(kept, reverse=True):
        with suppress(OSError, ValueError, LookupError, TypeError):
            if (why := json.loads(Path(path).read_text())["why"]) is None:
                return [ok(name, "has passed")]
            if time.time() - when < self_test.AGAIN:
                remedy = f"every change of a job is a restart; to test again within an hour remove {path}"
                return [warning(name, f"has failed: {why}", remedy)]
    return [ok(name, "has never run; the first job with NCCL runs it")] if driver.exists() else []


def check_address(local_addr: str | None, endpoint: str | None = None) -> list[Finding]:
    """Check whether other nodes can reach this one by the address that its agent would announce."""
    name = local_addr or _own_address(endpoint)
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError) as problem:
        return [
            error(
                "address",
                f"{name} does not resolve ({getattr(problem, 'strerror', None) or problem})",
                "give adaptdl-run --local-addr an address that other nodes can reach",
            )
        ]
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        return [
            warning(
                "address",
                f"{name} is {', '.join(addresses)}: no other node can reach that",
                "for several nodes give adaptdl-run --local-addr the address on their network",
            )
        ]
    return [ok("address", f"{name} is {', '.join(addresses)}" if addresses != [name] else name)]


def _own_address(endpoint: str | None) -> str:
    """Return the address or name by which an agent on this node announces itself to others."""
    try:
        return address_towards(parse_endpoints(endpoint)) if endpoint else socket.gethostname()
    except StoreError:  # another check reports an invalid endpoint
        return socket.gethostname()


def check_directory(path: Path) -> list[Finding]:
    """Check whether checkpoints can be written, kept and renamed in a directory."""
    name = "checkpoint directory"
    try:
        there = path.exists()
        where = path if there else next(p for p in path.parents if p.exists())
    except OSError as problem:
        return [
            error(
                name,
                f"{path} cannot be looked at: {problem.strerror}",
                f"let user {os.geteuid()} enter the directories above it (chmod +x), or choose another "
                f"--checkpoint-path",
            )
        ]
    if there and not path.is_dir():
        return [error(name, f"{path} is not a directory", "choose another --checkpoint-path")]
    probe = where / f".adaptdl-doctor-{secrets.token_hex(4)}"
    try:
        with probe.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        probe.rename(probe.with_suffix(".renamed"))
        probe.with_suffix(".renamed").unlink()
    except OSError as problem:
        with suppress(OSError):
            probe.unlink()
        return [
            error(
                name,
                f"{where} cannot be written to: {problem.strerror}",
                f"chown {os.geteuid()} {where}, or choose another --checkpoint-path",
            )
        ]
    free = shutil.disk_usage(where).free
    if free < MIN_FREE:
        return [warning(name, f"{path}: only {free >> 20} MiB are free", "free some space there")]
    new = "" if there else " (will be made)"
    return [ok(name, f"{path}{new} can be written to, {free >> 30} GiB free")]


# The store


def check_server(endpoint: str, options: StoreOptions) -> list[Finding]:
    """Check every endpoint: whether it answers, and its version."""
    # connecting to these checks everything
    if is_local(endpoint):
        return [ok("store", f"in the memory of a standalone job's agent ({endpoint})")]
    if scheme := foreign_scheme(endpoint):
        return [ok("store", f"{endpoint}, of the package {STORES.origin(scheme)}")]
    found: list[Finding] = []
    for url in parse_endpoints(endpoint, options.secure):
        http = Http((url,), options, lambda _: False)
        try:
            said = http.get_once("/version")
        except (HttpStatusError, urllib3.exceptions.HTTPError, OSError, ValueError) as raised:
            found.append(_unreachable(url, raised, options))
            continue
        finally:
            http.close()
        found.append(_version(url, str(said.get("etcdserver", "?"))))
    return found


def _unreachable(url: str, raised: Exception, options: StoreOptions) -> Finding:
    problem = TryAgainError.from_error(raised, url, options)
    if problem.summary == NO_ETCD and url.startswith("http:") and _speaks_tls(url, options.timeout):
        return error(
            "store",
            f"{url} speaks TLS, and was asked without",
            f"write {url.replace('http:', 'https:', 1)}, and give its CA with --etcd-ca (ADAPTDL_ETCD_CA)",
        )
    return error("store", f"{url} {problem.summary}: {problem.problem}", problem.remedy)


def _speaks_tls(url: str, timeout: float) -> bool:
    parts = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the identity of the server does not matter here
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((parts.hostname, parts.port or DEFAULT_PORT), timeout) as sock:
            context.wrap_socket(sock).close()
    except (OSError, ValueError) as problem:
        return "alert" in str(problem).lower()
    return True


def _version(url: str, text: str) -> Finding:
    parts = tuple(int(part) for part in text.split("-")[0].split(".") if part.isdecimal())
    if parts < (3, 4):
        return error("store", f"{url} is etcd {text}", "use etcd 3.4.22 or later")
    if (3, 5, 0) <= parts <= (3, 5, 2):
        return warning(
            "store",
            f"{url} is etcd {text}, which can corrupt its data when it is killed under load",
            "fine for tests and one machine; use 3.5.6 or later (or 3.4.22) for a cluster",
        )
    return ok("store", f"{url} is etcd {text}")


def check_rights(store: Store, keys: Keys) -> list[Finding]:
    """Check whether agents and coordinators have all permissions they need, and how fast writes are."""
    key = f"{keys.root}doctor/{secrets.token_hex(8)}"
    steps: list[tuple[str, Callable[[], object]]] = [
        ("read", lambda: store.range(keys.root + "doctor/")),
        ("write", lambda: store.put(key, "1")),
        ("compare and swap", lambda: store.compare_and_swap(key, "2", _revision(store, key))),
        ("delete", lambda: store.delete(key)),
        ("hold a lease", lambda: store.lease(5.0).revoke()),
        ("watch", lambda: _watched(store, key)),
    ]
    for name, step in steps:
        try:
            if step() is None and name == "compare and swap":
                return [
                    error("rights", "a compare and swap failed that should not", "is this a healthy etcd?")
                ]
        except StoreAuthError as problem:
            return [
                error(
                    "rights",
                    f"may not {name} under {keys.root}: {problem}",
                    f"etcdctl role grant-permission ROLE readwrite --prefix=true {keys.root}",
                )
            ]
        except StoreError as problem:
            return [error("rights", f"could not {name}: {problem}", "see the store's own log")]
    return [ok("rights", f"read, write, lease and watch under {keys.root}"), _latency(store, key)]


def _revision(store: Store, key: str) -> int:
    item = store.get(key)
    return 0 if item is None else item.mod_revision


def _watched(store: Store, key: str) -> bool:
    revision = store.put(key, "seen")
    with store.watch(key, revision) as watch:
        for _ in watch:
            break
    store.delete(key)
    return True


def _latency(store: Store, key: str) -> Finding:
    times = []
    for _ in range(10):
        started = time.perf_counter()
        store.put(key, "1")
        times.append(time.perf_counter() - started)
    store.delete(key)
    median = 1000 * statistics.median(times)
    if median > 100:
        return warning(
            "store latency",
            f"{median:.0f} ms a write",
            "etcd wants a fast disk and a near network; see its metric wal_fsync_duration_seconds",
        )
    return ok("store latency", f"{median:.1f} ms a write")


# The cluster


def check_cluster(view: View, node: str) -> list[Finding]:
    """Check which nodes are registered, with which versions, and whether there is a leader."""
    agents = [seen.record for by_node in view.nodes.values() for seen in by_node.values()]
    found = [ok("nodes", f"{len({agent.node for agent in agents})} registered")]
    versions = {agent.version for agent in agents if agent.version}
    mine = _program.version()
    others = sorted(versions - {mine})
    if others:
        found.append(
            error(
                "versions",
                f"this node has adaptdl-elastic {mine}, others have {', '.join(others)}",
                "install the same version everywhere: agents of different versions refuse each other",
            )
        )
    if agents and view.leader is None:
        found.append(
            warning(
                "coordinator",
                "nodes are registered and nobody leads",
                "an agent starts one within a few seconds; else run adaptdl coordinator, and see its log",
            )
        )
    elif view.leader is not None:
        leader = view.leader.record
        found.append(ok("coordinator", f"{leader.id} leads"))
    found += _reachable(sorted({agent.host for agent in agents if agent.node != node and agent.host}))
    return found


def check_devices(view: View) -> list[Finding]:
    """Name the GPUs that their nodes' agents cannot use, and the nodes where replicas cannot lock GPUs."""
    lines = {
        f"{node}: {line}"
        for agents in view.nodes.values()
        for node, seen in agents.items()
        for line in seen.record.unusable
    }
    remedy = (
        "end the other program (nvidia-smi names it), drain the node and repair the GPU, or remove the folder"
    )
    return [warning("GPUs", line, remedy) for line in sorted(lines)]


def _reachable(hosts: Iterable[str]) -> Iterator[Finding]:
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as problem:
            yield error(
                "peers",
                f"{host} does not resolve here: {getattr(problem, 'strerror', None) or problem}",
                "have that node give its address with --local-addr, or fix DNS or /etc/hosts",
            )


@contextmanager
def marked(store: Store, keys: Keys, node: str, path: Path) -> Iterator[list[Finding]]:
    """Write a mark into the checkpoint directory, and look for the marks of other nodes.

    Run on every node, at the same time or one after the other, this shows whether they share the directory.
    """
    folder, token = path / ".adaptdl-doctor", secrets.token_hex(8)
    mark = folder / node
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # behind a link lie files that are no marks
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a link: remove it")
        for old in folder.iterdir():
            if time.time() - old.stat().st_mtime > FRESH:
                old.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
        mark.write_text(token)
    except OSError as problem:
        yield [error("shared directory", f"{folder}: {problem.strerror}", "see the finding above")]
        return
    store.put(f"{keys.root}doctor/marks/{node}", json.dumps({"token": token, "time": time.time()}))
    yield list(_marks(store, keys, node, folder))


def _marks(store: Store, keys: Keys, node: str, folder: Path) -> Iterator[Finding]:
    seen: list[str] = []
    unseen: list[str] = []
    for item in store.range(f"{keys.root}doctor/marks/").items:
        other = item.key.rsplit("/", 1)[-1]
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(item.value)
            if other == node:
                continue
            if time.time() - float(said["time"]) > FRESH:
                store.delete(item.key)
                continue
            matches = False
            with suppress(OSError):
                matches = (folder / other).read_text() == said["token"]
            (seen if matches else unseen).append(other)
    if unseen:
        yield error(
            "shared directory",
            f"{_some(unseen)} ran the doctor on a directory that is not this one ({folder.parent})",
            "mount the same directory everywhere, or use --checkpoint-path s3://…",
        )
    elif seen:
        yield ok("shared directory", f"{_some(seen)} wrote to the same one")
    else:
        yield ok(
            "shared directory",
            f"no other node has looked in the last {FRESH / 60:.0f} minutes: run this on each of them",
        )


def check_checkpoints(view: View) -> list[Finding]:
    """Check whether the newest recorded checkpoint of each job can be seen from this node."""
    found = []
    for name, job in sorted(view.jobs.items()):
        if job.checkpoint is None or "://" in job.checkpoint.record.path:
            continue
        record = job.checkpoint.record
        try:
            there = Path(record.path).exists()
        except OSError:  # below a directory that this user may not enter
            there = False
        if there:
            found.append(ok(f"checkpoint of {name}", f"{record.id} is here"))
        elif name in view.nodes:
            found.append(
                error(
                    f"checkpoint of {name}",
                    f"{record.path} is recorded in the store and cannot be seen from this machine",
                    "replicas here will refuse to start: mount the directory that the others use",
                )
            )
    return found


def _some(names: Iterable[object], limit: int = 5) -> str:
    listed = [str(name) for name in names]
    more = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {more} more" if more > 0 else "")
