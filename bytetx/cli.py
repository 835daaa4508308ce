"""The command line: batch jobs over files, and what this machine and a checkpoint are."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bytetx.errors import BytetxError, InputError
from bytetx.files.options import JobOptions, with_job_options

app = typer.Typer(
    help="Transformer inference on packed tokens: no pad token is ever computed.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TopK = Annotated[int | None, typer.Option(min=1, show_default=False, help="Best answers to keep.")]
RawScores = Annotated[
    bool, typer.Option("--raw-scores", help="The model's scores, without softmax or sigmoid.")
]
