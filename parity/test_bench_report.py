"""The speed report: which peer counts, what is a roofline's share, that a rerun replaces its own rows alone."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as xml

import pytest

from vtlab.benches.gpu import benches, families, report, results

ABOUT = {"gpu": "NVIDIA Example", "driver_cuda": "13.0", "cupy": "14.2.0", "torch": "2.11.0"}
CEILINGS = {"GB/s": 4000.0, "float32": 60.0, "bfloat16 tensor cores": 700.0}


def row(bench="add 1x8", **more) -> dict:
    peers = {"torch": {"us": 3.0, "cold us": 5.0}, "vllm": {"us": 2.5, "cold us": 9.0}}
    return {
        "family": "elementwise", "bench": bench, "us": 2.0, "cold us": 4.0, "bytes": 48, "flops": 8, "unit": "float32",
        "GB/s": 0, "% of roofline": 0.6, "peers": peers, "ceilings": CEILINGS, "date": "2026-11-29",
    } | more  # fmt: skip


def test_the_fastest_peer_is_named():
    shown = report.flat(row())
    assert (shown["best peer"], shown["peer us"], shown["peer / ours"]) == ("vllm", 2.5, 1.25)
    assert (shown["peer cold us"], shown["cold peer / ours"]) == (9.0, 2.25)


def test_a_copy_of_as_many_bytes_stands_beside_what_moves_them():
    assert report.flat(row(**{"copy us": 1.5}))["copy / ours"] == 0.75
    assert report.flat(row())["copy / ours"] == ""


def test_no_peer_leaves_the_columns_empty():
    shown = report.flat(row(peers={}))
    assert shown["best peer"] == "" and shown["peer / ours"] == ""


def test_a_rerun_replaces_its_own_rows(tmp_path):
    path = tmp_path / "example.json"
    results.save(path, ABOUT, [row("a"), row("b")])
    results.save(path, ABOUT, [row("b", us=1.0), row("c")])
    assert [(r["bench"], r["us"]) for r in results.load(path)["rows"]] == [("a", 2.0), ("b", 1.0), ("c", 2.0)]


def test_the_report_is_a_page_a_table_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="plots come with vtlab[docs]")
    figures = tmp_path / "figures"
    figures.mkdir()
    results.save(figures / "example.json", ABOUT, [row(**{"copy us": 1.0}), row("slow 1x8", us=8.0)])
    page, table, image = report.write(tmp_path / "docs", figures)
    assert "| add 1x8 | 2.0 | 4.0 | 0 | 0.6 | 0.5 | vllm | 2.5 | 1.25 | 9.0 | 2.25 |" in page.read_text()
    assert [r["bench"] for r in csv.DictReader(io.StringIO(table.read_text()))] == ["add 1x8", "slow 1x8"]
    assert xml.parse(image).getroot().tag.endswith("svg")


def test_every_bench_moves_something_and_has_its_own_name():
    found = list(benches())
    assert {bench.family for bench in found} == set(families())
    assert len({bench.name for bench in found}) == len(found)
    assert all(bench.bytes > 0 for bench in found)
