"""The pytest plugin: options and markers of the suite, there only when the suite is asked for.

It is an entry point, so pytest loads it wherever megabench is installed. Without
`megabench.conformance` on the command line (or in PYTEST_ADDOPTS) it does nothing: other suites
may have a `--backend` of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megabench.conformance.groups import GROUPS

if TYPE_CHECKING:
    from megabench.runs import Request

SUITE = "megabench.conformance"
REQUEST: pytest.StashKey[Request] = pytest.StashKey()
_CASE_MARKERS = {
    "decode": "steps with a decode",
    "prefill": "steps with a prefill",
    "tp": "steps split over several ranks",
}


def _asked(config: pytest.Config) -> bool:
    words = [*config.invocation_params.args, *os.environ.get("PYTEST_ADDOPTS", "").split()]
    return any(str(word).split("::")[0] == SUITE for word in words)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config = pluginmanager.get_plugin("pytestconfig")
    if config is None or not _asked(config):
        return
    group = parser.getgroup("megabench", "conformance of a mega-attention backend")
    group.addoption(
        "--backend",
        dest="megabench_backend",
        default="auto",
        metavar="SPEC",
        help="a backend's name or package.module:attribute; auto takes the fastest here",
    )
    group.addoption(
        "--cases",
        dest="megabench_cases",
        default="ci",
        metavar="FILE",
        help="a case file, or a packaged one's name (default: ci)",
    )
    group.addoption(
        "--device", dest="megabench_device", metavar="DEVICE", help="cpu, cuda or cuda:N"
    )
    group.addoption(
        "--seed", dest="megabench_seed", type=int, metavar="N", help="seed of all cases' inputs"
    )
    group.addoption(
        "--case-timeout",
        dest="megabench_limit_s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for one case (default: 600)",
    )
    group.addoption(
        "--dump",
        dest="megabench_dump",
        metavar="DIR",
        help="keep the tensors of failing cases as safetensors",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not _asked(config):
        return
    for group, stages in GROUPS.items():
        config.addinivalue_line("markers", f"{group}: {', '.join(stages)}")
    for name, meaning in _CASE_MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", "xdist_group(name): tests of one case, for --dist loadgroup")
    config.stash[REQUEST] = _request(config)


def _request(config: pytest.Config) -> Request:
    """The run asked for; a usage error, in one line, when it cannot be run."""
    from megabench.backends import BackendError
    from megabench.cases import CaseError, load_suite
    from megabench.geometry import GeometryError
    from megabench.runs import Request, RunError, find_device, resolve_backends

    option = config.option
    try:
        device = find_device(option.megabench_device)
        suite = load_suite(option.megabench_cases)
        if option.megabench_seed is not None:
            suite = suite.reseeded(option.megabench_seed)
        backends = resolve_backends([option.megabench_backend], suite.cases, device)
    except (BackendError, CaseError, GeometryError, RunError) as error:
        raise pytest.UsageError(f"megabench: {error}") from error
    return Request(
        command="validate",
        suite=suite,
        cases=suite.cases,
        backends=backends,
        device=device,
        out="",
        seed=option.megabench_seed,
        as_json=False,
        limit_s=option.megabench_limit_s,
        dump=option.megabench_dump,
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    request = config.stash.get(REQUEST, None)
    if request is None:
        return None
    return (
        f"megabench: {len(request.cases)} cases of {request.suite.source} "
        f"on {request.backends[0]}, {request.device}"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.startswith(SUITE) and "outcome" in metafunc.fixturenames:
        cases = metafunc.config.stash[REQUEST].cases
        order = sorted(cases, key=lambda case: (case.model, case.page_layout, case.tp))
        params = []
        for case in order:
            decodes = {request.is_decode for request in case.requests}
            marks = [pytest.mark.xdist_group(case.id)]
            marks += [pytest.mark.decode] * (True in decodes)
            marks += [pytest.mark.prefill] * (False in decodes)
            marks += [pytest.mark.tp] * (case.tp > 1)
            params.append(pytest.param(case, id=case.id, marks=marks))
        metafunc.parametrize("outcome", params, indirect=True, scope="session")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Ids without the path of site-packages, so that reports of two machines compare."""
    if module_path != Path(__file__).with_name("test_conformance.py"):
        return None
    return pytest.Module.from_parent(parent, path=module_path, nodeid=SUITE)
