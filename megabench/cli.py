"""The command line: list, validate, bench, gate, baseline, report, doctor.

Results go to stdout, progress and errors to stderr. Exit 0 when all is right, 1 when a case is
wrong, 2 when the request itself is, 3 when the gate cannot decide; an error is one line and leaves
nothing written. Heavy modules are imported by the commands that need them, so that `--help` and
`list` are instant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from megabench.cases import Case, CaseError, Suite, load_suite, nearest, packaged_suites
from megabench.cli_gate import baseline, bench_processes, gate, gated_bench_options
from megabench.version import __version__

if TYPE_CHECKING:
    from megabench.runs import Request

Command = TypeVar("Command", bound=Callable[..., Any])
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


def case_options(command: Command) -> Command:
    """Options that choose cases."""
    for option in (
        click.option("--seed", type=click.IntRange(min=0), help="Seed of all cases' inputs."),
        click.option("--case", "pattern", default="*", help="Glob on case ids."),
        click.option(
            "--cases", "suite", metavar="FILE", help="Case file, or a packaged one's name."
        ),
    ):
        command = option(command)
    return command


def run_options(command: Command) -> Command:
    """Options of the commands that run cases."""
    for option in (
        click.option(
            "--json", "as_json", is_flag=True, help="Result rows as JSON lines on stdout."
        ),
        click.option("--out", default="reports", metavar="DIR", help="Where run folders are made."),
        click.option("--device", help="cpu, cuda or cuda:N; the first GPU by default, if any."),
        click.option(
            "--backend",
            "backends",
            default="auto",
            metavar="NAME[,NAME]",
            help="Backends by name, or package.module:attribute; auto takes the fastest here.",
        ),
    ):
        command = option(command)
    return case_options(command)


def chosen_cases(name: str, pattern: str, seed: int | None) -> tuple[Suite, list[Case]]:
    """The suite and its selected cases, `seed` put in place of their own."""
    suite = load_suite(name)
    if seed is not None:
        suite = suite.reseeded(seed)
    return suite, suite.select(pattern)


@cli.command("list")
@case_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object a case.")
def list_command(suite: str | None, pattern: str, seed: int | None, as_json: bool) -> None:
    """List the cases of a file, or the packaged files when none is named."""
    if suite is None and pattern == "*" and not as_json:
        for path in packaged_suites():
            loaded = load_suite(path)
            click.echo(f"{loaded.name:10} {_budget(loaded, loaded.cases):40} {loaded.description}")
        return
    names = [path.stem for path in packaged_suites()] if suite is None else [suite]
    for name in names:
        loaded, cases = chosen_cases(name, pattern, seed)
        for case in cases:
            click.echo(json.dumps(_described(case)) if as_json else f"{case.id}  {case.num_tokens}")
        if not as_json:
            click.echo(f"{loaded.source}: {_budget(loaded, cases)}")


def _budget(suite: Suite, cases: list[Case]) -> str:
    tokens = sum(case.num_tokens for case in cases)
    allowed = "" if suite.token_budget is None else f" of {suite.token_budget:,}"
    return f"{len(cases)} cases, {tokens:,}{allowed} tokens"


def _described(case: Case) -> dict[str, Any]:
    requests = case.requests
    decodes = sum(request.is_decode for request in requests)
    return {
        "id": case.id,
        "hash": case.hash,
        "tokens": case.num_tokens,
        "decodes": decodes,
        "prefills": len(requests) - decodes,
        **case.model_dump(mode="json"),
    }


@cli.command()
@run_options
def validate(**options: Any) -> None:
    """Compare every stage of every case with the golden model; exit 1 when any is wrong."""
    from megabench.runs import validate_cases

    sys.exit(validate_cases(_request("validate", "ci", **options)))


@cli.command()
@run_options
@gated_bench_options
@click.option("--no-validate", is_flag=True, help="Time without checking correctness first.")
def bench(
    no_validate: bool,
    processes: int | None,
    baseline: Path | None,
    policy: Path | None,
    **options: Any,
) -> None:
    """Check, then time, every op and the whole step; ends with the path of an HTML report."""
    from megabench.runs import bench_cases

    request = _request("bench", None, **options)
    if processes is None and baseline is None:
        sys.exit(bench_cases(request, check=not no_validate))
    pattern = options["pattern"]
    sys.exit(bench_processes(request, pattern, no_validate, processes, baseline, policy))


def _request(
    command: str,
    default_suite: str | None,
    *,
    suite: str | None,
    pattern: str,
    seed: int | None,
    backends: str,
    device: str | None,
    out: str,
    as_json: bool,
) -> Request:
    """The run asked for, with device, cases, models and backends found; nothing is written yet."""
    from megabench.runs import Request, find_device, resolve_backends, suite_for

    where = find_device(device)
    loaded, cases = chosen_cases(suite or default_suite or suite_for(where), pattern, seed)
    names = [name.strip() for name in backends.split(",")]
    found = resolve_backends(names, cases, where)
    return Request(command, loaded, cases, found, where, out, seed, as_json)


@cli.command()
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--out", default="reports", metavar="DIR", help="Where the latest run is looked for.")
def report(run: Path | None, out: str) -> None:
    """Rebuild the HTML report of RUN, a run folder; of the latest one by default."""
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
    """Say what is installed, what each backend can run here, and why not."""
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
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        _fail(error.format_message())
    except CaseError as error:
        _fail(str(error))
    except Exception as error:
        from megabench.backends import BackendError
        from megabench.geometry import GeometryError
        from megabench.results import StoreError
        from megabench.runs import RunError

        if not isinstance(error, BackendError | GeometryError | StoreError | RunError):
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    click.echo(f"megabench: error: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_USAGE)
