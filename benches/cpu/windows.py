"""The fastest stretch of a run: what a machine does while others leave it alone. Imports nothing, and runs anywhere."""

from __future__ import annotations

WINDOW = 8  # tokens


def fastest(moments: list[float]) -> float:
    """Tokens a second over the fastest WINDOW tokens in a row; `moments` are when each token was there."""
    width = min(WINDOW, len(moments) - 1)
    return width / min(end - begin for begin, end in zip(moments, moments[width:]))
