"""One small run of each kernel, for compute-sanitizer."""

from __future__ import annotations

import triton_check

for check in (
    lambda: triton_check.decode(s_q=2, extra_bytes=288, lens=(0, 5)),
    lambda: triton_check.decode(s_q=133, extra_bytes=528, pattern="alternating", lens=(127, 3)),
    lambda: triton_check.prefill(s_q=3, lens=(0, 1, 100)),
    triton_check.inserts,
    triton_check.gathers,
    triton_check.index_ops,
    triton_check.permutes,
):
    print(check())
