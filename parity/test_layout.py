"""The layout's promises that import-linter cannot see, because gguf/ is a namespace folder on purpose."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add("." * node.level + node.module)
    return names


def test_pypi_gguf_wins_over_our_folder_even_in_the_repository_root():
    code = "import gguf, vtlab.gguf.reader; print(gguf.__file__); print(vtlab.gguf.reader.__file__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    theirs, ours = (Path(line) for line in run.stdout.split())
    assert theirs.name == "__init__.py" and theirs.parent != ROOT / "gguf"
    assert ours == Path(importlib.import_module("vtlab.gguf.reader").__file__)
    assert not (ROOT / "gguf" / "__init__.py").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "gguf").glob("*.py")), ids=lambda p: p.name)
def test_gguf_imports_nothing_of_ours_but_errors_and_block_layouts(path):
    ours = {name for name in _imports(path) if name.startswith("vtlab.")}
    shared = {"vtlab.ops.errors", "vtlab.ops.blocks", "vtlab.ops.block_grids"}
    assert all(name in shared or name.startswith("vtlab.gguf.") for name in ours), ours


@pytest.mark.parametrize("folder", ["ops", "oracle", "device"])
def test_gguf_is_imported_by_models_parity_and_benches_alone(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not any(name.startswith(("vtlab.gguf", "gguf")) for name in _imports(path)), path


def test_oracle_imports_quickly():
    """`import vtlab.oracle` brings in NumPy and ml_dtypes, and none of the slow libraries."""
    code = "import vtlab.oracle, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"scipy", "rich", "typer", "tokenizers", "gguf", "pytest", "numba", "cupy", "mpmath", "hypothesis"}
    assert not slow & set(run.stdout.split())
