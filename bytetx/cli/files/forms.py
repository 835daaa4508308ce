"""Options of `bytetx generate` for the form of all chats and answers."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bytetx.errors import OptionError

TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="What chat templates read: tools, documents, variables of the checkpoint's.",
    ),
]
JsonSchema = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Answers are JSON of this schema.")
]
Regex = Annotated[str | None, typer.Option(help="Answers match this regex as a whole.")]
Choices = Annotated[
    list[str] | None, typer.Option(help="A possible answer; give the option for each.")
]


def structured_outputs(
    json_schema: Path | None, regex: str | None, choice: list[str] | None
) -> dict[str, Any]:
    """The argument of SamplingParams, where a form is given; OptionError for two, or no file."""
    form: dict[str, Any] = {"regex": regex, "choice": choice or None}
    if json_schema is not None:
        try:
            form["json"] = json_schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--json-schema {json_schema} cannot be read: {error}") from None
    form = {name: value for name, value in form.items() if value is not None}
    if len(form) > 1:
        raise OptionError("--json-schema, --regex and --choice exclude each other; give one")
    return {"structured_outputs": form} if form else {}
