"""Compiles the CUDA sources of this folder with NVRTC and loads the result, once per process.

The cubin is also kept in a cache directory of the user's (`MEGABENCH_CACHE`, else
`$XDG_CACHE_HOME/megabench`), named by a digest of sources and options. `cuda-bindings` is imported
only here and only when a kernel is asked for. `MEGABENCH_LINE_INFO=1` adds line tables for
profilers and sanitizers; the code stays the same.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

ARCH = "sm_90a"
SOURCE_DIR = Path(__file__).parent


class KernelBuildError(RuntimeError):
    """The kernel cannot be compiled or loaded; the message says why."""


def bindings() -> tuple[Any, Any]:
    """The (driver, nvrtc) modules of cuda-bindings; KernelBuildError where it is not installed."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise KernelBuildError(
            "sm90: the package cuda-bindings is needed to compile the kernels "
            f"(pip install cuda-bindings): {error}"
        ) from error
    return driver, nvrtc


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a cuda-bindings call (None, one or a tuple); KernelBuildError on failure."""
    status, *values = result
    if int(status) != 0:
        raise KernelBuildError(f"sm90: {what} failed with {status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


def sources(entry: str) -> dict[str, bytes]:
    """The entry file and every header beside it, by name."""
    names = [entry, *sorted(path.name for path in SOURCE_DIR.glob("*.cuh"))]
    return {name: (SOURCE_DIR / name).read_bytes() for name in names}


def cache_dir() -> Path:
    """Where cubins are kept between processes."""
    chosen = os.environ.get("MEGABENCH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megabench"


def _compile(entry: str, files: dict[str, bytes], options: tuple[str, ...]) -> bytes:
    _, nvrtc = bindings()
    headers = [name for name in files if name != entry]
    program = check(
        nvrtc.nvrtcCreateProgram(
            files[entry],
            entry.encode(),
            len(headers),
            [files[name] for name in headers],
            [name.encode() for name in headers],
        ),
        "nvrtcCreateProgram",
    )
    (status,) = nvrtc.nvrtcCompileProgram(
        program, len(options), [option.encode() for option in options]
    )
    if int(status) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program), "reading the compiler's log")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelBuildError(f"sm90: {entry} does not compile:\n{log.decode(errors='replace')}")
    cubin: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program), "reading the cubin's size")
    check(nvrtc.nvrtcGetCUBIN(program, cubin), "reading the cubin")
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


@cache
def cubin(entry: str, defines: tuple[str, ...] = ()) -> bytes:
    """The sm_90a cubin of `entry` (a .cu file here), from memory, disk or the compiler."""
    files = sources(entry)
    options = (f"--gpu-architecture={ARCH}", "--std=c++17", *(f"-D{name}" for name in defines))
    if os.environ.get("MEGABENCH_LINE_INFO") == "1":
        options += ("--generate-line-info",)
    _, nvrtc = bindings()
    version = check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    digest = hashlib.sha256(repr((entry, files, options, version)).encode()).hexdigest()[:32]
    path = cache_dir() / f"{entry.removesuffix('.cu')}-{ARCH}-{digest}.cubin"
    if path.is_file():
        return path.read_bytes()
    image = _compile(entry, files, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(image)
        os.replace(file.name, path)
    except OSError:
        pass  # a cache that cannot be written costs a compilation, nothing else
    return image


def load_function(entry: str, name: str, shared_bytes: int, defines: tuple[str, ...] = ()) -> Any:
    """A CUfunction in the current context, allowed `shared_bytes` of dynamic shared memory."""
    driver, _ = bindings()
    module = check(driver.cuModuleLoadData(cubin(entry, defines)), "cuModuleLoadData")
    function = check(driver.cuModuleGetFunction(module, name.encode()), "cuModuleGetFunction")
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, limit, shared_bytes), "raising the shared memory")
    return function
