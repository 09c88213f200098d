"""The gate's commands: `gate`, `baseline update`, and what `bench` needs to be gated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from megabench.gate import GateResult
    from megabench.runs import Request

Command = TypeVar("Command", bound=Callable[..., Any])
BASELINES = "reports/baselines"
_path = click.Path(path_type=Path)

policy_option = click.option(
    "--policy", type=_path, metavar="FILE", help="Thresholds in YAML; built-in ones by default."
)


@click.command()
@click.argument("run", type=_path)
@click.option(
    "--baseline",
    type=_path,
    default=BASELINES,
    metavar="PATH",
    help="A shard, a folder of shards, or another run; reports/baselines by default.",
)
@policy_option
@click.option("--explain", is_flag=True, help="Print the evidence behind every verdict.")
@click.option("--junit", type=_path, metavar="FILE", help="Also write the verdicts as JUnit XML.")
def gate(run: Path, baseline: Path, policy: Path | None, explain: bool, junit: Path | None) -> None:
    """Compare RUN with a baseline, every op of every case.

    Exit 1 when something is slower or broken, 3 when it cannot be decided.
    """
    from megabench.gate import compare, find_baseline, load_policy, read_processes, read_rerun
    from megabench.gate.processes import header_of, suite_of

    rules = load_policy(policy)
    runs = read_processes(run)
    device = header_of(runs).environment.device_name
    recorded = find_baseline(baseline, device, suite_of(runs))
    result = compare(recorded, runs, rules, read_rerun(run))
    _tell(result, run, baseline, explain, junit)
    sys.exit(result.exit_code)


@click.group()
def baseline() -> None:
    """Keep what the gate compares with."""


@baseline.command()
@click.argument("run", type=_path)
@click.option("--accept", is_flag=True, help="Write it; otherwise only print what would change.")
@click.option(
    "--dir",
    "folder",
    type=_path,
    default=BASELINES,
    metavar="DIR",
    help="Where shards are kept; reports/baselines by default.",
)
@click.option("--prune", is_flag=True, help="Drop cases that RUN does not have.")
def update(run: Path, accept: bool, folder: Path, prune: bool) -> None:
    """Take RUN as the baseline of its device and suite."""
    from megabench.gate import Policy, read_processes
    from megabench.gate.update import describe, plan_update, too_noisy

    runs = read_processes(run)
    planned = plan_update(runs, folder, prune=prune)
    for line in describe(planned):
        click.echo(line)
    if len(runs) < Policy().processes:
        click.echo(
            f"note: {len(runs)} of {Policy().processes} processes; "
            "by default the gate calls such times AMBIGUOUS",
            err=True,
        )
    commit = planned.new.header.git_commit
    if commit is not None and commit.endswith("+dirty"):
        click.echo(f"note: of an uncommitted tree ({commit}): nobody can check it out", err=True)
    if noisy := too_noisy(runs):
        click.echo(
            f"note: noise keeps {len(noisy)} of the times from ever being SAME by the default "
            f"policy, {noisy[0]} first; rules with a larger `relative` in a --policy allow for it",
            err=True,
        )
    if not accept:
        click.echo("nothing written; --accept writes it", err=True)
        return
    try:
        planned.write()
    except OSError as error:
        raise click.ClickException(f"{planned.path}: {error.strerror}") from error


def gated_bench_options(command: Command) -> Command:
    """Options of `bench` that make it several processes."""
    for option in (
        policy_option,
        click.option(
            "--gate",
            "baseline",
            type=_path,
            metavar="PATH",
            help="Judge the run by a baseline; what looks slower is run again first.",
        ),
        click.option(
            "--processes",
            type=click.IntRange(min=1),
            metavar="N",
            help="Repeat in N fresh processes; as many as the policy wants with --gate.",
        ),
    ):
        command = option(command)
    return command


def bench_processes(
    request: Request,
    patterns: tuple[str, ...],
    no_validate: bool,
    processes: int | None,
    baseline: Path | None,
    policy: Path | None,
) -> int:
    """`bench` in fresh processes, then judged if asked to -> exit code."""
    from megabench.gate import find_baseline, load_policy
    from megabench.gate.launch import (
        UNUSABLE,
        Processes,
        fresh_process,
        gate_processes,
        new_folder,
    )
    from megabench.results import capture_environment
    from megabench.runs import write_html

    rules = load_policy(policy)
    recorded = None
    if baseline is not None:  # before hours of work, not after
        device = capture_environment(request.device).device_name
        recorded = find_baseline(baseline, device, request.suite.name)
    arguments = ["--backend", ",".join(request.backends), "--device", str(request.device)]
    if request.seed is not None:
        arguments += ["--seed", str(request.seed)]
    if request.weights is not None:
        arguments += ["--weights", str(request.weights)]
    arguments += ["--no-validate"] * no_validate + ["--json"] * request.as_json
    arguments += ["--cross-check", "cupti"] * request.cross_check
    limit = request.limit_s
    arguments += ["--no-isolate"] if limit is None else ["--timeout", f"{limit:g}"]
    cases = ["--cases", request.suite.source]
    for pattern in patterns:
        cases += ["--case", pattern]
    count = processes or rules.processes
    bench = Processes(
        folder=new_folder(Path(request.out), count),
        arguments=arguments,
        cases=cases,
        count=count,
        launch=fresh_process(request.as_json),
    )
    code = bench.run()
    click.echo(bench.folder, err=request.as_json)
    if code in UNUSABLE:
        return code
    if recorded is None or baseline is None:
        click.echo(f"report: {write_html(bench.folder)}", err=True)
        return code
    result = gate_processes(bench, recorded, rules)
    _tell(result, bench.folder, baseline, explain=False, junit=None, err=request.as_json)
    return result.exit_code


def _tell(
    result: GateResult,
    run: Path,
    baseline: Path,
    explain: bool,
    junit: Path | None,
    err: bool = False,
) -> None:
    """Keep the verdicts in the run's folder with a report that shows them, and print them."""
    from megabench.gate.junit import write_junit
    from megabench.gate.kept import verdicts_of, write_verdicts
    from megabench.gate.render import show
    from megabench.report import build

    report = None
    try:
        write_verdicts(verdicts_of(result, baseline), run.parent if run.is_file() else run)
        report = build(run)
    except OSError as error:
        click.echo(f"note: {run}: verdicts are not kept ({error.strerror})", err=True)
    show(result, explain=explain, err=err, report=report)
    if junit is not None:
        try:
            write_junit(result, run.name, junit)
        except OSError as error:
            raise click.ClickException(f"--junit {junit}: {error.strerror}") from error
