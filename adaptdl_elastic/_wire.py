"""Frames between replicas, and what they hold.

A frame is 8 bytes of length, one byte of kind, and the payload. Before the first frame both sides prove
that they know the same key (HMAC-SHA256 over both sides' nonces, so that neither an eavesdropper's copy
nor a reflection helps). Where no secret was given there is nothing to prove.

A value travels as plain data (`_codec`), whose decoding runs no code. Only *objects*, which are a user's,
are pickled, and are marked so. They are unpickled where the receiver has asked for an object itself, and
its peer has proved to know the key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import socket
import struct
from typing import Any

from adaptdl_elastic import _codec

_HEADER = struct.Struct("!QB")
_HELLO = struct.Struct("!4sI16s")
_MAGIC = b"ADL1"
_MAX_FRAME = 1 << 34
_NONCE, _PROOF = 16, 32  # bytes

REFUSAL = bytes(_PROOF)
"""What the listening side sends instead of its proof to a peer that it refuses."""

HANDSHAKE_SECONDS = 10.0
"""How long one handshake may take."""

INTRODUCTION = _HELLO.size + _PROOF
"""Bytes that the connecting side sends in a handshake."""

_PLAIN, _OBJECT = b"p", b"o"
_NO_SECRET = (
    "objects of any type are exchanged only between replicas that share a secret: set the same "
    "ADAPTDL_SECRET for all of them"
)


class AuthenticationError(ConnectionError):
    """The other side does not know the secret."""


def pack(value: object, objects: bool = False) -> bytes:
    """Return `value` as bytes.

    Args:
        value: Plain data; any object that can be pickled, if `objects`.
        objects: It is a user's, and the receiver may run code of it.

    Raises:
        NotPlainError: It is no plain data.
    """
    if objects:
        return _OBJECT + pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _PLAIN + _codec.encode(value)


def pack_for_strangers(value: object) -> bytes:
    """Return a user's `value` as bytes where replicas share no secret: plain data only."""
    try:
        return pack(value)
    except _codec.NotPlainError as error:
        raise _codec.NotPlainError(f"{error}; {_NO_SECRET}") from None


def unpack(data: bytes | memoryview, objects: bool = False) -> Any:
    """Return what `pack` made bytes of.

    Args:
        data: From a peer.
        objects: The peer has authenticated, and a user's object is expected here.

    Raises:
        CodecError: It is not what `pack` makes, or an object where none is expected.
    """
    kind, body = bytes(data[:1]), memoryview(data)[1:]
    if kind == _PLAIN:
        return _codec.decode(body)
    if kind == _OBJECT and objects:
        return pickle.loads(body)
    raise _codec.CodecError("an object where only plain data may come" if kind == _OBJECT else "garbage")


def send_frame(sock: socket.socket, kind: int, payload: bytes) -> None:
    """Send one frame, blocking."""
    header = _HEADER.pack(len(payload), kind)
    if len(payload) < 65536:
        sock.sendall(header + payload)
    else:
        sock.sendall(header)
        sock.sendall(payload)


def receive_frame(sock: socket.socket) -> tuple[int, bytes]:
    """Return the next frame; blocks, and raises ConnectionError if the peer has closed."""
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


class Answer:
    """The listening side of one handshake; whoever has the connection sends and receives."""

    def __init__(self, secret: bytes | None) -> None:
        self.nonce = os.urandom(_NONCE)
        """What to send first."""
        self._secret = secret

    def judge(self, introduction: bytes) -> tuple[int, bytes]:
        """Return the rank of the connecting side, and what to send it as the last step.

        Raises:
            AuthenticationError: It does not know the secret. Then REFUSAL is what to send it.
        """
        magic, rank, theirs = _HELLO.unpack_from(introduction)
        proof = introduction[_HELLO.size :]
        if magic != _MAGIC or not hmac.compare_digest(
            proof, _proof(self._secret, b"peer", self.nonce, theirs, rank)
        ):
            raise AuthenticationError("a stranger, or a replica with another ADAPTDL_SECRET")
        return int(rank), _proof(self._secret, b"root", theirs, self.nonce, rank)


def introduce(
    sock: socket.socket, secret: bytes | None, rank: int, timeout: float = HANDSHAKE_SECONDS
) -> None:
    """Do the connecting side of the handshake.

    Raises:
        AuthenticationError: One side does not know the secret of the other one.
        OSError: The listening side did not answer, or had too many to answer: to try again may help.
    """
    sock.settimeout(timeout)
    theirs, nonce = _receive(sock, _NONCE), os.urandom(_NONCE)
    sock.sendall(_HELLO.pack(_MAGIC, rank, nonce) + _proof(secret, b"peer", theirs, nonce, rank))
    proof = _receive(sock, _PROOF)
    if proof == REFUSAL:
        raise AuthenticationError("rank 0 refused this replica: is ADAPTDL_SECRET the same?")
    if not hmac.compare_digest(proof, _proof(secret, b"root", nonce, theirs, rank)):
        raise AuthenticationError("rank 0 does not know ADAPTDL_SECRET")
    sock.settimeout(None)
