"""What an exception says, as the reason of a row."""

from __future__ import annotations

_LONGEST = 2000
"""Characters of a message; a row is a line that people read."""


def reason_of(error: BaseException) -> str:
    """Type, message and notes in one printable line, whatever the message is."""
    said = " ".join(str(error)[:_LONGEST].split())
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    reason = f"{type(error).__name__}: {said}{notes}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason)
