"""The commands about one case: `repro` and `profile`."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def one_case_options(command: Command) -> Command:
    """A case by id, and where and on what it runs."""
    for option in (
        click.option("--seed", type=click.IntRange(min=0), help="Seed of all cases' inputs."),
        click.option("--device", help="cpu, cuda or cuda:N; the first GPU by default, if any."),
        click.option("--backend", default="auto", help="One backend; auto takes the fastest here."),
        click.option("--cases", "source", metavar="FILE", help="Case file; the packaged ones."),
        click.argument("case_id", metavar="CASE"),
    ):
        command = option(command)
    return command


@click.command()
@one_case_options
def repro(
    case_id: str, source: str | None, backend: str, device: str | None, seed: int | None
) -> None:
    """Print a script that repeats CASE on its own.

    Its model and inputs are included.
    """
    from megabench.evidence.case import find_case
    from megabench.evidence.repro import repro_script
    from megabench.runs import find_device, resolve_backends

    where = find_device(device)
    _, case = find_case(case_id, source, seed)
    (name,) = resolve_backends([backend], [case], where)
    click.echo(repro_script(case, name, str(where), seed or 0), nl=False)


@click.command()
@one_case_options
@click.option("--op", help="An op as `bench` names it; the attention by default.")
@click.option(
    "--tool", type=click.Choice(("ncu", "nsys")), help="Run under this profiler, if it is here."
)
def profile(
    case_id: str,
    source: str | None,
    backend: str,
    device: str | None,
    seed: int | None,
    op: str | None,
    tool: str | None,
) -> None:
    """Launch one op of CASE once, in an NVTX range.

    Prints the command that profiles it.
    """
    from megabench.evidence.case import find_case
    from megabench.evidence.profile import RANGE, blamed, command, launch, prepare
    from megabench.runs import find_device, resolve_backends

    where = find_device(device)
    suite, case = find_case(case_id, source, seed)
    (name,) = resolve_backends([backend], [case], where)
    arguments = ["--cases", suite.source, "--backend", name, "--device", str(where)]
    arguments += [] if seed is None else ["--seed", str(seed)]
    with blamed(case, name):
        chosen, run = prepare(case, name, where, op, seed or 0)
    profiler = command(tool or "ncu", case, chosen, arguments)
    if tool is None:
        with blamed(case, name):
            launch(run, where)
        kind = f"in the NVTX range {RANGE}" if where.type == "cuda" else "without a GPU to profile"
        click.echo(f"launched {chosen} of {case.id} on {name} once, {kind}", err=True)
        click.echo(shlex.join(profiler))
        return
    click.echo(shlex.join(profiler))
    if shutil.which(tool) is None:
        raise click.ClickException(f"{tool} is not on the PATH here; the command above needs it")
    sys.exit(subprocess.run(profiler, check=False).returncode)
