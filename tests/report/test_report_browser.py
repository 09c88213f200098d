"""The report in a real browser: it opens from a file, sorts, filters, and fits a phone.

Skipped where Chromium and its driver are not installed. Speaks the WebDriver protocol itself.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_fake_gate import gated_page
from report_fake_run import bench_run

from megabench.report import write_report

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    DRIVER is None or BROWSER is None, reason="chromium and chromedriver are not installed"
)
START_SECONDS = 30
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
)


class Browser:
    """One WebDriver session."""

    def __init__(self, port: int, profile: Path) -> None:
        self.root = f"http://127.0.0.1:{port}"
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        made = self.send("POST", "/session", {"capabilities": capabilities})
        self.session = f"/session/{made['sessionId']}"

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]

    def quit(self) -> None:
        """End the browser; ending the driver alone would leave it running."""
        self.send("DELETE", self.session)

    def open(self, path: Path) -> None:
        self.send("POST", f"{self.session}/url", {"url": path.as_uri()})

    def run(self, script: str) -> Any:
        body = {"script": script, "args": []}
        return self.send("POST", f"{self.session}/execute/sync", body)

    def resize(self, width: int) -> None:
        self.send("POST", f"{self.session}/window/rect", {"width": width, "height": 900})


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert DRIVER is not None
    process = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        found = Browser(_port(process), tmp_path_factory.mktemp("profile"))
        try:
            yield found
        finally:
            found.quit()
    finally:
        process.terminate()
        process.wait(timeout=10)


def _port(process: subprocess.Popen[str]) -> int:
    """The port the driver says it listens on."""
    assert process.stdout is not None
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if "on port" in line and "successfully" in line:
            return int(line.rsplit("port", 1)[1].strip(" .\n"))
    raise AssertionError("chromedriver did not start")


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    browser.resize(1400)
    browser.open(write_report(bench_run(), tmp_path / "report.html"))
    return browser


SHOWN = (
    "return [...document.querySelectorAll('#case-table tbody tr:not([hidden])')]"
    ".map(r => r.cells[{column}].textContent.trim())"
)


def shown(page: Browser, column: int) -> list[str]:
    found: list[str] = page.run(SHOWN.replace("{column}", str(column)))
    return found


def click_head(page: Browser, label: str) -> str:
    return str(
        page.run(
            "const b = [...document.querySelectorAll('#case-table thead button')]"
            f".find(b => b.textContent === '{label}'); b.click();"
            "return b.closest('th').getAttribute('aria-sort')"
        )
    )


def enter(page: Browser, field: str, value: str) -> None:
    page.run(
        f"const f = document.getElementById('{field}'); f.value = '{value}';"
        "f.dispatchEvent(new Event('input', {bubbles: true}))"
    )


def test_a_numeric_head_sorts_by_value_both_ways_with_missing_cells_last(page: Browser) -> None:
    assert click_head(page, "step") == "ascending"
    up = shown(page, 4)
    assert click_head(page, "step") == "descending"
    down = shown(page, 4)
    assert up[-3:] == down[-3:] == ["–"] * 3
    assert up[:6] == down[:6][::-1]
    values = [float(text.split()[0].replace(",", "")) for text in up[:6]]
    assert values == sorted(values)


def test_a_text_head_sorts_numbers_inside_names_naturally(page: Browser) -> None:
    click_head(page, "case")
    names = [name.split("-")[-1] for name in shown(page, 0)]
    assert names == sorted(names, key=lambda name: int(name.split("q")[0]))


def test_filters_narrow_the_table_and_the_details_together(page: Browser) -> None:
    enter(page, "filter-backend", "triton")
    assert shown(page, 1) == ["triton"] * 3
    enter(page, "filter-text", "-32Q")
    assert shown(page, 0) == ["r1-nvfp4-tp1-32q1s4k"]
    count = "return document.querySelectorAll('details.case:not([hidden])').length"
    assert page.run(count) == 1
    assert page.run("return document.getElementById('filter-count').textContent") == "1 of 9 rows"
    enter(page, "filter-text", "")
    enter(page, "filter-backend", "")
    enter(page, "filter-status", "failed")
    assert shown(page, 2) == ["✗ failed"]


def test_a_link_to_a_case_opens_its_detail(page: Browser) -> None:
    page.run("document.querySelector('.problems a').click()")
    time.sleep(0.2)
    opened = "return [...document.querySelectorAll('details[open] .id')].map(d => d.textContent)"
    assert page.run(opened) == ["r1-nvfp4-tp1-2q1s4k"]


VERDICTS = (
    "return [...document.querySelectorAll('#gate-table tr[data-verdict]')]"
    ".filter(r => !r.hidden).map(r => r.dataset.verdict + ' ' + r.dataset.op)"
)
SHOWN_EVIDENCE = (
    "return [...document.querySelectorAll('tr.evidence')].filter(r => !r.hidden)"
    ".map(r => r.previousElementSibling.dataset.verdict + ': ' + r.textContent)"
)


@pytest.fixture
def gated(browser: Browser, tmp_path: Path) -> Browser:
    browser.resize(1400)
    path = tmp_path / "report.html"
    path.write_text(gated_page(), encoding="utf-8")
    browser.open(path)
    return browser


def choose(page: Browser, field: str, value: str) -> None:
    page.run(
        f"const f = document.querySelector('#gate [data-field={field}]'); f.value = '{value}';"
        "f.dispatchEvent(new Event('input', {bubbles: true}))"
    )


def test_the_gates_table_filters_by_its_own_fields_and_leaves_the_cases_alone(
    gated: Browser,
) -> None:
    choose(gated, "verdict", "SLOWER")
    choose(gated, "op", "wo_a")
    assert gated.run(VERDICTS) == ["SLOWER wo_a"]
    count = "return document.querySelector('#gate output').textContent"
    assert gated.run(count) == "1 of 27 rows"
    assert len(shown(gated, 0)) == 8


def test_evidence_opens_below_its_row_and_goes_where_the_row_goes(gated: Browser) -> None:
    assert gated.run(SHOWN_EVIDENCE) == []
    gated.run("document.querySelector('tr[data-verdict=SLOWER] button.more').click()")
    (found,) = gated.run(SHOWN_EVIDENCE)
    assert found.startswith("SLOWER: baseline")
    gated.run("document.querySelectorAll('#gate-table thead button')[5].click()")
    assert gated.run(SHOWN_EVIDENCE) == [found]
    choose(gated, "verdict", "FASTER")
    assert gated.run(SHOWN_EVIDENCE) == []
    choose(gated, "verdict", "")
    assert gated.run(SHOWN_EVIDENCE) == [found]


def test_sorting_by_verdict_puts_the_worst_first(gated: Browser) -> None:
    head = "document.querySelectorAll('#gate-table thead button')[0].click();"
    gated.run(head + head)
    last_first = gated.run(VERDICTS)
    assert last_first[0].startswith("SAME")
    gated.run(head)
    assert gated.run(VERDICTS) == last_first[::-1]


FRAMED = "document.getElementById('probe').contentDocument"


def frame(page: Browser, width: int) -> None:
    """Show the page in itself: a window has a least width of its own, a frame has none."""
    page.run(
        "const f = document.createElement('iframe'); f.id = 'probe';"
        f"f.style.width = '{width}px'; f.srcdoc = document.documentElement.outerHTML;"
        "document.body.append(f)"
    )
    time.sleep(0.5)


@pytest.mark.parametrize("width", [390, 1400])
def test_the_gates_tables_do_not_widen_the_page(gated: Browser, width: int) -> None:
    for button in range(3):
        gated.run(f"document.querySelectorAll('button.more')[{button}].click()")
    test_no_width_makes_the_page_itself_scroll_sideways(gated, width)


@pytest.mark.parametrize("width", [390, 1400])
def test_no_width_makes_the_page_itself_scroll_sideways(page: Browser, width: int) -> None:
    frame(page, width)
    measured = page.run(
        f"const d = {FRAMED}.documentElement; return [d.scrollWidth, d.clientWidth]"
    )
    assert measured[0] <= measured[1]


def test_on_a_phone_every_verdict_is_read_without_scrolling_sideways(gated: Browser) -> None:
    gated.run("document.querySelectorAll('button.more')[0].click()")
    frame(gated, 420)
    scrolled = f"const t = {FRAMED}.getElementById('gate-table'); const s = t.parentElement;"
    measured = gated.run(scrolled + "return [s.scrollWidth, s.clientWidth]")
    assert measured[0] <= measured[1]
    heads = "return [...t.querySelectorAll('thead button')].map(b => b.offsetHeight > 0)"
    assert gated.run(scrolled + heads) == [True] * 7


def test_nothing_is_loaded_but_the_file(page: Browser) -> None:
    assert page.run("return performance.getEntriesByType('resource').length") == 0
