"""One point of the matrix: its axes, its readable id, its canonical hash."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from megabench.cases.batch import Request, parse_batch
from megabench.formats import FP8, NVFP4, CacheDType, KVRecord, PageLayout

DEFAULT_MODEL = "deepseek-v4.1-flash"
MODEL_FOLDER = Path(__file__).parent.parent / "data"

Sink = Literal["matched", "none", "zero", "large", "inf"]
Family = Literal[
    "random",
    "zeros",
    "tiny",
    "saturating",
    "outliers",
    "exponents",
    "equal_logits",
    "one_hot",
    "ramp",
    "monotone",
    "spikes",
    "far",
]
FAMILIES: tuple[Family, ...] = get_args(Family)

_SHORT_CACHE = {"auto": "auto", "fp8": "anyfp8", "fp8_ds_mla": "fp8", "nvfp4_ds_mla": "nvfp4"}


def _check_batch(text: str) -> str:
    parse_batch(text)
    return text


class Case(BaseModel):
    """A step of one layer on one rank, fully determined: same case, same bytes, everywhere."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    suite: str = ""
    """Name of the case file; no part of what defines the case."""
    model: str = DEFAULT_MODEL
    """A packaged geometry's name or the path of a Hugging Face config.json."""
    tp: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel size; sizes the model cannot be served at are reported as skipped."""
    kv_cache: CacheDType = "auto"
    """Record of the compressed cache; auto and fp8 take the layer's packed one."""
    page_layout: PageLayout = "interleaved"
    compress_ratio: Literal[0, 1, 2] = 1
    """Tokens a compressed row stands for; 0 is a sliding-window-only layer."""
    batch: Annotated[str, AfterValidator(_check_batch)]
    decode_threshold: Annotated[int, Field(ge=1)] = 1
    """Longest query that still counts as a decode (more than 1 with speculative decoding)."""
    sink: Sink = "matched"
    """Attention sinks; matched ones lie at ln(valid keys), where every sink fault shows."""
    family: Family = "random"
    """How the values of queries and keys are drawn."""
    page_padding: Annotated[int, Field(ge=0)] = 0
    """Records of unused space after each page (a pool shared by caches pads its pages)."""
    padding_tokens: Annotated[int, Field(ge=0)] = 0
    """Invalid tokens after the decodes, as CUDA graphs pad a batch; decode-only batches."""
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _padding_follows_decodes(self) -> Self:
        requests = self.requests
        if self.padding_tokens and not (requests and all(r.is_decode for r in requests)):
            raise ValueError(f"padding_tokens: batch {self.batch!r} is not of decodes only")
        return self

    @property
    def requests(self) -> list[Request]:
        """The step's requests, decodes first."""
        return parse_batch(self.batch, self.decode_threshold)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return sum(request.query_len for request in self.requests) + self.padding_tokens

    @property
    def max_seq_len(self) -> int:
        """Longest sequence after the step; 1 for a step without requests."""
        return max((request.seq_len for request in self.requests), default=1)

    @property
    def record(self) -> KVRecord:
        """The compressed cache's record."""
        return FP8 if self.kv_cache == "fp8_ds_mla" else NVFP4

    @property
    def id(self) -> str:
        """Ratio, cache, TP and batch, then every other axis that is not at its default."""
        parts = [f"r{self.compress_ratio}", _SHORT_CACHE[self.kv_cache], f"tp{self.tp}", self.batch]
        named = {
            "model": Path(self.model).name.removesuffix(".json").removesuffix(".config"),
            "page_layout": "split",
            "decode_threshold": f"dt{self.decode_threshold}",
            "sink": f"sink.{self.sink}",
            "family": self.family,
            "page_padding": f"pad{self.page_padding}",
            "padding_tokens": f"pt{self.padding_tokens}",
            "seed": f"seed{self.seed}",
        }
        fields = type(self).model_fields
        for name, text in named.items():
            if getattr(self, name) != fields[name].default:
                parts.append(text)
        return "-".join(parts)

    @property
    def hash(self) -> str:
        """16 hex digits of what defines the case: its axes, and the model's config, not its path.

        Independent of the order of keys in the case file, and of the file.
        """
        content = self.model_dump(exclude={"suite"}) | {"model": read_model_config(self.model)}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def model_path(model: str) -> Path:
    """The config.json a model's name or path stands for (which may not exist)."""
    return Path(model) if model.endswith(".json") else MODEL_FOLDER / f"{model}.config.json"


@lru_cache
def read_model_config(model: str) -> Any:
    """The parsed config of a model; ValueError with one line when it cannot be read."""
    path = model_path(model)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(p.name.removesuffix(".config.json") for p in packaged_models()))
        raise ValueError(
            f"model {model!r} cannot be read ({error.strerror}); "
            f"give the path of a config.json, or one of: {known}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model {path} is not JSON: {error}") from error


def packaged_models() -> list[Path]:
    """The configs shipped with the package."""
    return sorted(MODEL_FOLDER.glob("*.config.json"))
