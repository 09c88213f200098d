"""What the judges of one rank's step look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megabench.validate.judgement import Judgement
from megabench.validate.step import RankRun
from megabench.validate.trace import INSERT_COMPRESSED, PAD_AND_INSERT, Call
from megabench.validate.truth import Truth
from reference.layer import PreparedWeights, Weights
from reference.layouts import output_meaning


class UnobservedError(Exception):
    """An op was not called as often as the contract's step calls it."""


@dataclass(frozen=True)
class Evidence:
    """One rank's step beside the case's truth."""

    run: RankRun
    truth: Truth
    quantized: Weights
    """This rank's weights in standard order."""
    weights: PreparedWeights
    """The same, dequantized, with the case's sinks."""
    table: Tensor
    """float32 [P, 64] cos/sin rows by position: production's where right, golden's elsewhere."""
    dtype: torch.dtype = torch.float32
    sums_rounded_p: bool = False
    """Whether the backend declares that it normalizes by the sum of rounded probabilities."""

    def calls(self, op: str, times: int) -> list[Call]:
        """The calls of an op; UnobservedError unless there are `times` of them."""
        found = self.run.of(op)
        if len(found) != times:
            raise UnobservedError(f"{op} was called {len(found)} times, expected {times}")
        return found

    def call(self, op: str) -> Call:
        return self.calls(op, 1)[0]

    @cached_property
    def swa_after(self) -> Tensor:
        """The SWA cache's bytes right after the insertion."""
        return self.call(PAD_AND_INSERT).after["swa_cache"]

    @cached_property
    def compressed_after(self) -> Tensor:
        """The compressed cache's bytes right after the insertion."""
        return self.call(INSERT_COMPRESSED).after["cache"]

    @cached_property
    def output(self) -> tuple[Tensor, Tensor]:
        """Codes uint8 [T, H, 512] and scales uint8 [T, H, 16] of the live heads, as written."""
        if len(self.run.outputs) != 1:
            raise UnobservedError(
                f"{len(self.run.outputs)} output pairs were allocated, expected 1"
            )
        pair, groups = self.run.outputs[0].pair, self.run.groups
        return output_meaning(pair.data[:, :groups], pair.scale[:, :groups])


def missing(stage: str, why: UnobservedError) -> Judgement:
    """The judgement of a stage whose evidence is not there."""
    return Judgement(stage, problem=str(why))
