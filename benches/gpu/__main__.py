"""Run GPU benches here and print one line each: python -m vtlab.benches.gpu [--keep FILE] [NAME …]

NAME: only benches whose family or name contains it. --keep: merge the figures into this JSON file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import benches
from .report import flat
from .results import FOLDER, measure, save


def about() -> dict[str, str]:
    """The machine and the peers' versions."""
    import importlib.metadata

    import torch

    from vtlab.parity.device_record import this_gpu

    facts = this_gpu() | {"torch": torch.__version__}
    for name in ("vllm", "flashinfer-python"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def run(names: tuple[str, ...], keep: Path | None) -> None:
    """Measure, print as it goes, and keep every row as soon as it is there."""
    import cupy
    import torch

    from . import ceilings

    def clean() -> None:
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()

    roofs, facts = ceilings.measure(), about()
    clean()
    print("  ".join(f"{name} {value:.0f}" for name, value in roofs.items()), flush=True)
    for bench in benches(names):
        try:
            row = measure(bench, roofs, clean)
        except Exception as error:  # one broken bench must not cost the others their run
            print(f"{bench.name:>40}  FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)
            clean()
            continue
        shown = flat(row)
        print(f"{bench.name:>40}", *(f"{shown[name]!s:>9}" for name in list(shown)[2:]), flush=True)
        if keep is not None:
            save(keep, facts, [row])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path, help=f"e.g. {FOLDER.name}/nvidia_h200.json")
    options = parser.parse_args()
    run(tuple(options.names), options.keep)


if __name__ == "__main__":
    main()
