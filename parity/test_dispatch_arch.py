"""Which architectures are built for, which tactic a GPU gets, what is known of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.device.arrays import DeviceArrays
from vtlab.device.caps import DeviceCaps, device_caps, read_caps
from vtlab.device.intersect import arch_intersect, dotted, enabled_for, undotted
from vtlab.device.tactics import ArchTactic, Tactics
from vtlab.ops.errors import ContractError
from vtlab.ops.providers import OpProvider, Registry

from .emulated_arrays import emulated_arrays

# Results of vLLM's cuda_archs_loose_intersection under cmake.
CMAKE = [
    ("7.5;8.0;8.6;9.0;9.0a", "8.0;8.9;9.0", "9.0a;8.0;8.6"),
    ("8.0+PTX", "9.0", "8.0+PTX"),
    ("8.0", "9.0", ""),
    ("9.0a", "9.0", "9.0a"),
    ("9.0", "9.0a", "9.0a"),
    ("12.0f", "12.1a", "12.1a"),
    ("10.0f", "10.0;10.3a", "10.0f"),
    ("12.0a", "12.1a", ""),
    ("8.0+PTX;12.0a;12.1a", "9.0a;12.1a", "12.1a;8.0+PTX"),
    ("8.0;9.0", "8.6;8.9", "8.0"),
    ("", "8.0", ""),
    ("8.0", "", ""),
]


def listed(text: str) -> list[str]:
    return text.split(";") if text else []


@pytest.mark.parametrize(("src", "tgt", "want"), CMAKE)
def test_the_intersection_is_cmakes(src, tgt, want):
    assert arch_intersect(listed(src), listed(tgt)) == listed(want)


VERSIONS = st.sampled_from(["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"])
NAMES = st.builds("{}{}".format, VERSIONS, st.sampled_from(["", "", "a", "f"]))


@given(st.lists(NAMES, max_size=6), st.lists(NAMES, max_size=6))
def test_what_is_built_was_listed_or_asked_for_and_no_two_are_the_same(src, tgt):
    found = arch_intersect(src, tgt)
    assert len(set(found)) == len(found) and set(found) <= {*src, *tgt}
    majors = {name.split(".")[0] for name in tgt}
    assert all(name.split(".")[0] in majors for name in found)
    assert set(arch_intersect(src, src)) <= set(src)


@pytest.mark.parametrize(("targets", "want"), [
    ("121a", "121a"), ("120a", "120a"), ("120a;121a", "120a;121a"), ("120", ""), ("121", ""), ("80", ""), ("90", ""),
    ("90a", ""), ("100a", ""), ("90a;121a", "121a"),
])  # fmt: skip
def test_a_feature_of_chip_generations_wants_them_by_name(targets, want):
    assert enabled_for(["120a", "121a"], listed(targets)) == listed(want)


def test_names_have_two_forms():
    assert [dotted(name) for name in ("121a", "90", "103f", "80+PTX")] == ["12.1a", "9.0", "10.3f", "8.0+PTX"]
    assert [undotted(name) for name in ("12.1a", "9.0", "8.0+PTX")] == ["121a", "90", "80+PTX"]
    for wrong in ("", "9", "sm_90", "9.0", "90b", "90aa"):
        with pytest.raises(ContractError, match="an architecture such as 121a"):
            dotted(wrong)
    for wrong in ("90a", "9.", "9.0x"):
        with pytest.raises(ContractError):
            undotted(wrong)
        with pytest.raises(ContractError):
            arch_intersect([wrong], ["9.0"])


def caps(major: int, minor: int = 0) -> DeviceCaps:
    return DeviceCaps(major, minor, 232448, 132, False, False, 50 << 20, 141 << 30)


def tactic(name: str, least: int, accepts: bool, calls: list) -> ArchTactic:
    def launch(arguments):
        calls.append((name, arguments["m"]))
        return accepts

    return ArchTactic(name, "fp8", lambda found: found.sm_arch >= least, launch)


def test_tactics_go_in_order_of_registration_and_may_decline():
    calls: list = []
    device = [caps(9)]
    tactics = Tactics(lambda: device[0])
    tactics.register(tactic("hopper", 90, False, calls))
    tactics.register(tactic("blackwell", 100, True, calls))
    tactics.register(tactic("ampere", 80, True, calls))
    assert tactics.select("fp8").name == "hopper" and tactics.select("fp4") is None
    assert tactics.run("fp8", {"m": 1}) and calls == [("hopper", 1), ("ampere", 1)]
    device[0] = caps(10)
    assert tactics.run("fp8", {"m": 2}) and calls[2:] == [("hopper", 2), ("blackwell", 2)]
    device[0] = caps(7, 5)
    assert not tactics.run("fp8", {"m": 3}) and not tactics.run("fp4", {"m": 3}) and len(calls) == 4
    stats = tactics.stats("fp8")
    assert (stats.last_selected, stats.selections, stats.fallbacks) == ("blackwell", 2, 1)
    assert tactics.stats("fp4").fallbacks == 1 and tactics.stats("none").last_selected is None
    with pytest.raises(ContractError, match="'hopper', want a new name"):
        tactics.register(tactic("hopper", 90, True, calls))


FACTS = {
    "major": 9, "minor": 0, "sharedMemPerBlockOptin": 232448, "multiProcessorCount": 132, "pageableMemoryAccess": 0,
    "integrated": 0, "l2CacheSize": 52428800, "totalGlobalMem": 150_000_000_000,
}  # fmt: skip


def test_facts_of_a_device_are_read_by_name():
    found = read_caps(FACTS)
    assert (found.sm_arch, found.smem_per_block_optin, found.sm_count) == (90, 232448, 132)
    assert not found.unified_memory and read_caps(FACTS | {"integrated": 1}).unified_memory


def test_facts_of_the_current_gpu(request):
    if request.config.getoption("--device") != "cuda":
        pytest.skip("--device cuda")
    import cupy

    ordinal = cupy.cuda.runtime.getDevice()
    found = device_caps(ordinal)
    assert found is device_caps(ordinal)
    assert f"{found.sm_major}{found.sm_minor}" == cupy.cuda.Device(ordinal).compute_capability
    if found.sm_arch == 90:
        assert found.smem_per_block_optin == 232448
    with pytest.raises(ContractError, match="ordinal"):
        device_caps(cupy.cuda.runtime.getDeviceCount())


def test_copy_through_carries_a_devices_arrays_to_the_cpu_and_back():
    """An op without a kernel, where that was asked for; never by itself."""
    with emulated_arrays() as (there, _):
        registry = Registry(environ={})
        registry.register_backend("cuda", there)
        registry.register_op_provider("relu", "cpu", OpProvider("oracle", lambda x: oracle.relu(x)))
        x = np.array([[-1, 2]], np.float32)
        with pytest.raises(ContractError, match="no kernel for op relu on device cuda"):
            registry.call("relu", "cuda", {"x": there.send(x)})
        registry.enable_copy_through("cuda")
        out = registry.call("relu", "cuda", {"x": there.send(x)})
        assert type(out) is type(there.send(x)) and there.fetch(out).tolist() == [[0, 2]]
        assert there.to_host(np.float32(3)) == 3 and there.to_host(x) is x and there.to_device(5) == 5
        assert isinstance(there, DeviceArrays) and not there.unified_memory()
