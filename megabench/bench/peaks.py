"""Datasheet peaks: what the vendor says a device can do, with the source of each figure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

PEAKS_FILE = "peaks.json"
_FIELDS = {
    "read": "memory_bytes_per_s",
    "write": "memory_bytes_per_s",
    "copy": "memory_bytes_per_s",
    "bf16_matmul": "bf16_flops",
    "fp8_matmul": "fp8_flops",
    "fp32_matmul": "fp32_flops",
}
"""Ceiling name to the datasheet figure that stands beside it."""


@dataclass(frozen=True)
class Peak:
    """One device's datasheet figures, dense (no sparsity), by the names in `peaks.json`."""

    figures: dict[str, float]
    source: str

    def value(self, ceiling: str) -> tuple[float | None, str]:
        """The figure beside the ceiling of that name, and its source; (None, "") for none."""
        figure = self.figures.get(_FIELDS.get(ceiling, ""))
        return (figure, self.source) if figure is not None else (None, "")


@cache
def load_peaks() -> dict[str, Any]:
    """The packaged data file: key -> match (substrings), exclude, figures, source."""
    text = (resources.files("megabench.data") / PEAKS_FILE).read_text(encoding="utf-8")
    devices: dict[str, Any] = json.loads(text)["devices"]
    return devices


def find_peak(device_name: str) -> tuple[str | None, Peak | None]:
    """The entry whose every `match` word, and no `exclude` word, is in the device's name."""
    name = device_name.lower()
    for key, entry in load_peaks().items():
        wanted = all(word.lower() in name for word in entry["match"])
        if wanted and not any(word.lower() in name for word in entry["exclude"]):
            return key, Peak(entry["figures"], entry["source"])
    return None, None
