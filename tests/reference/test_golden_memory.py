"""Working memory of golden attention is set by the chunk, not by the number of tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import resource, sys, torch
from reference import attention, rope, rows

tokens = int(sys.argv[1])
kv = torch.randn(4096, 512).bfloat16()
indices = torch.randint(0, 4096, (tokens, 640))
q = torch.randn(tokens, 64, 512).bfloat16()
table = rope.cos_sin_table(8, True)
zeros = torch.zeros(tokens, dtype=torch.long)
torch.bmm(q[:1].float(), q[:1].float().transpose(1, 2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = rows.workspace_rows(kv, indices)
for part, out in attention.attend_chunks(
    q, zeros, table, source, torch.zeros(64), 0.04, torch.float64
):
    out.o.abs().amax()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_attention_in_chunks_stays_below_a_gibibyte_beyond_its_inputs() -> None:
    tokens = 256  # unchunked: 2.5 GB; every further token adds only its row numbers
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tokens)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 1 << 30
