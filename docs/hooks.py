"""mkdocs hook: mkdocstrings reads sources from a folder called vtlab, and here folder X is vtlab.X; so link them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ops", "oracle", "models", "gguf", "parity")


def on_startup(command, dirty):
    package = ROOT / "build" / "sources" / "vtlab"
    package.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        link = package / folder
        if not link.exists():
            link.symlink_to(ROOT / folder, target_is_directory=True)
