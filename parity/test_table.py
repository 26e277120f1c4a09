"""The table, the door and the dispatch, on a small op of their own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.ops import checking, shapes, table
from vtlab.ops.contract import EXACT, Bound, Choice, Contract, Flag, Parity, Scalar, Tensor, Value, refuse
from vtlab.ops.errors import ContractError, FormatError


def _even(arguments, axes):
    """k must be even."""
    if arguments["k"] % 2:
        raise refuse("k", arguments["k"], "an even number")


CONTRACT = Contract(
    name="toy", family="norm", row="KERNEL-EW-NORM-ACT", summary="", parity=Parity(), mirror=EXACT, rounding={},
    args={
        "x": Tensor("T 2*D", ("float32", "bfloat16")), "y": Tensor("... D", like="x", layout="rows", optional=True),
        "z": Tensor("a+b", ("int32",), optional=True), "k": Scalar(int, minimum=0, maximum=8), "s": Scalar(above=0.0),
        "flag": Flag(), "mode": Choice(("a", "b")), "out_dtype": Choice(("float32",), optional=True),
        "a": Scalar(int, axis="a"), "b": Scalar(int, axis="b"), "rope": Value("a dict", optional=True),
    },
    returns={}, requires=(_even,),
)  # fmt: skip
GOOD = {
    "x": np.zeros((3, 8), np.float32), "y": np.zeros((2, 5, 4), np.float32), "z": np.zeros(5, np.int32), "k": 2,
    "s": 1.5, "flag": True, "mode": "a", "out_dtype": "float32", "a": 2, "b": 3, "rope": None,
}  # fmt: skip


ROWS = "unit inner stride and non-overlapping rows"


def test_a_good_call_binds_its_axes():
    arguments = dict(GOOD)
    axes = checking.check(CONTRACT, arguments)
    assert axes == {"T": 3, "D": 4, "a": 2, "b": 3, "...": (2, 5)}
    assert arguments["out_dtype"] == np.float32


@pytest.mark.parametrize(
    ("name", "value", "got", "want"),
    [
        ("x", [[1.0]], "list", "an array"),
        ("x", None, "None", "a value"),
        ("x", np.zeros((3, 8), np.int32), "dtype int32", "dtype float32 or bfloat16"),
        ("x", np.zeros((3, 7), np.float32), "shape (3, 7)", "(T, 2*D) with D = 4"),
        ("x", np.zeros(8, np.float32), "shape (8,)", "(T, 2*D)"),
        ("x", np.zeros((3, 16), np.float32)[:, ::2], "strides (64, 8) for shape (3, 8)", "a C-contiguous array"),
        ("y", np.zeros((2, 5, 4), np.float64), "dtype float64", "dtype float32, that of x"),
        ("y", np.zeros((2, 5, 8), np.float32)[..., ::2], "strides (160, 32, 8) for shape (2, 5, 4)", ROWS),
        ("y", np.broadcast_to(np.zeros((1, 4), np.float32), (5, 4)), "strides (0, 4) for shape (5, 4)", ROWS),
        ("z", np.zeros(6, np.int32), "shape (6,)", "(a+b,) with a = 2, b = 3"),
        ("k", 1.0, "1.0", "an integer"),
        ("k", True, "True", "an integer"),
        ("k", -1, "-1", ">= 0"),
        ("k", 9, "9", "<= 8"),
        ("k", 3, "3", "an even number"),
        ("s", 0.0, "0.0", "> 0.0"),
        ("s", float("nan"), "nan", "> 0.0"),
        ("s", "1", "'1'", "a number"),
        ("flag", 1, "1", "True or False"),
        ("mode", "c", "'c'", "one of a, b"),
        ("out_dtype", "float16", "'float16'", "one of float32"),
        ("out_dtype", np.float16, "<class 'numpy.float16'>", "one of float32"),
    ],
)  # fmt: skip
def test_the_door_names_what_is_wrong(name, value, got, want):
    with pytest.raises(ContractError) as caught:
        checking.check(CONTRACT, {**GOOD, name: value})
    error = caught.value
    assert (error.op, error.argument, error.got, error.want) == ("toy", name, got, want)
    assert str(error) == f"toy({name}): got {got}, want {want}"


def test_rows_layout_takes_slices_of_a_merged_projection():
    merged = np.zeros((5, 12), np.float32)
    checking.check(CONTRACT, {**GOOD, "y": merged[:, 4:8]})


def test_two_devices_are_refused():
    class Elsewhere(np.ndarray):
        pass

    Elsewhere.__module__ = "cupy._core"
    with pytest.raises(ContractError, match="an array on cuda, want all arrays on cpu"):
        checking.device_of("toy", {"x": np.zeros(1), "y": np.zeros(1).view(Elsewhere)})


@pytest.mark.parametrize("text", ["T", "... D", "T 2*D", "Hq*2*D", "dq+dk+dv", "H 7"])
def test_shape_texts_parse(text):
    shapes.parse(text)


@pytest.mark.parametrize("text", ["T-1", "__import__('os')", "D D()", "a;b"])
def test_shape_texts_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="not an axis"):
        shapes.parse(text)


def test_a_product_solves_for_its_free_name_only_where_it_divides():
    axes: dict[str, int] = {}
    assert shapes.check_sizes(axes, "2*D", (7,)) == "(2*D,)"
    assert shapes.check_sizes(axes, "2*D", (8,)) is None and axes == {"D": 4}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "rms_norm(x): got nothing, want a value"),
        ({"x": 1, "weight": 2, "epsilon": 3}, "rms_norm(epsilon): got an unknown argument"),
    ],
)
def test_binding_faults(arguments, fault):
    with pytest.raises(ContractError) as caught:
        ops.rms_norm(**arguments)
    assert str(caught.value).startswith(fault)


def test_too_many_and_repeated_arguments():
    with pytest.raises(
        ContractError, match=r"3 positional arguments, want at most 2 \(x, weight\), the others by name"
    ):
        oracle.rms_norm(1, 2, 3)
    with pytest.raises(ContractError, match=r"rms_norm\(x\): got two values"):
        oracle.rms_norm(1, x=2)


def test_a_mirror_is_of_a_device_that_there_is():
    x, w = np.ones((2, 8), np.float32), np.ones(8, np.float32)
    assert (oracle.rms_norm.mirror_on("cuda", x, w) == oracle.rms_norm.mirror(x, w)).all()
    with pytest.raises(ContractError, match="rms_norm: got device 'gpu', want cpu or cuda"):
        oracle.rms_norm.mirror_on("gpu", x, w)


def test_an_unknown_op_is_named_with_its_neighbours():
    with pytest.raises(AttributeError, match="rms_norm"):
        _ = ops.rms_nrom
    with pytest.raises(ContractError, match="rms_norm"):
        table.lookup("rms_nrom")


def test_registering_an_op_twice_is_an_error():
    with pytest.raises(ValueError, match="registered already"):
        table.op(row="KERNEL-EW-NORM-ACT", args={}, returns={}, rounding=("none",), parity=Parity(), mirror=Bound())(
            oracle.rms_norm.body
        )


def test_a_contract_must_list_the_functions_own_arguments():
    def fresh(nx, x):
        return x

    register = table.op(row="r", args={"y": Tensor("T")}, returns={}, rounding=("n",), parity=Parity(), mirror=Bound())
    with pytest.raises(ValueError, match="the contract lists"):
        register(fresh)


X, W = np.ones((2, 4), np.float32), np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("out", "fault"),
    [
        (np.zeros((2, 4), np.float64), "float64"),
        (np.zeros((4, 2), np.float32), r"\(4, 2\)"),
        ((np.zeros((2, 4), np.float32),) * 2, "2 arrays, want 1"),
        ([0], "list"),
        (X, "memory shared with x"),
    ],
)
def test_a_bad_out_is_refused_unwritten(out, fault):
    before = [np.copy(o) for o in (out if isinstance(out, tuple) else (out,))]
    with pytest.raises(ContractError, match=fault):
        ops.rms_norm(X, W, out=out)
    for one, two in zip(before, out if isinstance(out, tuple) else (out,)):
        np.testing.assert_array_equal(one, two)


def test_out_is_returned():
    out = np.empty_like(X)
    assert ops.rms_norm(X, W, out=out) is out


def test_a_provider_may_decline_and_the_next_one_serves():
    asked = []

    def decline(**arguments):
        asked.append(arguments["eps"])
        return NotImplemented

    registered = ops.providers.registry
    assert registered.register_op_provider("rms_norm", "cpu", ops.providers.OpProvider("declining", decline, 10))
    try:
        np.testing.assert_array_equal(ops.rms_norm(X, W, eps=0.5), oracle.rms_norm.mirror(X, W, eps=0.5))
        assert asked == [0.5]
        with ops.using("oracle"):
            ops.rms_norm(X, W)
        assert asked == [0.5]
    finally:
        registered.disable_op_provider("declining")


@pytest.mark.parametrize("error", [ContractError("op", "arg", 1, "2"), FormatError("f", 3, "field", "g", "w")])
def test_errors_cross_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)


def test_every_contract_is_json():
    for found in table.table().values():
        json.dumps(found.contract.as_dict())


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        (["matrix", "--json"], 0, '"row": "KERNEL-SAMPLING"'),
        (["explain", "rms_norm"], 0, "rounds (vllm_native)"),
        (["explain", "rms_norm", "--json"], 0, '"rounding_points"'),
        (["explain", "rms_nrom"], 1, "rms_norm"),
        (["gate", "--row", "NONSENSE"], 1, "gate(row)"),
        (["gate", "--row", "SAMPLING", "--record"], 1, "a full run"),
        (["generate", "--model", "/no/such/file", "hello"], 1, "/no/such/file"),
    ],
)
def test_command_line(command, status, text):
    run = subprocess.run([sys.executable, "-c", "from vtlab.parity.cli import main; main()", *command],
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == status, run.stderr
    assert text in run.stdout + run.stderr and "Traceback" not in run.stderr
