"""Calls of tasks that read a schema, by GLiNER2's models of spans and of boundaries."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar, cast

from bytetx.errors import InputError
from bytetx.nn.boundary_head import BoundaryHead
from bytetx.nn.schema_head import SchemaHead, SpanSchemaHead
from bytetx.requests.schema import ExtractionSchema, schema_prompt, schema_words
from bytetx.requests.words import WordReader
from bytetx.tasks.boundary_scores import BoundaryTask
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import Results
from bytetx.tasks.schema_scores import SpanSchemaTask
from bytetx.tasks.task import TextOptions
from bytetx.tasks.text_scores import SchemaTask, TextScores

R = TypeVar("R")


def schema_call(
    context: TaskContext,
    name: str,
    texts: Iterable[str],
    schema: ExtractionSchema,
    options: TextOptions,
    result: Callable[[TextScores], R],
    *,
    key: Hashable,
) -> TaskCall[Results[R]]:
    """A call of a task that reads a schema.  key: of what `result` does besides.

    Raises InputError where the checkpoint is no GLiNER2 model.
    """
    head = context.need_head(context.heads.extraction, "span extraction")
    if not isinstance(head, SchemaHead):
        raise InputError(
            "this checkpoint is a GLiNER model of version 1, which reads labels and no schemas; "
            "use extract, or load a GLiNER2 model"
        )
    tokenizer, most = context.need_tokenizer(), context.spec.max_positions
    prompt = schema_prompt(schema, tokenizer, most=most)
    reader = WordReader(
        context.spec,
        tokenizer,
        truncate=options.truncate,
        keeps_errors=options.on_error == "return",
        label_prompt=prompt,
        max_words=head.spec.max_words,
        max_tokens=most,
        words=schema_words(),
        reads_sentences=True,
    )
    given = (schema, prompt, result, key)
    job: SchemaTask[R]
    if isinstance(head, BoundaryHead):
        job = BoundaryTask(head, *given)
    else:
        job = SpanSchemaTask(cast(SpanSchemaHead, head), *given)
    return TaskCall(name, texts, job, reader, list_sink)
