"""What a process asks of its GPU: to be the current one, and why it would not capture a graph."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Make a GPU that was named by its number the current one: streams, events, graph capture and
    kernel launches are the current device's, wherever their tensors lie."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def first_cause(error: BaseException) -> str:
    """The first line of what broke a step, not of the graph capture that then could not end."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
