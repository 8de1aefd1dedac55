"""By which address others reach this machine, and ports on it to listen on."""

from __future__ import annotations

import ipaddress
import random
import socket
from urllib.parse import urlsplit

Ports = tuple[int, int] | None  # first and last of a range; None: whatever is free


class NoPortError(RuntimeError):
    """Nothing is free to listen on; the message says where, and which options say so."""


def address_towards(urls: tuple[str, ...]) -> str:
    """The address of this machine on the way to the store: other nodes reach it there.

    urls: endpoints, as `parse_endpoints` gives them. They are asked in turn, because one may have a name
    that nobody knows here, or be on this very machine: a loopback address is only the last resort.
    """
    found = [address for url in urls for address in _local_addresses(url)]
    return next((one for one in found if not is_loopback(one)), found[0] if found else "127.0.0.1")


def _local_addresses(url: str) -> list[str]:
    parts = urlsplit(url)
    found = []
    try:
        infos = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):  # ValueError: what can not be a host's name
        return []
    for family, kind, protocol, _, address in infos:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)  # sends nothing
                found.append(str(sock.getsockname()[0]))
        except OSError:  # no way there
            continue
    return found


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach `address`."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_local(host: str) -> bool:
    """Return whether a name or address is one of this machine's, so that it can be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((host, 0))
    except OSError:  # socket.gaierror is one
        return False
    return True


def listen(host: str, ports: Ports) -> socket.socket:
    """A listening socket on one interface, within the range of ports if there is one."""
    sock = reserve(host, ports)
    try:
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise _nowhere(host, ports, error) from None
    return sock


def reserve(host: str, ports: Ports) -> socket.socket:
    """A socket that keeps a port for somebody else of this machine until it is closed.

    Nobody gets the port by chance meanwhile: neither who asks for any port, nor who connects, nor
    another `reserve` that has others to choose from. Who names it, and sets SO_REUSEADDR as servers do,
    can listen there.
    """
    candidates = [0]
    if ports is not None:
        candidates = list(range(ports[0], ports[1] + 1))
        random.shuffle(candidates)  # agents of several jobs on a node do not all try the same one first
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem = OSError()
    # at first only what nobody keeps; then also where connections of a dead process linger
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
    return NoPortError(f"can not listen on {where}: {problem.strerror}; see --port-range and --local-addr")
