"""The command `plan`: which grid of GPUs for a model, a machine and its traffic."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bytetx.cli.files.options import FAMILIES_HELP, KV_CACHE_DTYPE_HELP
from bytetx.errors import InputError, OptionError

_PLAIN = "axonn2024"


def plan(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Checkpoint folder or named shape; see --list."),
    ] = None,
    machine: Annotated[
        str, typer.Option(help="A named machine, or a TOML file like theirs.")
    ] = "h200-nvlink",
    gpus: Annotated[int | None, typer.Option(help="GPUs of one instance; a node's.")] = None,
    lengths: Annotated[
        str,
        typer.Option(help="A profile, tokens of every text, or a file with a length a line."),
    ] = "ln128",
    batch: Annotated[int, typer.Option(help="Texts that run together.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Generated for each text.")] = 0,
    rate: Annotated[float | None, typer.Option(help="Texts a second to be served.")] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Of a GPU; the machine's.")] = None,
    goal: Annotated[str, typer.Option(help="latency, throughput or memory.")] = "throughput",
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16, float16, float32, or auto: bfloat16 and codes that one GPU keeps."
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help=KV_CACHE_DTYPE_HELP)] = "auto",
    families: Annotated[str | None, typer.Option(help=FAMILIES_HELP)] = None,
    top: Annotated[int, typer.Option(min=1, help="Grids that are shown.")] = 10,
    explain: Annotated[
        str | None, typer.Option(metavar="GRID", help="Every collective of this grid, as data2.z2.")
    ] = None,
    year: Annotated[
        bool, typer.Option("--year", help="A year of mixed traffic on --gpus GPUs; 10 000.")
    ] = False,
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Measure this machine, and write its TOML file."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="With --calibrate: processes; the GPUs that there are."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    lists: Annotated[
        bool, typer.Option("--list", help="Known shapes, machines, profiles.")
    ] = False,
) -> None:
    """Ranks every grid data x z x y x x of GPUs for a model, before anything runs.

    --model axonn2024:80B gives the ranking that AxoNN's authors published, for --gpus and --batch.
    """
    from bytetx.parallel.planner import plan as planning
    from bytetx.parallel.planner import report

    if lists:
        _print_lists()
        return
    if calibrate is not None:
        from bytetx.cli.calibrate import calibrate_to_file  # it imports torch

        print(calibrate_to_file(Path(calibrate), ranks=ranks))
        return
    if model is None:
        raise OptionError("plan needs --model: a checkpoint's folder or a name of --list")
    if model.partition(":")[0] == _PLAIN:
        _print_axonn(model.partition(":")[2] or "80B", gpus, batch, top, as_json=as_json)
        return
    if year:
        from bytetx.parallel.planner.simulate import simulate_year

        found = simulate_year(
            model,
            machine=machine,
            gpus=10_000 if gpus is None else gpus,
            families=families,
        )
        print(json.dumps(asdict(found), indent=2) if as_json else report.year_text(found))
        return
    kept_bits = 0.0
    if dtype == "auto":
        dtype, kept_bits = "bfloat16", _kept_bits(model, families)
    planned = planning.plan(
        model,
        machine=machine,
        gpus=gpus,
        lengths=_lengths(lengths),
        batch=batch,
        output_tokens=output_tokens,
        rate=rate,
        memory_gib=memory_gib,
        goal=goal,  # type: ignore[arg-type]  # plan checks it
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kept_bits=kept_bits,
        families=families,
    )
    if explain is not None and as_json:
        one = planned.explain(explain)
        passes = {"prefill": asdict(one.prefill), "decode": one.decode and asdict(one.decode)}
        print(json.dumps(one.as_dict() | passes, indent=2))
    elif explain is not None:
        print(report.ledger_text(planned, planned.explain(explain)))
    elif as_json:
        print(json.dumps(planned.as_dict(), indent=2))
    else:
        print(report.plan_text(planned, top=top))


def _kept_bits(model: str, families: str | None) -> float:
    """Bits of a weight that a GPU keeps of a checkpoint of few bits; 0 of another model."""
    from bytetx.checkpoint.files import begins_static, load_config, transformer_folder

    folder = Path(model)
    if not folder.is_dir() or begins_static(folder):
        return 0.0
    own = transformer_folder(folder)
    if not any(own.glob("*.gguf")) and not load_config(own).get("quantization_config"):
        return 0.0
    from bytetx.nn.kept_codes import planned_bits  # it imports torch

    return planned_bits(own, families)


def _lengths(given: str) -> str | list[int]:
    path = Path(given)
    if not path.is_file():
        return given
    try:
        return [int(line) for line in path.read_text(encoding="utf-8").split()]
    except ValueError as error:
        raise InputError(f"{given} must hold a length in tokens on each line: {error}") from error


def _print_axonn(size: str, gpus: int | None, batch: int, top: int, *, as_json: bool) -> None:
    from bytetx.parallel.planner import axonn2024, report
    from bytetx.parallel.planner.machine import load_machine

    machine = load_machine("perlmutter")
    both = [
        axonn2024.rank_grids(
            size, gpus=1024 if gpus is None else gpus, batch=batch, machine=machine, mends_ffn_out=m
        )
        for m in (False, True)
    ]
    if as_json:
        rows = [[{"grid": c.notation, "seconds": c.total_s} for c in costs] for costs in both]
        print(json.dumps({"as_published": rows[0], "mended": rows[1]}, indent=2))
        return
    print(report.training_text(size, both[0], both[1], top=top))
    print(report.headline_text(axonn2024.headline(machine)))


def _print_lists() -> None:
    from bytetx.parallel.planner.machine import machine_names
    from bytetx.parallel.planner.shapes import SHAPES
    from bytetx.parallel.planner.traffic import PROFILES

    print(f"models: {', '.join(SHAPES)}, {_PLAIN}:80B")
    print(f"machines: {', '.join(machine_names())}")
    print(f"lengths: {', '.join(PROFILES)}")
