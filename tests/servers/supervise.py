"""Between a test process and a server that it starts: the server never outlives the tests.

    python -m tests.servers.supervise PARENT_PID DIRECTORY FILE... -- COMMAND...

Runs COMMAND, tells its pid, and ends with it. When the parent is gone, however it went, the server
is killed, and DIRECTORY and FILEs are removed. When this process is killed, the kernel kills the
server.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys

from orchestrator.spawn.lifeline import die_with_parent


def main(parent_pid: int, leaves: list[str], command: list[str]) -> int:
    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:
        return 1
    own_pid = os.getpid()
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=lambda: die_with_parent(own_pid, signal.SIGKILL),
    )
    print(server.pid, flush=True)
    ends = select.poll()
    ends.register(parent, select.POLLIN)
    ends.register(os.pidfd_open(server.pid), select.POLLIN)
    if any(fd == parent for fd, _ in ends.poll()):
        server.kill()
        server.wait()
        for path in leaves:
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            elif os.path.lexists(path):
                os.unlink(path)
    return server.wait() & 0xFF


if __name__ == "__main__":
    split = sys.argv.index("--")
    sys.exit(main(int(sys.argv[1]), sys.argv[2:split], sys.argv[split + 1 :]))
