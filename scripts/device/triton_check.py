"""Every op of a backend of ours against the golden model, on the GPU of this machine.

    PYTHONPATH=.:tests/backends python scripts/device/triton_check.py [--backend triton|sm90]
        [--only NAME] [--processes 8]

One check a line: its name and the worst error over its bound (exact ones say 0). Processes share
the work, for most of the time goes to compiling kernels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback
from collections.abc import Iterator

import attention_checks
from attention_checks import ATTENTION_CHECKS
from op_checks import OP_CHECKS

CHECKS = ATTENTION_CHECKS | OP_CHECKS


def run(names: list[str]) -> int:
    failed = 0
    for name in names:
        try:
            worst = CHECKS[name]()
            verdict = "ok" if worst <= 1 else "WRONG"
        except Exception as error:  # one broken check must not hide the others
            traceback.print_exc(limit=-3)
            worst, verdict = float("nan"), f"ERROR {type(error).__name__}: {str(error)[:300]}"
        failed += verdict != "ok"
        print(f"{name:24} {worst:8.3f}  {verdict}", flush=True)
    return failed


def shares(names: list[str], processes: int) -> Iterator[list[str]]:
    yield from (names[i::processes] for i in range(processes) if names[i::processes])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="triton", choices=("triton", "sm90"))
    parser.add_argument("--only", default="")
    parser.add_argument("--names", nargs="*", help="exactly these, in this process")
    parser.add_argument("--processes", type=int, default=8)
    chosen = parser.parse_args()
    attention_checks.chosen = chosen.backend
    if chosen.names:
        return 1 if run(chosen.names) else 0
    names = [name for name in CHECKS if chosen.only in name]
    children = [
        subprocess.Popen([sys.executable, __file__, "--backend", chosen.backend, "--names", *share])
        for share in shares(names, chosen.processes)
    ]
    return max(child.wait() for child in children)


if __name__ == "__main__":
    sys.exit(main())
