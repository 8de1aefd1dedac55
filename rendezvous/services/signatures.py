"""Sign texts with a person's SSH key, and check such signatures, by `ssh-keygen -Y`.

OpenSSH is on every node already, so neither a package nor a certificate of the person is needed. A person's
key may be any that `ssh-keygen` signs with.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from adaptdl_elastic.rendezvous.schema.records import HEAVIEST
from adaptdl_elastic.rendezvous.schema.submissions import MOST_PRIORITY, PERSON_PATTERN

NAMESPACE = "adaptdl"
"""Namespace of the signatures: a signature made for another program is not valid here."""

_SECONDS = 20.0  # that one call of ssh-keygen may take
_PERSON = re.compile(PERSON_PATTERN)
_KEY = re.compile(r"(ssh-|ecdsa-|sk-)[A-Za-z0-9@.-]+ [A-Za-z0-9+/=]+")


class SignatureError(Exception):
    """A text cannot be signed, or a signature is not valid; the message says why."""


class UncheckedError(SignatureError):
    """Nothing is known about the signature, because ssh-keygen could not be run; later it may be possible."""


@dataclass(frozen=True)
class Person:
    """A person who may use the cluster.

    Attributes:
        name: Name of the person.
        key: Public key: type and base64, as in the first two words of a `.pub` file.
        admin: Whether the person may see and cancel other people's jobs, and drain nodes.
        most_priority: Largest priority that the person's jobs have, whatever they ask for; None: 0, or
            `MOST_PRIORITY` for an administrator.
        most_weight: Largest weight that counts, likewise; None: 1, or `HEAVIEST` for an administrator.
    """

    name: str
    key: str
    admin: bool = False
    most_priority: int | None = None
    most_weight: float | None = None

    def __post_init__(self) -> None:
        if not _PERSON.fullmatch(self.name):
            raise SignatureError(
                f"person {self.name!r} cannot be used: letters, digits, '.', '_', '@', '-' only, at most 64"
            )
        if not _KEY.fullmatch(self.key):
            raise SignatureError(f"the key of {self.name} is no public key of OpenSSH: give a .pub file")

    @property
    def priority_limit(self) -> int:
        """Largest priority that the person's jobs have."""
        if self.most_priority is not None:
            return self.most_priority
        return MOST_PRIORITY if self.admin else 0

    @property
    def weight_limit(self) -> float:
        """Largest weight that the person's jobs have."""
        if self.most_weight is not None:
            return self.most_weight
        return HEAVIEST if self.admin else 1.0


# its key signs nothing that counts
_UNKNOWN = Person(
    "unknown", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAICxG5FC52pO6UQTuOtmcGx5hciuyBmlR+TThWUZwLOTy"
)
People = Mapping[str, Person]
_PEOPLE = TypeAdapter(list[Person])


def public_key(text: str) -> str:
    """Return type and base64 of the key in the text of a `.pub` file."""
    return " ".join(text.split()[:2])


def encode_people(people: People) -> str:
    """Return the content of `people.json`."""
    return json.dumps([asdict(people[name]) for name in sorted(people)], indent=1) + "\n"


def decode_people(text: str) -> dict[str, Person]:
    """Return what `encode_people` wrote.

    Raises:
        SignatureError: the text holds something else.
    """
    try:
        people = _PEOPLE.validate_json(text, strict=True)
    except ValidationError as error:
        raise SignatureError(f"the list of people is damaged: {error.errors()[0]['msg']}") from None
    return {person.name: person for person in people}


def request_text(cluster_id: str, node: str, method: str, target: str, body_digest: str, moment: str) -> str:
    """Return the text that a person signs to ask a node service for something.

    It names the node, so that a node service cannot use a request of a person at another node, and the moment
    (seconds since 1970), so that a request that has leaked is not good for ever.
    """
    return "\n".join(("adaptdl request", cluster_id, node, method, target, body_digest, moment))


def digest(data: bytes) -> str:
    """Return the SHA-256 of data as hexadecimal text."""
    return hashlib.sha256(data).hexdigest()


def record_text(cluster_id: str, kind: str, record: str) -> str:
    """Return the text that a person signs for a record of the store."""
    return "\n".join(("adaptdl record", cluster_id, kind, record))


def sign(key: Path, text: str) -> str:
    """Return the signature of a text by the private key in a file (or by its public key and the SSH agent).

    Raises:
        SignatureError: it cannot be signed.
    """
    command = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE]
    armored = _run(command, text, f"the key {key} cannot sign")
    return base64.b64encode(armored.encode()).decode()


def verify(people: People, name: str, text: str, signature: str) -> Person:
    """Return the person of this name, who has signed the text.

    Raises:
        SignatureError: there is no such person, or the person has not signed the text.
        UncheckedError: that cannot be found out now.
    """
    # for an unknown name ssh-keygen runs, too: the time of an answer does not tell which names are known
    person = people.get(name, _UNKNOWN)
    try:
        armored = base64.b64decode(signature, validate=True)
    except ValueError:
        raise SignatureError("the signature is damaged") from None
    try:
        with tempfile.TemporaryDirectory(prefix="adaptdl-verify-") as folder:
            signers, signed = Path(folder) / "signers", Path(folder) / "signature"
            signers.write_text(f'{person.name} namespaces="{NAMESPACE}" {person.key}\n')
            signed.write_bytes(armored)
            command = ["ssh-keygen", "-q", "-Y", "verify", "-f", str(signers), "-I", person.name]
            command += ["-n", NAMESPACE, "-s", str(signed)]
            _run(command, text, f"the signature is not one of {person.name}'s key")
    except SignatureError:
        if person is not _UNKNOWN:
            raise
    except OSError as error:  # a full disk
        raise UncheckedError(f"the signature of {name!r} cannot be checked: {error}") from None
    if person is _UNKNOWN:
        raise SignatureError(
            f"{name!r} may not use this cluster: an administrator runs adaptdl cluster grant {name} KEY.pub"
        )
    return person


def _run(command: list[str], text: str, problem: str) -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        raise UncheckedError("ssh-keygen is not installed: install OpenSSH's client (8.1 or later)") from None
    except OSError as error:  # no process can be started
        raise UncheckedError(f"ssh-keygen cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise UncheckedError(f"ssh-keygen has not answered after {_SECONDS:g} s") from None
    if done.returncode < 0:
        raise UncheckedError(f"ssh-keygen was ended by signal {-done.returncode}")
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise SignatureError(f"{problem}: {said or f'ssh-keygen exits with {done.returncode}'}")
    return done.stdout
