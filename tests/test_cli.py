"""The commands as people and scripts use them: output, exit codes, nothing written in vain."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megabench import __version__
from megabench.backends import TorchBackend
from megabench.cli import main
from megabench.results import read_run
from megabench.runs import RunError, find_device, latest_run, suite_for

ROOT = Path(__file__).parent.parent
Call = Callable[..., tuple[int, str, str]]


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command line."""
    monkeypatch.setattr(sys, "argv", ["megabench", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    return lambda *args: run(capsys, monkeypatch, *args)


@pytest.fixture(scope="module", autouse=True)
def faulty_backends() -> None:
    """Backends of a user's own, importable by `--backend user_kernels:NAME`."""

    class Negated(TorchBackend):
        def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
            return -super().linear(x, w, sw)

    class Interrupted(TorchBackend):
        def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    class Broken(TorchBackend):
        def linear(self, x: torch.Tensor, w: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such instruction")

    module = types.ModuleType("user_kernels")
    vars(module).update(Negated=Negated, Interrupted=Interrupted, Broken=Broken)
    sys.modules["user_kernels"] = module


def test_help_version_and_list_import_no_torch() -> None:
    code = (
        "import sys\nfrom megabench.cli import cli\n"
        "for args in (['--help'], ['--version'], ['list'], ['list', '--cases', 'ci', '--json']):\n"
        "    cli.main(args, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout


def test_list_prints_ids_tokens_and_the_budget(call: Call) -> None:
    code, out, _ = call("list", "--cases", "smoke", "--case", "r0-*")
    assert code == 0
    assert out.splitlines()[0] == "r0-fp8-tp1-2q1s300_1q4  6"
    assert out.splitlines()[-1] == "smoke: 3 cases, 13 of 100 tokens"


def test_a_case_option_given_again_adds_its_cases(call: Call) -> None:
    _, one, _ = call("list", "--cases", "smoke", "--case", "r0-*")
    _, two, _ = call("list", "--cases", "smoke", "--case", "r1-*")
    code, both, _ = call("list", "--cases", "smoke", "--case", "r0-*", "--case", "r1-*")
    assert code == 0
    assert both.splitlines()[:-1] == [*one.splitlines()[:-1], *two.splitlines()[:-1]]


def test_list_without_a_file_names_the_packaged_ones(call: Call) -> None:
    code, out, _ = call("list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        p.stem for p in sorted((ROOT / "cases").glob("*.yaml"))
    ]
    assert max(len(line) for line in out.splitlines()) <= 100  # columns of a terminal


def test_a_glob_without_a_file_lists_the_matches_of_every_packaged_file(call: Call) -> None:
    code, out, _ = call("list", "--case", "r2-nvfp4-tp1-2q1s300_1q4")
    assert code == 0
    assert "r2-nvfp4-tp1-2q1s300_1q4  6" in out.splitlines()
    assert "smoke: 1 case, 6 of 100 tokens" in out.splitlines()
    code, _, error = call("list", "--case", "r2-nvfp4-tp1-2q1s300_1q5", "--case", "r0-*")
    assert code == 2
    assert "no case of a packaged file matches 'r2-nvfp4-tp1-2q1s300_1q5'; did you mean" in error
    code, out, _ = call("list", "--case", "r2-nvfp4-tp1-2q1s300_1q4", "--case", "*-seed2")
    assert code == 0  # each glob has to match somewhere, not everywhere
    assert "smoke: 1 case, 6 of 100 tokens" in out.splitlines()
    assert len([line for line in out.splitlines() if "-seed2 " in line]) >= 5


def test_listed_json_has_a_case_a_line_that_makes_the_case_again(call: Call) -> None:
    from megabench.cases import Case

    _, out, _ = call("list", "--cases", "ci", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) >= 200
    for row in rows:
        case = Case.model_validate({k: v for k, v in row.items() if k in Case.model_fields})
        assert (case.id, case.hash) == (row["id"], row["hash"])


def test_a_seed_takes_the_place_of_the_files_own(call: Call) -> None:
    _, out, _ = call("list", "--cases", "ci", "--seed", "7", "--case", "*-seed7")
    assert len(out.splitlines()) > 200
    _, other, _ = call("list", "--cases", "ci", "--case", "*-seed2")
    assert len(other.splitlines()) == 5


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["lst"], "no command 'lst'; did you mean 'list'"),
        (["list", "--cases", "smok"], "did you mean 'smoke'"),
        (["list", "--cases", "smoke", "--case", "r9-*"], "no case matches 'r9-*'"),
        (["validate", "--cases", "smoke", "--backend", "torhc"], "torhc"),
        (["validate", "--cases", "smoke", "--backend", "nowhere.module:x"], "nowhere"),
        (["validate", "--cases", "smoke", "--device", "cdua"], "did you mean 'cuda'"),
        (["validate", "--cases", "smoke", "--device", "cuda:99"], "cuda:99"),
        (["validate", "--cases", "smoke", "--seed", "-1"], "--seed"),
        (["bench", "--cases", "gone.yaml"], "gone.yaml"),
        (["bench", "--bogus"], "--bogus"),
        (["bench", "--cases", "smoke", "--backend", "torch,"], "'torch,': a name is empty"),
        (["bench", "--cases", "smoke", "--backend", "torch,torch"], "names torch twice"),
        (["bench", "--cases", "smoke", "--policy", "gate.yaml"], "give --gate BASELINE with it"),
        (["report", "nowhere"], "nowhere: holds no run"),
        (["report", "."], ".: holds no run"),
    ],
)
def test_a_bad_request_is_one_line_exit_2_and_nothing_written(
    call: Call,
    args: list[str],
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert wanted in err
    assert not list(tmp_path.iterdir())


def test_a_bad_model_config_is_one_line_exit_2_and_nothing_written(
    call: Call,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: config.json\naxes: {batch: 1q1s9}")
    code, out, err = call("validate", "--cases", str(mine), "--out", str(tmp_path / "runs"))
    assert (code, out) == (2, "")
    assert "config.json: key rope_scaling is missing" in err
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_exit_2(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "runs")
    code, _, err = call("validate", "--cases", "smoke", "--case", "*0q1", "--out", out)
    assert code == 2
    assert out in err


def validate(call: Call, tmp_path: Path, *args: str) -> tuple[int, str, str]:
    """`validate` in this process, which has the backends above; workers: test_isolate.py."""
    out = str(tmp_path / "runs")
    return call(
        "validate", "--cases", "smoke", "--device", "cpu", "--no-isolate", "--out", out, *args
    )


def test_validate_passes_right_cases_and_keeps_their_rows(call: Call, tmp_path: Path) -> None:
    code, out, err = validate(call, tmp_path, "--case", "r2-fp8-tp8*", "--backend", "torch")
    assert code == 0, err
    run_folder = Path(out.strip()).parent
    kept = read_run(run_folder)
    assert kept.header is not None
    assert (kept.header.command, kept.header.suite, kept.header.planned) == ("validate", "smoke", 1)
    assert [row.status for row in kept.cases] == ["passed"]
    assert kept.end is not None
    assert kept.end.exit_code == 0
    assert "1 passed" in err
    assert latest_run(tmp_path / "runs") == run_folder
    code, out, _ = call("report", str(run_folder))
    assert (code, out) == (0, f"{run_folder / 'report.html'}\n")
    assert "r2-fp8-tp8-2q1s300" in (run_folder / "report.html").read_text()


@pytest.mark.parametrize(("name", "status"), [("Negated", "failed"), ("Broken", "error")])
def test_a_wrong_or_broken_backend_exits_1_with_the_command_that_repeats_it(
    call: Call,
    name: str,
    status: str,
    tmp_path: Path,
) -> None:
    code, out, err = validate(
        call, tmp_path, "--case", "r2-fp8-tp8*", "--backend", f"user_kernels:{name}"
    )
    assert code == 1
    assert [row.status for row in read_run(Path(out.strip()).parent).cases] == [status]
    assert f"--case r2-fp8-tp8-2q1s300 --backend user_kernels:{name}" in err


def test_an_interrupted_run_keeps_what_is_done_and_says_so(call: Call, tmp_path: Path) -> None:
    code, out, err = validate(
        call, tmp_path, "--case", "r2-fp8-tp8*", "--backend", "user_kernels:Interrupted"
    )
    assert code == 130
    folder = Path(out.strip()).parent
    assert f"interrupted; the rows so far are kept, megabench validate --resume {folder} " in err
    end = read_run(folder).end
    assert end is not None
    assert end.exit_code == 130


def test_an_unsupported_topology_is_a_skipped_row_with_its_reason(
    call: Call, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("axes: {batch: 1q1s9, tp: 16}")
    args = ("validate", "--cases", str(mine), "--backend", "torch", "--out", str(tmp_path / "runs"))
    code, out, err = call(*args)
    (row,) = read_run(Path(out.strip()).parent).cases
    assert (code, row.status) == (0, "skipped")
    assert "TP 16" in row.reason
    assert f"skipped 1 x: {row.reason}" in err
    _, out, err = call(*args, "--json")
    (line,) = out.splitlines()
    assert json.loads(line)["reason"] == row.reason
    assert "results.jsonl" in err


def test_doctor_says_what_runs_here_and_what_is_missing(call: Call) -> None:
    code, out, _ = call("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["megabench"] == __version__
    eager = [a for a in found["abilities"] if (a["backend"], a["device"]) == ("torch", "cpu")]
    assert eager[0]["ok"]
    assert eager[0]["records"] == ["fp8_ds_mla", "nvfp4_ds_mla"]
    _, text, _ = call("doctor")
    assert "torch" in text
    assert torch.cuda.is_available() or "no GPU" in text


def test_the_case_file_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert suite_for(torch.device("cpu")) == "smoke"
    for name, family, wanted in (
        ("NVIDIA H200", 9, "h200"),
        ("NVIDIA B200", 10, "b200"),
        ("NVIDIA GB300", 10, "b200"),
        ("NVIDIA A100", 8, "default"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, family=family: (family, 0)
        )
        assert suite_for(gpu) == wanted


def test_a_device_that_is_not_here_is_refused_by_name() -> None:
    with pytest.raises(RunError, match="mps: megabench runs on cpu and cuda"):
        find_device("mps")
