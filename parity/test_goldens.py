"""The goldens themselves: complete provenance, the scripts that made them, names the ops know, streams worth gating."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open

import vtlab.oracle  # noqa: F401  fills the op table
from vtlab.goldens import share, tiny
from vtlab.ops.dtypes import dtype as dtype_of
from vtlab.ops.errors import FormatError
from vtlab.ops.numerics import round_to
from vtlab.ops.table import lookup

from . import goldens
from .generating_tiny import RECURRENT
from .goldens import FOLDER, list_goldens, op_cases, token_golden

ROOT = FOLDER.parent
FILES = list_goldens()
OPS = [file for file in FILES if file.kind == "ops"]
TOKENS = [file for file in FILES if file.kind == "tokens"]
TINY = [file for file in TOKENS if token_golden(file.name)["model"].startswith("tiny:")]
PROVENANCE = {"build", "gpu", "numpy", "python", "isa", "captured", "script", "script_sha256"}
OF_VLLM = {"vllm", "vllm_commit", "cuda", "torch", "transformers", "threads"}
OF_GGML = {"ggml", "library_sha256"}


def name_of(file: goldens.GoldenFile) -> str:
    return file.path.name


def digest_of(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()


def test_there_are_goldens_of_every_kind():
    assert {file.name for file in OPS} >= {"norm", "activation", "rope", "attention", "kv_cache", "matmul", "sampling"}
    # Recurrent models in float32 run in vLLM on a GPU alone; transformers has hidden states of most of them.
    streams = {f"{name}_float32" for name in tiny.CHECKPOINTS if name not in RECURRENT}
    assert {file.name for file in TOKENS} >= streams
    known = {file.name.rsplit("_", 1)[0] for file in TOKENS} | {file.name for file in FILES if file.kind == "hidden"}
    assert known >= set(tiny.CHECKPOINTS)


def test_the_folder_stays_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 60e6


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_provenance_is_complete(file):
    about = file.provenance
    assert about.keys() >= PROVENANCE | (OF_GGML if "ggml" in about else OF_VLLM)
    if "vllm" in about:
        assert about["vllm"] == "0.26.0" and about["torch"].startswith("2.11.0") and about["transformers"] == "5.14.1"
    assert about["build"] in ("cpu", "cuda")
    assert (about["gpu"] is not None) == (about["build"] == "cuda")
    assert about["isa"], "the vector extensions of the machine's CPU"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_committed_script_made_it(file):
    assert file.provenance["script_sha256"] == digest_of(file.provenance["script"]), "capture it again"
    if "checkpoint_script_sha256" in file.provenance:
        assert file.provenance["checkpoint_script_sha256"] == digest_of(file.provenance["checkpoint_script"])


@pytest.mark.parametrize("file", OPS, ids=name_of)
def test_op_cases_speak_the_ops_names(file):
    assert file.path.name == f"{file.name}.{file.build}.safetensors"
    cases = op_cases(file.name, build=file.build)
    assert cases and len({(case.op, case.name) for case in cases}) == len(cases)
    for case in cases:
        contract = lookup(case.op).contract
        assert case.call().keys() <= contract.args.keys(), case
        assert case.outputs.keys() <= contract.returns.keys() | set(contract.mutates) and case.outputs, case


@pytest.mark.parametrize("file", [file for file in OPS if file.build == "cpu"], ids=name_of)
def test_nothing_failed_on_the_cpu(file):
    assert file.errors == {}


@pytest.mark.parametrize("file", OPS, ids=name_of)
def test_every_tensor_belongs_to_a_case(file):
    with safe_open(file.path, "np") as tensors:
        stored, about = set(tensors.keys()), json.loads(tensors.metadata()["vtlab"])
    beside = about.get("elsewhere", {}).keys()
    named = {key for case in about["cases"] for part in ("inputs", "outputs") for key in case[part].values()}
    assert stored | beside == named and not stored & beside


@pytest.mark.parametrize("file", [file for file in OPS if file.build == "cuda"], ids=name_of)
def test_tensors_beside_a_file_come_back(file, tmp_path):
    """Taken back in, a file has every tensor of its cases; shared again, its bytes of before."""
    for path in (file.path, file.path.with_name(f"{file.name}.cpu.safetensors")):
        if path.exists():
            shutil.copy(path, tmp_path)
    if not share.read(copy := tmp_path / file.path.name)[0].get("elsewhere"):
        return
    share.whole(copy)
    about, tensors = share.read(copy)
    with safe_open(copy, "np") as opened:
        assert set(opened.keys()) == tensors.keys() and "elsewhere" not in about
    for case, read in zip(about["cases"], op_cases(file.name, build="cuda"), strict=True):
        for part in ("inputs", "outputs"):
            for name, array in getattr(read, part).items():
                assert array.tobytes() == tensors[case[part][name]][1], read
    share.share(copy)
    assert copy.read_bytes() == file.path.read_bytes()


def test_a_tensor_that_changed_beside_its_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(goldens, "FOLDER", tmp_path)
    (tmp_path / "ops").mkdir()
    for build in ("cpu", "cuda"):
        shutil.copy(FOLDER / "ops" / f"sampling.{build}.safetensors", tmp_path / "ops")
    cpu = tmp_path / "ops" / "sampling.cpu.safetensors"
    of_cuda, _ = share.read(cpu.with_name("sampling.cuda.safetensors"))
    about, tensors = share.read(cpu)
    there = next(iter(of_cuda["elsewhere"].values()))[1]
    entry, data = tensors[there]
    share.write(cpu, about, {**tensors, there: (entry, bytes([data[0] ^ 1]) + data[1:])})
    assert op_cases("sampling", build="cpu")
    with pytest.raises(FormatError, match="other bytes"):
        op_cases("sampling", build="cuda")
    with pytest.raises(SystemExit, match="capture it again"):
        share.whole(cpu.with_name("sampling.cuda.safetensors"))


@pytest.mark.parametrize("file", TOKENS, ids=name_of)
def test_streams_are_whole_and_greedy(file):
    golden = token_golden(file.name)
    assert file.name.endswith(f"_{golden['dtype']}") and len(golden["prompts"]) == len(golden["outputs"]) >= 6
    for prompt, output in zip(golden["prompts"], golden["outputs"]):
        assert prompt["ids"] and len(output["tokens"]) == len(output["logprobs"]) == 32
        for token, top in zip(output["tokens"], output["logprobs"]):
            values = [value for _, value in top]
            assert len({chosen for chosen, _ in top}) == 10 and values == sorted(values, reverse=True)
            assert dict(top)[token] == values[0] <= 0 and np.logaddexp.reduce(values) < 1e-4


@pytest.mark.parametrize("file", TINY, ids=name_of)
def test_tiny_streams_are_not_degenerate(file):
    assert all(len(set(output["tokens"])) >= 10 for output in token_golden(file.name)["outputs"])


@pytest.mark.parametrize("file", TINY, ids=name_of)
def test_tiny_goldens_rest_on_this_checkpoint_and_these_prompts(file):
    golden = token_golden(file.name)
    name = golden["model"].removeprefix("tiny:")
    assert file.provenance["checkpoint_digest"] == tiny.digest(name, golden["dtype"])
    spec = importlib.util.spec_from_file_location("capture_tokens", FOLDER / "capture" / "tokens.py")
    capture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(capture)
    assert golden["prompts"] == capture.random_prompts(name, tiny.CHECKPOINTS[name]["vocab_size"])


@pytest.mark.parametrize("file", [file for file in TOKENS if file.name.endswith("_float32")], ids=name_of)
def test_float32_streams_are_robust(file):
    """Each arg-max leads by far more than float32 evaluations differ (transformers and vLLM: 3.5e-5 nats)."""
    gaps = [top[0][1] - top[1][1] for output in token_golden(file.name)["outputs"] for top in output["logprobs"]]
    assert min(gaps) > 5e-4


@pytest.mark.parametrize("file", [file for file in TOKENS if file.build == "cpu"], ids=name_of)
def test_bfloat16_on_a_cpu_came_from_one_that_rounds(file):
    """Without AVX-512 vLLM's CPU build truncates float32 to bfloat16."""
    assert "avx512f" in file.provenance["isa"] or file.name.endswith("_float32")


@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_checkpoints_are_hugging_face_checkpoints(name, dtype, tmp_path):
    written = tiny.write_checkpoint(name, tmp_path, dtype)
    assert written == tiny.digest(name, dtype) != tiny.digest(name, "bfloat16" if dtype == "float32" else "float32")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == tiny.CHECKPOINTS[name]["vocab_size"] and config["torch_dtype"] == dtype
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(tiny.tensors(name))
        for key in file.keys():  # noqa: SIM118  the handle is no mapping
            piece = file.get_slice(key)
            assert piece.get_dtype() == {"float32": "F32", "bfloat16": "BF16"}[dtype]
            assert tuple(piece.get_shape()) == tiny.tensors(name)[key].shape


@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_tiny_bfloat16_rounds_the_float32_values_to_nearest_even(name):
    narrow = tiny.tensors(name, "bfloat16")
    for key, wide in tiny.tensors(name).items():
        want = round_to(wide.astype(np.float64), dtype_of("bfloat16"))
        np.testing.assert_array_equal(narrow[key], want.view(np.uint16))


def test_tiny_refuses_other_dtypes():
    with pytest.raises(ValueError, match="float16"):
        tiny.tensors("llama", "float16")


def test_tiny_runs_without_vtlab():
    """The capture environment has vLLM, not vtlab: tiny.py and tokens.py import nothing of it."""
    for path in (FOLDER / "tiny.py", *(FOLDER / "capture").glob("*.py")):
        assert "vtlab." not in "".join(line for line in path.read_text().splitlines(True) if "import" in line), path


def test_reader_refuses_what_is_no_golden(tmp_path, monkeypatch):
    monkeypatch.setattr(goldens, "FOLDER", tmp_path)
    (tmp_path / "ops").mkdir()
    (tmp_path / "tokens").mkdir()
    bad = tmp_path / "ops" / "norm.cpu.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    for data in (b"", b"\xff" * 16, (4).to_bytes(8, "little") + b"nope", len(header).to_bytes(8, "little") + header):
        bad.write_bytes(data)
        with pytest.raises(FormatError, match=r"norm\.cpu"):
            op_cases("norm")
    for text in ("{", '{"model": "x"}'):
        (tmp_path / "tokens" / "x.json").write_text(text)
        with pytest.raises(FormatError, match=r"x\.json"):
            token_golden("x")


def test_a_case_hands_out_copies():
    case = op_cases("kv_cache", "reshape_and_cache")[0]
    call = case.call()
    call["key_cache"][...] = 1
    assert not np.array_equal(call["key_cache"], case.inputs["key_cache"])
