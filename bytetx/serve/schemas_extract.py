"""Bodies of /extract and /fill_schema."""

from typing import Annotated, Any

from pydantic import Field

from bytetx.serve.schemas import ListOf, OrNull, Request

MAX_LABELS = 1024  # in one body of /extract, each of which is scored with every span


class ExtractRequest(Request):
    texts: ListOf[str]
    labels: (
        Annotated[ListOf[str], Field(max_length=MAX_LABELS)]
        | Annotated[dict[str, str], Field(max_length=MAX_LABELS)]
    ) = Field(description="What is looked for, or a table with a description of each label.")
    threshold: OrNull[Annotated[float, Field(ge=0, le=1)]] = 0.5
    nested: OrNull[bool] = False
    multi_label: OrNull[bool] = False
    relations: OrNull[Annotated[ListOf[str], Field(max_length=MAX_LABELS)]] = Field(
        [], description="What is looked for between spans, by models that extract relations."
    )
    relation_threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Of relations; null is threshold."
    )
    adjacency_threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Of pairs of spans, before relations are looked for; null is threshold."
    )
    truncate: bool | None = Field(None, description="Cut long texts; the server's --auto-truncate.")
    model: str | None = Field(None, description="A served model; the first one.")


class FillSchemaRequest(Request):
    texts: ListOf[str]
    schema_: dict[str, Any] = Field(
        alias="schema",
        description="Tables entities, structures, relations, classifications and "
        "entity_attributes, as of Python's fill_schema.",
    )
    threshold: OrNull[Annotated[float, Field(ge=0, le=1)]] = 0.5
    truncate: bool | None = Field(None, description="Cut long texts; the server's --auto-truncate.")
    model: str | None = Field(None, description="A served model; the first one.")
