"""Serve torch's TCPStore on one address."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaptdl_elastic.rendezvous.local.addresses import Ports, listen


def serve(host: str, ports: Ports, timeout: float) -> tuple[int, TCPStore]:
    """Open a TCPStore on one address; torch's own way listens on all addresses.

    Returns:
        Its port and the store. The port is closed when the store is garbage-collected.

    Raises:
        NoPortError: no port is free.
    """
    sock = listen(host, ports)
    port = int(sock.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=sock.detach(),
    )
    return port, store
