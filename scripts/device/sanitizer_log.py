"""Reads what compute-sanitizer prints, and line tables out of cubins.

A hazard of racecheck is one byte of shared memory in one block; findings count those of the same
kind between the same two source lines (its analysis counts them itself, without kind or address).
Reports of the other tools are counted by title and place.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

PREFIX = "========="
HAZARD = re.compile(
    r"(?P<severity>\w+): .*?(?P<kind>RAW|WAR|WAW) hazard detected(?P<barrier> \([^)]*\))?"
    r" at (?P<space>__\w+__) 0x(?P<address>[0-9a-f]+) in block (?P<block>\([^)]*\))"
)
ACCESS = re.compile(r"(?P<what>\w+) Thread \(.*?\) at (?P<place>.+)")
PLACE = re.compile(
    r"(?P<function>.+?)\+0x(?P<offset>[0-9a-f]+)(?: in (?P<file>\S+):(?P<line>\d+))?$"
)
RACE = re.compile(r"(?P<severity>\w+): Race reported between (?P<what>\w+) access at (?P<place>.+)")
OTHER = re.compile(r"and (?P<what>\w+) access at (?P<place>.+?) \[(?P<count>\d+) hazards?\]")
SUMMARY = re.compile(r"\w+ SUMMARY: .*")
CTA_BITS = 24
"""Bits of a shared address inside its CTA; a cluster's ranks lie above."""
HELPERS = ("ptx.cuh", "ring.cuh", "wgmma.cuh", "wgmma_registers.cuh")
"""Files of one-instruction functions, whose caller says more."""

LineTable = dict[tuple[int, str], str]
"""(byte offset in a kernel, innermost line) -> the kernel and its line outside the helpers."""


class Finding(NamedTuple):
    """What the tool says again and again: a kind and the source lines that meet."""

    title: str
    places: tuple[str, ...]


@dataclass
class Extent:
    """How often a finding was reported, and between which shared addresses of a CTA."""

    count: int = 0
    low: int | None = None
    high: int | None = None

    def add(self, address: int | None, count: int) -> None:
        self.count += count
        if address is not None:
            self.low = address if self.low is None else min(self.low, address)
            self.high = address if self.high is None else max(self.high, address)


@dataclass
class Report:
    """One run's findings, the tool's own closing lines, and lines that say something else."""

    findings: dict[Finding, Extent] = field(default_factory=dict)
    summaries: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, finding: Finding, address: int | None = None, count: int = 1) -> None:
        self.findings.setdefault(finding, Extent()).add(address, count)


def records(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """(first line, indented lines) of each report of the tool, prefixes taken off."""
    head, rest = "", list[str]()
    for line in lines:
        if not line.startswith(PREFIX):
            continue
        text = line[len(PREFIX) :].rstrip()
        if text.startswith("   "):
            rest.append(text.strip())
            continue
        if head:
            yield head, rest
        head, rest = text.strip(), []
    if head:
        yield head, rest


def place_of(text: str, table: LineTable) -> str:
    """A line for `function+0x.. [in file:line]`: the table's, else the tool's, else `text`."""
    found = PLACE.match(text)
    if found is None or found["file"] is None:
        return text
    line = f"{found['file']}:{found['line']}"
    return table.get((int(found["offset"], 16), line), f"{found['function'].split('(')[0]} {line}")


def side(access: re.Match[str], table: LineTable) -> str:
    return f"{access['what'].lower()} {place_of(access['place'], table)}"


def read_log(lines: Iterable[str], table: LineTable) -> Report:
    """What a log says, with code offsets as source lines where `table` or the tool knows them."""
    report = Report()
    for head, rest in records(lines):
        at = next((line for line in rest if line.startswith("at ")), None)
        if (hazard := HAZARD.match(head)) is not None:
            places = tuple(side(access, table) for access in map(ACCESS.match, rest) if access)
            kind = f"{hazard['severity']} {hazard['kind']}{hazard['barrier'] or ''}"
            address = int(hazard["address"], 16) % (1 << CTA_BITS)
            report.add(Finding(f"{kind} {hazard['space']}", places), address)
        elif (race := RACE.match(head)) is not None:
            for other in filter(None, map(OTHER.match, rest)):
                places = (side(race, table), side(other, table))
                report.add(Finding(f"{race['severity']} race", places), count=int(other["count"]))
        elif SUMMARY.match(head):
            report.summaries.append(head)
        elif at is not None:
            report.add(Finding(head, (place_of(at[3:], table),)))
        elif head != "COMPUTE-SANITIZER":
            report.notes[re.sub(r"0x[0-9a-f]+", "0x..", " | ".join((head, *rest[:2])))] += 1
    return report


FRAME = re.compile(r'//## File "(?P<file>[^"]+)", line (?P<line>\d+)(?P<inlined> inlined at)?')
INSTRUCTION = re.compile(r"\s*/\*(?P<offset>[0-9a-f]+)\*/")
SECTION = re.compile(r"\.text\.(?P<kernel>\w+):")


def read_disassembly(lines: Iterable[str]) -> LineTable:
    """The line table in `nvdisasm -c -gi` output: of inlined frames, the innermost that is no
    helper's."""
    table: LineTable = {}
    kernel, frames, fresh = "", list[str](), False
    for line in lines:
        if (section := SECTION.match(line)) is not None:
            kernel = section["kernel"]
        elif (frame := FRAME.search(line)) is not None:
            if not fresh:
                frames, fresh = [], True
            frames.append(f"{Path(frame['file']).name}:{frame['line']}")
        elif (instruction := INSTRUCTION.match(line)) is not None:
            fresh = False
            outside = [f for f in frames if f.split(":")[0] not in HELPERS]
            if outside:
                table[int(instruction["offset"], 16), frames[0]] = f"{kernel} {outside[0]}"
    return table


def line_table(nvdisasm: Path, cubins: Iterable[Path]) -> LineTable:
    """The line tables of cubins, together."""
    table: LineTable = {}
    for cubin in cubins:
        ran = subprocess.run([nvdisasm, "-c", "-gi", cubin], capture_output=True, text=True)
        table |= read_disassembly(ran.stdout.splitlines())
    return table
