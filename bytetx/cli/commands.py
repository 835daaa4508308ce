"""The command line: batch jobs over files, and reports on the machine and a checkpoint."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytetx import __version__
from bytetx.arguments import MAX_DRAFT
from bytetx.cli.files import forms
from bytetx.cli.files.options import (
    DTYPE_HELP,
    FAMILIES_HELP,
    GENERATION_CONFIG_HELP,
    KV_CACHE_DTYPE_HELP,
    AdjacencyThreshold,
    JobOptions,
    Labels,
    MultiLabel,
    Nested,
    Relations,
    RelationThreshold,
    SpanThreshold,
    with_job_options,
)
from bytetx.errors import BytetxError, DeviceLostError, InputError, OptionError, shown

if TYPE_CHECKING:
    from bytetx.executor.torchrun import TorchrunLeader

    CommandError = UsageError = typer.BadParameter
else:  # what click calls UsageError and ClickException; typer names only their child
    _, UsageError, CommandError = typer.BadParameter.__mro__[:3]

app = typer.Typer(
    help="Transformer inference on packed tokens: no pad token is ever computed.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TopK = Annotated[int | None, typer.Option(min=1, help="Best answers to keep.", show_default=False)]
NamedTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="query, document, or a task of the checkpoint's own: its adapter and its prompt.",
        show_default=False,
    ),
]
Prompt = Annotated[str | None, typer.Option(help="Text to put before every text.")]
PromptName = Annotated[str | None, typer.Option(help="A prompt of the checkpoint.")]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        help="float32, float16, int8, uint8, or binary and ubinary, which pack 8 signs in a byte.",
    ),
]
Ranges = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="For int8 and uint8: a .npy of float vectors, as embed writes; the minimum and "
        "maximum of each dimension are the ends of the 256 steps.",
    ),
]
OverflowOption = Annotated[
    str | None,
    typer.Option(
        "--overflow",
        help="Of texts that are too long: error, truncate (as --truncate) or chunk.",
        show_default=False,
    ),
]
Stride = Annotated[int, typer.Option(min=0, help="Tokens that two chunks of a text share.")]
RawScores = Annotated[
    bool, typer.Option("--raw-scores", help="The head's own numbers, without softmax or sigmoid.")
]


def _checkpoints(otherwise: str, text: str, *, min: int | None = None) -> Any:
    """An option whose default is the checkpoint's own, else `otherwise`."""
    text = f"{text} [default: the checkpoint's, else {otherwise}]"
    return typer.Option(help=text, min=min)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 1 failed, 2 wrong usage, 3 done without
    malformed records of an input, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if sys.stderr is None:  # closed (2>&-): a file opened next would take its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
    try:
        with _torchrun(arguments) as ranks:
            run = _named(arguments)
            given = arguments or ["--help"]
            sys.exit(run(given, prog_name="bytetx", standalone_mode=False, obj=ranks) or 0)
    except CommandError as error:
        if error.format_message():  # a group of commands alone prints its help and has none
            _print_error(error.format_message())
        sys.exit(error.exit_code)
    except (BytetxError, DeviceLostError) as error:
        _print_error(str(error))
        sys.exit(2 if isinstance(error, OptionError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


def _named(arguments: Sequence[str]) -> typer.Typer:
    """The app with the command that the arguments begin with, alone; all where it has none such.

    Typer reads the options of all commands of an app, which takes longer than those of one.
    """
    own = [
        info
        for info in app.registered_commands
        if info.callback is not None and arguments
        if arguments[0] == info.callback.__name__.replace("_", "-")
    ]
    if not own:
        return all_commands()
    single = copy(app)
    single.registered_commands, single.registered_groups = own, []
    return single


@cache
def all_commands() -> typer.Typer:
    """The app with bench, plan and serve, too, whose imports no other command needs."""
    from bytetx.cli.bench import app as bench_app
    from bytetx.cli.plan import plan
    from bytetx.cli.serve import serve

    app.add_typer(bench_app)
    app.command()(plan)
    app.command()(serve)
    return app


@contextmanager
def _torchrun(arguments: Sequence[str]) -> Iterator["TorchrunLeader | None"]:
    """The ranks that torchrun started, on rank 0, the leader; None where torchrun started none.

    Only torchrun's environment is used. Its store is not, because it listens on every interface:
    ranks connect to processes of the same user on this machine only. Every other rank is a worker
    until the leader closes, and exits here.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield None
        return
    from bytetx.executor.torchrun import TorchrunLeader, torchrun_rank

    rank = torchrun_rank(os.environ)
    if rank is not None and rank.rank:
        from bytetx.executor.worker import serve_torchrun_rank

        serve_torchrun_rank(rank)
        sys.exit(0)
    leader = None if rank is None else TorchrunLeader(rank)
    try:
        yield leader
    finally:
        if leader is not None:
            leader.close()


def _overflow(options: JobOptions, overflow: str | None, stride: int) -> dict[str, Any]:
    """Return the options of a job; only what is given, so that jobs of before can be resumed."""
    given: dict[str, Any] = {"truncate": options.truncate}
    if overflow is not None:
        given["overflow"] = overflow
    return given | ({"stride": stride} if stride else {})


def _of_task(task: str | None) -> dict[str, Any]:
    """Return the options of a job; only what is given, so that jobs of before can be resumed."""
    return {} if task is None else {"task": task}


def _check_prompt(prompt: str | None, prompt_name: str | None) -> None:
    if prompt is not None and prompt_name is not None:
        raise typer.BadParameter("--prompt and --prompt-name exclude each other")


def _print_error(message: str) -> None:
    from rich.console import Console  # imported late, as all that a quick command may not need
    from rich.text import Text

    line = Text.assemble(("error: ", "bold red"), message.replace("\n", " "))
    with suppress(OSError):  # a stderr that is full changes no exit code
        Console(stderr=True).print(line, soft_wrap=True)


@app.callback(invoke_without_command=True)
def _common(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"bytetx {__version__}")
        raise typer.Exit


@app.command()
@with_job_options
def embed(
    options: JobOptions,
    pooling: Annotated[
        str | None,
        typer.Option(help="cls, mean, max, ...; the checkpoint's own if not given."),
    ] = None,
    task: NamedTask = None,
    prompt: Prompt = None,
    prompt_name: PromptName = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Keep the first dimensions and normalise again.")
    ] = None,
    precision: PrecisionOption = "float32",
    ranges: Ranges = None,
    overflow: OverflowOption = None,
    stride: Stride = 0,
) -> None:
    """One vector for each text: float32 rows in .npy; the row of an error is NaN, in integers 0."""
    from bytetx.cli.files.command import run_text_job
    from bytetx.cli.files.ranges import check_precision, read_ranges
    from bytetx.cli.files.tasks import embed_task

    _check_prompt(prompt, prompt_name)
    check_precision(precision, has_ranges=ranges is not None)
    given = {
        "pooling": pooling,
        "prompt": prompt,
        "prompt_name": prompt_name,
        "dimensions": dimensions,
        "precision": precision,
        **_of_task(task),
        **_overflow(options, overflow, stride),
    }
    calibration = None if ranges is None else read_ranges(ranges)
    run_text_job(options, embed_task(given, ranges=calibration))


@app.command()
@with_job_options
def embed_sparse(
    options: JobOptions,
    task: NamedTask = None,
    prompt: Prompt = None,
    prompt_name: PromptName = None,
    max_active_dims: Annotated[
        int | None,
        typer.Option(min=1, help="Keep so many of the largest weights; the checkpoint's own."),
    ] = None,
) -> None:
    """Token ids and weights of each text (SPLADE, BGE-M3): only those above 0."""
    from bytetx.cli.files.command import run_text_job
    from bytetx.cli.files.tasks import embed_sparse_task

    given = {
        "prompt": prompt,
        "prompt_name": prompt_name,
        "max_active_dims": max_active_dims,
        "truncate": options.truncate,
        **_of_task(task),
    }
    _check_prompt(prompt, prompt_name)
    run_text_job(options, embed_sparse_task(given))


@app.command()
@with_job_options
def embed_tokens(
    options: JobOptions,
    task: Annotated[
        str, typer.Option(help="query or document: which prompt, length and expansion texts get.")
    ] = "document",
    prompt: Prompt = None,
    prompt_name: PromptName = None,
    precision: PrecisionOption = "float32",
    ranges: Ranges = None,
) -> None:
    """A vector for each token of each text (ColBERT, BGE-M3), as a list of lists."""
    from bytetx.cli.files.command import run_text_job
    from bytetx.cli.files.ranges import check_precision, read_ranges
    from bytetx.cli.files.tasks import embed_tokens_task

    _check_prompt(prompt, prompt_name)
    if task not in ("query", "document"):
        raise typer.BadParameter(f"--task must be query or document, got {task!r}")
    check_precision(precision, has_ranges=ranges is not None)
    given = {
        "task": task,
        "prompt": prompt,
        "prompt_name": prompt_name,
        "precision": precision,
        "truncate": options.truncate,
    }
    calibration = None if ranges is None else read_ranges(ranges)
    run_text_job(options, embed_tokens_task(given, ranges=calibration))


@app.command()
@with_job_options
def classify(
    options: JobOptions,
    top_k: TopK = None,
    raw_scores: RawScores = False,
    overflow: OverflowOption = None,
    stride: Stride = 0,
) -> None:
    """Labels and scores of each text or pair (--column twice), best first."""
    from bytetx.cli.files.command import run_text_job
    from bytetx.cli.files.tasks import list_task

    given = {"top_k": top_k, "raw_scores": raw_scores, **_overflow(options, overflow, stride)}
    run_text_job(options, list_task("classify", given), takes_pairs=True)


@app.command()
@with_job_options
def tag(
    options: JobOptions,
    aggregation: Annotated[
        str,
        typer.Option(help="none, simple, first, average or max; rows are as Hugging Face's."),
    ] = "simple",
    decoding: Annotated[
        str,
        typer.Option(
            help="argmax, viterbi (the likeliest sequence that BIO, BIOES or BILOU allows), or "
            "auto: viterbi where the checkpoint has a viterbi_calibration.json."
        ),
    ] = "auto",
    overflow: OverflowOption = None,
    stride: Stride = 0,
) -> None:
    """Tagged tokens or groups of tokens of each text, with character offsets."""
    from bytetx.cli.files.command import run_text_job
    from bytetx.cli.files.tasks import list_task

    choices = {"aggregation": aggregation, "decoding": decoding}
    run_text_job(options, list_task("tag", choices | _overflow(options, overflow, stride)))


@app.command()
@with_job_options
def extract(
    options: JobOptions,
    label: Labels,
    threshold: SpanThreshold = 0.5,
    nested: Nested = False,
    multi_label: MultiLabel = False,
    relation: Relations = None,
    relation_threshold: RelationThreshold = None,
    adjacency_threshold: AdjacencyThreshold = None,
) -> None:
    """Spans of each text that have one of the labels (GLiNER), with character offsets."""
    from bytetx.cli.files.command import run_text_job
    from bytetx.cli.files.tasks import list_task

    given = {
        "labels": label,
        "threshold": threshold,
        "nested": nested,
        "multi_label": multi_label,
        "relations": relation or [],
        "relation_threshold": relation_threshold,
        "adjacency_threshold": adjacency_threshold,
        "truncate": options.truncate,
    }
    run_text_job(options, list_task("extract", given))


@app.command()
@with_job_options
def fill_schema(
    options: JobOptions,
    schema: Annotated[
        Path,
        typer.Option(
            "--schema",
            exists=True,
            dir_okay=False,
            help="A JSON file with entities, structures, relations and classifications.",
        ),
    ],
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="The least score of spans and choices.")
    ] = 0.5,
) -> None:
    """Answers to a schema, from each text: entities, fields, relations, classes (GLiNER2)."""
    from bytetx.cli.files.command import run_text_job
    from bytetx.cli.files.tasks import fill_schema_task, read_schema_file

    given = {"schema": read_schema_file(schema), "threshold": threshold}
    given["truncate"] = options.truncate
    run_text_job(options, fill_schema_task(given))


@app.command()
@with_job_options
def answer(
    options: JobOptions,
    top_k: TopK = 1,
    max_answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that an answer may have.")
    ] = 15,
    allow_no_answer: Annotated[
        bool, typer.Option("--allow-no-answer", help='Score "no answer", too (SQuAD 2.0).')
    ] = False,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a chunk of a long context; as many as the model takes."
        ),
    ] = None,
    stride: Annotated[
        int, typer.Option(min=0, help="Tokens that neighbouring chunks of a context share.")
    ] = 128,
) -> None:
    """Spans of each context that answer its question (columns question and context)."""
    from bytetx.cli.files.command import run_pair_job
    from bytetx.cli.files.tasks import list_task

    given = {
        "top_k": top_k,
        "max_answer_tokens": max_answer_tokens,
        "allow_no_answer": allow_no_answer,
        "chunk_tokens": chunk_tokens,
        "stride": stride,
    }
    run_pair_job(options, list_task("answer", given), columns=("question", "context"))


@app.command()
@with_job_options
def fill_mask(options: JobOptions, top_k: TopK = 5) -> None:
    """The best tokens for each mask of each text."""
    from bytetx.cli.files.command import run_text_job
    from bytetx.cli.files.tasks import list_task

    run_text_job(options, list_task("fill_mask", {"top_k": top_k, "truncate": options.truncate}))


@app.command()
@with_job_options
def score(options: JobOptions) -> None:
    """Log-likelihood and perplexity of each text under a causal language model."""
    from bytetx.cli.files.command import run_text_job
    from bytetx.cli.files.tasks import score_task

    run_text_job(options, score_task({"truncate": options.truncate}))


@app.command()
@with_job_options
def decide(
    options: JobOptions,
    order: Annotated[
        str,
        typer.Option(
            help="given, or average: the mean over the n cyclic orders of a choice question's n "
            "options, for n times the cost."
        ),
    ] = "given",
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Fit the temperatures to requests that also have "answers": {name: true, an '
            "option or a level}, and write them into decision.json: the model folder's, or that "
            "of -o.",
        ),
    ] = None,
    reliability: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.svg", help="With --calibrate: a picture of confidence and accuracy."
        ),
    ] = None,
) -> None:
    """Answers to the typed questions of each request, with a probability for each option."""
    if calibrate is not None:
        from bytetx.cli.decisions import calibrate_decisions

        print(calibrate_decisions(options, calibrate, order=order, picture=reliability))
        return
    if reliability is not None:
        raise typer.BadParameter("--reliability goes with --calibrate")
    from bytetx.cli.files.command import run_decision_job
    from bytetx.cli.files.tasks import decide_task

    run_decision_job(options, decide_task({} if order == "given" else {"order": order}))


@app.command()
@with_job_options
def generate(
    options: JobOptions,
    max_tokens: Annotated[
        int | None,
        _checkpoints("256", "The most tokens of an answer.", min=1),
    ] = None,
    temperature: Annotated[
        float | None,
        _checkpoints("1", "0 takes the most likely token each time; at most 2."),
    ] = None,
    top_p: Annotated[
        float | None,
        _checkpoints("1", "Sample from the likeliest tokens with this total probability; above 0."),
    ] = None,
    top_k: Annotated[
        int | None, _checkpoints("0", "Sample from so many tokens; 0 or -1 is all.")
    ] = None,
    min_p: Annotated[
        float | None,
        _checkpoints("0", "Sample from tokens with this share of the highest probability."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        _checkpoints("1", "Above 1, tokens of the prompt and the answer become less likely."),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logits of tokens in the answer; -2 to 2.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, times the count of the token in the answer; -2 to 2.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer; may be given several times.")
    ] = None,
    include_stop_str_in_output: Annotated[
        bool,
        typer.Option("--include-stop-str-in-output", help="Keep what ended an answer in its text."),
    ] = False,
    skip_special_tokens: Annotated[
        bool, typer.Option(help="Leave special tokens out of the text.")
    ] = True,
    json_schema: forms.JsonSchema = None,
    regex: forms.Regex = None,
    choice: forms.Choices = None,
    generation_config: Annotated[
        str, typer.Option(metavar="auto|vllm|none|PATH", help=GENERATION_CONFIG_HELP)
    ] = "auto",
    chat_template_kwargs: forms.TemplateKwargs = None,
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="KV cache in tokens; by default what fits the memory."),
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="auto|fp8", help=KV_CACHE_DTYPE_HELP)
    ] = "auto",
    num_speculative_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_DRAFT,
            help="Tokens of a step that are drafted from the text so far and checked; 0: none.",
        ),
    ] = 0,
) -> None:
    """A causal language model's answer to each prompt or chat."""
    from bytetx.cli.files.command import run_prompt_job
    from bytetx.cli.files.tasks import generate_task

    of_checkpoint = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
    }
    params = {
        **{name: value for name, value in of_checkpoint.items() if value is not None},
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        **({"include_stop_str_in_output": True} if include_stop_str_in_output else {}),
        **({} if skip_special_tokens else {"skip_special_tokens": False}),
    }
    try:
        engine = {
            "kv_cache_tokens": kv_cache_tokens,
            "num_speculative_tokens": num_speculative_tokens,
        }
        template_kwargs = _json_table("--chat-template-kwargs", chat_template_kwargs)
        params |= forms.structured_outputs(json_schema, regex, choice)
        task = generate_task(
            params,
            engine,
            generation_config=generation_config,
            kv_cache_dtype=kv_cache_dtype,
            template_kwargs=template_kwargs,
        )
    except InputError as error:  # SamplingParams names the parameter and its range
        raise UsageError(str(error)) from error
    run_prompt_job(options, task)


def _json_table(name: str, given: str | None) -> dict[str, Any] | None:
    """An option that is a table in JSON; UsageError for anything else."""
    if given is None:
        return None
    try:
        table = json.loads(given)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{name} is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{name} must be a JSON object, got {shown(table)}")
    return table


@app.command()
@with_job_options
def rerank(
    options: JobOptions,
    query: Annotated[
        str | None, typer.Option("--query", "-q", help="Rank all texts of FILES for this query.")
    ] = None,
    query_file: Annotated[
        str | None,
        typer.Option(help="Rank them for each query of this file; --column applies to it, too."),
    ] = None,
    top_k: TopK = None,
    raw_scores: RawScores = False,
    instruction: Annotated[
        str | None,
        typer.Option(
            help="What a causal reranker or a chat model is told; that of its model card if "
            "not given."
        ),
    ] = None,
    listwise: Annotated[
        bool, typer.Option("--listwise", help="Of a chat model: all documents in one prompt.")
    ] = False,
) -> None:
    """Documents sorted by their score for a query, one line for each query.

    Without --query and --query-file, FILES are .jsonl with {"query", "documents"} on each line.
    """
    from bytetx.cli.files.command import run_rank_job
    from bytetx.cli.files.tasks import rerank_task

    if query is not None and query_file is not None:
        raise typer.BadParameter("--query and --query-file exclude each other")
    given: dict[str, Any] = {
        "top_k": top_k,
        "raw_scores": raw_scores,
        "instruction": instruction,
        "truncate": options.truncate,
        **({"listwise": True} if listwise else {}),
    }
    run_rank_job(options, rerank_task(given), query=query, query_file=query_file)


@app.command()
def info(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", envvar="BYTETX_MODEL", help="Checkpoint folder or hub id."),
    ] = None,
    device: Annotated[str, typer.Option(envvar="BYTETX_DEVICE", help="As for embed.")] = "auto",
    dtype: Annotated[str, typer.Option(envvar="BYTETX_DTYPE", help=DTYPE_HELP)] = "auto",
    revision: Annotated[str | None, typer.Option(help="Of a hub id.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never ask the hub.")] = False,
    families: Annotated[str | None, typer.Option(help=FAMILIES_HELP)] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help=KV_CACHE_DTYPE_HELP)] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """The kernels of each operation on this machine, and a checkpoint's sizes and heads."""
    from rich.console import Console

    from bytetx.cli.report import checkpoint_report, machine_report, print_report
    from bytetx.nn.loading import check_placement

    check_placement(device, dtype)
    report = machine_report()
    if model is not None:
        from bytetx.checkpoint.files import resolve_checkpoint
        from bytetx.model import load

        folder = resolve_checkpoint(model, revision=revision, local_files_only=offline)
        loaded = load(
            folder, device=device, dtype=dtype, families=families, kv_cache_dtype=kv_cache_dtype
        )
        report["checkpoint"] = checkpoint_report(loaded)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report, Console(highlight=False))
