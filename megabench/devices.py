"""The current device of a process that works on one GPU of several."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Make a GPU that was named by its number the current one: streams, events, graph capture and
    kernel launches are the current device's, wherever their tensors lie."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
