"""Streams beside the current one, for tests of captured graphs."""

from __future__ import annotations


def side_stream(cupy):
    """A CuPy stream that waits for no other, once all that was sent or started so far is over."""
    cupy.cuda.Device().synchronize()
    return cupy.cuda.Stream(non_blocking=True)
