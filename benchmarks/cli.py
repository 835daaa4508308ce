"""`python -m benchmarks`: run a suite, keep its records, draw them."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bytetx.errors import BytetxError, OptionError

if TYPE_CHECKING:
    from benchmarks.suite import Suite

app = typer.Typer(
    name="benchmarks",
    help="Measure bytetx and what a user would run instead, side by side.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_OF_ONE_GPU = frozenset(
    ["attention", "linear", "norm", "encoder", "decode", "latency", "text", "generate", "maxsim"]
)
_uses_triton = ContextVar("uses_triton", default=False)  # the option before the suite's name
_PLOT_FOLDER = Path("benchmarks")

RecordOption = Annotated[
    Path | None,
    typer.Option("--record", help="A .jsonl file: the line of each case run is replaced."),
]
CaseOption = Annotated[
    list[str] | None,
    typer.Option(
        "--case", help="Run cases whose name has this part or fits this glob; repeatable."
    ),
]
PlotOption = Annotated[
    bool, typer.Option("--plot", help="Draw the recorded cases beside the --record file.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="A part of the name of the device whose records are shown."),
]
Fa3Option = Annotated[
    Path | None,
    typer.Option(
        "--fa3",
        help="FlashAttention-3's library as a rival: _vllm_fa3_C.abi3.so of the wheel vllm 0.24.0.",
    ),
]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Measure this checkpoint folder instead.")
]


@app.callback()
def options(
    context: typer.Context,
    triton: Annotated[
        bool,
        typer.Option(
            "--triton",
            help="On a GPU, switch the native kernels off and measure what serves other GPUs; the "
            "records are of a suite of its own.",
        ),
    ] = False,
) -> None:
    suite = context.invoked_subcommand
    if triton and suite not in _OF_ONE_GPU:
        known = ", ".join(sorted(_OF_ONE_GPU))
        _fail(OptionError(f"--triton is for the suites of one GPU ({known}), not for {suite}"))
    _uses_triton.set(triton)


@app.command()
def cpu(
    record: RecordOption = None,
    plot: PlotOption = False,
    case: CaseOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few texts and one round: does everything run?")
    ] = False,
    model: ModelOption = None,
) -> None:
    """Encoders on the CPU: bytetx, transformers, sentence-transformers, OpenVINO, ONNX Runtime."""
    console = Console()
    try:
        _run_cpu(console, record=record, plot=plot, case=case or [], quick=quick, model=model)
    except BytetxError as error:
        _fail(error)


@app.command()
def attention(
    record: RecordOption = None,
    case: CaseOption = None,
    plot: PlotOption = False,
    fa3: Fa3Option = None,
) -> None:
    """Packed attention on a Hopper GPU: bytetx, FlashAttention-2 as torch ships it, and -3."""
    from benchmarks.attention import attention_suite

    make_suite, command = partial(attention_suite, fa3=fa3), _with_option("attention", "--fa3", fa3)
    _run_gpu(command, make_suite, record=record, case=case, plot=plot)


@app.command()
def linear(
    record: RecordOption = None,
    case: CaseOption = None,
    plot: PlotOption = False,
    tune: Annotated[
        Path | None,
        typer.Option("--tune", help="Measure every tiling instead, and write the table of plans."),
    ] = None,
) -> None:
    """An encoder's GEMMs on a GPU with what follows them fused: bytetx and cuBLAS."""
    from benchmarks.linear import linear_suite

    if tune is not None and case:
        _fail(OptionError("--tune measures every layer, --case chooses cases; give one of them"))
    if tune is not None:
        return _tune(tune)

    _run_gpu("linear", linear_suite, record=record, case=case, plot=plot)


@app.command()
def norm(record: RecordOption = None, case: CaseOption = None, plot: PlotOption = False) -> None:
    """Norms, embedding and pooling on a GPU: bytetx, torch, torch.compile."""
    from benchmarks.norm import norm_suite

    _run_gpu("norm", norm_suite, record=record, case=case, plot=plot)


@app.command()
def encoder(
    record: RecordOption = None,
    case: CaseOption = None,
    plot: PlotOption = False,
    device: Annotated[
        str, typer.Option(help="cuda; or cpu, which runs whole models in fp32.")
    ] = "cuda",
    packed_encoders: Annotated[
        Path | None,
        typer.Option(
            help="packed-encoders as a rival of ModernBERT on a GPU: the folder that pip installed "
            "it into with --target."
        ),
    ] = None,
) -> None:
    """All layers of BERT, whole ModernBERTs and DeBERTas: bytetx, transformers, packed torch."""
    from benchmarks.encoder import encoder_suite
    from benchmarks.encoder_cpu import encoder_cpu_suite

    _check_device(device)
    if device == "cuda":
        make_suite = partial(encoder_suite, packed_encoders_folder=packed_encoders)
        command = _with_option("encoder", "--packed-encoders", packed_encoders)
        return _run_gpu(command, make_suite, record=record, case=case, plot=plot)
    if packed_encoders is not None:
        _fail(OptionError("--packed-encoders needs a GPU; it goes with --device cuda"))
    _run_gpu("encoder --device cpu", encoder_cpu_suite, record=record, case=case, plot=plot)


@app.command()
def decode(
    record: RecordOption = None,
    case: CaseOption = None,
    plot: PlotOption = False,
    fa3: Fa3Option = None,
) -> None:
    """Attention over paged keys, writing them, choosing tokens, on a GPU: bytetx and torch."""
    from benchmarks.decode import decode_suite

    make_suite, command = partial(decode_suite, fa3=fa3), _with_option("decode", "--fa3", fa3)
    _run_gpu(command, make_suite, record=record, case=case, plot=plot)


@app.command()
def maxsim(
    record: RecordOption = None,
    case: CaseOption = None,
    plot: PlotOption = False,
    device: Annotated[str, typer.Option(help="cuda; or cpu, fewer documents in fp32.")] = "cuda",
) -> None:
    """ColBERT's scores of packed vectors: bytetx, sentence-transformers, torch's operations."""
    from benchmarks.maxsim import maxsim_cpu_suite, maxsim_suite

    _check_device(device)
    if device == "cuda":
        return _run_gpu("maxsim", maxsim_suite, record=record, case=case, plot=plot)
    _run_gpu("maxsim --device cpu", maxsim_cpu_suite, record=record, case=case, plot=plot)


@app.command()
def latency(
    record: RecordOption = None,
    case: CaseOption = None,
    plot: PlotOption = False,
    model: ModelOption = None,
) -> None:
    """One text, or one sequence, at a time on a GPU: bytetx and what a user would run instead."""
    from benchmarks.latency import latency_suite

    make_suite = partial(latency_suite, checkpoint=model)
    _run_gpu("latency", make_suite, record=record, case=case, plot=plot, model=model)


@app.command()
def text(
    record: RecordOption = None,
    case: CaseOption = None,
    plot: PlotOption = False,
    model: ModelOption = None,
) -> None:
    """Many texts to vectors on a GPU: bytetx, sentence-transformers, transformers."""
    from benchmarks.text import text_suite

    make_suite = partial(text_suite, checkpoint=model)
    _run_gpu("text", make_suite, record=record, case=case, plot=plot, model=model)


@app.command()
def generate(
    record: RecordOption = None, case: CaseOption = None, plot: PlotOption = False
) -> None:
    """Ragged prompts and answers on a GPU: bytetx, transformers padded and continuous."""
    from benchmarks.generate import generate_suite

    _run_gpu("generate", generate_suite, record=record, case=case, plot=plot)


@app.command()
def serve(
    record: RecordOption = None,
    case: CaseOption = None,
    model: ModelOption = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16, for every server.")] = "fp32",
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Of load that is measured, a case and server.")
    ] = 10.0,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            "--rate", help="Add cases of so many requests a second, at random moments; repeatable."
        ),
    ] = None,
    generators: Annotated[
        int, typer.Option(min=1, help="Processes that send requests; one sends some thousand.")
    ] = 1,
    frontends: Annotated[
        int, typer.Option(min=1, help="Processes of `bytetx serve` that share the port.")
    ] = 1,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, help="Whole servers that share the port; --device cuda:0 is one GPU for all."
        ),
    ] = 1,
    infinity_python: Annotated[
        Path | None,
        typer.Option(help="The python of an environment with infinity-emb[server,torch]."),
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(help="The python of an environment with vllm; on a GPU.")
    ] = None,
) -> None:
    """Embeddings over HTTP under load: bytetx serve, infinity-emb, vLLM, and Model.embed."""
    from benchmarks.serve import Settings, serve_suite

    settings = Settings(
        device,
        dtype,
        seconds,
        rates=rate or (),
        num_generators=generators,
        frontends=frontends,
        replicas=replicas,
        checkpoint=model,
        infinity_python=infinity_python,
        vllm_python=vllm_python,
    )
    options = {"--device": device, "--dtype": dtype, "--seconds": f"{seconds:g}"}
    words = [word for pair in options.items() for word in pair]
    words += [word for value in rate or () for word in ("--rate", f"{value:g}")]
    if frontends > 1:
        words += ["--frontends", str(frontends)]
    if replicas > 1:
        words += ["--replicas", str(replicas)]
    command = _command(shlex.join(["serve", *words]), case or [], model)
    try:
        suite = serve_suite(settings, patterns=case or [])
        _run_suite(Console(), suite, command=command, record=record)
    except BytetxError as error:
        _fail(error)


CommTuneOption = Annotated[
    Path | None,
    typer.Option(
        "--tune",
        help="Measure every plan of the layers (of --case) instead, and write the best into the "
        "table: one to three minutes a suite.",
    ),
]


@app.command(name="ag_gemm")
def ag_gemm(
    record: RecordOption = None, case: CaseOption = None, tune: CommTuneOption = None
) -> None:
    """All-gather and GEMM in one kernel, on all GPUs: bytetx, cuBLAS and NCCL, torch's own."""
    _run_ranks("ag_gemm", record=record, case=case, tune=tune)


@app.command(name="gemm_rs")
def gemm_rs(
    record: RecordOption = None, case: CaseOption = None, tune: CommTuneOption = None
) -> None:
    """GEMM and reduce-scatter, with what follows, on all GPUs: bytetx, cuBLAS and NCCL, torch."""
    _run_ranks("gemm_rs", record=record, case=case, tune=tune)


@app.command(name="gemm_ar")
def gemm_ar(
    record: RecordOption = None, case: CaseOption = None, tune: CommTuneOption = None
) -> None:
    """GEMM and all-reduce of few rows, with what follows, on all GPUs: bytetx, NCCL, torch."""
    _run_ranks("gemm_ar", record=record, case=case, tune=tune)


@app.command(name="tp_layer")
def tp_layer(
    record: RecordOption = None,
    case: CaseOption = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            "--tune",
            help="Measure from how many rows on ranks shard them instead, and write the table.",
        ),
    ] = None,
    tune_layers_file: Annotated[
        Path | None,
        typer.Option(
            "--tune-layers",
            help="Measure plans of GEMMs in whole layers instead, after the other suites' "
            "--tune, and write the best into their table: three minutes.",
        ),
    ] = None,
) -> None:
    """Whole layers shared by all GPUs: bytetx, cuBLAS and NCCL, and bytetx on one GPU."""
    if tune is not None and tune_layers_file is not None:
        _fail(OptionError("--tune and --tune-layers write tables of their own; give one of them"))
    if tune_layers_file is not None:
        return _run_ranks("tp_layer", record=None, case=case, tune=tune_layers_file, tuner="layers")
    _run_ranks("tp_layer", record=record, case=case, tune=tune)


@app.command()
def grids(
    record: RecordOption = None,
    case: CaseOption = None,
    machine: Annotated[
        str,
        typer.Option(
            help="What the planner plans for: a name, or best the file that `bytetx plan "
            "--calibrate` has just written here."
        ),
    ] = "h100-nvlink",
) -> None:
    """Whole models on every grid of all GPUs, and the times that the planner says: two copies of
    each model must fit."""
    from benchmarks.grids import grids_suite

    suite = partial(grids_suite, machine=machine)
    _run_gpu(
        shlex.join(["grids", "--machine", machine]), suite, record=record, case=case, plot=False
    )


@app.command()
def train(
    record: RecordOption = None,
    case: CaseOption = None,
    device: Annotated[str, typer.Option(help="cuda: a rank each GPU; cpu: --ranks.")] = "cuda",
    ranks: Annotated[int, typer.Option(min=1, help="Processes on a CPU.")] = 2,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", help="data2, z2, y2, x2, data2.z2, ...; repeatable. All without x."),
    ] = None,
    shape: Annotated[
        str, typer.Option(help="gpt2-tiny, gpt2-small, gpt2-medium, gpt2-xl or gpt3-6.7b.")
    ] = "gpt2-small",
    layers: Annotated[int | None, typer.Option(min=1, help="In place of the shape's.")] = None,
    hidden: Annotated[
        int | None, typer.Option(min=64, help="In place of the shape's; heads of 64 features.")
    ] = None,
    vocab: Annotated[int, typer.Option(min=2, help="Word embeddings.")] = 50304,
    tokens: Annotated[int, typer.Option(min=2, help="Of a batch, all ranks together.")] = 1024,
    seqlen: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 256,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    no_overlap: Annotated[
        bool, typer.Option("--no-overlap", help="Ours waits for every collective where it starts.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of steps, a grid.")] = 60.0,
) -> None:
    """A training step of a GPT on grids of ranks: bytetx, FSDP2, DDP, DTensor, axonn."""
    from benchmarks.ranks import start_ranks, this_rank
    from benchmarks.train import Settings, train_suite

    _check_device(device)
    settings = Settings(
        device=device,
        dtype=dtype,
        shape=shape,
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        tokens=tokens,
        seqlen=seqlen,
        grids=tuple(grid or ()),
        overlaps=not no_overlap,
        seconds=seconds,
    )
    try:
        settings.check()
        rank = this_rank(device)
        if rank is None:
            return start_ranks(sys.argv[1:], on_cpu=ranks if device == "cpu" else None)
        suite = train_suite(settings, patterns=case or [])
        command = _command(shlex.join(["train", *settings.options(ranks)]), case or [])
        own_record = record if rank == 0 else None
        _run_suite(Console(quiet=rank > 0), suite, command=command, record=own_record)
    except BytetxError as error:
        _fail(error)


@app.command(name="plot")
def plot_command(
    records: Annotated[Path, typer.Argument(help="The .jsonl file of records.")] = _PLOT_FOLDER
    / "cpu.jsonl",
    device: DeviceOption = None,
) -> None:
    """Draw the records as .svg files beside them, one for light and one for dark pages."""
    try:
        _draw(Console(), records, device=device)
    except BytetxError as error:
        _fail(error)


@app.command(name="table")
def table_command(
    records: Annotated[list[Path], typer.Argument(help=".jsonl files of records.")],
    device: DeviceOption = None,
) -> None:
    """Print the README's tables from records, a table a device, as Markdown."""
    from benchmarks.markdown import markdown_tables
    from benchmarks.records import of_devices, read_records

    try:
        every = [record for path in records for record in read_records(path)]
        print(markdown_tables(of_devices(every, device)))
    except BytetxError as error:
        _fail(error)


def _run_cpu(
    console: Console,
    *,
    record: Path | None,
    plot: bool,
    case: list[str],
    quick: bool,
    model: Path | None,
) -> None:
    # Imported late: torch and the rivals take seconds, which `--help` must not wait for.
    from benchmarks.cpu import QUICK, Sizes, cpu_suite

    if quick and record is not None:
        raise OptionError("--quick measures too little to be recorded; drop --quick or --record")
    _check_plot(plot, record)
    suite = cpu_suite(QUICK if quick else Sizes(), patterns=case, checkpoint=model)
    command = _command("cpu", case, model)
    _run_suite(console, suite, command=command, record=record)
    if plot and record is not None:
        _draw(console, record, device=suite.device)


def _run_gpu(
    command: str,
    make_suite: Callable[..., "Suite"],
    *,
    record: Path | None,
    case: list[str] | None,
    plot: bool,
    model: Path | None = None,
) -> None:
    """command: the suite's name, and options that its command has besides those given here."""
    console, patterns = Console(), case or []
    uses_triton = _uses_triton.get()
    try:
        _check_plot(plot, record)
        with _triton_alone() if uses_triton else nullcontext():
            suite = make_suite(patterns=patterns)
            if uses_triton:
                suite, command = replace(suite, name=f"{suite.name}-triton"), f"--triton {command}"
            _run_suite(console, suite, command=_command(command, patterns, model), record=record)
        if plot and record is not None:
            _draw(console, record, device=suite.device)
    except BytetxError as error:
        _fail(error)


@contextmanager
def _triton_alone() -> Iterator[None]:
    """The native kernels of GPUs are off.  Raises BytetxError where Triton does not serve then."""
    import torch

    from bytetx.ops import native
    from bytetx.ops.triton_backend import why_no_triton

    with native.without_kernels("cuda"):
        reason = why_no_triton(torch.device("cuda"))
        if reason is not None:
            raise BytetxError(f"--triton measures nothing here: {reason}")
        yield


def _run_ranks(
    name: str,
    *,
    record: Path | None,
    case: list[str] | None,
    tune: Path | None,
    tuner: str | None = None,
) -> None:
    """Runs a suite in one process a GPU: starts them, or is one of them.

    tune: the table to be made instead.  tuner: who makes it, if not the suite's own.
    """
    from benchmarks.comm import comm_suite
    from benchmarks.ranks import start_ranks, this_rank
    from benchmarks.tp_layer import tp_layer_suite

    try:
        rank = this_rank()
        if rank is None:
            return start_ranks(sys.argv[1:])
        console = Console(quiet=rank > 0)
        if tune is not None:
            return _tune_ranks(console, tuner or name, tune, patterns=case or [])
        patterns, command = case or [], _command(name, case or [])
        make_suite = tp_layer_suite if name == "tp_layer" else partial(comm_suite, name)
        own_record = record if rank == 0 else None
        _run_suite(console, make_suite(patterns=patterns), command=command, record=own_record)
    except BytetxError as error:
        _fail(error)


def _tune_ranks(console: Console, tuner: str, path: Path, *, patterns: list[str]) -> None:
    from benchmarks.comm import join
    from benchmarks.tune_comm import tune_comm
    from benchmarks.tune_layers import tune_layers
    from benchmarks.tune_rows import tune_rows

    ranks = join()
    tune = {"tp_layer": tune_rows, "layers": tune_layers}.get(tuner, partial(tune_comm, tuner))
    for line in tune(path, ranks, patterns=patterns):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _tune(path: Path) -> None:
    from benchmarks.tune import tune

    console = Console()
    try:
        for line in tune(path):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    except BytetxError as error:
        _fail(error)
    console.print(f"wrote {path}", highlight=False, markup=False)


def _check_device(device: str) -> None:
    if device not in ("cuda", "cpu"):
        _fail(OptionError(f"--device is cuda or cpu, not {device!r}"))


def _check_plot(plot: bool, record: Path | None) -> None:
    if plot and record is None:
        raise OptionError("--plot draws from a file of records; add --record FILE")


def _run_suite(console: Console, suite: "Suite", *, command: str, record: Path | None) -> None:
    """Measures and records case after case, and prints each one and a table of all."""
    from benchmarks.suite import run_suite
    from benchmarks.table import records_table, summary_line

    versions = ", ".join(f"{name} {version}" for name, version in suite.versions.items())
    console.print(f"{suite.device}; {versions}", highlight=False, soft_wrap=True)
    done, seen = [], set[str]()
    for measured, notes in run_suite(suite, command=command, record_to=record):
        done.append(measured)
        console.print(summary_line(measured), highlight=False, markup=False, soft_wrap=True)
        for note in sorted(set(notes) - seen):
            console.print(f"  {note}", highlight=False, markup=False, soft_wrap=True)
        seen.update(notes)
    console.print(records_table(done, width=console.width))


def _draw(console: Console, records: Path, *, device: str | None) -> None:
    from benchmarks.plot import draw

    for path in draw(records, device=device):
        console.print(f"wrote {path}", highlight=False, markup=False)


def _command(suite: str, case: list[str], model: Path | None = None) -> str:
    """The command that measures a record's case again; where the record goes is left out."""
    words = ["python", "-m", "benchmarks", *shlex.split(suite)]
    words += [word for pattern in case for word in ("--case", pattern)]
    if model is not None:
        words += ["--model", str(model)]
    return shlex.join(words)


def _with_option(suite: str, option: str, path: Path | None) -> str:
    """The suite's name and the option where it is given, as _run_gpu takes them."""
    return suite if path is None else shlex.join([suite, option, str(path)])


def _fail(error: BytetxError) -> None:
    line = f"benchmarks: {error}"
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2 if isinstance(error, OptionError) else 1) from error
