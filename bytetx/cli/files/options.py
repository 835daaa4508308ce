"""Options of every batch command: inputs, model, output; declared once and shared."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytetx.cli.files.start import starting
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S

if TYPE_CHECKING:
    from bytetx.executor.torchrun import TorchrunLeader

# Far beyond any machine's cores; a runtime that cannot start so many threads ends the process.
MAX_THREADS = 1024
DTYPE_HELP = "auto, fastest, float32 (fp32), bfloat16 (bf16), float16 (fp16), fp8, int8 or int4."
GENERATION_CONFIG_HELP = (
    "Where generation starts for what is not given: the checkpoint's generation_config.json; vllm "
    "takes its end-of-text tokens alone, none nothing; or the path of such a file."
)
KV_CACHE_DTYPE_HELP = (
    "Keys and values of generation: auto, the model's dtype, or fp8, half of bf16's memory."
)
FAMILIES_HELP = (
    "Folder of TOML files as models/ has them, whose families are added, and used in place of "
    "bytetx's own of the same model_type."
)

_MODEL, _RUN, _OUTPUT = "Model", "Input and run", "Output"


# Options of `bytetx extract`.
Labels = Annotated[
    list[str], typer.Option("--label", help="What is looked for; give it for each label.")
]
SpanThreshold = Annotated[
    float, typer.Option(min=0, max=1, help="Spans with a higher score are extracted.")
]
Nested = Annotated[bool, typer.Option("--nested", help="Spans may lie inside one another.")]
MultiLabel = Annotated[
    bool, typer.Option("--multi-label", help="One span may have several labels.")
]
Relations = Annotated[
    list[str] | None,
    typer.Option("--relation", help="What is looked for between spans; give it for each relation."),
]
RelationThreshold = Annotated[
    float | None, typer.Option(min=0, max=1, help="That of relations; else --threshold.")
]
AdjacencyThreshold = Annotated[
    float | None, typer.Option(min=0, max=1, help="That of pairs of spans; else --threshold.")
]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of one batch command, as given; each field's annotation is its help text."""

    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES",
            help="Inputs: text (one text a line), .jsonl, .csv, .tsv or .parquet; - or nothing "
            "reads stdin.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            envvar="BYTETX_MODEL",
            help="Checkpoint folder or hub id. Without it, embed takes the demo checkpoint, which "
            "the extra called demo installs.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a hub id.", rich_help_panel=_MODEL),
    ] = None
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Never ask the hub.", rich_help_panel=_MODEL),
    ] = False
    device: Annotated[
        str,
        typer.Option(
            envvar="BYTETX_DEVICE", help="auto, cpu, cuda or cuda:N.", rich_help_panel=_MODEL
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            envvar="BYTETX_DTYPE",
            help=DTYPE_HELP,
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs that share the model's layers. Under torchrun, all its ranks do; they must "
            "be this user's and on this machine.",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None
    grid: Annotated[
        str | None,
        typer.Option(
            help="Ranks in data x z x y x x, as data2.z2, in place of --tp, which is y; "
            "`bytetx plan` ranks grids, and auto takes the first for all GPUs.",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None
    group_timeout: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds after which a process of --tp that is stopped ends the job; one that "
            "runs without progress has ten times as long.",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT_LIMIT_S
    families: Annotated[
        str | None,
        typer.Option(help=FAMILIES_HELP, rich_help_panel=_MODEL, show_default=False),
    ] = None
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="The same bits for a text whatever else is in its batch; slower on a GPU, not "
            "with --tp.",
            rich_help_panel=_MODEL,
        ),
    ] = False
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            "-c",
            help='Column or key of the text; "text" if not given, twice for pairs.',
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            help="Columns of the input to copy into the output's rows, as id,date; not into .npy. "
            'A text file has one, "text".',
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None
    input_format: Annotated[
        str | None,
        typer.Option(
            help="text, jsonl, csv or parquet, where the file's name does not say.",
            rich_help_panel=_RUN,
        ),
    ] = None
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Cut texts beyond the model's positions; without it they are errors.",
            rich_help_panel=_RUN,
        ),
    ] = False
    token_budget: Annotated[
        int | None,
        typer.Option(
            envvar="BYTETX_TOKEN_BUDGET",
            min=1,
            help="Most tokens in one step; bounds memory. The default fits the device.",
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None
    prefix_cache_bytes: Annotated[
        int | None,
        typer.Option(
            envvar="BYTETX_PREFIX_CACHE_BYTES",
            min=0,
            help="Most bytes of common prefixes that a causal model keeps; 0 keeps none.",
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            envvar="BYTETX_THREADS",
            min=1,
            max=MAX_THREADS,
            help="CPU threads; all cores if not given.",
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help=".npy (embed), .jsonl or .parquet; - is jsonl on stdout.",
            rich_help_panel=_OUTPUT,
        ),
    ] = "-"
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with an unfinished job; start it where there is none.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an existing output.", rich_help_panel=_OUTPUT),
    ] = False
    ranks: "TorchrunLeader | None" = None  # the ranks that torchrun started

    @property
    def output_path(self) -> Path | None:
        """None for stdout."""
        return None if self.output == "-" else Path(self.output)

    @property
    def output_suffix(self) -> str:
        """In small letters; empty for stdout."""
        return "" if self.output_path is None else self.output_path.suffix.lower()


def with_job_options(function: Callable[..., None]) -> Callable[..., None]:
    """`function(options, own...)` as a command that takes JobOptions' fields and its own.

    Typer reads a command's options from its signature, so the shared ones are put into it here
    rather than repeated in every command.
    """
    shared = [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(JobOptions)
        if f.name != "ranks"
    ]
    context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    own = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for parameter in list(signature(function).parameters.values())[1:]
    ]

    @wraps(function)
    def command(context: typer.Context, **values: Any) -> None:
        given = {parameter.name: values.pop(parameter.name) for parameter in shared}
        options = JobOptions(**given, ranks=context.obj)
        with starting():
            function(options, **values)

    command.__signature__ = Signature([context, shared[0], *own, *shared[1:]])  # type: ignore[attr-defined]
    return command
