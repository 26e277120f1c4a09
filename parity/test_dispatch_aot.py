"""Trees of builds made ahead of time: what is missing, stale, damaged or too much is an error, and nothing compiles."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vtlab.device import DeviceError, aot, source
from vtlab.device.build import Store, build_all, manifest
from vtlab.device.compiler import Compiled, Usage
from vtlab.device.loader import Loader
from vtlab.ops.errors import ContractError

from .test_device_build import FakeCupy

TARGETS = ("sm_80", "sm_90a")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A whole tree for two targets; compiling takes no time, and its result names source and target."""
    made = []

    def compile_family(family, target):
        made.append((family, target))
        return Compiled(f"{family} {target}".encode(), "nvrtc 0.0", {"kernel": Usage(32, 0, 0, 0)})

    monkeypatch.setattr("vtlab.device.build.compile_family", compile_family)
    aot.write(tmp_path, manifest(build_all(TARGETS, Store(tmp_path))))
    assert len(made) == 2 * len(source.families())
    made.clear()
    return tmp_path, made


def edit(folder: Path, change) -> None:
    listing = json.loads((folder / aot.MANIFEST).read_text())
    change(listing)
    (folder / aot.MANIFEST).write_text(json.dumps(listing))


def cubin(folder: Path, target: str = "sm_90a", family: str = "norm") -> Path:
    return next((folder / target).glob(f"{family}-*.cubin"))


def test_a_whole_tree_is_verified(tree):
    folder, _ = tree
    count = len(source.families())
    assert aot.verify(folder) == {"sm_80": count, "sm_90a": count}
    assert aot.verify(folder, ["sm_90a"]) == {"sm_90a": count}


FAULTS = {
    "no tree": (lambda folder: (folder / aot.MANIFEST).unlink(), "no tree of builds"),
    "no json": (lambda folder: (folder / aot.MANIFEST).write_text("{"), "no tree of builds"),
    "no manifest": (lambda folder: (folder / aot.MANIFEST).write_text("[1]"), "not a manifest"),
    "a family less": (lambda folder: edit(folder, lambda all: all["sm_90a"].pop("norm")), "not those of.*norm"),
    "a family more": (lambda folder: edit(folder, lambda all: all["sm_90a"].update(old={})), "not those of.*old"),
    "another source": (
        lambda folder: edit(folder, lambda all: all["sm_90a"]["norm"].update(digest="0" * 16)), "norm.*stale"
    ),
    "other flags": (
        lambda folder: edit(folder, lambda all: all["sm_90a"]["norm"].update(flags=["-fmad=true"])), "norm.*stale"
    ),
    "a file less": (lambda folder: cubin(folder).unlink(), "norm for sm_90a is missing"),
    "a file more": (lambda folder: shutil.copy(cubin(folder), folder / "sm_90a/old-0.cubin"), "no manifest.*old-0"),
    "a byte": (lambda folder: cubin(folder).write_bytes(b"x" + cubin(folder).read_bytes()[1:]), "norm.*damaged"),
    "another target's": (
        lambda folder: shutil.copy(cubin(folder, "sm_80"), cubin(folder)), "norm for sm_90a is damaged"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_wrong_is_found(tree, fault):
    folder, _ = tree
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises(DeviceError, match=message):
        aot.verify(folder)


def test_a_changed_source_makes_the_tree_stale(tree, monkeypatch):
    folder, _ = tree
    monkeypatch.setattr(aot, "source_digest", lambda family: "1" * 16)
    with pytest.raises(DeviceError, match="stale"):
        aot.verify(folder)


def test_targets_that_a_tree_lacks_or_nobody_knows(tree):
    with pytest.raises(DeviceError, match="no tree for sm_89, only for sm_80, sm_90a"):
        aot.verify(tree[0], ["sm_89"])
    with pytest.raises(ContractError, match="one of sm_80"):
        aot.verify(tree[0], ["sm_999"])


def test_kernels_come_from_the_tree_alone(tree, monkeypatch):
    folder, made = tree
    monkeypatch.setenv("VTLAB_AOT", str(folder))
    loader = Loader(FakeCupy, aot.store())
    assert loader.function("norm", "rms_norm_rows", 0) == (b"norm sm_90a", "rms_norm_rows") and not made
    cubin(folder).unlink()
    with pytest.raises(DeviceError, match="no whole build of the present norm for sm_90a, and nothing is compiled"):
        Loader(FakeCupy, aot.Tree(folder)).function("norm", "rms_norm_rows", 0)
    assert not made
    with pytest.raises(DeviceError, match="missing"):
        aot.store()
    monkeypatch.delenv("VTLAB_AOT")
    assert type(aot.store()) is Store


def test_building_again_takes_old_builds_away(tree):
    folder, _ = tree
    old = folder / "sm_90a" / "norm-0123456789abcdef.cubin"
    old.write_bytes(b"old")
    old.with_suffix(".json").write_text("{}")
    aot.write(folder, json.loads((folder / aot.MANIFEST).read_text()))
    assert not old.exists() and not old.with_suffix(".json").exists()
    aot.verify(folder)


def test_the_command_verifies(tree):
    folder, _ = tree
    code = "from vtlab.parity.cli import main; main()"
    command = [sys.executable, "-c", code, "build", "--verify", "--out", str(folder), "--arch", "sm_90a"]
    run = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert json.loads(run.stdout) == {"sm_90a": len(source.families())}, run.stderr
    cubin(folder).unlink()
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1 and "norm for sm_90a is missing" in run.stderr
    run = subprocess.run(command[:5], capture_output=True, text=True)
    assert run.returncode == 1 and "the tree to verify" in run.stderr
