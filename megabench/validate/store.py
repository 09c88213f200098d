"""What the cases of a run share: backends, checkpoint and golden weights, finalized layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megabench.backends import Backend, get_backend
from megabench.cases.case import read_model_config
from megabench.formats import PageLayout
from megabench.geometry import Geometry
from megabench.layer import DeepseekV4MegaAttnAttention
from megabench.validate.golden import GoldenWeights
from megabench.validate.guards import fingerprint
from megabench.validate.judgement import Judgement, attempted, merge
from megabench.validate.reload import reload_weights
from megabench.validate.stages import Evidence, load
from megabench.validate.step import RankRun
from megabench.validate.trace import EINSUM, LINEAR, TracingBackend
from megabench.workload import Workload, bind, checkpoint, make_layer
from reference.layer import Weights
from reference.model import from_config


@dataclass(frozen=True)
class _Model:
    geometry: Geometry
    checkpoint: dict[str, Tensor]
    golden: GoldenWeights


@dataclass(frozen=True)
class _JudgedWeights:
    fingerprints: tuple[tuple[int, ...], ...]
    judgement: Judgement


class Store:
    """Kept from case to case: one model's weights, and one set of ranks' finalized layers.

    Only the last model and the last (page layout, TP size) are held, so a run should go through
    cases in that order; within them every backend keeps its own layers, since a bench alternates
    between backends. `layer_seed` chooses the random weights, unless `weights_file` holds a
    checkpoint.
    """

    def __init__(
        self,
        device: torch.device,
        layer_seed: int = 0,
        dtype: torch.dtype = torch.float32,
        weights_file: Path | None = None,
    ) -> None:
        self.device = device
        self.layer_seed = layer_seed
        self.dtype = dtype
        self.weights_file = weights_file
        self._model: tuple[str, _Model] | None = None
        self._backends: dict[tuple[str, str], TracingBackend] = {}
        self._layers_of: tuple[str, str, int] | None = None
        self._layers: dict[tuple[str, int], DeepseekV4MegaAttnAttention] = {}
        self._weights: dict[tuple[Backend, int], _JudgedWeights] = {}
        self.on_rank: Callable[[Evidence, list[Judgement]], None] | None = None
        """Told of every rank's step and judgements, while its tensors are there."""

    def backend(self, name: str, layout: PageLayout) -> TracingBackend:
        """The traced backend of a name or spec; BackendError when there is none."""
        key = name, layout
        if key not in self._backends:
            self._backends[key] = TracingBackend(get_backend(name, layout))
        return self._backends[key]

    def add_backend(self, name: str, backend: Backend) -> None:
        """Use an object of the caller's under a name, for the page layout it has."""
        self._forget_layers(None)
        self._backends[name, backend.page_layout] = TracingBackend(backend)

    def model(self, name: str) -> _Model:
        """Checkpoint and golden weights of a model."""
        if self._model is None or self._model[0] != name:
            self._forget_layers(None)
            self._model = None
            geometry = Geometry.load(name)
            tensors = checkpoint(geometry, self.layer_seed, self.weights_file, self.device)
            model = from_config(read_model_config(name))
            golden = GoldenWeights.of(tensors, model, self.dtype)
            self._model = name, _Model(geometry, tensors, golden)
        return self._model[1]

    def _forget_layers(self, group: tuple[str, str, int] | None) -> None:
        self._layers_of = group
        self._layers.clear()
        self._weights.clear()

    def layer(
        self, workload: Workload, backend_name: str, rank: int
    ) -> DeepseekV4MegaAttnAttention:
        """One rank's layer with the case's caches and sinks; its linears are shared by cases."""
        case = workload.case
        model = self.model(case.model)
        group = case.model, case.page_layout, case.tp
        if self._layers_of != group:
            self._forget_layers(group)
        backend = self.backend(backend_name, case.page_layout)
        first = self._layers.get((backend_name, rank))
        if first is None:
            first = make_layer(workload, backend.as_backend(), model.checkpoint, rank)
            reload_weights(first)
            self._layers[backend_name, rank] = first
        config = replace(
            first.config,
            compress_ratio=case.compress_ratio,
            kv_cache_dtype=case.kv_cache,
            max_model_len=workload.max_model_len,
            max_num_batched_tokens=workload.max_num_batched_tokens,
        )
        layer = DeepseekV4MegaAttnAttention(config)
        layer.adopt_linears(first, workload.attn_sink)
        bind(layer, workload)
        return layer

    def judge_weights(self, run: RankRun, golden: Weights) -> Judgement:
        """The weights stage; what an earlier case of the same bytes found is found again."""
        given = [t for call in run.of(LINEAR) for t in (call.args["w"], call.args["sw"])]
        given += [t for call in run.of(EINSUM) for t in call.args["w"]]
        now = tuple(fingerprint(t) for t in given)
        key = run.layer.backend, run.rank
        known = self._weights.get(key)
        if known is None or known.fingerprints != now:
            ops = attempted("weights", lambda: load.permuting_ops(run, golden))
            judged = merge((load.weights(run, golden), ops))[0]
            known = self._weights[key] = _JudgedWeights(now, judged)
        return known.judgement
