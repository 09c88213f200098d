"""Model geometry from a Hugging Face `config.json`, its tensor-parallel shard, who can serve it.

Nothing else hard-wires a model: DeepSeek-V4.1-Flash is the packaged default, read like any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from megabench.formats import HEAD_DIM, PADDED_HEADS, QUANT_GROUP, ROPE_DIM, WV_GROUP_SIZE

DEFAULT_MODEL = "deepseek-v4.1-flash"


class GeometryError(ValueError):
    """A config that cannot be read as a model of this family; the message names file and key."""


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension of the compressed layers' RoPE."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int


@dataclass(frozen=True)
class Geometry:
    """The numbers of one model that the layer depends on (CONTRACT names in brackets)."""

    name: str
    hidden_size: int
    num_heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window_size: int
    index_topk: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn
    rms_norm_eps: float
    max_position_embeddings: int
    head_dim: int = HEAD_DIM
    rope_dim: int = ROPE_DIM

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] = DEFAULT_MODEL) -> Geometry:
        """Read a geometry from a packaged model's name, a path to a config.json, or a mapping.

        The text model's keys may be flat or nested under `text_config`.
        Raises GeometryError for a missing file, bad JSON, or a missing or impossible key.
        """
        if isinstance(source, Mapping):
            return cls._from_config(source, "config")
        path = Path(source)
        try:
            if path.suffix == ".json":
                text, where = path.read_text(encoding="utf-8"), str(path)
            else:
                packaged = resources.files("megabench.data") / f"{source}.config.json"
                text, where = packaged.read_text(encoding="utf-8"), str(source)
        except (OSError, UnicodeDecodeError) as error:
            raise GeometryError(
                f"model {source}: cannot be read ({getattr(error, 'strerror', None) or error}); "
                f"give a path to a config.json, or {DEFAULT_MODEL}"
            ) from error
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise GeometryError(f"{where}:{error.lineno}: not JSON ({error.msg})") from error
        except RecursionError as error:
            raise GeometryError(f"{where}: nested too deeply") from error
        if not isinstance(config, dict):
            raise GeometryError(f"{where}: a config.json holds an object at its top")
        return cls._from_config(config, where)

    @classmethod
    def _from_config(cls, config: Mapping[str, Any], where: str) -> Geometry:
        text = config.get("text_config")
        if text is None:
            text = config
        if not isinstance(text, Mapping):
            raise GeometryError(f"{where}: text_config must be an object")

        def get(key: str, inside: Mapping[str, Any] = text) -> Any:
            if key not in inside:
                raise GeometryError(f"{where}: key {key} is missing")
            return inside[key]

        def number(key: str, inside: Mapping[str, Any] = text) -> float:
            value = get(key, inside)
            real = isinstance(value, int | float) and not isinstance(value, bool)
            if not real or not math.isfinite(value) or value <= 0:
                raise GeometryError(f"{where}: {key} is {value!r}; must be a positive number")
            return float(value)

        def whole(key: str, inside: Mapping[str, Any] = text) -> int:
            value = number(key, inside)
            if not value.is_integer():
                raise GeometryError(f"{where}: {key} is {value!r}; must be a whole number")
            return int(value)

        scaling, ratios = get("rope_scaling"), get("compress_ratios")
        if not isinstance(ratios, list) or not all(type(ratio) is int for ratio in ratios):
            raise GeometryError(f"{where}: compress_ratios must be a list of whole numbers")
        if not isinstance(scaling, Mapping):
            raise GeometryError(f"{where}: rope_scaling must be an object")
        geometry = cls(
            name=str(config.get("_name_or_path") or config.get("model_type", "model")),
            hidden_size=whole("hidden_size"),
            num_heads=whole("num_attention_heads"),
            q_lora_rank=whole("q_lora_rank"),
            o_groups=whole("o_groups"),
            o_lora_rank=whole("o_lora_rank"),
            window_size=whole("sliding_window"),
            index_topk=whole("index_topk"),
            compress_ratios=tuple(ratios),
            rope_theta=number("rope_theta"),
            compress_rope_theta=number("compress_rope_theta"),
            yarn=Yarn(
                factor=number("factor", scaling),
                beta_fast=number("beta_fast", scaling),
                beta_slow=number("beta_slow", scaling),
                original_max_position=whole("original_max_position_embeddings", scaling),
            ),
            rms_norm_eps=number("rms_norm_eps"),
            max_position_embeddings=whole("max_position_embeddings"),
            head_dim=whole("head_dim"),
            rope_dim=whole("qk_rope_head_dim"),
        )
        geometry._check(where)
        return geometry

    def _check(self, where: str) -> None:
        for key, value, fixed in (
            ("head_dim", self.head_dim, HEAD_DIM),
            ("qk_rope_head_dim", self.rope_dim, ROPE_DIM),
        ):
            if value != fixed:
                raise GeometryError(f"{where}: {key} is {value}; this layer is built for {fixed}")
        for key in ("q_lora_rank", "o_lora_rank"):
            if getattr(self, key) % QUANT_GROUP:
                raise GeometryError(
                    f"{where}: {key} is {getattr(self, key)}; must be a multiple of {QUANT_GROUP}"
                )


@dataclass(frozen=True)
class Shard:
    """What one tensor-parallel rank holds."""

    tp_size: int
    n_local_heads: int
    n_local_groups: int

    @property
    def padded_heads(self) -> int:
        """Heads the kernel runs: 64, or 128 above 64 live ones."""
        return next(padded for padded in PADDED_HEADS if self.n_local_heads <= padded)

    @property
    def n_wv_group(self) -> int:
        return self.padded_heads // WV_GROUP_SIZE


def topology_problem(geometry: Geometry, tp_size: int) -> str | None:
    """Why mega attention cannot serve `geometry` at `tp_size`, or None when it can."""
    heads, groups = geometry.num_heads, geometry.o_groups
    if tp_size < 1:
        return f"a tensor-parallel size of {tp_size} is not a size"
    if heads % tp_size:
        return f"{heads} heads do not divide by TP {tp_size}"
    if groups % tp_size:
        return f"{groups} wo_a groups do not divide by TP {tp_size}"
    local_heads, local_groups = heads // tp_size, groups // tp_size
    if not local_groups:
        return f"TP {tp_size} leaves no wo_a group on a rank"
    if local_heads % WV_GROUP_SIZE:
        return (
            f"mega attention needs the local head count ({local_heads}) to be a multiple of "
            f"{WV_GROUP_SIZE}"
        )
    if local_heads // local_groups != WV_GROUP_SIZE:
        return (
            f"mega attention needs {WV_GROUP_SIZE} heads per wo_a group, "
            f"not {local_heads}/{local_groups}"
        )
    if local_heads > PADDED_HEADS[-1]:
        return f"{local_heads} local heads exceed the kernel's {PADDED_HEADS[-1]}"
    return None


def shard(geometry: Geometry, tp_size: int) -> Shard:
    """The shard of one rank; ValueError with `topology_problem`'s reason when there is none."""
    problem = topology_problem(geometry, tp_size)
    if problem:
        raise ValueError(problem)
    return Shard(tp_size, geometry.num_heads // tp_size, geometry.o_groups // tp_size)


def _inverse_frequencies(geometry: Geometry, compressed: bool) -> torch.Tensor:
    """float32 [32] inverse frequencies; YaRN with its own base for compressed layers."""
    dim = geometry.rope_dim
    base = geometry.compress_rope_theta if compressed else geometry.rope_theta
    plain = [base ** (-2.0 * i / dim) for i in range(dim // 2)]
    if not compressed:
        return torch.tensor(plain, dtype=torch.float32)
    yarn = geometry.yarn

    def turns_to_dim(turns: float) -> float:
        ratio = yarn.original_max_position / (turns * 2.0 * math.pi)
        return dim * math.log(ratio) / (2.0 * math.log(base))

    low = max(math.floor(turns_to_dim(yarn.beta_fast)), 0)
    high = min(math.ceil(turns_to_dim(yarn.beta_slow)), dim - 1)
    mixed = []
    for i, frequency in enumerate(plain):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        mixed.append(frequency * (1.0 - ramp) + frequency / yarn.factor * ramp)
    return torch.tensor(mixed, dtype=torch.float32)


def cos_sin_cache(geometry: Geometry, positions: int, compressed: bool) -> torch.Tensor:
    """RoPE table float32 [positions, 64] on the CPU: 32 cosines, then 32 sines, per position.

    The angle is float32(position) * inv_freq in float32, as engines compute it (0.04 rad off at
    one million); its cosine and sine are taken in float64 and rounded once.
    """
    return _cos_sin_table(geometry, positions, compressed).clone()


@lru_cache(maxsize=2)
def _cos_sin_table(geometry: Geometry, positions: int, compressed: bool) -> torch.Tensor:
    """The last tables, since a case makes a dozen layers and the cosines take longer than a step;
    for copying, lest one caller's writes reach another."""
    frequencies = _inverse_frequencies(geometry, compressed)
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    exact = angle.to(torch.float64)
    return torch.cat((exact.cos(), exact.sin()), dim=-1).to(torch.float32)
