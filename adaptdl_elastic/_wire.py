"""Frames between replicas: authenticated first, unpickled only afterwards.

A frame is 8 bytes of length, one byte of kind, and the payload. Before the first frame both sides prove
that they know the same secret (HMAC-SHA256 over both sides' nonces, so that neither an eavesdropper's
copy nor a reflection helps). Where no secret was given there is nothing to prove, and objects are then
unpickled from a closed list of types: whoever reaches the port can disturb the training, as with torch's
own store, but runs no code.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!QB")
_HELLO = struct.Struct("!4sI16s")
_MAGIC = b"ADL1"
_MAX_FRAME = 1 << 34

_PLAIN = {
    "builtins": {"set", "frozenset", "complex", "slice", "range", "bytearray", "int", "float", "bool", "str"},
    "collections": {"OrderedDict", "Counter", "defaultdict", "deque"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
}


class AuthenticationError(ConnectionError):
    """The other side does not know the secret."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{module}.{name} is exchanged only between replicas that share a secret: "
            f"set the same ADAPTDL_SECRET for all of them"
        )


def dumps(value: object) -> bytes:
    """`value` as bytes."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def loads(data: bytes, trusted: bool) -> Any:
    """What `dumps` made bytes of; of plain types only unless the sender has authenticated."""
    return pickle.loads(data) if trusted else _PlainUnpickler(io.BytesIO(data)).load()


def send_frame(sock: socket.socket, kind: int, payload: bytes) -> None:
    """Send one frame, blocking."""
    header = _HEADER.pack(len(payload), kind)
    if len(payload) < 65536:
        sock.sendall(header + payload)
    else:
        sock.sendall(header)
        sock.sendall(payload)


def receive_frame(sock: socket.socket) -> tuple[int, bytes]:
    """The next frame, blocking; ConnectionError when the other side has gone."""
    length, kind = _HEADER.unpack(_receive(sock, _HEADER.size))
    if length > _MAX_FRAME:
        raise ConnectionError(f"a frame of {length} bytes: this is not one of our peers")
    return kind, _receive(sock, length)


def _receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = sock.recv_into(view[done:])
        if count == 0:
            raise ConnectionError("the connection was closed")
        done += count
    return bytes(data)


def _proof(secret: bytes | None, role: bytes, ours: bytes, theirs: bytes, rank: int) -> bytes:
    message = role + ours + theirs + rank.to_bytes(4, "big")
    return hmac.new(secret or b"", message, hashlib.sha256).digest()


def answer(sock: socket.socket, secret: bytes | None, timeout: float = 10.0) -> int:
    """The listening side of the handshake: the rank of who has connected."""
    sock.settimeout(timeout)
    nonce = os.urandom(16)
    sock.sendall(nonce)
    magic, rank, theirs = _HELLO.unpack(_receive(sock, _HELLO.size))
    proof = _receive(sock, 32)
    if magic != _MAGIC or not hmac.compare_digest(proof, _proof(secret, b"peer", nonce, theirs, rank)):
        raise AuthenticationError("a stranger, or a replica with another ADAPTDL_SECRET")
    sock.sendall(_proof(secret, b"root", theirs, nonce, rank))
    sock.settimeout(None)
    return int(rank)


def introduce(sock: socket.socket, secret: bytes | None, rank: int, timeout: float = 10.0) -> None:
    """The connecting side of the handshake."""
    sock.settimeout(timeout)
    theirs, nonce = _receive(sock, 16), os.urandom(16)
    sock.sendall(_HELLO.pack(_MAGIC, rank, nonce) + _proof(secret, b"peer", theirs, nonce, rank))
    try:
        proof = _receive(sock, 32)
    except (TimeoutError, ConnectionError):
        raise AuthenticationError("rank 0 refused this replica: is ADAPTDL_SECRET the same?") from None
    if not hmac.compare_digest(proof, _proof(secret, b"root", nonce, theirs, rank)):
        raise AuthenticationError("rank 0 does not know ADAPTDL_SECRET")
    sock.settimeout(None)
