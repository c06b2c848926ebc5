"""An S3 in a process of its own, which can be stopped."""

import os
import signal
import subprocess
import sys


class Server:
    """Accepts connections after `freeze`, and answers nothing, as a hung machine."""

    bucket = "bucket"

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, self.bucket],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        # Until then its threads go on.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


_PROGRAM = f"""
import sys
from {__package__}.moto_s3 import Server

server = Server()
server.make_bucket(sys.argv[1])
print(server.port, flush=True)
sys.stdin.read()
server.stop()
"""
