"""Options that commands share, and what they mean together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from megabench.cases import Suite, load_suite

Command = TypeVar("Command", bound=Callable[..., Any])


def case_options(command: Command) -> Command:
    """Options that choose cases."""
    for option in (
        click.option("--seed", type=click.IntRange(min=0), help="Seed of all cases' inputs."),
        click.option(
            "--case",
            "patterns",
            multiple=True,
            metavar="GLOB",
            help="Case ids, as in 'r2-*'; given again, those of either.",
        ),
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
            "--resume",
            type=click.Path(path_type=Path),
            metavar="RUN",
            help="Continue a run that was cut short, with its own options.",
        ),
        click.option(
            "--timeout",
            "limit_s",
            type=click.FloatRange(min=0, min_open=True),
            default=600.0,
            metavar="SECONDS",
            help="For one case on one backend; 600 by default.",
        ),
        click.option(
            "--no-isolate",
            is_flag=True,
            help="Run cases in this process, for a debugger; a crash then ends the run.",
        ),
        click.option(
            "--json", "as_json", is_flag=True, help="Result rows as JSON lines on stdout."
        ),
        click.option(
            "--weights",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="A safetensors checkpoint of the layer in place of random weights.",
        ),
        click.option(
            "--out",
            default="reports",
            metavar="DIR",
            help="Where run folders are made; reports by default.",
        ),
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


def backend_names(text: str) -> list[str]:
    """The names of --backend, each once there; UsageError where one is empty or repeated."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not name:
            raise click.UsageError(f"--backend {text!r}: a name is empty")
        if names.count(name) > 1:
            raise click.UsageError(f"--backend {text}: names {name} twice")
    return names


def suite_at(name: str, seed: int | None) -> Suite:
    """The suite, `seed` put in place of its cases' own."""
    suite = load_suite(name)
    return suite if seed is None else suite.reseeded(seed)


def continued(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the run that --resume names, under those that are given beside it."""
    if options["resume"] is None:
        return options
    from megabench.resume import read_header

    context = click.get_current_context()
    header = read_header(options["resume"])
    if header.command != context.info_name:
        raise click.UsageError(f"--resume {options['resume']}: a run of {header.command}")
    own = context.command.make_context(context.info_name, header.argv[1:]).params
    given = ParameterSource.COMMANDLINE
    return {
        name: value if context.get_parameter_source(name) is given else own[name]
        for name, value in options.items()
    }
