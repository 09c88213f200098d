"""Numbers in words: times, rates, sizes and fractions as a person reads them."""

from __future__ import annotations

import math

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
NONE = "–"


def _missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def digits(value: float, count: int = 3) -> str:
    """`count` significant digits, no exponent."""
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else "∞" if value > 0 else "-∞"
    rounded = float(f"{value:.{count - 1}e}")  # 9.996 has the places of 10.0
    places = max(0, count - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded if places else value:,.{places}f}"


def microseconds(value: float | None) -> str:
    """A time in its natural unit: µs, ms from 10,000 µs, s from 10 s."""
    if value is None or _missing(value):
        return NONE
    for scale, unit in ((1e7, "s"), (1e4, "ms")):
        if value >= scale:
            return f"{digits(value / (1e6 if unit == 's' else 1e3))} {unit}"
    return f"{digits(value)} µs"


def rate(value: float | None, unit: str) -> str:
    """A rate with an SI prefix: 4.30 TB/s, 790 TFLOP/s."""
    if value is None or _missing(value):
        return NONE
    for scale, prefix in _STEPS:
        if abs(value) >= scale:
            return f"{digits(value / scale)} {prefix}{unit}"
    return f"{digits(value)} {unit}"


def percent(value: float | None) -> str:
    """A fraction in percent; two digits below 10 %, so that small ones stay apart."""
    if value is None or _missing(value):
        return NONE
    scaled = value * 100
    return f"{scaled:.0f} %" if scaled >= 10 else f"{digits(scaled, 2)} %"


def ratio(value: float | None) -> str:
    """An error / bound: 0 for exact, three digits otherwise."""
    if value is None:
        return NONE
    if math.isnan(value):
        return "NaN"
    return digits(value) if value < 1e6 or math.isinf(value) else f"{value:.1e}"


def size(value: float | None) -> str:
    """Bytes with a binary prefix."""
    if value is None or _missing(value):
        return NONE
    for power, prefix in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 2**power:
            return f"{digits(value / 2**power)} {prefix}"
    return f"{int(value)} B"
