"""The kernels of device/numba_cuda against the mirror's bytes, under Numba's simulator or with ``--device cuda``.

Numba asks for the simulator once, when it is imported: without a GPU these tests run in a pytest of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from vtlab import oracle
from vtlab.device import runtime
from vtlab.device.numba_cuda import kv_blocks, kv_cache, launch
from vtlab.ops.errors import ContractError
from vtlab.ops.table import table

from .compare import ParityError, assert_bytes
from .device_cases import DeviceCase, cases, provider_names
from .device_run import Cuda, Emulated, check_case
from .side_streams import side_stream
from .test_device_calls_kv import ALLOCATED, LIES, paged
from .test_kv_cache import bits, slots

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
OPS = [name for name in table() if launch.PROVIDER in provider_names(name)]
WORK = 1500
"""Elements of a case under the simulator, where each thread of a kernel is one of Python's."""

pytestmark = pytest.mark.skipif(find_spec("numba_cuda") is None, reason="numba-cuda is not installed")


@pytest.fixture(scope="module")
def device(request):
    if request.config.getoption("--device") == "cuda":
        return Cuda(provider=launch.PROVIDER)
    if not SIMULATED:
        pytest.skip("runs under the simulator, in a process of its own")
    simulator = sys.modules[type(launch._numba()[0].fill).__module__]
    simulator.np = LastFirst()
    return Emulated(provider=launch.PROVIDER)


class LastFirst:
    """NumPy for the simulator, whose blocks go by `ndindex`: a kernel that counts on their order shows itself."""

    def __getattr__(self, name):
        return getattr(np, name)

    def ndindex(self, *shape):
        return reversed([*np.ndindex(*shape)])


def small(case: DeviceCase) -> bool:
    arguments = case.arguments()
    if case.op == "embedding" and arguments.get("out_dtype") not in (None, arguments["table"].dtype.name):
        return False  # declined: the kernels convert nothing
    return sum(value.size for value in arguments.values() if isinstance(value, np.ndarray)) <= WORK


CASES = [case for case in cases(OPS) if small(case)]


@pytest.mark.skipif(SIMULATED, reason="this is that process")
def test_under_the_simulator_in_a_process_of_its_own(request):
    if request.config.getoption("--device") == "cuda":
        pytest.skip("the GPU runs the kernels")
    command = [sys.executable, "-m", "pytest", __file__, "-n0", "-p", "no:cacheprovider", "-k", "not of_its_own"]
    environ = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    run = subprocess.run(command, env=environ, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:]
    assert f"{len(CASES)} cases in the simulator" in run.stdout and "skipped" not in run.stdout


def test_every_op_has_cases(capsys):
    assert {case.op for case in CASES} == {"copy_blocks", "cp_gather_cache", "embedding", "reshape_and_cache"}
    with capsys.disabled():
        print(f"{len(CASES)} cases in the simulator" if SIMULATED else "", end="")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_python_kernels_give_the_bytes_of_the_mirror(case, device):
    check_case(device, case)


@pytest.mark.parametrize("layout", ALLOCATED)
@pytest.mark.parametrize("D, kind, shift", [(8, "bfloat16", 0), (5, "float32", 1), (6, "float16", 1)])
def test_every_layout_of_pages(device, layout, D, kind, shift):
    NB, BS, H, T = 3, 2, 2, 4
    host, fused = bits(ALLOCATED[layout](NB, BS, H, D), kind, 1), bits((T, 2 * H * D + shift), kind, 2)
    where = slots(T - 1, NB * BS, 3, skip=(1,))

    def arguments(whole, packed):
        parts = (packed[:, at : at + H * D].reshape(T, H, D) for at in (shift, shift + H * D))
        return dict(zip(("key", "value", "key_cache", "value_cache"), (*parts, *paged(layout, whole, D))))

    whole = device.send(host)
    device.call("reshape_and_cache", arguments(whole, device.send(fused)) | {"slot_mapping": device.send(where)})
    oracle.reshape_and_cache(**arguments(host, fused), slot_mapping=where)
    assert_bytes(device.fetch(whole), host)


def test_a_gather_of_heads_and_a_copy_of_strided_blocks(device):
    host, dst = bits((4, 2, 3, 8), "bfloat16", 1), bits((5, 3, 10), "bfloat16", 2)
    given = {"block_table": np.int32([[2, 0]]), "cu_seq_lens": np.int32([0, 4])}
    whole, into = device.send(host), device.send(dst)
    sent = {name: device.send(value) for name, value in given.items()}
    device.call("cp_gather_cache", {"src": whole[..., :4], "dst": into[..., 2:6], **sent})
    oracle.cp_gather_cache(host[..., :4], dst[..., 2:6], **given)
    assert_bytes(device.fetch(into), dst)
    ids = np.int64([[0, 3], [3, 1]])
    device.call("copy_blocks", {"cache": whole[:, 1], "block_mapping": device.send(ids)})
    oracle.copy_blocks(host[:, 1], ids)
    assert_bytes(device.fetch(whole), host)


def test_layouts_that_are_no_stretch_of_memory_are_declined(device):
    if isinstance(device, Cuda):
        pytest.skip("the next provider would serve it")
    cache = device.send(bits((4, 2, 8), "bfloat16", 1))
    assert device.call("copy_blocks", {"cache": cache[..., :4], "block_mapping": np.int64([[0, 1]])}) is NotImplemented


MODULES = {"reshape_and_cache": kv_cache, "copy_blocks": kv_blocks, "cp_gather_cache": kv_blocks}
LIES_HERE = [lie[1:] for lie in LIES if lie[1] in MODULES]


def past_the_door(device, op, arguments):
    if isinstance(device, Cuda):
        device.call(op, arguments)
    else:
        with runtime.using(device.runtime):
            getattr(MODULES[op], op)(**arguments)


@pytest.mark.parametrize("op, made, lie, instead, argument", LIES_HERE)
def test_lists_that_lie_are_refused_before_anything_is_written(device, op, made, lie, instead, argument):
    host = made() | lie
    sent = {name: device.send(value) for name, value in host.items()}
    with pytest.raises(ContractError) as refusal:
        past_the_door(device, op, dict(sent))
    assert (refusal.value.op, refusal.value.argument) == (op, argument)
    for name, value in sent.items():
        assert_bytes(device.fetch(value), host[name], name)


@pytest.mark.parametrize("op, made, lie, instead, argument", [lie for lie in LIES_HERE if lie[3] is not None])
def test_in_a_capture_what_lies_is_left_out(device, op, made, lie, instead, argument):
    fresh = lambda arguments: {name: device.send(value) for name, value in arguments.items()}
    sent, want = fresh(made() | lie), made() | instead
    if isinstance(device, Cuda):
        stream = side_stream(device.cupy)
        with stream:
            device.call(op, fresh(made()))
            stream.synchronize()
            stream.begin_capture()
            device.call(op, dict(sent))
            stream.end_capture().launch(stream)
            stream.synchronize()
    else:
        past_the_door(device, op, fresh(made()))
        device.runtime.in_capture = True
        try:
            past_the_door(device, op, dict(sent))
        finally:
            device.runtime.in_capture = False
    getattr(oracle, op)(**want)
    for name in getattr(oracle, op).contract.mutates:
        assert_bytes(device.fetch(sent[name]), want[name], name)


WRONGS = {
    "reshape_and_cache": {
        "negative slots wrap": ("and 0 <= slot < key_cache", "and slot < key_cache"),
        "the first head": ("value_cache[block, offset, head, word]", "value_cache[block, offset, 0, word]"),
        "offsets by block": ("slot // page_size, slot % page_size", "slot // page_size, slot // page_size"),
    },
    "copy_blocks": {
        "never in order": ("if in_order[0] != 0:", "if in_order[0] > 1:"),
        "targets alone": (" or ids[other, 1] == ids[pair, 0])", ")"),
        "backwards": ("cache[target, lane] = cache[source, lane]", "cache[source, lane] = cache[target, lane]"),
    },
    "cp_gather_cache": {
        "a request too far": ("if bounds[middle] <= token:", "if bounds[middle] < token:"),
        "chunks begin at 0": ("        position += starts[low]\n", ""),
        "the first page": ("np.int64(table[low, page])", "np.int64(table[low, 0])"),
    },
    "embedding": {
        "the next row": ("out[at, word] = table[entry, word]", "out[at, word] = table[entry - 1, word]"),
        "the first word": ("table[entry, word] if", "table[entry, 0] if"),
        "rows in order": ("entry = ids[at]", "entry = at"),
    },
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.kernel_mutation
@pytest.mark.parametrize("op, name", [(op, name) for op, wrongs in WRONGS.items() for name in wrongs])
def test_a_wrong_kernel_is_noticed(op, name, device, monkeypatch):
    if isinstance(device, Cuda):
        pytest.skip("a wrong kernel may write anywhere")
    kernels, *how = launch._numba()
    text, (old, new) = Path(kernels.__file__).read_text(), WRONGS[op][name]
    assert text.count(old) == 1
    wrong = types.ModuleType("wrong")
    exec(compile(text.replace(old, new), "wrong.py", "exec"), wrong.__dict__)
    monkeypatch.setattr(launch, "_numba", lambda: (wrong, *how))
    with pytest.raises(ParityError):
        for case in CASES:
            if case.op == op:
                check_case(device, case)
