"""A script that repeats one case on its own, from nothing but an installed megabench."""

from __future__ import annotations

import json
import pprint

from megabench.cases import Case
from megabench.cases.case import packaged_models, read_model_config
from megabench.version import __version__

_SCRIPT = '''\
"""{case_id} on {backend}: one step of the layer, then every stage beside the golden model.

    python repro.py            every stage; exit 1 when one is wrong
    python repro.py step       the step alone, for a debugger or a sanitizer

Needs megabench {version}, and the backend's module on the path.
"""

import json
import sys
import tempfile

import torch

from megabench import get_backend
from megabench.cases import Case
from megabench.devices import make_current
from megabench.metadata import forward_context
from megabench.validate import Store, validate_case
from megabench.workload import build_weights, build_workload, make_layer

BACKEND = {backend!r}
DEVICE = torch.device({device!r})
LAYER_SEED = {layer_seed}
RANK = 0
MODEL = {model}
CASE = {case}


def the_case() -> Case:
    if isinstance(MODEL, str):
        return Case.model_validate({{**CASE, "model": MODEL}})
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(MODEL, file)
    return Case.model_validate({{**CASE, "model": file.name}})


def step(case: Case) -> torch.Tensor:
    """The layer's output on one rank; nothing of the validator is in the way here."""
    workload = build_workload(case, DEVICE)
    weights = build_weights(workload.geometry, LAYER_SEED, DEVICE)
    layer = make_layer(workload, get_backend(BACKEND, case.page_layout), weights, RANK)
    metadata = workload.step_metadata(layer.swa_cache_layer.prefix, layer.compressed_cache_prefix)
    with forward_context(metadata):
        return layer.forward(workload.qr, workload.kv, workload.positions, workload.latent)


def judge(case: Case) -> bool:
    right = True
    for stage in validate_case(case, BACKEND, DEVICE, Store(DEVICE, layer_seed=LAYER_SEED)):
        verdict = ("right" if stage.ok else "WRONG") if stage.verdict else "beside"
        print(f"{{verdict:6}} {{stage.name:24}} {{stage.checked:>9}} checked {{stage.message}}")
        right &= stage.ok or not stage.verdict
    return right


if __name__ == "__main__":
    make_current(DEVICE)
    if sys.argv[1:] == ["step"]:
        print(step(the_case()))
    else:
        sys.exit(not judge(the_case()))
'''


def repro_script(case: Case, backend: str, device: str, layer_seed: int) -> str:
    """A Python script that runs `case` as `megabench validate` does.

    The model's config is written into it unless it is a packaged one.
    """
    packaged = {path.name.removesuffix(".config.json") for path in packaged_models()}
    model: object = case.model if case.model in packaged else read_model_config(case.model)
    return _SCRIPT.format(
        case_id=case.id,
        backend=backend,
        version=__version__,
        device=device,
        layer_seed=layer_seed,
        model=_literal(model),
        case=_literal(case.model_dump(mode="json", exclude={"model"})),
    )


def _literal(value: object) -> str:
    """A value as Python source; JSON's values are."""
    return pprint.pformat(json.loads(json.dumps(value)), width=96, sort_dicts=False)
