"""The provider registry: order, choice, capabilities, steering, statistics and the tiers. Machinery, no numerics."""

from __future__ import annotations

import itertools
import pickle
import threading

import numpy as np
import pytest

from vtlab.ops.capabilities import Capabilities, Device
from vtlab.ops.errors import ContractError
from vtlab.ops.providers import COPY_THROUGH, REFERENCE_TIER, OpProvider, OpStats, ProviderError, Registry, using

OP, CUDA = "rms_norm", Device.CUDA


def kernel(name: str):
    return lambda **arguments: name


def names(registry, op=OP, device=CUDA):
    return [registry.op_provider_name_at(op, device, i) for i in range(registry.op_provider_count(op, device))]


def add(registry, name, priority=0, supports=None, fn=None, device=CUDA, op=OP):
    fn = kernel(name) if fn is None else fn
    assert registry.register_op_provider(op, device, OpProvider(name, fn, priority, supports))
    return fn


@pytest.fixture
def registry():
    return Registry(environ={})


@pytest.fixture
def chain(registry):
    for name, priority in (("vt-native", 0), ("accel", 100), ("accel-mid", 50)):
        add(registry, name, priority)
    return registry


def served(registry, op=OP, device=CUDA):
    return registry.get_op(op, device)()


@pytest.mark.parametrize("order", list(itertools.permutations([("slow", -5), ("fast", 10), ("middle", 3)])))
def test_order_is_by_priority_whatever_the_registration_order(registry, order):
    for name, priority in order:
        add(registry, name, priority)
    assert names(registry) == ["fast", "middle", "slow"]
    assert served(registry) == "fast"


@pytest.mark.parametrize("order", [1, -1])
def test_equal_priorities_go_by_the_bytes_of_the_name(order):
    # UTF-16 code units would put U+1F600 before U+FFFF, a case-blind order "alpha" before "Beta".
    for group in (["alpha", "beta"], ["Beta", "alpha", "é"], ["a", "\uffff", "\U0001f600"]):
        registry = Registry(environ={})
        for name in group[::order]:
            add(registry, name)
        assert names(registry) == group == sorted(group, key=str.encode)
        assert served(registry) == group[0]


def test_the_first_registration_of_a_name_wins(registry):
    first = add(registry, "a", 1)
    assert not registry.register_op_provider(OP, CUDA, OpProvider("a", kernel("second"), 99))
    assert names(registry) == ["a"] and registry.get_op(OP, CUDA) is first


@pytest.mark.parametrize(
    "op, device, provider",
    [
        (OP, CUDA, OpProvider("a", None)), (OP, CUDA, OpProvider("", kernel("a"))),
        (OP, CUDA, OpProvider(None, kernel("a"))), (OP, CUDA, OpProvider("a", kernel("a"), priority="high")),
        (OP, CUDA, OpProvider("a", kernel("a"), supports=True)), (OP, CUDA, None), (OP, "tpu", OpProvider("a", max)),
        ([], CUDA, OpProvider("a", max)), (OP, [], OpProvider("a", max)), (OP, CUDA, OpProvider(REFERENCE_TIER, max)),
        (OP, CUDA, OpProvider(COPY_THROUGH, max)),
    ],
)  # fmt: skip
def test_a_malformed_provider_is_refused_without_raising(registry, op, device, provider):
    assert registry.register_op_provider(op, device, provider) is False
    assert registry.op_provider_count(OP, CUDA) == 0


def test_a_slot_holds_four_and_refuses_even_a_better_fifth(registry):
    for name in "abcd":
        add(registry, name)
    assert not registry.register_op_provider(OP, CUDA, OpProvider("e", kernel("e"), 1000))
    assert names(registry) == list("abcd") and served(registry) == "a"
    assert [registry.op_provider_name_at(OP, CUDA, i) for i in (-1, 4)] == [None, None]
    add(registry, "e", device=Device.CPU)


def test_register_op_is_vt_native_at_priority_zero(registry):
    fn = kernel("native")
    assert registry.register_op(OP, CUDA, fn) and registry.get_op(OP, CUDA) is fn
    add(registry, "below", -1)
    add(registry, "above", 1)
    assert names(registry) == ["above", "vt-native", "below"]


def test_the_decorator_raises_where_registration_returns_false(registry):
    @registry.provider(OP, "cuda", "fast", priority=2, supports=lambda caps: True)
    def fast(**arguments):
        return "fast"

    assert registry.get_op(OP, "cuda") is fast
    with pytest.raises(ProviderError, match=r"'fast' for op rms_norm on device cuda.*taken.*cuda: fast"):
        registry.provider(OP, "cuda", "fast")(kernel("other"))
    with pytest.raises(ProviderError, match="no such op or device"):
        registry.provider(OP, "tpu", "fast")(fast)
    assert names(registry) == ["fast"]


def test_known_ops_closes_the_table():
    registry = Registry(known_ops={"rms_norm"}.__contains__, environ={})
    assert not registry.register_op("rms_nrom", CUDA, max) and registry.register_op("rms_norm", CUDA, max)
    assert not registry.op_registered("rms_nrom", CUDA)
    with pytest.raises(ProviderError, match="'rms_nrom'"):
        registry.get_op("rms_nrom", CUDA)


def test_str_and_enum_name_the_same_device(chain):
    assert chain.get_op(OP, "cuda") is chain.get_op(OP, Device.CUDA)
    assert chain.op_provider_count(OP, "cuda") == 3


@pytest.mark.parametrize("op, device", [(OP, "cpu"), ("matmul", "cuda"), (OP, "tpu"), ([], CUDA)])
def test_a_missing_kernel_is_an_error_that_says_what_exists(chain, op, device):
    assert not chain.op_registered(op, device)
    for _ in range(2):
        with pytest.raises(ContractError) as error:
            chain.get_op(op, device)
    assert isinstance(error.value, ProviderError) and (error.value.op, error.value.device) == (op, str(device))
    if device == "cpu":
        text = "no kernel for op rms_norm on device cpu; providers of rms_norm: cuda: accel, accel-mid, vt-native"
        assert str(error.value) == str(pickle.loads(pickle.dumps(error.value))) == text


def test_the_choice_follows_the_capabilities_both_ways(registry):
    add(registry, "hopper", 10, lambda caps: caps.compute_major >= 9)
    add(registry, "any")
    for major, want in ((8, "any"), (9, "hopper"), (8, "any"), (9, "hopper")):
        registry.set_device_provider_caps(Capabilities(CUDA, True, major))
        assert served(registry) == want == registry.op_provider_stats(OP, CUDA).last_selected
        assert registry.device_provider_caps("cuda").compute_major == major
    registry.set_device_provider_caps(Capabilities(Device.XPU, True, 1))
    assert served(registry) == "hopper"


def test_an_unprobed_device_is_not_valid_and_meets_no_demand(registry):
    caps = registry.device_provider_caps(CUDA)
    assert caps == Capabilities(CUDA) and not caps.valid
    add(registry, "probed", 10, lambda caps: caps.at_least(0) and caps.has(0))
    assert not registry.op_registered(OP, CUDA)
    registry.set_device_provider_caps(Capabilities(CUDA, True))
    assert served(registry) == "probed"


def test_capabilities_compare_versions_and_features_and_refuse_nonsense():
    caps = Capabilities("cuda", True, 8, 6, features=0b101)
    assert caps.at_least(8, 6) and caps.at_least(7, 9) and not caps.at_least(8, 7) and not caps.at_least(9)
    assert caps.has(0b100) and caps.has(0b101) and not caps.has(0b110)
    unprobed = Capabilities("cuda", False, 9, features=1)
    assert not unprobed.at_least(8) and not unprobed.has(1)
    assert caps.device is Device.CUDA and Capabilities("cuda", features=2**64 - 1)
    for wrong in ({"device": "tpu"}, {"features": 2**64}, {"features": -1}, {"compute_major": -1}):
        with pytest.raises(ContractError):
            Capabilities(**{"device": "cuda"} | wrong)


def test_a_predicate_that_raises_means_unsupported_and_is_logged(registry, caplog):
    add(registry, "broken", 10, lambda caps: 1 / 0)
    assert not registry.op_registered(OP, CUDA)
    add(registry, "sound")
    assert served(registry) == "sound" and "unsupported by broken" in caplog.text


def test_choices_and_misses_are_remembered_until_something_changes(registry):
    asked = []
    add(registry, "picky", 0, lambda caps: asked.append(caps) or caps.valid)

    def miss():
        with pytest.raises(ProviderError):
            registry.get_op(OP, CUDA)

    events = [
        lambda: registry.set_device_provider_caps(Capabilities(CUDA)), lambda: registry.disable_op_provider("other"),
        lambda: registry.enable_op_provider("other"), registry.clear_disabled,
        lambda: registry.register_op("matmul", CUDA, max),
    ]  # fmt: skip
    for count, event in enumerate([*events, lambda: None], 1):
        miss()
        miss()
        assert len(asked) == count == registry.op_provider_stats(OP, CUDA).fallbacks
        event()
    registry.set_device_provider_caps(Capabilities(CUDA, True))
    assert [served(registry), served(registry)] == ["picky"] * 2 and len(asked) == len(events) + 2


def test_a_predicate_may_change_the_registry_it_is_asked_by(registry):
    def supports(caps):
        registry.disable_op_provider("late")
        return True

    add(registry, "late", 1, supports)
    add(registry, "early")
    assert served(registry) == "late" and served(registry) == "early"


def test_fallbacks_walk_down_and_leave_the_choice_alone(chain):
    assert chain.get_op_fallback(OP, CUDA, "accel")() == "accel-mid"
    assert chain.get_op_fallback(OP, CUDA, "accel-mid")() == "vt-native"
    with pytest.raises(ProviderError, match="no kernel for op rms_norm on device cuda below vt-native"):
        chain.get_op_fallback(OP, CUDA, "vt-native")
    assert chain.op_provider_stats(OP, CUDA).declines == 3
    for op, name in ((OP, "nobody"), ("matmul", "accel")):
        with pytest.raises(ProviderError, match=f"is called '{name}'"):
            chain.get_op_fallback(op, CUDA, name)
    assert chain.op_provider_stats(OP, CUDA).declines == 3 and served(chain) == "accel"


def test_fallbacks_skip_what_is_disabled_or_unsupported(chain):
    add(chain, "accel-new", 75, lambda caps: caps.valid)
    chain.disable_op_provider("accel-mid")
    assert chain.get_op_fallback(OP, CUDA, "accel")() == "vt-native"


def test_a_call_goes_down_while_providers_return_not_implemented(registry, capsys):
    add(registry, "first", 2, fn=lambda x: NotImplemented)
    add(registry, "second", 1, fn=lambda x: NotImplemented if x < 0 else ("second", x))
    add(registry, "third", 0, fn=lambda x: NotImplemented if x < -1 else ("third", x))
    assert [registry.call(OP, CUDA, {"x": x}) for x in (1, 2, -1)] == [("second", 1), ("second", 2), ("third", -1)]
    assert registry.op_provider_stats(OP, CUDA) == OpStats("first", 0, 4, 0)
    assert capsys.readouterr().err.splitlines() == [
        "vtlab: rms_norm on cuda: first declined a call; second serves it",
        "vtlab: rms_norm on cuda: second declined a call; third serves it",
    ]
    with pytest.raises(ProviderError, match="below third, which declined the call"):
        registry.call(OP, CUDA, {"x": -2})


def test_disabling_and_enabling_by_name(chain):
    assert chain.disable_op_provider("accel") and served(chain) == "accel-mid"
    assert chain.disable_op_provider("accel-mid") and chain.disable_op_provider("vt-native")
    assert not chain.op_registered(OP, CUDA) and len(names(chain)) == 3
    with pytest.raises(ProviderError, match=r"accel \(disabled\), accel-mid \(disabled\)"):
        chain.get_op(OP, CUDA)
    assert chain.enable_op_provider("vt-native") and served(chain) == "vt-native"
    assert not chain.enable_op_provider("vt-native")
    chain.clear_disabled()
    assert served(chain) == "accel"


def test_at_most_eight_names_of_63_bytes_are_disabled(registry):
    wide = "é" * 31
    for name, fits in (("n" * 63, True), ("n" * 64, False), (wide + "e", True), (wide + "é", False), ("", False)):
        assert registry.disable_op_provider(name) is fits
    assert not registry.disable_op_provider(None)
    assert [registry.disable_op_provider(f"n{i}") for i in range(7)] == [True] * 6 + [False]
    assert registry.disable_op_provider("n0")
    assert registry.enable_op_provider("n0") and registry.disable_op_provider("n6")


def test_the_environment_disables_once_at_first_use(caplog):
    environ = {"VTLAB_DISABLE": f" accel , ,vt-native,, {'n' * 64},"}
    registry = Registry(environ=environ)
    for name, priority in (("accel", 2), ("accel-mid", 1), ("vt-native", 0)):
        add(registry, name, priority)
    assert served(registry) == "accel-mid" and "n" * 64 in caplog.text
    with pytest.raises(ProviderError):
        registry.get_op_fallback(OP, CUDA, "accel-mid")
    registry.clear_disabled()
    assert served(registry) == "accel"
    first_use_clears = Registry(environ=environ)
    add(first_use_clears, "accel")
    first_use_clears.clear_disabled()
    assert served(first_use_clears) == "accel"


def test_the_process_environment_reaches_the_default_registry(monkeypatch):
    monkeypatch.setenv("VTLAB_DISABLE", "accel")
    registry = Registry()
    add(registry, "accel")
    assert not registry.op_registered(OP, CUDA)


def test_using_nests_survives_exceptions_and_leaves_no_trace(chain):
    with pytest.raises(KeyError), using("vt-native", "accel-mid"):
        assert served(chain) == "accel-mid" == chain.call(OP, CUDA, {})
        with pytest.raises(ZeroDivisionError), using("vt-native"):
            assert served(chain) == "vt-native"
            raise ZeroDivisionError
        assert served(chain) == "accel-mid"
        raise KeyError
    assert served(chain) == "accel" == chain.op_provider_stats(OP, CUDA).last_selected
    chain.disable_op_provider("other")
    with using("vt-native"):
        assert served(chain) == "vt-native" and chain.op_provider_stats(OP, CUDA).last_selected == "accel"


def test_using_makes_everything_else_ineligible(chain):
    with using("oracle"):
        assert not chain.op_registered(OP, CUDA)
        with pytest.raises(ProviderError, match="no kernel for op rms_norm on device cuda"):
            chain.get_op(OP, CUDA)
    with using("accel"), pytest.raises(ProviderError, match="below accel"):
        chain.get_op_fallback(OP, CUDA, "accel")
    chain.disable_op_provider("accel")
    with using("accel"), pytest.raises(ProviderError):
        chain.get_op(OP, CUDA)
    assert served(chain) == "accel-mid" and chain.op_provider_stats(OP, CUDA).fallbacks == 0


def test_using_follows_changes_and_stays_in_its_thread(chain):
    seen = []
    with using("vt-native", "accel"):
        assert served(chain) == "accel"
        chain.disable_op_provider("accel")
        assert served(chain) == "vt-native"
        thread = threading.Thread(target=lambda: seen.append(served(chain)))
        thread.start()
        thread.join()
    assert seen == ["accel-mid"]


@pytest.mark.parametrize("wrong", [(), ("",), (None,), ("oracle", 3)])
def test_using_wants_names(wrong):
    with pytest.raises(ContractError), using(*wrong):
        pass


def test_selections_are_counted_only_while_call_statistics_are_on(chain):
    served(chain)
    assert chain.op_provider_stats(OP, CUDA) == OpStats("accel", 0, 0, 0)
    chain.enable_op_provider_call_stats(True)
    for _ in range(5):
        served(chain)
    chain.enable_op_provider_call_stats(False)
    served(chain)
    served(chain)
    chain.get_op_fallback(OP, CUDA, "accel")
    with pytest.raises(ProviderError):
        chain.get_op("matmul", CUDA)
    assert chain.stats() == {(OP, CUDA): OpStats("accel", 5, 1, 0), ("matmul", CUDA): OpStats(None, 0, 0, 1)}
    chain.stats()[OP, CUDA].selections = chain.op_provider_stats(OP, CUDA).declines = 99
    assert chain.op_provider_stats(OP, CUDA) == OpStats("accel", 5, 1, 0)
    chain.reset_op_provider_stats()
    assert chain.stats() == {(OP, CUDA): OpStats("accel", 0, 0, 0), ("matmul", CUDA): OpStats(None, 0, 0, 0)}
    assert chain.op_provider_stats("unheard-of", CUDA) == OpStats()


@pytest.mark.parametrize("value, counted", [("1", 3), ("0", 0), ("", 0)])
def test_the_environment_turns_call_statistics_on(capsys, value, counted):
    registry = Registry(environ={"VTLAB_PROVIDER_STATS": value})
    add(registry, "accel")
    for _ in range(3):
        served(registry)
    assert registry.op_provider_stats(OP, CUDA).selections == counted
    lines = ["vtlab: rms_norm on cuda: accel selected"] if counted else []
    assert capsys.readouterr().err.splitlines() == lines


class Shelf:
    """An array of a made-up device: unreadable as it is, copied by its backend alone."""

    def __init__(self, data):
        self.data = np.array(data)
        self.writes = 0

    def __setitem__(self, where, other):
        assert where is Ellipsis and isinstance(other, Shelf)
        self.data[...] = other.data
        self.writes += 1


class FakeBackend:
    def __init__(self, unified):
        self.unified = unified

    def unified_memory(self):
        return self.unified

    def to_host(self, value):
        return value.data.copy() if isinstance(value, Shelf) else value

    def to_device(self, value):
        return Shelf(value) if isinstance(value, np.ndarray) else value


XPU = Device.XPU


def xpu(registry, unified, ops=(OP,)):
    for op in ops:
        add(registry, "oracle", -1000, fn=lambda x: x + 1, device=Device.CPU, op=op)
    registry.register_backend(XPU, FakeBackend(unified))
    return registry


@pytest.mark.parametrize("backend", [None, FakeBackend(False)])
def test_a_discrete_device_never_runs_the_cpu_function(registry, backend, capsys):
    add(registry, "oracle", device=Device.CPU)
    if backend is not None:
        registry.register_backend(XPU, backend)
    with pytest.raises(ProviderError, match="no kernel for op rms_norm on device xpu; providers of rms_norm: cpu: ora"):
        registry.get_op(OP, XPU)
    assert registry.register_reference_tier(XPU) == 0 == registry.reference_tier_hits() == len(names(registry, OP, XPU))
    assert capsys.readouterr().err == ""


def test_a_unified_device_without_kernels_runs_the_cpu_function(registry):
    xpu(registry, unified=True)
    assert not registry.op_registered(OP, XPU) and names(registry, OP, XPU) == []
    assert registry.get_op(OP, XPU) is registry.get_op(OP, "cpu")
    assert registry.call(OP, XPU, {"x": 41}) == 42
    assert names(registry, OP, XPU) == [REFERENCE_TIER] and not registry.op_registered(OP, XPU)
    assert registry.op_provider_stats(OP, XPU) == OpStats(REFERENCE_TIER, 0, 0, 1)


def test_the_reference_tier_follows_the_choice_of_the_cpu(registry):
    xpu(registry, unified=True)
    registry.get_op(OP, XPU)
    add(registry, "numba", device=Device.CPU)
    assert served(registry, OP, XPU) == "numba"
    registry.disable_op_provider("numba")
    assert registry.get_op(OP, XPU)(41) == 42
    registry.disable_op_provider("oracle")
    with pytest.raises(ProviderError):
        registry.get_op(OP, XPU)


def test_a_miss_ends_when_the_cpu_kernel_arrives(registry):
    registry.register_backend(XPU, FakeBackend(True))
    with pytest.raises(ProviderError):
        registry.get_op(OP, XPU)
    xpu(registry, unified=True)
    assert registry.get_op(OP, XPU)(1) == 2


def test_native_wins_and_finds_its_place_even_after_the_tier_came(registry):
    xpu(registry, unified=True)
    registry.get_op(OP, XPU)
    for name in "abcd":
        add(registry, name, -999, device=XPU)
    assert served(registry, OP, XPU) == "a" and registry.op_registered(OP, XPU)
    assert names(registry, OP, XPU) == [*"abcd", REFERENCE_TIER]


def test_the_tier_catches_what_native_providers_decline(registry):
    xpu(registry, unified=True)
    add(registry, "native", device=XPU, fn=lambda x: NotImplemented)
    add(registry, "numba", device=Device.CPU, fn=lambda x: NotImplemented)
    assert registry.call(OP, XPU, {"x": 1}) == 2
    assert registry.op_provider_stats(OP, XPU).declines == 1 == registry.op_provider_stats(OP, "cpu").declines
    assert registry.reference_tier_hits() == 1


def test_hits_count_slots_and_each_says_one_line(registry, capsys):
    xpu(registry, unified=True, ops=("add", "mul"))
    registry.register_backend("metal", FakeBackend(True))
    for op, device in 3 * [("add", "xpu"), ("mul", XPU), ("add", "metal")]:
        registry.get_op(op, device)
        registry.set_device_provider_caps(Capabilities(device))
    assert registry.reference_tier_hits() == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"vtlab: {slot}: served by vt-cpu-ref, the CPU's function"
                     for slot in ("add on xpu", "mul on xpu", "add on metal")]  # fmt: skip


def test_the_reference_tier_can_be_disabled_and_steered_to(registry):
    xpu(registry, unified=True)
    add(registry, "native", device=XPU)
    with using(REFERENCE_TIER):
        assert registry.get_op(OP, XPU)(1) == 2
    assert served(registry, OP, XPU) == "native"
    registry.disable_op_provider(REFERENCE_TIER)
    registry.disable_op_provider("native")
    with pytest.raises(ProviderError):
        registry.get_op(OP, XPU)


def test_eager_registration_adds_what_is_lacking_once(registry):
    xpu(registry, unified=True, ops=("add", "mul", "norm", "gone"))
    add(registry, "native", device=XPU, op="mul")
    add(registry, "picky", device=XPU, op="norm", supports=lambda caps: caps.valid)
    add(registry, "native", device=XPU, op="not-on-cpu")
    add(registry, "native", op="on-cuda-alone")
    with pytest.raises(ProviderError), using("native"):
        registry.get_op("add", XPU)
    assert names(registry, "add", XPU) == []
    assert registry.register_reference_tier(XPU) == 3
    assert registry.register_reference_tier("xpu") == 0 == registry.register_reference_tier("cpu")
    assert ("on-cuda-alone", XPU) not in registry.stats()
    assert names(registry, "mul", XPU) == ["native"] and names(registry, "norm", XPU) == ["picky", REFERENCE_TIER]
    assert registry.reference_tier_hits() == 0 and registry.get_op("add", XPU)(1) == 2


def test_copy_through_is_off_until_asked_for(registry, capsys):
    xpu(registry, unified=False)
    registry.enable_copy_through(XPU)
    out = registry.call(OP, XPU, {"x": Shelf([1.0, 2.0])})
    assert isinstance(out, Shelf) and out.data.tolist() == [2.0, 3.0]
    assert names(registry, OP, XPU) == [COPY_THROUGH] and not registry.op_registered(OP, XPU)
    assert registry.op_provider_stats(OP, XPU).fallbacks == 1 and registry.reference_tier_hits() == 0
    assert capsys.readouterr().err == "vtlab: rms_norm on xpu: served by copy-through, the CPU's function\n"
    add(registry, "native", -899, device=XPU)
    assert served(registry, OP, XPU) == "native"
    with using(COPY_THROUGH):
        assert registry.call(OP, XPU, {"x": Shelf([1.0])}).data.tolist() == [2.0]
    registry.disable_op_provider("native")
    registry.enable_copy_through(XPU, False)
    with pytest.raises(ProviderError):
        registry.get_op(OP, XPU)


def test_copy_through_writes_caches_back_and_returns_the_same_array(registry):
    def write(cache, out, parts, note):
        cache[0] = parts[0][0]
        parts[0][0] = out[...] = 5
        return out, [cache, cache + parts[1]["b"]], note

    registry.register_backend(XPU, FakeBackend(False))
    registry.enable_copy_through(XPU)
    registry.register_op(OP, "cpu", write)
    cache, out, only_read, host = Shelf([1.0, np.nan]), Shelf([0, 0]), Shelf([1.0, np.nan]), np.array([7.0])
    result = registry.call(OP, XPU, {"cache": cache, "out": out, "parts": (host, {"b": only_read}), "note": "n"})
    assert isinstance(result, tuple) and isinstance(result[1], list)
    assert (cache.writes, out.writes, only_read.writes) == (1, 1, 0)
    assert result[0] is out and result[1][0] is cache and result[2] == "n"
    np.testing.assert_array_equal(cache.data, [7.0, np.nan])
    np.testing.assert_array_equal(result[1][1].data, [8.0, np.nan])
    assert out.data.tolist() == [5, 5] and host.tolist() == [5.0]


def test_copy_through_goes_down_the_slot_of_the_cpu(registry):
    xpu(registry, unified=False)
    registry.enable_copy_through(XPU)
    add(registry, "numba", device=Device.CPU, fn=lambda x: NotImplemented)
    with using(COPY_THROUGH):
        assert registry.call(OP, XPU, {"x": Shelf([1.0])}).data.tolist() == [2.0]


def test_eight_threads_select_one_provider_and_count_exactly(chain):
    asked, seen, barrier = [], [], threading.Barrier(8)
    add(chain, "best", 200, lambda caps: asked.append(1) or True)
    chain.enable_op_provider_call_stats(True)

    def work():
        barrier.wait()
        seen.append({served(chain) for _ in range(500)})

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [{"best"}] * 8 and len(asked) == 1
    assert chain.op_provider_stats(OP, CUDA).selections == 4000


def test_no_reader_sees_a_choice_older_than_the_last_change(chain):
    stop, stale, want = threading.Event(), [], ["accel"]

    def read():
        while not stop.is_set():
            before = want[0]  # a new list entry for every change; None while one is under way
            name = served(chain)
            if before is not None and before is want[0] and name != before:
                stale.append((before, name))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        for change, name in ((chain.disable_op_provider, "accel-mid"), (chain.enable_op_provider, "accel")):
            want[0] = None
            change("accel")
            want[0] = "".join(name)
    stop.set()
    for thread in threads:
        thread.join()
    assert stale == []


def test_every_op_of_the_table_ends_in_the_oracle_on_the_cpu():
    from vtlab.ops.providers import registry
    from vtlab.ops.table import table

    assert table()
    for op in table():
        assert names(registry, op, "cpu")[-1] == "oracle", op
