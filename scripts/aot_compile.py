"""Compile the triton backend's declared kernel variants for GPUs this machine need not have.

For every variant and architecture the cubin's registers, stack, spills and shared memory are read
with the `cuobjdump` that ships with Triton. Exit 1 when a kernel spills more than its variant
declares, or needs more shared memory than the architecture gives a block.

    python scripts/aot_compile.py [--only SUBSTRING] [--arch 90]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from aot_variants import ARCHITECTURES, MAX_COMPILATIONS, VARIANTS, Variant
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
DIVISIBLE = [["tt.divisibility", 16]]
"""What the runtime finds of pointers from the allocator and of strides."""
ALIGNED = ("D", "K", "w_scale_word", "w_scale_group", "x_scale_group")
"""Sizes that are multiples of 16 in the model."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor."""

    registers: int
    stack: int
    spilled: int
    """Bytes of local memory a thread stores and loads in spills."""
    shared: int


def source_of(variant: Variant, capability: int) -> ASTSource | GluonASTSource:
    """The kernel with the variant's argument types and compile-time values for a capability."""
    names = variant.kernel.arg_names
    constants = variant.constants(capability)
    signature = {name: "constexpr" if name in constants else variant.types[name] for name in names}
    aligned = {
        (i,): DIVISIBLE
        for i, name in enumerate(names)
        if signature[name].startswith("*") or "stride" in name or name in ALIGNED
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    kind = GluonASTSource if isinstance(variant.kernel, GluonJITFunction) else ASTSource
    return kind(variant.kernel, signature, values, aligned)


def resources_of(compiled: Any) -> Resources:
    """Registers, stack and shared memory of a compiled kernel, as the driver will see them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    stack = found["STACK"]
    return Resources(found["REG"], stack, stack + found["LOCAL"], compiled.metadata.shared)


def problems(variant: Variant, capability: int, used: Resources) -> Iterator[str]:
    """Why this compilation is not acceptable."""
    limit = ARCHITECTURES[capability].shared_limit
    if used.shared > limit:
        yield f"shared memory {used.shared} B exceeds the {limit} B a block may have"
    allowed = variant.spills.get(capability, 0)
    if used.spilled > allowed:
        yield f"{used.spilled} B of local memory, {allowed} B declared"


def compile_variant(variant: Variant, capability: int) -> Any:
    """The compiled kernel of a variant for a capability."""
    target = GPUTarget("cuda", capability, 32)
    options = {
        "num_warps": variant.warps(capability),
        "num_stages": variant.stages(capability),
        "maxnreg": variant.max_registers,
    }
    return triton.compile(source_of(variant, capability), target=target, options=options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="variants whose name has this")
    parser.add_argument("--arch", type=int, help="one capability, for example 90")
    chosen = parser.parse_args()
    compilations = [
        (variant, capability)
        for variant in VARIANTS
        for capability in variant.capabilities
        if chosen.only in variant.name and chosen.arch in (None, capability)
    ]
    if len(compilations) > MAX_COMPILATIONS:
        parser.error(f"{len(compilations)} compilations declared, {MAX_COMPILATIONS} allowed")
    failed = 0
    for variant, capability in compilations:
        start = time.monotonic()
        used = resources_of(compile_variant(variant, capability))
        wrong = list(problems(variant, capability, used))
        failed += bool(wrong)
        print(
            f"{variant.name:24} sm_{capability:<4} {used.registers:4} regs "
            f"{used.spilled:5} B local {used.shared:7} B shared "
            f"{time.monotonic() - start:6.1f} s  {'; '.join(wrong) or 'ok'}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
