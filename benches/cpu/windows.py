"""The fastest stretch of a run, what a machine does while others leave it alone, and its memory. Runs anywhere."""

from __future__ import annotations

import re
import resource

WINDOW = 8  # tokens


def fastest(moments: list[float]) -> float:
    """Tokens a second over the fastest WINDOW tokens in a row; `moments` are when each token was there."""
    width = min(WINDOW, len(moments) - 1)
    return width / min(end - begin for begin, end in zip(moments, moments[width:]))


def peak_rss_mb() -> float:
    """The most memory that this process has had, MB; the kernel's other count begins with what its parent had."""
    try:
        with open("/proc/self/status") as status:
            return int(re.search(r"^VmHWM:\s+(\d+) kB", status.read(), re.MULTILINE)[1]) / 1024
    except (OSError, TypeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
