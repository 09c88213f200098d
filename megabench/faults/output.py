"""Faults after attention: the inverse rotation, and the cast to e4m3 under ue8m0 scales."""

from __future__ import annotations

import torch
from torch import Tensor

from megabench.faults.base import Args, fault
from megabench.faults.kernel import Kernel, Pair, kernel
from megabench.faults.triggers import MIXED, ONE_KEY, TWO, ZEROS
from megabench.formats import NOPE_DIM, QUANT_GROUP, ROPE_DIM
from megabench.quant import (
    AMAX_FLOOR,
    UE8M0_BIAS,
    decode_e4m3,
    dequantize_mxfp8,
    encode_e4m3,
    quantize_kv_mxfp8,
)

CODES = ("output_codes_decode",)
SCALES = ("output_scales_decode",)


def blocks_of(out: Tensor) -> Tensor:
    """[t, H, 16, 32]"""
    return torch.unflatten(out, -1, (-1, QUANT_GROUP))


def scaled(out: Tensor, scale: Tensor) -> Tensor:
    """out · 2^(127 - byte) [t, H, 512], what an e4m3 code is made of."""
    exponent = (UE8M0_BIAS - scale.int())[..., None]
    return torch.ldexp(blocks_of(out), exponent).flatten(-2)


def exponents(ratio: Tensor) -> Tensor:
    """Scale bytes of exponents given as floats."""
    return (ratio + UE8M0_BIAS).clamp(0, 254).to(torch.uint8)


class Scaled(Kernel):
    """A cast whose scale bytes come from `bytes_of(amax)`."""

    def amax(self, out: Tensor) -> Tensor:
        return blocks_of(out).abs().amax(-1)

    def bytes_of(self, amax: Tensor) -> Tensor:
        ratio = amax.double().clamp(min=AMAX_FLOOR) / 448
        return exponents(torch.log2(ratio).ceil())

    def encode(self, x: Tensor) -> Tensor:
        return encode_e4m3(x)

    def cast(self, out: Tensor, args: Args) -> Pair:
        scale = self.bytes_of(self.amax(out))
        return self.encode(scaled(out, scale)), scale


# ---- inverse RoPE --------------------------------------------------------------------------------


@fault("I1", "the output is turned forward instead of back", MIXED, *CODES)
@kernel
class TurnedForward(Kernel):
    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        return self.turned(out, angles)


@fault("I2", "the output is turned back at dims 0..63", MIXED, *CODES)
@kernel
class FirstDimsTurnedBack(Kernel):
    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        return super().turned_back(out.roll(-ROPE_DIM, -1), angles).roll(ROPE_DIM, -1)


@fault("I3", "the output is cast first, then turned back and cast again", MIXED, *CODES)
@kernel
class TurnedAfterTheCast(Kernel):
    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        return super().turned_back(dequantize_mxfp8(*quantize_kv_mxfp8(out)), angles)


@fault("I4", "RoPE dims are scaled by the sink twice", MIXED, *SCALES)
@kernel
class SunkTwice(Kernel):
    factor: Tensor

    def sink_factor(self, sink: Tensor, lse: Tensor) -> Tensor:
        self.factor = super().sink_factor(sink, lse)
        return self.factor

    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        turned = super().turned_back(out, angles)
        turned[..., NOPE_DIM:] *= self.factor[..., None]
        return turned


@fault("I5", "the output is not turned back", MIXED, *CODES)
@kernel
class NotTurnedBack(Kernel):
    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        return out


# ---- cast ----------------------------------------------------------------------------------------


@fault("C1", "a block's amax is taken before the inverse rotation", MIXED, *SCALES)
@kernel
class AmaxBeforeRotation(Scaled):
    unturned: Tensor

    def turned_back(self, out: Tensor, angles: Pair) -> Tensor:
        self.unturned = out
        return super().turned_back(out, angles)

    def amax(self, out: Tensor) -> Tensor:
        return super().amax(self.unturned)


@fault("C2a", "amax has no floor: a zero block has byte 0", ZEROS, *SCALES)
@kernel
class NoFloor(Scaled):
    def bytes_of(self, amax: Tensor) -> Tensor:
        return exponents(torch.log2(amax.double() / 448).ceil())


@fault("C2b", "amax has no floor: a zero block is divided by zero", ZEROS, *CODES)
@kernel
class ZeroByZero(Scaled):
    def encode(self, x: Tensor) -> Tensor:
        zero = (blocks_of(x) == 0).all(-1, keepdim=True).expand_as(blocks_of(x)).flatten(-2)
        return torch.where(zero, 0x7F, super().encode(x))


@fault("C2c", "the floor of 1e-4 is applied after the division by 448", ZEROS, *SCALES)
@kernel
class FloorAfterDivision(Scaled):
    def bytes_of(self, amax: Tensor) -> Tensor:
        return exponents(torch.log2((amax.double() / 448).clamp(min=AMAX_FLOOR)).ceil())


@fault("C3a", "a scale's exponent is rounded down", TWO, *SCALES)
@kernel
class ExponentDown(Scaled):
    def bytes_of(self, amax: Tensor) -> Tensor:
        return exponents(torch.log2(amax.double().clamp(min=AMAX_FLOOR) / 448).floor())


@fault("C3b", "a scale's exponent is rounded to nearest", TWO, *SCALES)
@kernel
class ExponentToNearest(Scaled):
    def bytes_of(self, amax: Tensor) -> Tensor:
        return exponents(torch.log2(amax.double().clamp(min=AMAX_FLOOR) / 448).round())


@fault("C4", "an amax of exactly 448 · 2^k gets the exponent k + 1", ONE_KEY, "exact_output")
@kernel
class ExactPowerDoubled(Scaled):
    def bytes_of(self, amax: Tensor) -> Tensor:
        return exponents(torch.log2(amax.double().clamp(min=AMAX_FLOOR) / 448).floor() + 1)


@fault(
    "C5",
    "a value beyond 448 becomes NaN instead of 448",
    ONE_KEY,
    equivalent="The exponent e is the least with amax <= 448 · 2^e, so that no scaled value "
    "exceeds 448 and saturation never happens; a wrong exponent is a fault of its own.",
)
@kernel
class OverflowIsNan(Scaled):
    def encode(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() > 448, 0x7F, super().encode(x))


@fault("C6", "codes are truncated instead of rounded to nearest", TWO, *CODES)
@kernel
class Truncated(Scaled):
    def encode(self, x: Tensor) -> Tensor:
        codes = super().encode(x)
        return codes - (decode_e4m3(codes).abs() > x.abs()).to(torch.uint8)


def _shared(amax: Tensor, blocks: int) -> Tensor:
    wide = torch.unflatten(amax, -1, (-1, blocks))
    return wide.amax(-1, keepdim=True).expand_as(wide).flatten(-2)


@fault("C7a", "amax is taken over 64 dims", TWO, *SCALES)
@kernel
class AmaxOf64(Scaled):
    def amax(self, out: Tensor) -> Tensor:
        return _shared(super().amax(out), 2)


@fault("C7b", "amax is taken over 128 dims", TWO, *SCALES)
@kernel
class AmaxOf128(Scaled):
    def amax(self, out: Tensor) -> Tensor:
        return _shared(super().amax(out), 4)


@fault("C8", "amax ignores negative values", TWO, *SCALES)
@kernel
class AmaxOfPositives(Scaled):
    def amax(self, out: Tensor) -> Tensor:
        return blocks_of(out).amax(-1)


@fault("C9", "the sign of an output code is dropped", TWO, *CODES)
@kernel
class NoSignOfCodes(Scaled):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x) & 0x7F


@fault(
    "C10", "a block is scaled by the exact ratio amax / 448 under a power-of-two byte", TWO, *CODES
)
@kernel
class ScaledByTheRatio(Scaled):
    def cast(self, out: Tensor, args: Args) -> Pair:
        amax = self.amax(out).clamp(min=AMAX_FLOOR)
        exact = blocks_of(out) * (448 / amax)[..., None]
        return self.encode(exact.flatten(-2)), self.bytes_of(amax)
