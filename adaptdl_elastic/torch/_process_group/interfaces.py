"""Find the network interface of an address, and make gloo listen on that interface only."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable with gloo's interface; the user may have set it."""

_GET_ALL = 0x8912  # SIOCGIFCONF, netdevice(7)
_ENTRY, _NAME = 40, 16  # bytes of one `struct ifreq` on 64-bit Linux, and of the name in it
_MOST = 256  # most addresses of one machine
_IPV6 = Path("/proc/net/if_inet6")

chosen: str | None = None  # value that this module has set GLOO_VARIABLE to


def listen_on(address: str) -> None:
    """Make gloo groups listen on the interface of `address` only, unless the user has chosen one.

    Otherwise gloo listens at the address of the machine's name, which may be in another network. If the
    interface cannot be found, that is not changed.
    """
    global chosen
    if os.environ.get(GLOO_VARIABLE, chosen) != chosen:
        return
    found = interface_of(address)
    if found is not None:
        os.environ[GLOO_VARIABLE] = chosen = found


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`; None if that is unknown."""
    try:
        wanted = ipaddress.ip_address(socket.gethostbyname(address) if ":" not in address else address)
        known = addresses()
    except (OSError, ValueError):
        return None
    for name, one in known:
        if one == wanted:
            return name
    if wanted.is_loopback:  # the interface has one address of 127.0.0.0/8, and all of them lead to it
        return next((name for name, one in known if one.is_loopback), None)
    return None


def addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Return (interface, address) of every address of this machine; OSError on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"interfaces are not known on {sys.platform}")
    return [*_ipv4(), *_ipv6()]


def _ipv4() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    buffer = array.array("B", bytes(_MOST * _ENTRY))
    where, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _GET_ALL, struct.pack("iL", len(buffer), where))
    used: int = struct.unpack("iL", answer)[0]
    entries = [buffer[at : at + _ENTRY].tobytes() for at in range(0, used, _ENTRY)]
    return [
        (entry[:_NAME].partition(b"\0")[0].decode().partition(":")[0], ipaddress.IPv4Address(entry[20:24]))
        for entry in entries
    ]


def _ipv6() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    if not _IPV6.exists():
        return []
    fields = [line.split() for line in _IPV6.read_text().splitlines()]
    return [(line[-1], ipaddress.IPv6Address(bytes.fromhex(line[0]))) for line in fields]
