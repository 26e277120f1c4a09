"""ggml's own matrix product through ctypes: a graph of one node, on the threads that a call names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vtlab.ops.blocks import LAYOUTS


class _Parameters(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    _fields_ = (
        ("work_size", ctypes.c_size_t), ("work_data", ctypes.c_void_p), ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p), ("abort", ctypes.c_void_p), ("abort_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )  # fmt: skip


class Peer:
    """The libraries of one build, which must have the instruction sets of this machine to be worth a comparison."""

    def __init__(self, folder: Path):
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        self.cpu.ggml_cpu_init()
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
            ("ggml_init", pointer, (_Parameters,)), ("ggml_free", None, (pointer,)),
            ("ggml_new_tensor_2d", pointer, (pointer, ctypes.c_int, number, number)),
            ("ggml_mul_mat", pointer, (pointer, pointer, pointer)), ("ggml_get_data", pointer, (pointer,)),
            ("ggml_new_graph", pointer, (pointer,)), ("ggml_build_forward_expand", None, (pointer, pointer)),
        ):  # fmt: skip
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        self.plan, self.compute = self.cpu.ggml_graph_plan, self.cpu.ggml_graph_compute
        self.plan.restype, self.plan.argtypes = _Plan, (pointer, ctypes.c_int, pointer)
        self.compute.argtypes = (pointer, ctypes.POINTER(_Plan))

    def product(self, x: np.ndarray, b: np.ndarray, quant_type: str) -> tuple[Callable[[int], None], np.ndarray]:
        """(run(threads), where the result [M, N] stands) of x [M, K] by blocks b [N, bytes]."""
        (rows, depth), columns = x.shape, len(b)
        size = b.nbytes + x.nbytes + 4 * rows * columns + (1 << 20)
        context = self.base.ggml_init(_Parameters(size, None, False))
        weight = self.base.ggml_new_tensor_2d(context, LAYOUTS[quant_type].id, depth, columns)
        value = self.base.ggml_new_tensor_2d(context, 0, depth, rows)
        ctypes.memmove(self.base.ggml_get_data(weight), np.ascontiguousarray(b).ctypes.data, b.nbytes)
        ctypes.memmove(self.base.ggml_get_data(value), np.ascontiguousarray(x).ctypes.data, x.nbytes)
        out = self.base.ggml_mul_mat(context, weight, value)
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, out)

        plans: dict[int, _Plan] = {}

        def run(threads: int) -> None:
            if threads not in plans:
                plan = plans[threads] = self.plan(graph, threads, None)
                work = np.empty(plan.work_size + 64, np.uint8)
                plan.work_data, plan.work = work.ctypes.data, work
            self.compute(graph, ctypes.byref(plans[threads]))

        run.free = lambda: self.base.ggml_free(context)
        run(1)
        at = ctypes.cast(self.base.ggml_get_data(out), ctypes.POINTER(ctypes.c_float))
        return run, np.ctypeslib.as_array(at, (rows, columns))
