"""The batch grammar of attention benchmarks: `<count>q<query>[s<length after the step>]`, by `_`.

As in vLLM's: `32q1s4k_2q2k` is 32 requests of one query at length 4096 and two prefills of 2048.
`k` multiplies either number by 1024; the count is 1 when left out; `0q1` is a step without tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_REQUESTS = 1 << 20
"""Requests of one step, far above what any engine schedules."""

_PART = re.compile(r"(?P<count>\d+)?q(?P<q>\d+)(?P<qk>k?)(?:s(?P<s>\d+)(?P<sk>k?))?")


@dataclass(frozen=True)
class Request:
    """One sequence of a step: `query_len` new tokens end it at `seq_len`."""

    query_len: int
    seq_len: int
    is_decode: bool

    @property
    def prefix_len(self) -> int:
        """Tokens already in the caches before the step."""
        return self.seq_len - self.query_len


def _parse_part(part: str, decode_threshold: int) -> tuple[int, Request]:
    """How many requests a part names, and what each is."""
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(
            f"part {part!r} is not <count>q<query>[s<length after the step>], as in 32q1s4k"
        )
    count = int(match["count"] or 1)
    query = int(match["q"]) * (1024 if match["qk"] else 1)
    length = query if match["s"] is None else int(match["s"]) * (1024 if match["sk"] else 1)
    if query == 0:
        raise ValueError(f"part {part!r}: a request has at least one query (0q1 is the empty step)")
    if length < query:
        raise ValueError(
            f"part {part!r}: the length after the step (s{length}) is below the query (q{query})"
        )
    decode = query <= decode_threshold and length > query
    return count, Request(query, length, decode)


def parse_batch(text: str, decode_threshold: int = 1) -> list[Request]:
    """The requests of a batch in token order: decodes first, each kind in the order written.

    A request is a decode iff its query is at most `decode_threshold` and it has a prefix.
    ValueError naming the offending part.
    """
    requests: list[Request] = []
    for part in text.split("_"):
        count, request = _parse_part(part, decode_threshold)
        if len(requests) + count > MAX_REQUESTS:
            raise ValueError(f"part {part!r}: a step has at most {MAX_REQUESTS} requests")
        requests += [request] * count
    return sorted(requests, key=lambda request: not request.is_decode)
