"""Send and receive frames between replicas, after a handshake.

A frame is 8 bytes of length, a byte of kind, the payload, and a tag. Before the first frame both sides prove
that they know the same key: each sends an HMAC-SHA256 over the nonces of both sides. Neither replaying nor
reflecting an earlier message passes this check. The tag of a frame is an HMAC by a key of this connection and
direction, over the frame's number and content: a stranger between the two sides can end the connection, but
cannot add, repeat or leave out a frame. Without a secret nothing is proved, and frames have no tag.

A value is encoded as plain data (`_codec`), whose decoding runs no code. Only *objects*, values of any type
from the script, are pickled, and they are marked as such. A receiver unpickles a value only if it expects an
object and its peer has proved that it knows the key.
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
_MAGIC = b"ADL2"
_MAX_FRAME = 1 << 34  # bytes
_NONCE, _PROOF, _TAG = 16, 32, 16  # bytes

REFUSAL = bytes(_PROOF)
"""Bytes that the listening side sends, instead of its proof, to a peer that it refuses."""

HANDSHAKE_SECONDS = 10.0
"""Largest duration of a handshake, in seconds."""

INTRODUCTION = _HELLO.size + _PROOF
"""Number of bytes that the connecting side sends in a handshake."""

_PLAIN, _OBJECT = b"p", b"o"
_NO_SECRET = (
    "objects of any type are exchanged only between replicas that share a secret: set the same "
    "ADAPTDL_SECRET for all of them"
)


class AuthenticationError(ConnectionError):
    """Raised if the other side does not know the secret."""


def pack(value: object, objects: bool = False) -> bytes:
    """Return `value` as bytes.

    Args:
        value: Plain data; if `objects`, any object that can be pickled.
        objects: Whether to pickle the value. Unpickling it runs code in the receiver.

    Raises:
        NotPlainError: `value` is not plain data, and `objects` is False.
    """
    if objects:
        return _OBJECT + pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _PLAIN + _codec.encode(value)


def pack_for_strangers(value: object) -> bytes:
    """Return a value of the script as bytes for replicas that share no secret: plain data only.

    Raises:
        NotPlainError: `value` is not plain data.
    """
    try:
        return pack(value)
    except _codec.NotPlainError as error:
        raise _codec.NotPlainError(f"{error}; {_NO_SECRET}") from None


def unpack(data: bytes | memoryview, objects: bool = False) -> Any:
    """Return the value that `pack` encoded as `data`.

    Args:
        data: Bytes received from a peer.
        objects: Whether the peer has proved that it knows the key, and an object of the script is expected.

    Raises:
        CodecError: `data` was not made by `pack`, or holds an object although none is expected.
    """
    kind, body = bytes(data[:1]), memoryview(data)[1:]
    if kind == _PLAIN:
        return _codec.decode(body)
    if kind == _OBJECT and objects:
        return pickle.loads(body)
    raise _codec.CodecError("an object where only plain data may come" if kind == _OBJECT else "garbage")


class FrameKeys:
    """Compute the tags of the frames of one connection, in both directions.

    Args:
        secret: Secret that both sides know; None: frames have no tags.
        listening: The nonce of the listening side.
        connecting: The nonce of the connecting side.
        listens: Whether this is the listening side.
    """

    def __init__(self, secret: bytes | None, listening: bytes, connecting: bytes, listens: bool) -> None:
        self._keys: dict[bool, bytes] | None = None
        if secret is not None:
            to_root, to_peer = (
                hmac.digest(secret, b"frames " + name + listening + connecting, "sha256")
                for name in (b"to root", b"to peer")
            )
            self._keys = {True: to_peer, False: to_root} if listens else {True: to_root, False: to_peer}
        self._counts = {True: 0, False: 0}  # frames so far; True: those that this side sends

    def tag(self, header: bytes, payload: bytes, sends: bool) -> bytes:
        """Return the tag of the next frame of one direction."""
        if self._keys is None:
            return b""
        self._counts[sends] += 1
        message = b"".join((self._counts[sends].to_bytes(8, "big"), header, payload))
        return hmac.digest(self._keys[sends], message, "sha256")[:_TAG]


def send_frame(sock: socket.socket, keys: FrameKeys, kind: int, payload: bytes) -> None:
    """Send one frame, and return when it is sent. Callers send the frames of a connection one at a time."""
    header = _HEADER.pack(len(payload), kind)
    tag = keys.tag(header, payload, sends=True)
    if len(payload) < 65536:
        sock.sendall(header + payload + tag)
    else:
        sock.sendall(header)
        sock.sendall(payload)
        sock.sendall(tag)


def receive_frame(sock: socket.socket, keys: FrameKeys) -> tuple[int, bytes]:
    """Wait for the next frame, and return its kind and payload.

    Raises:
        ConnectionError: the peer has closed the connection, or the frame's tag is wrong.
    """
    header = _receive(sock, _HEADER.size)
    length, kind = _HEADER.unpack(header)
    if length > _MAX_FRAME:
        raise ConnectionError(f"a frame of {length} bytes: this is not one of our peers")
    payload = _receive(sock, length)
    wanted = keys.tag(header, payload, sends=False)
    if not hmac.compare_digest(_receive(sock, len(wanted)), wanted):
        raise ConnectionError("a frame that the peer has not sent: the connection was tampered with")
    return kind, payload


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
    """Compute the listening side's messages of one handshake; the caller sends and receives them."""

    def __init__(self, secret: bytes | None) -> None:
        self.nonce = os.urandom(_NONCE)
        """The first message to send."""
        self._secret = secret

    def judge(self, introduction: bytes) -> tuple[int, bytes, FrameKeys]:
        """Check the connecting side's message; return its rank, the last message to send, and the keys.

        Raises:
            AuthenticationError: the connecting side does not know the secret. The caller sends REFUSAL.
        """
        magic, rank, theirs = _HELLO.unpack_from(introduction)
        proof = introduction[_HELLO.size :]
        if magic != _MAGIC or not hmac.compare_digest(
            proof, _proof(self._secret, b"peer", self.nonce, theirs, rank)
        ):
            raise AuthenticationError("a stranger, or a replica with another ADAPTDL_SECRET")
        keys = FrameKeys(self._secret, self.nonce, theirs, listens=True)
        return int(rank), _proof(self._secret, b"root", theirs, self.nonce, rank), keys


def introduce(
    sock: socket.socket, secret: bytes | None, rank: int, timeout: float = HANDSHAKE_SECONDS
) -> FrameKeys:
    """Do the connecting side of the handshake, and return the keys of the frames.

    Args:
        sock: A connection to the listening side.
        secret: Secret that both sides must know; None: no secret.
        rank: Rank of this replica.
        timeout: Time limit of each operation on the connection, in seconds.

    Raises:
        AuthenticationError: the two sides do not have the same secret.
        OSError: the listening side did not answer, or has too many connections. Trying again may help.
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
    return FrameKeys(secret, theirs, nonce, listens=False)
