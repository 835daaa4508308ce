"""`bytetx bench`: how fast this machine embeds, in this process and over HTTP.

The repository's benchmarks/ measure kernels, rivals and floors, and keep records; a wheel does not
hold them.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bytetx.cli.files.options import DTYPE_HELP
from bytetx.errors import OptionError

_REPOSITORY = Path(__file__).resolve().parents[2]


def where_suites_are() -> str:
    """Say where the other suites are, or that they are not on this machine."""
    what = "Kernels, rivals, floors and records are measured by the repository's benchmarks/"
    if (_REPOSITORY / "benchmarks" / "__main__.py").is_file():
        return f"{what}: python -m benchmarks --help, in {_REPOSITORY}"
    return f"{what}, which are not in this installation: clone it, and run python -m benchmarks"


class _Suites(TyperGroup):
    """Sends who asks for a suite of the repository there."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer's click, or the real one
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            known = ", ".join(self.commands)
            raise OptionError(f"bench has {known}, not {args[0]!r}. {where_suites_are()}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="bench",
    cls=_Suites,
    help="Measure how fast this machine embeds, beside sentence-transformers if it is installed.",
    epilog=where_suites_are(),
    no_args_is_help=True,
)
Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Checkpoint folder or hub id of an encoder; all-MiniLM-L6-v2."
    ),
]
Dtype = Annotated[str, typer.Option(help=DTYPE_HELP)]
Texts = Annotated[int, typer.Option(min=1, help="English passages of about 90 tokens.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Of each measurement, about.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]


@app.command()
def cpu(
    model: Model = None,
    dtype: Dtype = "auto",
    texts: Texts = 256,
    seconds: Seconds = 10.0,
    as_json: AsJson = False,
) -> None:
    """Strings to vectors on this machine's CPU: many texts at once, and one at a time."""
    _embedding(model, "cpu", dtype, texts, seconds, as_json=as_json)


@app.command()
def gpu(
    model: Model = None,
    dtype: Dtype = "auto",
    texts: Texts = 4096,
    seconds: Seconds = 10.0,
    as_json: AsJson = False,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
) -> None:
    """Strings to vectors on a GPU: many texts at once, and one at a time."""
    if not device.startswith("cuda"):
        raise OptionError(f"--device must be cuda or cuda:N, got {device!r}")
    _embedding(model, device, dtype, texts, seconds, as_json=as_json)


@app.command()
def serve(
    model: Model = None,
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    callers: Annotated[
        int, typer.Option(min=1, help="Connections that ask again as soon as they are answered.")
    ] = 16,
    texts_per_request: Annotated[int, typer.Option(min=1, help="English passages.")] = 1,
    seconds: Seconds = 10.0,
    as_json: AsJson = False,
) -> None:
    """`bytetx serve` on this machine under load: texts per second and latencies over HTTP.

    The callers are threads of this process and share the cores with the server.
    """
    # It imports what measures over HTTP, which other commands do not need.
    from bytetx.cli.bench_speed import print_serving, serving_speed

    found = serving_speed(
        model,
        device,
        dtype,
        callers=callers,
        texts_per_request=texts_per_request,
        seconds=seconds,
    )
    print_serving(found, note=where_suites_are(), as_json=as_json)


def _embedding(
    model: str | None, device: str, dtype: str, num_texts: int, seconds: float, *, as_json: bool
) -> None:
    from bytetx.cli.bench_speed import embedding_speed, print_embedding

    found = embedding_speed(model, device, dtype, num_texts, seconds)
    print_embedding(found, note=where_suites_are(), as_json=as_json)
