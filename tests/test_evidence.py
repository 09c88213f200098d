"""Evidence about one case: what a dump keeps, what a script repeats, what a profile launches."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import evil_backends
import pytest
import torch
from safetensors.torch import load_file
from tiny_suite import environment, write_suite

from megabench.cases import Case, CaseError, load_suite
from megabench.cli import main
from megabench.evidence.case import find_case
from megabench.evidence.dump import Dumper
from megabench.evidence.profile import command, prepare
from megabench.evidence.repro import repro_script
from megabench.results import CaseResult
from megabench.validate import Store, examine
from megabench.validate.judgement import Judgement
from megabench.validate.poison import POISONS
from megabench.validate.stages import Evidence
from megabench.workload import build_workload

CPU = torch.device("cpu")
WRONG = "evil_backends:Wrong"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="module")
def case(folder: Path) -> Case:
    return load_suite(write_suite(folder, ["2q1s9_1q2"])).cases[0]


@dataclass
class Examined:
    """A case judged under a dumper's eyes."""

    row: CaseResult
    dump: Path | None
    outputs: list[torch.Tensor]
    """Every rank's."""


def examined(case: Case, backend: str, root: Path) -> Examined:
    store, dumper = Store(CPU), Dumper(root)
    outputs: list[torch.Tensor] = []

    def watch(evidence: Evidence, judged: list[Judgement]) -> None:
        outputs.append(evidence.run.output)
        dumper.rank(evidence, judged)

    store.on_rank = watch
    dumper.start(case, backend)
    row = examine(case, backend, CPU, store)
    return Examined(row, dumper.finish(row), outputs)


@pytest.fixture(scope="module")
def right(case: Case, folder: Path) -> Examined:
    return examined(case, "torch", folder / "right")


@pytest.fixture(scope="module")
def wrong(case: Case, folder: Path) -> Examined:
    return examined(case, WRONG, folder / "wrong")


def test_a_failing_case_leaves_what_it_read_was_told_and_wrote(case: Case, wrong: Examined) -> None:
    assert wrong.row.status == "failed"
    assert wrong.dump is not None
    about = json.loads((wrong.dump / "case.json").read_text())
    assert about["row"]["reason"] == wrong.row.reason
    tensors = load_file(wrong.dump / "rank0.safetensors")
    work = build_workload(case, CPU, POISONS[0].fills)
    assert torch.equal(tensors["inputs/qr"], work.qr)
    assert torch.equal(tensors["inputs/swa_cache"], work.swa_cache)
    assert torch.equal(tensors["calls/00.linear/x"], work.qr)
    linear = [key for key in tensors if key.startswith("calls/00.linear/")]
    assert sorted(linear) == ["calls/00.linear/results/0", "calls/00.linear/x"]  # no weights
    codes, scales = tensors["output/codes"], tensors["output/scales"]
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape[0] == scales.shape[0] == case.num_tokens
    assert about["strides"]["output/scales"][0] == 1  # column-major words
    assert any("decode/after/out_fp8" in key for key in tensors)


def test_a_right_case_leaves_nothing_and_a_raising_one_its_inputs(
    right: Examined, folder: Path, tmp_path: Path
) -> None:
    assert right.row.status == "passed"
    assert right.dump is None
    assert not (folder / "right").exists()
    evil = load_suite(write_suite(tmp_path, ["6q1s9"])).cases[0]
    raised = examined(evil, "evil_backends:Evil", tmp_path / "dump")
    assert raised.row.status == "error"
    assert raised.dump is not None
    assert [file.name for file in sorted(raised.dump.iterdir())] == [
        "case.json",
        "inputs.safetensors",
    ]


def test_the_command_dumps_from_a_worker(
    case: Case, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["validate", "--cases", str(folder / "tiny.yaml"), "--backend", WRONG]
    words += ["--device", "cpu", "--dump", str(tmp_path / "dump"), "--out", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["megabench", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    (file,) = (tmp_path / "dump").glob("*/*/rank0.safetensors")
    assert file.parent.parent.name == case.id


def test_a_repro_script_needs_no_case_file_and_finds_the_same(case: Case, tmp_path: Path) -> None:
    text = repro_script(case, WRONG, "cpu", 0)
    assert "small.json" not in text
    script = tmp_path / "repro.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    verdicts = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}
    assert verdicts["wq_b_linear"] == "WRONG"
    assert verdicts["swa_cache"] == "right"
    assert verdicts["end_to_end"] == "beside"


def test_the_step_of_a_repro_script_is_the_step_that_is_judged(case: Case, right: Examined) -> None:
    names: dict[str, object] = {"__name__": "script"}
    exec(compile(repro_script(case, "torch", "cpu", 0), "repro.py", "exec"), names)
    again = names["the_case"]()  # type: ignore[operator]
    assert again.hash == case.hash
    assert torch.equal(names["step"](again), right.outputs[0])  # type: ignore[operator]


def test_a_case_is_found_by_id_in_the_packaged_files() -> None:
    suite, case = find_case("r0-fp8-tp1-2q1s300_1q4", None, None)
    assert case.id in [other.id for other in suite.cases]
    with pytest.raises(CaseError, match="did you mean 'r0-fp8-tp1-2q1s300_1q4'"):
        find_case("r0-fp8-tp1-2q1s300_1q4x", "smoke", None)
    _, seeded = find_case("r0-fp8-tp1-2q1s300_1q4-seed7", "smoke", 7)
    assert seeded.seed == 7


def test_a_profile_launches_the_op_it_names_once(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    linear = evil_backends.Wrong.linear

    def counted(self: object, *args: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return linear(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(evil_backends.Wrong, "linear", counted)
    name, run = prepare(case, WRONG, CPU, "wq_b", 0)
    assert name == "wq_b"
    before = len(calls)
    run()
    assert len(calls) == before + 1
    assert prepare(case, WRONG, CPU, None, 0)[0] == "decode_attention"
    with pytest.raises(CaseError, match="no op 'wq_c' in this step; did you mean 'wq_b'"):
        prepare(case, WRONG, CPU, "wq_c", 0)


@pytest.mark.parametrize("while_", ["made ready", "launched"])
def test_a_profile_of_a_backend_that_raises_ends_with_its_reason(
    case: Case,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    while_: str,
) -> None:
    calls: list[int] = []
    good = sys.maxsize
    linear = evil_backends.Wrong.linear

    def raising(self: object, *args: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > good:
            raise RuntimeError("no such\nluck")
        return linear(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(evil_backends.Wrong, "linear", raising)
    prepare(case, WRONG, CPU, "wq_b", 0)
    good = len(calls) if while_ == "launched" else 0
    calls.clear()
    words = ["profile", case.id, "--cases", str(folder / "tiny.yaml"), "--backend", WRONG]
    words += ["--device", "cpu", "--op", "wq_b"]
    monkeypatch.setattr(sys, "argv", ["megabench", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    wanted = f"megabench: error: {case.id} on {WRONG} raised RuntimeError: no such luck\n"
    assert capsys.readouterr().err == wanted


def test_the_profilers_command_holds_the_range_the_file_and_the_launch(case: Case) -> None:
    words = command("ncu", case, "step", ["--cases", "smoke"])
    assert words[:4] == ["ncu", "--nvtx", "--nvtx-include", "megabench/"]
    launch = [sys.executable, "-m", "megabench", "profile", case.id, "--op", "step"]
    assert words[-9:] == [*launch, "--cases", "smoke"]
    assert words[words.index("-o") + 1] == f"{case.id}-step"


def test_a_profiler_that_is_not_here_is_exit_2_and_the_command_is_printed(
    case: Case,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["profile", case.id, "--cases", str(folder / "tiny.yaml"), "--backend", "torch"]
    words += ["--device", "cpu", "--tool", "nsys"]
    monkeypatch.setattr(sys, "argv", ["megabench", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out.startswith("nsys profile --trace cuda,nvtx ")
    assert "nsys is not on the PATH here" in err
