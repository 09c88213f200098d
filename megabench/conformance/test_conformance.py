"""One test a case and stage group. A case runs once, in a worker process, for all its groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from megabench.conformance.groups import stages_of
from megabench.conformance.plugin import REQUEST
from megabench.isolate import Job, Pool
from megabench.results import CaseResult
from megabench.runs import Request
from megabench.session import validation_setup


@pytest.fixture(scope="session")
def asked(pytestconfig: pytest.Config) -> Request:
    return pytestconfig.stash[REQUEST]


@pytest.fixture(scope="session")
def pool(asked: Request) -> Iterator[Pool]:
    """Workers of the session; a case that ends one ends only its own tests."""
    assert asked.limit_s is not None
    with Pool([validation_setup(asked, str(asked.device))], asked.limit_s) as workers:
        yield workers


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, asked: Request, pool: Pool) -> CaseResult:
    """The row of one case."""
    job = Job(case=request.param, backends=tuple(asked.backends))
    (row,) = pool.run([job])
    assert isinstance(row, CaseResult)
    return row


@dataclass(frozen=True)
class Judge:
    """Passes, fails or skips the test by the stages of a group."""

    row: CaseResult
    properties: list[tuple[str, object]]
    """Of the test, as JUnit XML shows them."""

    def __call__(self, group: str) -> None:
        row = self.row
        if row.status == "skipped":
            pytest.skip(row.reason)
        self.properties.append(("repro", row.repro))
        if row.status == "error":
            pytest.fail("\n".join((row.reason, row.output, row.repro)), pytrace=False)
        stages = stages_of(group, row.stages)
        if not stages:
            pytest.skip("this step has no such stage")
        for stage in stages:
            found = f"{stage.checked} checked, error / bound {stage.worst}"
            self.properties.append((stage.name, found))
        wrong = [f"{stage.name}: {stage.message}" for stage in stages if not stage.ok]
        if wrong:
            pytest.fail("\n".join((*wrong, row.repro)), pytrace=False)


@pytest.fixture
def judge(outcome: CaseResult, request: pytest.FixtureRequest) -> Judge:
    return Judge(outcome, request.node.user_properties)


@pytest.mark.load
def test_load(judge: Judge) -> None:
    """The rotation table, the weights the linears were given, the sinks."""
    judge("load")


@pytest.mark.query
def test_query(judge: Judge) -> None:
    """wq_b, and Q as attention is given it."""
    judge("query")


@pytest.mark.caches
def test_caches(judge: Judge) -> None:
    """Every byte of both caches after insertion."""
    judge("caches")


@pytest.mark.selection
def test_selection(judge: Judge) -> None:
    """Index lists, and the rows a prefill gathers."""
    judge("selection")


@pytest.mark.attention
def test_attention(judge: Judge) -> None:
    """lse, max_logits, output scales and codes, exact results, rounding direction."""
    judge("attention")


@pytest.mark.projection
def test_projection(judge: Judge) -> None:
    """wo_a, wo_b, the layer's output and the sum over ranks."""
    judge("projection")


@pytest.mark.guards
def test_guards(judge: Judge) -> None:
    """Canaries, unchanged inputs, the same bytes over other poison."""
    judge("guards")
