"""The `vtlab` command: gate, matrix, explain, build, bench, generate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from vtlab.ops.errors import ContractError, FormatError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def matrix(as_json: Json = False) -> None:
    """Show the 45 rows of the kernel matrix with their honest state."""
    from .state import matrix as states

    found = states()
    if as_json:
        _print_json([state.as_dict() for state in found])
        return
    from .screen import console, matrix_table, show

    show(matrix_table(found, console.width))


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An op of the table, e.g. rms_norm.")], as_json: Json = False
) -> None:
    """Print an op's contract: arguments, rounding points, order, parity class, errors, source."""
    from vtlab.ops.table import lookup

    found = lookup(op)
    if as_json:
        _print_json(found.contract.as_dict() | {"documentation": found.__doc__})
        return
    from .screen import contract_page, show

    show(contract_page(found))


@app.command()
def gate(
    row: Annotated[list[str] | None, typer.Option(help="Only this row, e.g. SAMPLING; may be repeated.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Only this token golden, or FILE for a golden's GGUF file; may be repeated."),
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Write parity/records/oracle.json; full runs only.")] = False,
    bisect: Annotated[
        str | None, typer.Option(help="Only this model, e.g. glm4: its hidden states beside transformers', by layer.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the models run: cpu, or cuda for the current GPU.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Run the parity gate over whatever this machine has; exit status 1 if anything is red."""
    from vtlab.device import DeviceError

    from .gate_run import run_gate

    try:
        if bisect is not None:
            from .bisect import run_bisect

            raise typer.Exit(run_bisect(bisect, as_json=as_json, device=device))
        status = run_gate(tuple(row or ()), tuple(model or ()), record=record, as_json=as_json, device=device)
    except DeviceError as error:
        sys.exit(f"vtlab gate: {error}")
    raise typer.Exit(status)


@app.command()
def build(
    families: Annotated[list[str] | None, typer.Argument(help="Only these families, e.g. norm; default all.")] = None,
    arch: Annotated[list[str] | None, typer.Option(help="Only this one, e.g. sm_90a; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for cubins and manifest; default the user's cache.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write parity/records/builds.json; full builds only.")
    ] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what is not on record; each family for one architecture anyway.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compile nothing: check the builds in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Compile the CUDA kernels for every architecture, without a GPU; exit status 1 if one spills registers."""
    from vtlab.device import DeviceError

    from .building import run_build, run_verify

    try:
        if verify:
            status = run_verify(tuple(arch or ()), out, as_json=as_json)
        else:
            found = tuple(arch or ()), tuple(families or ()), out
            status = run_build(*found, record=record, as_json=as_json, changed=changed)
    except DeviceError as error:
        sys.exit(f"vtlab build: {error}")
    raise typer.Exit(status)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Only GPU benches whose family or name contains this; cpu: models beside llama.cpp."),
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Merge the figures into this JSON file.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Measure nothing; write table and plots into this folder.")
    ] = None,
    model: Annotated[list[Path] | None, typer.Option(help="cpu: a GGUF file; may be repeated. Default demo.")] = None,
    threads: Annotated[int | None, typer.Option(help="cpu: how many; default the cores.")] = None,
    peer: Annotated[str | None, typer.Option(help="cpu: a Python that has llama-cpp-python; default this one.")] = None,
    turns: Annotated[int, typer.Option(help="cpu: how often each engine runs, in turns; the best counts.")] = 3,
) -> None:
    """Time the kernels on this GPU beside their peers, or report the figures that are kept (--report docs).

    `vtlab bench cpu` times whole models and their products on the CPU, beside llama.cpp where it is installed.
    """
    from vtlab.device import DeviceError

    if names == ["cpu"]:
        from vtlab.benches.cpu.report import run as run_cpu

        try:
            run_cpu(list(model or ()), threads, peer, turns, keep=keep)
        except (FileNotFoundError, ContractError) as error:
            sys.exit(f"vtlab bench: {error}")
        return
    if report is not None:
        from vtlab.benches.gpu.report import write

        for path in write(report):
            _write(f"{path}\n")
        return
    from vtlab.benches.gpu.__main__ import run

    try:
        run(tuple(names or ()), keep)
    except (DeviceError, ImportError) as error:
        sys.exit(f"vtlab bench: {error}")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: Annotated[str, typer.Option(help="A GGUF file, a folder with safetensors, or demo.")] = "demo",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random stream; the same seed gives the same text.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of cached keys and values; float16 by default for GGUF blocks.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda for the current GPU.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Continue a text with a model, streaming it as it comes."""
    from vtlab.device import DeviceError

    from .generating import generate as run

    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    try:
        result = run(model, prompt, settings, dtype, device, None if as_json else _write, kv_dtype)
    except DeviceError as error:
        sys.exit(f"vtlab generate: {error}")
    if as_json:
        _print_json(result)
    else:
        _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    sys.stdout.write("\n")


def main() -> None:
    """Entry point: our own two errors end as one clear line, not as a traceback."""
    try:
        app()
    except (ContractError, FormatError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
