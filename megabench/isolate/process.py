"""One worker process as its parent sees it: jobs in, rows out, and how it ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megabench.isolate.messages import MESSAGE, Job, Message, Setup
from megabench.results.schema import Cause

TAIL_BYTES = 4096
"""Of a worker's output, kept for the row of a case that ends badly."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megabench.isolate.worker import main; main()"
)
_CHUNK = 1 << 16
_PIPE_BYTES = 1 << 20
"""As much as a pipe may hold, and more than it does by default."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class Ending(NamedTuple):
    """Why a job has no result."""

    cause: Cause
    reason: str
    output: str = ""


class Worker:
    """A fresh interpreter in a session of its own, so that a Ctrl-C is the parent's to handle."""

    def __init__(self, setup: Setup) -> None:
        jobs, self._jobs = os.pipe()
        self.rows, rows = os.pipe()
        self.output, output = os.pipe()
        words = [json.dumps(sys.path), str(jobs), str(rows), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", _BOOT, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(jobs, rows),
            start_new_session=True,
        )
        for theirs in (jobs, rows, output):
            os.close(theirs)
        for ours in (self.rows, self.output):
            os.set_blocking(ours, False)
        self._line = b""
        self._tail = b""
        self.written = 0
        """Bytes of output since the last job was sent."""
        self._oom_kills = _oom_kills()
        self._send(setup.model_dump_json())

    def send(self, job: Job) -> None:
        """Hand over a job; a worker that is gone is noticed by `exited`."""
        self.written, self._tail = 0, b""
        self._send(job.model_dump_json())

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):
            os.write(self._jobs, line.encode() + b"\n")

    def messages(self) -> list[Message]:
        """What has come up since the last call; a line cut off by death is dropped."""
        data = b"".join(_drain(self.rows))
        *lines, self._line = (self._line + data).split(b"\n")
        return [MESSAGE.validate_json(line) for line in lines]

    def read_output(self, limit: int) -> bool:
        """Take in what backends printed -> whether it is still within `limit` bytes."""
        for chunk in _drain(self.output):
            self.written += len(chunk)
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if self.written > limit:
                return False
        return True

    @property
    def tail(self) -> str:
        """The end of the output, as text."""
        return self._tail.decode(errors="replace").strip()

    def exited(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def ending(self) -> Ending:
        """How a process that is gone went."""
        code = self._process.wait()
        self.read_output(self.written + _PIPE_BYTES)
        if code >= 0:
            reason = f"the process left with exit code {code} in the middle of the case"
            return Ending("exit", reason, self.tail)
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            return Ending("out_of_memory", "killed by the kernel for want of memory", self.tail)
        name = signal.Signals(-code).name
        return Ending("crash", f"the process crashed: {name}{self._where()}", self.tail)

    def hung(self, seconds: float) -> Ending:
        """The ending of a job that ran out of time, with where it was; to be killed next."""
        self._tail = b""
        self._process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not self._where():
            time.sleep(0.02)
            self.read_output(self.written + _PIPE_BYTES)
        reason = f"no result after {seconds:g} s{self._where()}"
        return Ending("timeout", reason, self.tail)

    def _where(self) -> str:
        """The frame a traceback in the output points at."""
        found = _FRAME.search(self.tail)
        return f", in {found[3]} ({Path(found[1]).name}:{found[2]})" if found else ""

    def kill(self) -> None:
        """End the process and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for fd in (self._jobs, self.rows, self.output):
            os.close(fd)


def _drain(fd: int) -> list[bytes]:
    """What a non-blocking pipe holds, even if more is being written all the time."""
    chunks: list[bytes] = []
    while len(chunks) * _CHUNK < _PIPE_BYTES:
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            break
        if not chunk:
            break
        chunks.append(chunk)
    return chunks


def _oom_kills() -> int:
    """Processes the kernel has killed for memory since it started; 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0
