"""Builds without a GPU: every kernel for every architecture, the store's promises, which build serves which device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vtlab.device import DeviceError, compiler, loader, source
from vtlab.device.arch import ARCHS, PTX, lookup, serving
from vtlab.device.build import Store, build_all, cache_folder
from vtlab.device.spills import DECLARED, spilling
from vtlab.ops.errors import ContractError

from .device_cases import device_ops
from .device_record import TOOLS, built_record, gpu_records, verified


def have_compiler() -> bool:
    try:
        return bool(compiler.compiler())
    except DeviceError:
        return False


needs_compiler = pytest.mark.skipif(not have_compiler(), reason="neither NVRTC nor nvcc is installed")


@needs_compiler
def test_builds_of_several_families_come_in_order_and_whole(tmp_path):
    """A handwritten and a generated source; ``vtlab build``, which CI runs, compiles all for every architecture."""
    chain = next(family for family in source.families() if not (source.FOLDER / f"{family}.cu").exists())
    builds = build_all(["sm_90a", "sm_80"], Store(tmp_path), ["splits", chain])
    assert [(build.entry["target"], build.entry["family"]) for build in builds] == [
        (target, family) for target in ("sm_90a", "sm_80") for family in ("splits", chain)
    ]
    assert [name for build in builds for name in build.spilling] == []
    assert all(build.entry["kernels"] and build.image.startswith(b"\x7fELF") for build in builds)


@needs_compiler
def test_ptx_for_devices_that_no_cubin_serves():
    assert b".target sm_80" in compiler.compile_family("splits", PTX).image


@pytest.mark.parametrize(
    "major, minor, target",
    [(8, 0, "sm_80"), (8, 6, "sm_86"), (8, 7, "sm_86"), (8, 9, "sm_89"), (9, 0, "sm_90a"), (10, 0, "sm_100a"),
     (10, 3, "sm_103a"), (12, 0, "sm_120a"), (12, 1, "sm_121a"), (10, 1, PTX), (11, 0, PTX), (13, 0, PTX)],
)  # fmt: skip
def test_which_build_serves_a_device(major, minor, target):
    assert serving(major, minor) == target


def test_devices_and_archs_that_are_refused():
    with pytest.raises(ContractError, match=r"7\.5.*8\.0 or newer"):
        serving(7, 5)
    with pytest.raises(ContractError, match=r"'sm_90'.*sm_90a"):
        lookup("sm_90")
    with pytest.raises(ContractError, match=r"'nrm'.*norm"):
        source.text_of("nrm")


def test_the_digest_covers_headers_and_flags(tmp_path, monkeypatch):
    assert list(source.texts_of("norm")) == [
        "fast.cuh", "norm.cu", "rowwise.cuh", "storage.cuh", "teams.cuh", "tree.cuh", "vt_math.cuh",
    ]  # fmt: skip
    for path in source.FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    digests = {source.source_digest("norm")}
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    source.source_digest.cache_clear()
    assert source.source_digest("norm") in digests
    for change in ("vt_math.cuh", "norm.cu"):
        (tmp_path / change).write_text((tmp_path / change).read_text() + "\n")
        source.source_digest.cache_clear()
        digests.add(source.source_digest("norm"))
    monkeypatch.setattr(source, "FLAGS", source.FLAGS[1:])
    source.source_digest.cache_clear()
    digests.add(source.source_digest("norm"))
    source.source_digest.cache_clear()
    assert len(digests) == 4


@needs_compiler
def test_a_store_finds_what_it_made_and_nothing_damaged(tmp_path):
    store = Store(tmp_path)
    assert store.find("splits", "sm_90a") is None
    made = store.get("splits", "sm_90a")
    assert store.find("splits", "sm_90a") == made and store.find("splits", "sm_80") is None
    cubin = next(tmp_path.glob("sm_90a/*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"!")
    assert store.find("splits", "sm_90a") is None
    assert store.get("splits", "sm_90a") == made
    next(tmp_path.glob("sm_90a/*.json")).write_text("{")
    assert store.find("splits", "sm_90a") is None
    assert sorted(path.suffix for path in tmp_path.glob("sm_90a/*")) == [".cubin", ".json"]


@needs_compiler
def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert Store(blocked).get("splits", "sm_90a").image


@needs_compiler
def test_the_command_writes_a_manifest(tmp_path):
    code = "from vtlab.parity.cli import main; main()"
    command = [sys.executable, "-c", code, "build", "splits", "--arch", "sm_89", "--out", str(tmp_path), "--json"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    listing = json.loads(run.stdout)
    assert listing == json.loads((tmp_path / "manifest.json").read_text())
    assert set(listing["sm_89"]["splits"]["kernels"]) == {"split_2", "split_4", "split_16"}
    refused = subprocess.run([*command[:4], "--arch", "sm_1"], capture_output=True, text=True)
    assert refused.returncode == 1 and "one of sm_80" in refused.stderr


def test_declared_spills_are_bounded_and_of_kernels_that_exist(monkeypatch):
    monkeypatch.setitem(DECLARED, ("sm_80", "split_2"), (16, "a test's"))
    for (target, kernel), (most, why) in DECLARED.items():
        assert why and spilling(target, {kernel: {"spills": most}}) == []
        assert spilling(target, {kernel: {"spills": most + 1}}) == [kernel]
        assert spilling("sm_90a", {kernel: {"spills": 1}}) == [kernel]
        assert any(kernel in entry["kernels"] for entry in built_record()[target].values())


def test_a_spill_fails_the_build(monkeypatch, tmp_path):
    from .building import run_build

    usage = compiler.Usage(255, 0, 8, 16)
    monkeypatch.setattr("vtlab.device.build.compile_family", lambda *_: compiler.Compiled(b"x", "none", {"k": usage}))
    assert run_build(("sm_90a",), ("splits",), tmp_path, record=False, as_json=True) == 1


def test_builds_on_record_are_left_out_but_for_one_architecture(monkeypatch, tmp_path):
    """A changed source or another compiler is built for all; what is on record for the one that its digest picks."""
    from . import building

    made = []

    def compile_family(family, target):
        made.append(target)
        return compiler.Compiled(b"x", "one 1.0", {})

    monkeypatch.setattr("vtlab.device.build.compile_family", compile_family)
    monkeypatch.setattr(building, "compiler", lambda: "one 1.0")
    entry = {"digest": source.source_digest("splits"), "compiler": "one 1.0", "kernels": {}}
    for record, built in (({"splits": entry}, 1), ({"splits": entry | {"digest": "another"}}, 8),
                          ({"splits": entry | {"compiler": "one 2.0"}}, 8), ({}, 8)):  # fmt: skip
        monkeypatch.setattr(building, "built_record", lambda record=record: {arch.name: record for arch in ARCHS})
        monkeypatch.setenv("VTLAB_CACHE", str(tmp_path / str(len(made))))
        before = len(made)
        assert building.run_build((), ("splits",), None, record=False, as_json=True, changed=True) == 0
        assert len(made) - before == built
    with pytest.raises(ContractError):
        building.run_build((), (), tmp_path, record=False, as_json=True, changed=True)


def test_the_compilers_report_is_read():
    nvcc = """ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers"""
    usages = compiler.usages(nvcc)
    assert usages == {"a": compiler.Usage(255, 2048, 8, 16), "b": compiler.Usage(20, 0, 0, 0)}


def test_the_tier_imports_without_cupy_and_says_what_is_missing():
    code = """import sys; sys.modules["cupy"] = None
import vtlab.device, numpy
from vtlab.device.norm import rms_norm
try: rms_norm(numpy.ones((1, 8), "f4"), numpy.ones(8, "f4"))
except vtlab.device.DeviceError as error: print(error)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "CuPy is not installed" in run.stdout and "vtlab[cuda13]" in run.stdout


class FakeCupy:
    """As much of CuPy as the loader touches."""

    class cuda:
        class driver:
            class CUDADriverError(Exception):
                pass

        class Device:
            compute_capability = "90"

        class function:
            class Module:
                def load(self, image):
                    self.image = image

                def get_function(self, name):
                    if name == "missing":
                        raise FakeCupy.cuda.driver.CUDADriverError
                    return self.image, name


@needs_compiler
def test_the_loader_compiles_once_and_then_finds(tmp_path):
    first = loader.Loader(FakeCupy, Store(tmp_path))
    function = first.function("splits", "split_16", 0)
    assert function is first.function("splits", "split_16", 0) and first.compiled == 1
    second = loader.Loader(FakeCupy, Store(tmp_path))
    assert second.function("splits", "split_16", 0) == function and second.compiled == 0
    with pytest.raises(ContractError, match=r"'missing', want a kernel of splits\.cu"):
        second.function("splits", "missing", 0)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VTLAB_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("VTLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "vtlab"


def test_records_are_about_the_present_sources():
    """A kernel that changed since its record must run on that GPU again, or leave the record."""
    for gpu, record in gpu_records().items():
        stale = {name for name, entry in record["families"].items() if entry["digest"] != source.source_digest(name)}
        assert not stale, f"{gpu}: pytest parity/ --device cuda has not seen the present source of {stale}"
        assert all(set(entry["sanitizer"]) == set(TOOLS) for entry in record["families"].values())
    for target, made in built_record().items():
        stale = {name for name in source.families() if made.get(name, {}).get("digest") != source.source_digest(name)}
        assert not stale, f"{target}: run vtlab build --record, the source of {stale} changed"


@pytest.mark.parametrize("op", device_ops())
def test_an_h200_has_verified_the_kernels(op):
    assert verified(op, gpu_records()["NVIDIA H200"])


@needs_compiler
def test_compiling_writes_into_no_object_that_python_shares():
    """NVRTC fills the buffer it is given; an empty log is one byte long, and Python keeps one object for each byte."""
    compiler.compile_family("splits", PTX)
    assert [bytes([value])[0] for value in range(256)] == list(range(256))


def test_an_op_that_chains_serve_needs_all_of_them():
    from .device_record import device_states, recipes_of

    op, holds = "rms_norm_fp4_quant", lambda name, record, family=None: name in record
    recipes = set(recipes_of(op))
    assert len(recipes) == 4
    claims = [
        ("all", "verified", holds, recipes),
        ("one less", "verified", holds, recipes - {op}),
        ("op", "built", holds, {}),
    ]
    assert device_states(claims, (op,)) == {"all": "verified"}
    assert device_states(claims, (op, "mxfp4_quant")) == {"all": "partial"}
