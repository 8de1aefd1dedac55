"""Find the address at which other machines reach this one, and listen on ports of it."""

from __future__ import annotations

import ipaddress
import random
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

Ports = tuple[int, int] | None  # first and last port of a range; None: any free port


class NoPortError(RuntimeError):
    """No port is free to listen on; the message names the address and the options that choose it."""


def address_towards(urls: tuple[str, ...]) -> str:
    """Return the address at which other nodes reach this machine: the one of its route to the store.

    The endpoints are tried in turn, because the name of one may not resolve here, or lead to this machine. A
    loopback address is returned only if no endpoint gives another one.

    Args:
        urls: endpoints, as `parse_endpoints` returns them.
    """
    found = [address for url in urls for address in local_addresses(url)]
    return next((one for one in found if not is_loopback(one)), found[0] if found else "127.0.0.1")


def local_addresses(url: str) -> list[str]:
    """Return the addresses of this machine from which a URL is reached."""
    parts = urlsplit(url)
    found = []
    try:
        infos = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):  # ValueError: not a valid host name
        return []
    for family, kind, protocol, _, address in infos:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)  # UDP: this only chooses a route
                found.append(str(sock.getsockname()[0]))
        except OSError:  # no route to the endpoint
            continue
    return found


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach `address`."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def network() -> str:
    """Return an id of what processes share that reach each other at loopback addresses; "": not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    return ""


def is_local(host: str) -> bool:
    """Return whether a host name or address belongs to this machine, so that it can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((host, 0))
    except OSError:  # also socket.gaierror
        return False
    return True


def listen(host: str, ports: Ports) -> socket.socket:
    """Return a listening socket on one interface, within the range of ports if there is one.

    Raises:
        NoPortError: no port is free.
    """
    sock = reserve(host, ports)
    try:
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise _nowhere(host, ports, error) from None
    return sock


def reserve(host: str, ports: Ports) -> socket.socket:
    """Return a bound socket that keeps a port for a server of this machine until the socket is closed.

    Meanwhile the kernel gives the port to no other process by chance: neither as an ephemeral port, nor to
    another `reserve` with a choice of ports. A server that names the port and sets SO_REUSEADDR can listen on
    it.

    Raises:
        NoPortError: no port is free.
    """
    candidates = [0]
    if ports is not None:
        candidates = list(range(ports[0], ports[1] + 1))
        random.shuffle(candidates)  # agents of several jobs on a node do not all try the same one first
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem = OSError()
    # try ports that no socket uses first, then those with connections of a dead process in TIME_WAIT
    for reuse in (0, 1):
        for port in candidates:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                sock.bind((host, port))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            except OSError as error:
                sock.close()
                problem = error
                continue
            return sock
    raise _nowhere(host, ports, problem)


def _nowhere(host: str, ports: Ports, problem: OSError) -> NoPortError:
    where = f"{host}, ports {ports[0]} to {ports[1]}" if ports else host
    return NoPortError(f"cannot listen on {where}: {problem.strerror}; see --port-range and --local-addr")
