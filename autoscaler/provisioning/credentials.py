"""The certificates, passwords and keys of a cluster, in the directory of its context on the user's machine.

The certificates are made by `openssl`, as docs/explanation/security.md does by hand. A file that exists is
used again; a certificate is made again before it expires, or when its node has another address.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.service_config import NODE_SUBJECT
from adaptdl_elastic.rendezvous.services.signatures import Person, SignatureError

_CA_DAYS = 3650
_DAYS = 825
_RENEW_SECONDS = 30 * 24 * 3600
"""Seconds before its end at which a certificate is made again."""

_CLIENT = "client"


class Credentials:
    """The files of one cluster."""

    def __init__(self, context: ClusterContext) -> None:
        self._context = context
        self._directory = context.directory

    def check_authority(self) -> None:
        """Raise ProvisionError if another user has brought the cluster up, and this one may only use it."""
        if self._context.ca.exists() and not self._authority.exists():
            raise ProvisionError(
                f"cluster {self._context.name} was brought up by another user, who alone changes its nodes "
                "and people; you may use it: adaptdl submit, ls, logs"
            )

    def prepare(self) -> None:
        """Make what does not exist yet: authority, passwords, the user's key, the list of people.

        Raises:
            ProvisionError: a file cannot be made.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        self.check_authority()
        if not self._context.ca.exists():
            key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            self._openssl(
                *("req", "-x509", *key, "-days", str(_CA_DAYS), "-subj", "/CN=adaptdl CA"),
                *("-keyout", str(self._authority), "-out", str(self._context.ca)),
            )
        # without a common name: etcd's gateway refuses a client certificate that has one while it has users
        self._certificate(_CLIENT, f"/O={_CLIENT}", "DNS:localhost", "clientAuth")
        for name in ("root-password", "secret", "password"):
            if not (self._directory / name).exists():
                write_whole(self._directory / name, f"{secrets.token_hex(24)}\n")
        if not self._context.identity.exists():
            self._run(
                *("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"adaptdl {self._context.person}"),
                *("-f", str(self._context.identity)),
            )
        if not self.people_file.exists():
            key_text = self._context.identity.with_suffix(".pub").read_text()
            person = Person(self._context.person, signatures.public_key(key_text), admin=True)
            self.write_people({person.name: person})

    @property
    def _authority(self) -> Path:
        return self._directory / "ca-key.pem"

    def person_files(self, person: str, store_user: str, password: str) -> dict[str, bytes]:
        """Return what another person needs, by its path below that person's configuration directory.

        Args:
            person: Name of the person.
            store_user: The person's user of etcd.
            password: That user's password.
        """
        name = self._context.name
        own = replace(self._context, person=person, nodes=(), left=(), ssh_config="", store_user=store_user)
        files = {f"{name}.toml": contexts.encode(own).encode(), f"{name}/password": f"{password}\n".encode()}
        for file in ("ca.pem", f"{_CLIENT}.pem", f"{_CLIENT}-key.pem"):
            files[f"{name}/{file}"] = (self._directory / file).read_bytes()
        return files

    @property
    def people_file(self) -> Path:
        """The list of people."""
        return self._directory / "people.json"

    def people(self) -> dict[str, Person]:
        """Return who may use the cluster."""
        try:
            return signatures.decode_people(self.people_file.read_text())
        except (OSError, SignatureError) as error:
            raise ProvisionError(f"{self.people_file} cannot be used: {error}") from None

    def write_people(self, people: dict[str, Person]) -> None:
        """Replace the list of people."""
        write_whole(self.people_file, signatures.encode_people(people))

    def node_files(self, node: str, host: str) -> dict[str, bytes]:
        """Return the files of one node's service by which others know it, by their path there."""
        name = f"node-{node}"
        address = f"IP:{host}" if _is_address(host) else f"DNS:{host}"
        names = f"{address},DNS:localhost,IP:127.0.0.1"
        self._certificate(name, f"/O={NODE_SUBJECT}{node}", names, "serverAuth,clientAuth")
        read = {
            "pki/ca.pem": self._context.ca,
            "pki/node.pem": self._directory / f"{name}.pem",
            "pki/node-key.pem": self._directory / f"{name}-key.pem",
            "password": self._directory / "password",
            "secret": self._directory / "secret",
            "people.json": self.people_file,
        }
        return {path: source.read_bytes() for path, source in read.items()}

    def root_password(self) -> bytes:
        """Return the password of etcd's user `root`."""
        return (self._directory / "root-password").read_bytes()

    def _certificate(self, name: str, subject: str, alternative_names: str, usage: str) -> None:
        """Make a certificate and its key, unless there is one that is good for long enough.

        The usage keeps a person from posing as a server with the certificate that all people have.
        """
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}-key.pem"
        note = self._directory / f"{name}.json"
        wanted = json.dumps([subject, alternative_names, usage])
        if cert.exists() and key.exists() and note.exists() and note.read_text() == wanted:
            check = ["openssl", "x509", "-noout", "-checkend", str(_RENEW_SECONDS), "-in", str(cert)]
            if subprocess.run(check, capture_output=True, check=False).returncode == 0:
                return
        with tempfile.TemporaryDirectory(dir=self._directory) as folder:
            request, extension = Path(folder) / "request", Path(folder) / "extension"
            extension.write_text(f"subjectAltName={alternative_names}\nextendedKeyUsage={usage}\n")
            kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            self._openssl("req", *kind, "-subj", subject, "-keyout", str(key), "-out", str(request))
            self._openssl(
                *("x509", "-req", "-in", str(request), "-CA", str(self._context.ca)),
                *("-CAkey", str(self._authority), "-set_serial", str(secrets.randbits(120))),
                *("-days", str(_DAYS), "-extfile", str(extension), "-out", str(cert)),
            )
        key.chmod(0o600)
        note.write_text(wanted)

    def _openssl(self, *arguments: str) -> None:
        self._run("openssl", *arguments)

    def _run(self, *command: str) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, umask=0o077)
        except FileNotFoundError:
            raise ProvisionError(
                f"{command[0]} is not installed here, and makes the cluster's keys"
            ) from None
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise ProvisionError(f"{command[0]} {command[1]} fails in {self._directory}: {said}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
