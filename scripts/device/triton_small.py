"""One small run of each kernel of a backend, for compute-sanitizer.

PYTHONPATH=.:tests/backends python scripts/device/triton_small.py [triton|sm90] [NAME ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import attention_checks
import op_checks
from attention_checks import decode, prefill

SMALL: dict[str, Callable[[], float]] = {
    "decode split": lambda: decode(s_q=2, extra_bytes=288, lens=(0, 5)),
    "decode": lambda: decode(s_q=133, extra_bytes=528, pattern="alternating", lens=(127, 3)),
    "prefill": lambda: prefill(s_q=3, lens=(0, 1, 100)),
    "prefill plain": attention_checks.prefill_plain,
    "inserts": op_checks.inserts,
    "gathers": op_checks.gathers,
    "index ops": op_checks.index_ops,
    "permutes": op_checks.permutes,
    "linears": op_checks.linears,
    "einsums": op_checks.einsums,
}


def main() -> None:
    attention_checks.chosen, *names = sys.argv[1:] or ["triton"]
    for name in names or SMALL:
        print(f"{name:14} {SMALL[name]():.3f}", flush=True)


if __name__ == "__main__":
    main()
