"""`python -m benchmarks`: a table of the suites; one is run, its records are kept and drawn."""

import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
_uses_triton = ContextVar("uses_triton", default=False)  # the option before the suite's name
_CPU_RECORDS = Path("benchmarks") / "cpu.jsonl"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the command line; kind: its type."""

    kind: Any
    default: Any
    help: str
    name: str | None = None
    min: float | None = None

    def parameter(self, name: str, default: Any) -> inspect.Parameter:
        info = typer.Option(*([self.name] if self.name else []), help=self.help, min=self.min)
        annotation = Annotated[self.kind, info]  # type: ignore[name-defined]
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default, annotation=annotation)


_PATH, _TEXTS = Path | None, list[str] | None
OPTIONS = {
    "record": Option(_PATH, None, "A .jsonl file: the line of each case run is replaced."),
    "case": Option(_TEXTS, None, "Run cases whose name has this part or fits it as a glob."),
    "plot": Option(bool, False, "Draw the recorded cases beside the --record file.", "--plot"),
    "quick": Option(bool, False, "A few texts and one round: does everything run?", "--quick"),
    "model": Option(_PATH, None, "Measure this checkpoint folder instead."),
    "fa3": Option(
        _PATH,
        None,
        "FlashAttention-3's library as a rival: _vllm_fa3_C.abi3.so of the wheel vllm 0.24.0.",
    ),
    "tune": Option(
        _PATH,
        None,
        "Measure every plan (of --case) instead, and write the best into the table: minutes.",
    ),
    "tune_layers": Option(
        _PATH,
        None,
        "Measure plans of GEMMs in whole layers instead, after the other suites' --tune, and "
        "write the best into their table: three minutes.",
    ),
    "device": Option(str, "cuda", "cuda or cpu; serve takes cuda:N, too."),
    "packed_encoders": Option(
        _PATH,
        None,
        "packed-encoders as a rival of ModernBERT on a GPU: the folder that pip installed it into "
        "with --target.",
    ),
    "machine": Option(
        str,
        "h100-nvlink",
        "What the planner plans for: a name, or best the file that `bytetx plan --calibrate` has "
        "just written here.",
    ),
    "dtype": Option(str, "fp32", "fp32 or bf16; serve takes fp16, too."),
    "seconds": Option(float, 60.0, "Of each measurement, about.", min=0.1),
    "rate": Option(list[float] | None, None, "Add cases of so many random requests a second."),
    "generators": Option(int, 1, "Processes that send requests; one sends some thousand.", min=1),
    "frontends": Option(int, 1, "Processes of `bytetx serve` that share the port.", min=1),
    "replicas": Option(
        int, 1, "Whole servers that share the port; --device cuda:0 is one GPU for all.", min=1
    ),
    "infinity_python": Option(
        _PATH, None, "The python of an environment with infinity-emb[server,torch]."
    ),
    "vllm_python": Option(_PATH, None, "The python of an environment with vllm; on a GPU."),
    "ranks": Option(int, 2, "Processes on a CPU.", min=1),
    "shape": Option(str, "gpt2-small", "gpt2-tiny, gpt2-small, gpt2-medium, gpt2-xl, gpt3-6.7b."),
    "tokens": Option(int, 1024, "Of a batch, all ranks together.", min=2),
    "seqlen": Option(int, 256, "Tokens of each sequence.", min=2),
    "layers": Option(int | None, None, "In place of the shape's.", min=1),
    "hidden": Option(int | None, None, "In place of the shape's; heads of 64 features.", min=64),
    "vocab": Option(int, 50304, "Word embeddings.", min=2),
    "grid": Option(_TEXTS, None, "data2, z2, y2, x2, data2.z2, ...; repeatable. All without x."),
    "no_overlap": Option(
        bool, False, "Ours waits for every collective where it starts.", "--no-overlap"
    ),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A suite: its module has suite(patterns=..., **options).

    options: names of OPTIONS besides record and case, with defaults of their own.
    kind: what it runs on: one GPU, a rank each GPU (or CPU processes), or the host's choice.
    fixed: arguments that are no options.   said: options that a record's command always names.
    """

    help: str
    module: str
    options: tuple[str, ...] = ()
    kind: str = "gpu"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    said: tuple[str, ...] = ()

    def default(self, option: str) -> Any:
        return self.defaults.get(option, OPTIONS[option].default)


def _ranks(help: str, module: str, *options: str, **fixed: str) -> Entry:
    return Entry(help, module, options, kind="ranks", fixed=fixed)


SUITES = {
    "cpu": Entry(
        "Encoders on the CPU: bytetx, transformers, sentence-transformers, OpenVINO, ONNX Runtime.",
        "cpu",
        ("plot", "quick", "model"),
        kind="host",
    ),
    "attention": Entry(
        "Packed attention on a Hopper GPU: bytetx, FlashAttention-2 as torch ships it, and -3.",
        "attention",
        ("plot", "fa3"),
    ),
    "linear": Entry(
        "An encoder's GEMMs on a GPU with what follows them fused: bytetx and cuBLAS.",
        "linear",
        ("plot", "tune"),
    ),
    "norm": Entry(
        "Norms, embedding and pooling on a GPU: bytetx, torch, torch.compile.", "norm", ("plot",)
    ),
    "encoder": Entry(
        "All layers of BERT, whole ModernBERTs and DeBERTas: bytetx, transformers, packed torch.",
        "encoder",
        ("plot", "device", "packed_encoders"),
    ),
    "decode": Entry(
        "Attention over paged keys, writing them, choosing tokens, on a GPU: bytetx and torch.",
        "decode",
        ("plot", "fa3"),
    ),
    "maxsim": Entry(
        "ColBERT's scores of packed vectors: bytetx, sentence-transformers, torch's operations.",
        "maxsim",
        ("plot", "device"),
    ),
    "latency": Entry(
        "One text, or one sequence, at a time on a GPU: bytetx and what a user would run instead.",
        "latency",
        ("plot", "model"),
    ),
    "text": Entry(
        "Many texts to vectors on a GPU: bytetx, sentence-transformers, transformers.",
        "text",
        ("plot", "model"),
    ),
    "decide": Entry(
        "Texts with common prefixes under a causal model: bytetx, its rows alone, transformers.",
        "decide",
        ("plot", "device"),
    ),
    "adapters": Entry(
        "Texts and prompts of many LoRA adapters in a step: bytetx, its model without any, peft.",
        "adapters",
        ("plot", "device"),
    ),
    "families": Entry(
        "Encoders of many families from token ids to hidden states: bytetx, transformers.",
        "families",
        ("plot", "device"),
    ),
    "generate": Entry(
        "Ragged prompts and answers on a GPU: bytetx, transformers padded and continuous.",
        "generate",
        ("plot",),
    ),
    "serve": Entry(
        "Embeddings over HTTP under load: bytetx serve, infinity-emb, vLLM, and Model.embed.",
        "serve",
        (
            *("device", "dtype", "seconds", "rate", "generators", "frontends", "replicas"),
            *("infinity_python", "vllm_python", "model"),
        ),
        kind="host",
        defaults={"device": "cpu", "seconds": 10.0},
        said=("device", "dtype", "seconds"),
    ),
    "ag_gemm": _ranks(
        "All-gather and GEMM in one kernel, on all GPUs: bytetx, cuBLAS and NCCL, torch's own.",
        *("comm", "tune"),
        op="ag_gemm",
    ),
    "gemm_rs": _ranks(
        "GEMM and reduce-scatter, with what follows, on all GPUs: bytetx, cuBLAS and NCCL, torch.",
        *("comm", "tune"),
        op="gemm_rs",
    ),
    "gemm_ar": _ranks(
        "GEMM and all-reduce of few rows, with what follows, on all GPUs: bytetx, NCCL, torch.",
        *("comm", "tune"),
        op="gemm_ar",
    ),
    "tp_layer": _ranks(
        "Whole layers shared by all GPUs: bytetx, cuBLAS and NCCL, and bytetx on one GPU.",
        *("tp_layer", "tune", "tune_layers"),
    ),
    "grids": Entry(
        "Whole models on every grid of all GPUs, and the times that the planner says: two copies "
        "of each model must fit.",
        "grids",
        ("machine",),
        kind="host",
        said=("machine",),
    ),
    "train": Entry(
        "A training step of a GPT on grids of ranks: bytetx, FSDP2, DDP, DTensor, axonn.",
        "train",
        (
            *("device", "ranks", "dtype", "shape", "tokens", "seqlen", "layers", "hidden"),
            *("vocab", "grid", "no_overlap", "seconds"),
        ),
        kind="ranks",
        said=("device", "ranks", "dtype", "shape", "tokens", "seqlen"),
    ),
}


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
    known = sorted(name for name, entry in SUITES.items() if entry.kind == "gpu")
    if triton and suite not in known:
        names = ", ".join(known)
        _fail(OptionError(f"--triton is for the suites of one GPU ({names}), not for {suite}"))
    _uses_triton.set(triton)


def _add_command(name: str, entry: Entry) -> None:
    def command(**given: Any) -> None:
        try:
            _run(name, entry, given)
        except BytetxError as error:
            _fail(error)

    parameters = [
        OPTIONS[option].parameter(option, entry.default(option))
        for option in ("record", "case", *entry.options)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command(name, help=entry.help)(command)


for _name, _entry in SUITES.items():
    _add_command(_name, _entry)


@app.command()
def plot(
    records: Annotated[Path, typer.Argument(help="The .jsonl file of records.")] = _CPU_RECORDS,
    device: Annotated[
        str | None, typer.Option(help="A part of the name of the device whose records are drawn.")
    ] = None,
) -> None:
    """Draw the records as .svg files beside them, one for light and one for dark pages."""
    try:
        _draw(Console(), records, device=device)
    except BytetxError as error:
        _fail(error)


def _run(name: str, entry: Entry, given: dict[str, Any]) -> None:
    """Measures the selected cases, or tunes; starts one process each rank where a suite has ranks.

    given: by the names of OPTIONS.
    """
    record, patterns = given.pop("record"), given.pop("case") or []
    draws, own = given.pop("plot", False), dict(given)
    if draws and record is None:
        raise OptionError("--plot draws from a file of records; add --record FILE")
    if given.get("quick") and record is not None:
        raise OptionError("--quick measures too little to be recorded; drop --quick or --record")
    device = given.get("device", "cuda")
    if device not in ("cuda", "cpu") and name != "serve":
        raise OptionError(f"--device is cuda or cpu, not {device!r}")
    tables = {option: given.pop(option, None) for option in ("tune", "tune_layers")}
    if all(tables.values()):
        raise OptionError("--tune and --tune-layers write tables of their own; give one of them")
    rank = None
    if entry.kind == "ranks":
        from benchmarks.ranks import start_ranks, this_rank

        num_ranks = given.pop("ranks", None)
        if name == "train":
            _module(entry).check(**given)
        rank = this_rank(device)
        if rank is None:
            return start_ranks(sys.argv[1:], on_cpu=num_ranks if device == "cpu" else None)
    console = Console(quiet=bool(rank))
    if any(tables.values()):
        return _tune(console, name, tables, patterns=patterns)
    uses_triton = _uses_triton.get()
    with _triton_alone() if uses_triton else nullcontext():
        suite = _module(entry).suite(patterns=patterns, **entry.fixed, **given)
        if uses_triton:
            suite = replace(suite, name=f"{suite.name}-triton")
        command = command_of(name, patterns, own, uses_triton=uses_triton)
        _run_suite(console, suite, command=command, record=None if rank else record)
    if draws and record is not None:
        _draw(console, record, device=suite.device)


def _module(entry: Entry) -> Any:
    # Imported late: torch and the rivals take seconds, which `--help` must not wait for.
    return import_module(f"benchmarks.{entry.module}")


def command_of(
    name: str, patterns: Iterable[str], given: Mapping[str, Any], *, uses_triton: bool = False
) -> str:
    """The command that measures a record's case again; where the record goes is left out."""
    entry, words = SUITES[name], ["python", "-m", "benchmarks"]
    words += [*(["--triton"] if uses_triton else []), name]
    last = []
    for option in entry.options:
        value = given.get(option, entry.default(option))
        if option in ("plot", "quick") or (option == "ranks" and given.get("device") != "cpu"):
            continue
        if option not in entry.said and value == entry.default(option):
            continue
        flag = f"--{option.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        found = [w for v in values for w in ([flag] if v is True else [flag, _word(v)])]
        if option == "model":
            last = found
        else:
            words += found
    words += [word for pattern in patterns for word in ("--case", pattern)]
    return shlex.join([*words, *last])


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


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


def _tune(
    console: Console, name: str, tables: Mapping[str, Path | None], *, patterns: list[str]
) -> None:
    """Makes a table of plans, and prints a line for each layer."""
    option, path = next((option, path) for option, path in tables.items() if path is not None)
    tune: Callable[..., Iterable[str]]
    if name == "linear":
        from benchmarks import tune as linear_tuner

        if patterns:
            raise OptionError("--tune measures every layer, --case chooses cases; give one of them")
        tune = linear_tuner.tune
    else:
        from benchmarks import comm, tune_comm, tune_layers, tune_rows

        whole = tune_layers.tune_layers if option == "tune_layers" else tune_rows.tune_rows
        made = whole if name == "tp_layer" else partial(tune_comm.tune_comm, name)
        tune = partial(made, ranks=comm.join(), patterns=patterns)
    for line in tune(path):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if name == "linear":
        console.print(f"wrote {path}", highlight=False, markup=False)


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


def _fail(error: BytetxError) -> None:
    line = f"benchmarks: {error}"
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2 if isinstance(error, OptionError) else 1) from error
