"""POST /tasks: declared tasks by their names, with the options of their Python methods."""

from starlette.responses import Response

from bytetx.serve.answers import check_batch, count_characters, json_answer, run
from bytetx.serve.gateway import Exchange
from bytetx.serve.schemas import TaskRequest
from bytetx.serve.site import need_task


async def tasks(body: TaskRequest, exchange: Exchange) -> Response:
    """The results of a task, one for each text: those of the Python method of that name."""
    facts = exchange.site.find_model(exchange.model_name or body.model)
    need_task(facts, body.task, kind="validation")
    check_batch(exchange, body.texts, field="texts")
    # The engine's process has the task's declaration, and checks the options.
    outcome = await run(exchange, facts, "declared", body.texts, name=body.task, given=body.options)
    content = {"results": outcome.rows}
    return json_answer(exchange, content, num_characters=count_characters(body.texts))
