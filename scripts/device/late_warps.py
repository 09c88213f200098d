"""sm90 kernels whose warps come late by chance, and in which a wait without end is an error.

    python scripts/device/late_warps.py scripts/device/sm90_decode.py check

runs a script with these in place of the kernels as they are.
A hand-over that only timing keeps right works in every run, until one day it does not. Here a warp
sleeps, one time in eight and up to 2 us, before it arrives or waits; who waits for a second traps.
"""

from __future__ import annotations

import re
import runpy
import sys
from unittest.mock import patch

from megabench.backends.sm90 import nvrtc

LATE = """
DEVICE void come_late() {
  u32 clock, warp;
  asm volatile("mov.u32 %0, %%clock;\\nmov.u32 %1, %%warpid;" : "=r"(clock), "=r"(warp));
  u32 chance = (clock ^ warp * 0x9e3779b9u) * 0x85ebca6bu;
  chance ^= chance >> 15;
  chance *= 0xc2b2ae35u;
  if (chance >> 29 == 0) __nanosleep(chance >> 8 & 2047);
}
"""
PATIENT_WAIT = """DEVICE void mbar_wait(u32 bar, u32 parity) {
  come_late();
  const u32 start = clock();
  for (u32 done = 0; !done;) {
    asm volatile(
        "{\\n.reg .pred done;\\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\\n"
        "selp.u32 %0, 1, 0, done;\\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    if ((u32)clock() - start > 2000000000u) __trap();
  }
}
"""
WAIT = re.compile(r"DEVICE void mbar_wait\(.*?\n}\n", re.DOTALL)
MEETINGS = re.compile(r"(DEVICE void (?:mbar_arrive|bar_sync|bar_arrive)\([^)]*\) {\n)")
FIRST = "// ---- mbarriers\n"


def late_sources(files: dict[str, bytes]) -> dict[str, bytes]:
    """A kernel's files with `ptx.cuh` changed."""
    text = files["ptx.cuh"].decode()
    text, waits = WAIT.subn(lambda _: PATIENT_WAIT, text)
    text, meetings = MEETINGS.subn(r"\1  come_late();\n", text)
    if (waits, meetings, text.count(FIRST)) != (1, 3, 1):
        raise ValueError("ptx.cuh names its barriers otherwise than late_warps.py expects")
    return files | {"ptx.cuh": text.replace(FIRST, FIRST + LATE).encode()}


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sources = nvrtc.sources
    with patch.object(nvrtc, "sources", lambda entry: late_sources(sources(entry))):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
