"""Poison for memory nobody owns, and fences: buffers whose surroundings must keep it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megabench.formats import QUANT_GROUP, WV_GROUP_SIZE
from megabench.layer import QuantizedActivation
from megabench.metadata import DeepseekSparseSWAMetadata
from megabench.quant import MXFP8_DYNAMIC, tma_aligned
from megabench.validate.trace import unowned_words, whole
from megabench.workload import Workload, striped

MARGIN = 1 << 16
"""Bytes of canary before and after an output buffer: the codes of a token with 128 heads, since an
epilogue that forgets where the tokens end may do so for some dims alone. Keeps the alignment."""
WORKSPACE_STRIPE = 1024
"""Bytes of the workspace that share a fill: a gathered row."""
FILLS = (0xFF, 0xA5, 0x00, 0x7F)
"""NaN codes and scales outside the contract, small values, zeros that pass for rows, huge bf16."""


@dataclass(frozen=True)
class Poison:
    """Fills of memory nobody owns. A right result depends on none of them."""

    fills: tuple[int, ...]
    """Cycled over cache pages, workspace rows and the bytes of canaries."""
    data: int
    """Of output codes, and of whatever a kernel is to write."""
    scale: int
    index: int
    """Of list columns past a token's length."""


POISONS = (
    Poison(FILLS, data=0x7F, scale=0xFE, index=-1),
    Poison(FILLS[1:] + FILLS[:1], data=0x01, scale=0x01, index=2**31 - 1),
)
"""NaN codes, a scale of 2^127 and lists that end in -1 once; small finite values and slots beyond
any pool once. No page or row has the same fill in both."""


def _word(fills: tuple[int, ...]) -> int:
    """Four bytes as an int32, little endian."""
    return int.from_bytes(bytes(fills), "little", signed=True)


@dataclass(frozen=True)
class Fenced:
    """A tensor inside a larger storage; every word around it and between its elements holds the
    poison's four fills."""

    tensor: Tensor
    poison: Poison

    @classmethod
    def make(
        cls,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        extent: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: Poison,
        inside: int,
    ) -> Fenced:
        """`extent` elements between two margins, seen with `shape` and `strides`; every byte the
        tensor owns starts as `inside`."""
        size = 2 * MARGIN + extent * dtype.itemsize
        words = torch.full((-(-size // 4),), _word(poison.fills), dtype=torch.int32, device=device)
        raw = words.view(torch.uint8)[:size].view(dtype)
        tensor = raw.as_strided(shape, strides, MARGIN // dtype.itemsize)
        fill_bytes(tensor, inside)
        return cls(tensor, poison)

    @classmethod
    def dense(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        poison: Poison,
        inside: int,
    ) -> Fenced:
        """A contiguous tensor between two margins."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        return cls.make(shape, like.stride(), like.numel(), dtype, device, poison, inside)

    def lost(self) -> Tensor:
        """bool [n]: the words outside the tensor that no longer hold the poison."""
        return unowned_words(self.tensor) != _word(self.poison.fills)


def fill_bytes(tensor: Tensor, value: int) -> None:
    """Set every byte of a tensor's elements, whatever its strides."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    kind = kinds[tensor.element_size()]
    tensor.view(kind).fill_(
        int.from_bytes(bytes([value]) * kind.itemsize, "little", signed=kind != torch.uint8)
    )


@dataclass(frozen=True)
class CanariedOutput:
    """The step's output pair with canaries before, after, and in the scale's ceil4 padding."""

    pair: QuantizedActivation
    data: Fenced
    scale: Fenced

    @classmethod
    def make(cls, tokens: int, groups: int, device: torch.device, poison: Poison) -> CanariedOutput:
        """As `alloc_mega_attn_output` lays the pair out."""
        width = WV_GROUP_SIZE * 512
        words, stride = width // QUANT_GROUP // 4, tma_aligned(tokens)
        shape = (tokens, groups, width)
        data = Fenced.dense(shape, torch.float8_e4m3fn, device, poison, poison.data)
        scale = Fenced.make(
            (tokens, groups, words),
            (1, words * stride, stride),
            groups * words * stride,
            torch.int32,
            device,
            poison,
            poison.scale,
        )
        pair = QuantizedActivation(
            data.tensor, scale.tensor, torch.bfloat16, data.tensor.shape, MXFP8_DYNAMIC
        )
        return cls(pair, data, scale)

    def poison_from(self, groups: int) -> None:
        """Fill the groups from `groups` on, the padded heads', which nobody may read."""
        fill_bytes(self.pair.data[:, groups:], self.data.poison.data)
        fill_bytes(self.pair.scale[:, groups:], self.scale.poison.scale)


def poison_tails(metadata: DeepseekSparseSWAMetadata, poison: Poison) -> None:
    """Fill the decodes' window lists past each token's length, in place."""
    lists, lens = metadata.decode_swa_indices, metadata.decode_swa_lens
    if lists is not None and lens is not None:
        column = torch.arange(lists.shape[1], device=lists.device)
        lists.masked_fill_(column >= lens[:, None], poison.index)


def name_rows_of_padding(workload: Workload) -> None:
    """Give tokens that pad the batch the first token's top-k rows, in place, as if left there by an
    earlier step; their lists are empty all the same."""
    if workload.topk_indices is not None and workload.case.padding_tokens:
        workload.topk_indices[~workload.is_valid] = workload.topk_indices[0].clone()


def poison_workspace(buffer: Tensor, poison: Poison) -> None:
    """Fill a prefill workspace uint8 [n] before the step."""
    buffer.copy_(striped(len(buffer), poison.fills, WORKSPACE_STRIPE, buffer.device))


def strayed_bytes(buffer: Tensor, owned: list[Tensor], poison: Poison) -> Tensor:
    """bool [n]: bytes of a workspace outside the `owned` views of it that lost the poison."""
    clean = striped(len(buffer), poison.fills, WORKSPACE_STRIPE, buffer.device)
    for view in owned:
        typed = clean.view(view.dtype)
        typed.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(view)
    return whole(buffer)[: len(clean)] != clean
