"""Time every GPU bench and print one table; ``--csv FILE`` keeps it.

python -m vtlab.benches.gpu [--csv FILE] [NAME …]   # only benches whose name contains a NAME
"""

from __future__ import annotations

import argparse
import csv

from .replay import copy_bandwidth, cupy_time, torch_time
from .shapes import benches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--csv")
    options = parser.parse_args()
    import cupy
    import torch

    ceiling = copy_bandwidth()
    print(f"copy {ceiling:.0f} GB/s")
    rows = []
    for bench in benches():
        if options.names and not any(name in bench.name for name in options.names):
            continue
        ours = cupy_time(bench.ours(), bench.calls)
        cupy.get_default_memory_pool().free_all_blocks()
        peer = torch_time(bench.torch(), bench.calls) if bench.torch else None
        torch.cuda.empty_cache()
        rate = bench.bytes / ours / 1e3
        rows.append({
            "family": bench.family, "bench": bench.name, "us": round(ours, 2), "GB/s": round(rate),
            "% of copy": round(100 * rate / ceiling), "torch us": round(peer, 2) if peer else "",
            "torch / ours": round(peer / ours, 2) if peer else "",
        })  # fmt: skip
        print("  ".join(f"{value!s:>32}" if key == "bench" else f"{value!s:>9}" for key, value in rows[-1].items()))
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
