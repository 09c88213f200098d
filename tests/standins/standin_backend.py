"""The vendor ops of the `flashmla` backend on whatever device: stand-ins have no architecture."""

from __future__ import annotations

import torch

from megabench.backends.flashmla.backend import VendorOps


class StandinBackend(VendorOps):
    name = "flashmla-standin"

    def device_problem(self, device: torch.device) -> str | None:
        return None
