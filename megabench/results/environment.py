"""What a run ran on: device, libraries, threads, and the commit of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from megabench.results.schema import BackendInfo, Environment, RunHeader
from megabench.results.store import now
from megabench.version import __version__

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "nvidia-ml-py",
    "sgl-flash-mla",
    "sgl-deep-gemm",
    "vllm",
)
"""Distributions whose versions can change a result."""


def capture_environment(
    device: torch.device | str,
    backends: list[BackendInfo] | None = None,
    weights: str | None = None,
) -> Environment:
    """Describe `device`, the host and the libraries. Nothing here identifies a host by name.

    `weights` is the digest of a checkpoint that takes the place of random weights.
    """
    where = torch.device(device)
    environment = Environment(
        device=str(where),
        device_name=cpu_name(),
        memory_bytes=_host_memory(),
        platform=platform.platform(),
        cpu=cpu_name(),
        cpu_count=len(os.sched_getaffinity(0)),
        torch_threads=torch.get_num_threads(),
        python=platform.python_version(),
        packages=_packages(),
        backends=backends or [],
        weights=weights,
    )
    if where.type != "cuda":
        return environment
    properties = torch.cuda.get_device_properties(where)
    return environment.model_copy(
        update={
            "device_name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "sm_count": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "driver": _driver(),
            "cuda": torch.version.cuda,
        }
    )


def make_header(
    command: str,
    argv: list[str],
    environment: Environment,
    *,
    suite: str | None = None,
    seed: int | None = None,
    planned: int | None = None,
) -> RunHeader:
    """The first row of a run that starts now."""
    return RunHeader(
        command=command,
        argv=argv,
        started=now(),
        megabench_version=__version__,
        git_commit=git_commit(),
        suite=suite,
        seed=seed,
        planned=planned,
        environment=environment,
    )


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of the source tree this package runs from, "+dirty" when it differs; None when
    it was installed from a wheel or git is absent."""
    tree = Path(__file__).resolve().parents[2]
    if not (tree / ".git").exists():
        return None
    commit = _git(tree, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    dirty = _git(tree, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+dirty" if dirty else commit


def _git(tree: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *args], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no NVML here: the field stays empty
        return None
