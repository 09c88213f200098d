"""The command line: list, validate, bench, gate, baseline, repro, profile, report, doctor.

Results go to stdout, progress and errors to stderr. Exit 0 when all is right, 1 when a case is
wrong, 2 when the request itself is, 3 when the gate cannot decide; an error is one line and leaves
nothing written. Heavy modules are imported by the commands that need them, so that `--help` and
`list` are instant.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megabench.cases import CaseError, at_seeds, nearest
from megabench.cli_evidence import profile, repro
from megabench.cli_faults import faults
from megabench.cli_gate import baseline, bench_processes, gate, gated_bench_options
from megabench.cli_list import list_command
from megabench.cli_options import backend_names, continued, run_options, suite_at
from megabench.version import __version__

if TYPE_CHECKING:
    from megabench.runs import Request

EXIT_WRONG, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Group(click.Group):
    """A group that names the nearest command when one is unknown."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None:
            hint = nearest(args[0], self.commands)
            raise click.UsageError(f"no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="megabench")
def cli() -> None:
    """Validate and benchmark DeepSeek V4.1 mega-attention kernels."""


cli.add_command(gate)
cli.add_command(baseline)
cli.add_command(faults)
cli.add_command(repro)
cli.add_command(profile)
cli.add_command(list_command)


@cli.command()
@run_options
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Worker processes: a GPU each, or all on the CPU or the GPU that --device numbers.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Repeat every case at N seeds of its inputs.",
)
@click.option(
    "--dump",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the tensors of failing cases as safetensors.",
)
def validate(**options: Any) -> None:
    """Compare every stage of every case with the golden model.

    Exit 1 when any is wrong."""
    from megabench.session import validate_cases

    sys.exit(validate_cases(_request("validate", "ci", **continued(options))))


@cli.command()
@run_options
@gated_bench_options
@click.option("--no-validate", is_flag=True, help="Time without checking correctness first.")
@click.option(
    "--cross-check",
    type=click.Choice(("cupti",)),
    help="Beside each graph-timed median, the kernel span of CUPTI's activity records.",
)
def bench(
    no_validate: bool,
    processes: int | None,
    baseline: Path | None,
    policy: Path | None,
    **options: Any,
) -> None:
    """Check, then time, every op and the whole step.

    Ends with the path of an HTML report."""
    from megabench.session import bench_cases

    if policy is not None and baseline is None:
        raise click.UsageError("--policy is how --gate judges; give --gate BASELINE with it")
    if options["resume"] is not None:
        if processes is not None or baseline is not None:
            raise click.UsageError("--resume continues one process; not with --processes or --gate")
        options = continued({"no_validate": no_validate, **options})
        no_validate = options.pop("no_validate")
    request = _request("bench", None, **options)
    if processes is None and baseline is None:
        sys.exit(bench_cases(request, check=not no_validate))
    patterns = options["patterns"]
    sys.exit(bench_processes(request, patterns, no_validate, processes, baseline, policy))


def _request(
    command: str,
    default_suite: str | None,
    *,
    suite: str | None,
    patterns: tuple[str, ...],
    seed: int | None,
    backends: str,
    device: str | None,
    out: str,
    as_json: bool,
    resume: Path | None,
    limit_s: float,
    no_isolate: bool,
    weights: Path | None,
    jobs: int = 1,
    seeds: int = 1,
    dump: Path | None = None,
    cross_check: str | None = None,
) -> Request:
    """The run asked for, with device, cases, models and backends found; nothing is written yet."""
    from megabench.runs import (
        Request,
        check_cross_check,
        check_weights,
        check_workers,
        find_device,
        resolve_backends,
        suite_for,
    )

    where = find_device(device)
    check_workers(jobs, where)
    if cross_check is not None:
        check_cross_check(where)
    if jobs > 1 and no_isolate:
        raise click.UsageError("--jobs needs worker processes; not with --no-isolate")
    loaded = suite_at(suite or default_suite or suite_for(where), seed)
    cases = loaded.select(*patterns)
    names = backend_names(backends)
    found = resolve_backends(names, cases, where)
    if weights is not None:
        check_weights(weights, cases)
    return Request(
        command=command,
        suite=loaded,
        cases=at_seeds(cases, seeds),
        backends=found,
        device=where,
        out=out,
        seed=seed,
        as_json=as_json,
        resume=resume,
        limit_s=None if no_isolate else limit_s,
        workers=jobs,
        weights=weights,
        dump=dump,
        cross_check=cross_check is not None,
    )


@cli.command()
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--out", default="reports", metavar="DIR", help="Where runs are; reports by default.")
def report(run: Path | None, out: str) -> None:
    """Rebuild the HTML report of RUN, of the latest run by default.

    With its verdicts, if it was gated."""
    from megabench.runs import latest_run, write_html

    click.echo(write_html(latest_run(Path(out)) if run is None else run))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--probe",
    "probes",
    multiple=True,
    type=click.Choice(("layout", "flashmla")),
    help="Also run kernels: page layouts of every backend, or the vendor's libraries.",
)
def doctor(as_json: bool, probes: tuple[str, ...]) -> None:
    """Say what is installed, what backends can run here, and why not."""
    from megabench.doctor import examine
    from megabench.probes import probes_text, run_probes

    examination = examine()
    found = run_probes(probes)
    if as_json:
        click.echo(json.dumps(examination.model_dump() | ({"probes": found} if probes else {})))
    else:
        click.echo(examination.text())
        click.echo(probes_text(found), nl=False)
    sys.exit(int(any(not ok for checks in found.values() for _, ok, _ in checks)))


def main() -> None:
    """The console script: errors a user can mend are one line and exit 2."""
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(EXIT_USAGE)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        _fail(error.format_message())
    except CaseError as error:
        _fail(str(error))
    except Exception as error:
        from megabench.backends import BackendError
        from megabench.gate import GateError
        from megabench.geometry import GeometryError
        from megabench.isolate import WorkerError
        from megabench.results import StoreError
        from megabench.runs import RunError
        from megabench.weights import WeightsError

        known = (
            BackendError,
            GateError,
            GeometryError,
            RunError,
            StoreError,
            WeightsError,
            WorkerError,
        )
        if not isinstance(error, known):
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    click.echo(f"megabench: error: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_USAGE)
