"""The run folder: one `results.jsonl`, appended and fsynced row by row.

A run cut short leaves every finished row and at most one torn last line, which reading tolerates
and reports. A bad line anywhere else is an error: silence there would hide results.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter, ValidationError

from megabench.results.schema import CaseResult, Ceilings, Comparison, Row, RunEnd, RunHeader

RESULTS = "results.jsonl"
_ROW: TypeAdapter[Row] = TypeAdapter(Row)


class StoreError(OSError):
    """A run folder that cannot be made or read; the message names the path and the reason."""


def now() -> str:
    """The time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunFolder:
    """The folder of a run in progress; `append` is durable when it returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / RESULTS
        self.cases_written = 0
        self._file = self.results.open("ab")
        _lock(self._file, self.results)

    @classmethod
    def create(cls, out: str | Path, command: str) -> RunFolder:
        """Make `<out>/<UTC stamp>-<command>[-n]/`, never reusing an existing folder.

        StoreError, with nothing left behind, when `out` cannot be made or written.
        """
        root = Path(out)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        base = f"{stamp}-{command}"
        for n in range(1, 1000):
            path = root / (base if n == 1 else f"{base}-{n}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                if not root.is_dir():
                    raise StoreError(f"--out {root}: not a folder") from None
            except OSError as error:
                raise StoreError(f"--out {root}: cannot be written ({error.strerror})") from error
        raise StoreError(f"--out {root}: holds a thousand runs of this second")

    @classmethod
    def reopen(cls, path: str | Path) -> tuple[RunFolder, Run]:
        """Continue a run that was cut short -> the folder and the rows it has.

        A torn last line is cut off. StoreError when there is no run, it cannot be written, or
        another process is writing it.
        """
        root = Path(path)
        read_run(root)  # before opening makes a file where there is no run
        try:
            folder = cls(root)
            _mend(folder.results)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{root}: {error.strerror or error}") from error
        run = read_run(root)
        folder.cases_written = len(run.cases)
        return folder, run

    def append(self, row: Row) -> None:
        """Write one row as a line and force it to the disk."""
        self._file.write(row.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if isinstance(row, CaseResult):
            self.cases_written += 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _lock(file: BinaryIO, path: Path) -> None:
    """Keep other processes from writing `path` while `file` is open, where the system can."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StoreError(f"{path}: another process is writing it") from None
    except OSError:  # a file system without locks
        pass


def _mend(path: Path) -> None:
    """Make the file end with a whole line: a torn one is cut off, a whole one gets its newline."""
    data = path.read_bytes()
    last = data.rpartition(b"\n")[2]
    if not last:
        return
    try:
        _ROW.validate_json(last)
    except ValidationError:
        os.truncate(path, len(data) - len(last))
    else:
        with path.open("ab") as file:
            file.write(b"\n")


@dataclass
class Run:
    """A run read back. Every part may be absent: a run cut short is still a run."""

    path: Path
    header: RunHeader | None = None
    ceilings: Ceilings | None = None
    cases: list[CaseResult] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    end: RunEnd | None = None
    torn: bool = False
    """The last line was cut short and was left out."""


def read_run(path: str | Path) -> Run:
    """Read a run folder or a `results.jsonl`.

    StoreError when there is none, or when a line other than a torn last one is no row.
    """
    file = Path(path)
    if file.is_dir():
        file = file / RESULTS
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror})") from error
    run = Run(file.parent)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _ROW.validate_json(line)
        except ValidationError as error:
            if number == len(lines):  # no newline after it: the write was cut short
                run.torn = True
                break
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            what = first["msg"].removeprefix("Value error, ")
            parts = filter(None, (f"{file}:{number}", where, what))
            raise StoreError(": ".join(parts)) from error
        _file_row(run, row)
    return run


def _file_row(run: Run, row: Row) -> None:
    match row:
        case RunHeader():
            run.header = row
        case Ceilings():
            run.ceilings = row
        case CaseResult():
            run.cases.append(row)
        case Comparison():
            run.comparisons.append(row)
        case RunEnd():
            run.end = row
