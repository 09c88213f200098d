"""The rows of `results.jsonl`.

Times are microseconds, rates are per second, sizes are bytes, unless a name says otherwise.
Non-finite floats are written as the strings "NaN", "Infinity", "-Infinity", which these models
read back as floats: every line is strict JSON.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1
"""Raised when a field changes meaning; new optional fields leave it alone."""

Status = Literal["passed", "failed", "skipped", "error", "measured"]
Column = Literal["cold", "warm", "eager", "cpu"]
StopReason = Literal["target", "plateau", "timeout", "max_samples"]
Cause = Literal["crash", "exit", "timeout", "out_of_memory", "device", "output"]
"""How a case's worker process came to its end: a signal, leaving by itself or by raising SystemExit
or KeyboardInterrupt, the time limit, memory, a device left unusable, too much output."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class BackendInfo(_Model):
    """A backend of the run, and whether it can serve the default geometry on the device."""

    name: str
    """Name or `package.module:attribute`, as given."""
    supported: bool
    reason: str | None = None
    """Why not, in a sentence, when `supported` is False."""
    version: str | None = None
    """Of the library behind it (flash_mla, deep_gemm, ...), where there is one."""


class Environment(_Model):
    """What the run ran on; two runs compare only where these agree."""

    device: str
    """The torch device string: "cpu", "cuda:0"."""
    device_name: str
    """The processor's or accelerator's name as its driver gives it."""
    compute_capability: str | None = None
    sm_count: int | None = None
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None
    platform: str
    cpu: str
    cpu_count: int
    """Cores this process may use."""
    torch_threads: int
    python: str
    packages: dict[str, str]
    """Installed versions of torch, triton and the libraries backends use."""
    backends: list[BackendInfo] = []
    weights: str | None = None
    """Digest of the checkpoint that was read; None for weights drawn by seed."""


class RunHeader(_Model):
    """First row of a run."""

    kind: Literal["run"] = "run"
    schema_version: int = SCHEMA_VERSION
    command: str
    """"validate", "bench", ..."""
    argv: list[str]
    started: str
    """UTC, ISO 8601."""
    megabench_version: str
    git_commit: str | None = None
    """With "+dirty" when tracked files differ from it."""
    suite: str | None = None
    seed: int | None = None
    planned: int | None = None
    """Case x backend pairs the run set out to do, so that missing rows can be seen."""
    environment: Environment

    @model_validator(mode="after")
    def _of_this_reader(self) -> Self:
        if self.schema_version > SCHEMA_VERSION:
            raise ValueError(
                f"schema_version is {self.schema_version}: a later megabench wrote this, "
                f"and this one reads {SCHEMA_VERSION}"
            )
        return self


class StageResult(_Model):
    """One stage of one case, judged against the golden model."""

    name: str
    ok: bool
    checked: int
    """Elements compared."""
    worst: float | None = None
    """Largest error / bound; 0 for exact stages that agree, None where no ratio applies."""
    message: str = ""
    """For a failure: where and what; for a pass, usually empty."""
    verdict: bool = True
    """False for figures reported beside the verdict, such as the end-to-end chain."""
    detail: dict[str, Any] = {}


class Interval(_Model):
    """A confidence interval of the median."""

    low: float
    high: float
    level: float = 0.95


class Telemetry(_Model):
    """Device state over one measured block; None where the device does not tell."""

    source: Literal["nvml", "none", "fake"]
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    throttle_mask: int = 0
    """NVML clocks-event-reasons seen at any read of the block."""
    labels: list[str] = []
    """The mask's reasons in words; a power cap is a label, not an error."""
    invalid: str | None = None
    """Why the block's samples do not count (hardware or thermal slowdown)."""


class CrossCheck(_Model):
    """A second clock's figure for the same launches, beside the event pair's."""

    method: str
    status: Literal["agrees", "differs", "failed"]
    """Within 2 us, 5 % or 0.2 us an activity of the event pair's median less `overhead_us`, or not;
    or there is no figure."""
    message: str = ""
    """What differs, or why there is no figure."""
    span_us: float | None = None
    """Median over the launches of first start to last end of their device work."""
    spans_us: list[float] = []
    activities: int | None = None
    """Kernels, copies and fills of one launch."""


class Measurement(_Model):
    """One op of one case, timed one way. Samples are kept whole, in the order taken."""

    op: str
    """An op of `megabench.bench.ops`, or "step" for the whole layer step."""
    column: Column
    method: str
    """How it was timed: "cuda-graph replay, event pair", "perf_counter_ns, 2 threads", ..."""
    note: str = ""
    """Why the method is not the first choice, or what the reader must know about the numbers."""
    calls: int = 1
    """Backend calls behind one sample (a prefill's chunks, the step's ops)."""
    kernels: int | None = None
    """Device kernels a call launches, where they were counted."""
    sets: int = 1
    """Pointer-distinct argument sets rotated through."""
    bytes_rotated: int | None = None
    """Bytes the rotated sets touch in all."""
    samples_us: list[float]
    n: int
    discarded: int = 0
    """Samples taken in blocks that telemetry declared invalid; not in `samples_us`."""
    median_us: float
    mad_us: float
    q1_us: float
    q3_us: float
    min_us: float
    ci_us: Interval
    stop_reason: StopReason
    overhead_us: float | None = None
    """An empty event pair's (or clock pair's) own time, measured in the run; not subtracted."""
    rechecked: bool = False
    """The outputs after timing were bitwise those of the untimed run."""
    flops: int = 0
    bytes_compulsory: int = 0
    """Each distinct byte once."""
    bytes_issued: int = 0
    """Every read and write the op asks for, repeats counted."""
    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0
    """Compulsory bytes over the median."""
    bound: Literal["compute", "memory", "none"] = "none"
    """Which side of the roofline the op lies on, by measured ceilings."""
    floor_us: float | None = None
    """The least time at the run's measured ceilings."""
    roofline_fraction: float | None = None
    """floor_us / median_us."""
    datasheet_floor_us: float | None = None
    datasheet_fraction: float | None = None
    problem: str | None = None
    """Set when the number cannot be true or cannot be used; such a row is an error."""
    telemetry: Telemetry | None = None
    cross_check: CrossCheck | None = None
    """Where asked for, on rows that replay a graph."""

    @model_validator(mode="after")
    def _told_by_samples(self) -> Self:
        """What is judged must follow from what was measured: a row that was edited, or merged from
        two, would else be reported by one and defended by the other."""
        what = f"{self.op} ({self.column})"
        if self.n != len(self.samples_us):
            raise ValueError(f"{what}: n is {self.n}, of another count of samples")
        told = median(self.samples_us) if self.samples_us else math.nan
        if math.isfinite(told) and not math.isclose(told, self.median_us, rel_tol=1e-9):
            raise ValueError(
                f"{what}: median_us is {self.median_us:g}, but the samples' is {told:g}"
            )
        if not self.samples_us and math.isfinite(self.median_us):
            raise ValueError(f"{what}: median_us is {self.median_us:g}, of no samples")
        if min(self.samples_us, default=0.0) < 0:
            raise ValueError(f"{what}: a sample is {min(self.samples_us):g} us")
        ordered = [self.min_us, self.q1_us, self.median_us, self.q3_us]
        if ordered != sorted(ordered) or self.mad_us < 0 or self.ci_us.low > self.ci_us.high:
            raise ValueError(
                f"{what}: minimum, quartiles and interval are not of one set of samples"
            )
        return self

    @property
    def complaint(self) -> str | None:
        """The problem as a row's reason tells it, None where there is none."""
        return f"{self.op} ({self.column}): {self.problem}" if self.problem else None


class Phases(_Model):
    """Where a row's `seconds` went; the parts add up to it."""

    validate_s: float
    """The check against the golden model."""
    setup_s: float
    """Inputs, weights, an op's first run, which compiles, copies to rotate, graph capture, and
    giving memory back."""
    timed_s: float
    """The samples, discarded ones excluded, and the runs that checks time: their sum."""
    overhead_s: float
    """All else: what the harness adds to the timed runs."""


class CaseResult(_Model):
    """One case on one backend: validated, measured, or the reason why not."""

    kind: Literal["case"] = "case"
    schema_version: int = SCHEMA_VERSION
    suite: str
    case_id: str
    case_hash: str
    case: dict[str, Any]
    """The case's own fields, enough to make it again."""
    backend: str
    status: Status
    reason: str = ""
    """Why skipped, or what failed first; for an error, the exception in one line."""
    tokens: int = 0
    """Query tokens of the step (s_q)."""
    stages: list[StageResult] = []
    measurements: list[Measurement] = []
    seconds: float = 0.0
    """Wall time the case took, set-up included; a case's is shared equally by its backends."""
    phases: Phases | None = None
    """Of a benched case."""
    repro: str = ""
    """A command that runs this case alone."""
    cause: Cause | None = None
    """For an error that cost the case's process; None for one that was only raised."""
    output: str = ""
    """With a cause: the end of what that process wrote to stdout and stderr."""

    @model_validator(mode="after")
    def _told_once(self) -> Self:
        """An op told twice would count as a process more."""
        told = [(m.op, m.column) for m in self.measurements]
        if twice := sorted({key for key in told if told.count(key) > 1}):
            op, column = twice[0]
            raise ValueError(f"{self.case_id} on {self.backend} tells of {op} ({column}) twice")
        return self

    @property
    def raised(self) -> bool:
        """Whether it broke, and is not an error for a number that cannot be true alone."""
        complaints = [m.complaint for m in self.measurements]
        return self.status == "error" and self.reason not in complaints


class Comparison(_Model):
    """Two backends on one op of one case, interleaved ABBA in one process."""

    kind: Literal["comparison"] = "comparison"
    schema_version: int = SCHEMA_VERSION
    suite: str
    case_id: str
    op: str
    column: Column
    backend: str
    baseline: str
    ratio: float
    """Median over pairs of time(backend) / time(baseline): below 1, `backend` is faster."""
    ci: Interval
    pairs: int


class Ceiling(_Model):
    """One measured limit of the device, with the datasheet's beside it."""

    name: str
    """"read", "write", "copy", "gather_528", "gather_288", "bf16_matmul", "fp32_matmul", ..."""
    value: float
    unit: Literal["B/s", "FLOP/s", "us"]
    method: str
    samples: int
    datasheet: float | None = None
    source: str = ""
    """Where the datasheet figure comes from."""


class Ceilings(_Model):
    """The device's limits, measured at the start of a run and cached in its folder."""

    kind: Literal["ceilings"] = "ceilings"
    schema_version: int = SCHEMA_VERSION
    device_name: str
    datasheet_key: str | None = None
    """Key into `megabench/data/peaks.json`, None when no entry is the device's."""
    ceilings: list[Ceiling]
    seconds: float

    def value(self, name: str) -> float | None:
        """The measured value called `name`, or None."""
        return next((c.value for c in self.ceilings if c.name == name), None)

    def datasheet(self, name: str) -> float | None:
        """The datasheet value beside the ceiling called `name`, or None."""
        return next((c.datasheet for c in self.ceilings if c.name == name), None)


class RunEnd(_Model):
    """Last row of a run that ended; its absence means the run was cut short."""

    kind: Literal["end"] = "end"
    finished: str
    seconds: float
    rows: int
    """Case rows written."""
    exit_code: int = 0


Row = Annotated[
    RunHeader | CaseResult | Comparison | Ceilings | RunEnd, Field(discriminator="kind")
]
