"""OpenAI's completions and chat completions, whole or as server-sent events."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response

from bytetx.errors import shown
from bytetx.serve.answer_forms import structured_outputs
from bytetx.serve.answers import check_batch, count_characters, json_answer
from bytetx.serve.calls import Call, ModelFacts, Piece, Timings
from bytetx.serve.chat_answers import ChatChoice, ChatPlan, message_json, plan_chat
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import EventStream, Exchange
from bytetx.serve.logprobs import (
    chat_logprobs,
    completion_logprobs,
    limit_tokens,
)
from bytetx.serve.routes_openai import find_model
from bytetx.serve.schemas_generate import ChatRequest, CompletionRequest

# Without zeros before it, so that no two keys are one token.
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}", re.ASCII)
_FINISH = {"stop": "stop", "length": "length", "abort": "stop"}


@dataclass(slots=True)
class Choice:
    """One output so far; its number counts over all prompts of the request."""

    text: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    num_characters: int = 0
    is_reasoning: bool = False  # what its prompt has opened


@dataclass(slots=True)
class Usage:
    """Tokens of all prompts and outputs."""

    prompt_tokens: dict[int, int] = field(default_factory=dict)  # by the prompt's number
    completion_tokens: int = 0

    def as_json(self) -> dict[str, int]:
        prompt = sum(self.prompt_tokens.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
        }


@dataclass(slots=True)
class PromptRequest:
    """One request on its way: its pieces, what they add up to, and its times."""

    exchange: Exchange
    facts: ModelFacts
    prompts: Sequence[Any]
    options: dict[str, Any]
    n: int
    num_logprobs: int  # what it may have in all, as it is priced
    usage: Usage = field(default_factory=Usage)
    created: int = field(default_factory=lambda: int(time.time()))
    num_stream_tokens: int = 0

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(the choice's number, its next piece), of all prompts at once."""
        site = self.exchange.site
        backend = site.ready_backend()
        options = self.options
        if len(self.prompts) > 1:  # each is a call, and the limits are those of the request
            options = options | {"group": uuid.uuid4().hex}
        name, priority = self.facts.name, self.exchange.priority
        calls = [Call(name, "generate", prompt, options, priority) for prompt in self.prompts]
        site.open_logprobs(self.num_logprobs)
        try:
            async with aclosing(_merged([backend.generate(call) for call in calls])) as merged:
                async for prompt, piece in merged:
                    self.usage.prompt_tokens[prompt] = piece.num_prompt_tokens
                    self.usage.completion_tokens += piece.num_tokens
                    self._note_times()
                    yield prompt * self.n + piece.output, piece
        finally:
            site.close_logprobs(self.num_logprobs)

    def _note_times(self) -> None:
        """For the record of the request, whenever it ends."""
        exchange, now = self.exchange, time.perf_counter()
        if exchange.first_token_seconds is None:
            exchange.first_token_seconds = now - exchange.started
        elif self.usage.completion_tokens > 1:
            since_first = now - exchange.started - exchange.first_token_seconds
            exchange.token_seconds = since_first / (self.usage.completion_tokens - 1)
        exchange.timings = Timings(
            num_texts=len(self.usage.prompt_tokens),
            num_tokens=sum(self.usage.prompt_tokens.values()),
        )


async def completions(body: CompletionRequest, exchange: Exchange) -> Response:
    """Continues each prompt, a string or token ids, in n ways."""
    facts = find_model(exchange, body.model, "generate")
    check_batch(exchange, body.prompt, field="prompt")
    if body.best_of not in (None, body.n):
        raise ServeError(
            "unsupported", "best_of is not supported beside n; leave it out", param="best_of"
        )
    max_tokens = body.max_tokens or (None if _checkpoint_limit(facts) else 16)
    options = _options(body, max_tokens=max_tokens, logprobs=body.logprobs)
    run = _start(exchange, facts, list(body.prompt), options)
    form = _Completions(exchange, run)
    if body.stream:
        return await _stream(form, includes_usage=_includes_usage(body))
    choices = await _collect(run)
    content = form.document("text_completion") | {
        "choices": [form.choice(number, choice) for number, choice in enumerate(choices)],
        "usage": run.usage.as_json(),
    }
    return json_answer(exchange, content, num_characters=count_characters(body.prompt))


async def chat_completions(body: ChatRequest, exchange: Exchange) -> Response:
    """The model's next message, by the checkpoint's own chat template."""
    facts = find_model(exchange, body.model, "generate")
    if not facts.has_chat_template:
        raise ServeError(
            "validation",
            f"the model {facts.name} has no chat template; use /v1/completions, or serve a "
            "checkpoint that was tuned for chats",
            param="model",
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    options = _options(body, max_tokens=max_tokens, logprobs=logprobs) | {"is_chat": True}
    options["chat_template_kwargs"] = _template_kwargs(body)
    plan = plan_chat(body, facts, options)
    run = _start(exchange, facts, [body.messages], options)
    form = _Chat(exchange, run, plan)
    if body.stream:
        return await _stream(form, includes_usage=_includes_usage(body))
    choices = await _collect(run)
    content = form.document("chat.completion") | {
        "choices": [form.choice(number, choice) for number, choice in enumerate(choices)],
        "usage": run.usage.as_json(),
    }
    return json_answer(exchange, content, num_characters=_count_characters(body.messages))


class _AnswerForm:
    """How choices and pieces look in one of the two routes."""

    kind = ""
    chunk_object = ""

    def __init__(self, exchange: Exchange, run: PromptRequest):
        self.run, self.model = run, run.facts.name
        self.request_id = f"{self.kind}-{exchange.request_id}"

    def document(self, name: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": name,
            "created": self.run.created,
            "model": self.model,
        }

    def choice(self, number: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def first_events(self) -> list[dict[str, Any]]:
        """Choices before any text."""
        return []

    def piece(self, number: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return orjson.dumps(self.document(self.chunk_object) | {"choices": choices} | more)


class _Completions(_AnswerForm):
    kind = "cmpl"
    chunk_object = "text_completion"

    def choice(self, number: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": number,
            "text": "".join(choice.text),
            "logprobs": completion_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def piece(self, number: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": number,
            "text": piece.text,
            "logprobs": completion_logprobs(piece.logprobs or []),
            "finish_reason": _finish(piece),
        }


class _Chat(_AnswerForm):
    kind = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def __init__(self, exchange: Exchange, run: PromptRequest, plan: ChatPlan):
        super().__init__(exchange, run)
        self._plan = plan
        self._streamed: dict[int, ChatChoice] = {}

    def choice(self, number: int, choice: Choice) -> dict[str, Any]:
        message, reason = message_json(
            self._plan,
            "".join(choice.text),
            is_reasoning=choice.is_reasoning,
            reason=choice.finish_reason,
        )
        return {
            "index": number,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": reason,
        }

    def first_events(self) -> list[dict[str, Any]]:
        # Of an answer that may be calls alone the content is null: then it is in no delta.
        content = {} if self._plan.names is not None else {"content": ""}
        delta = {"role": "assistant"} | content
        return [
            {"index": number, "delta": delta, "finish_reason": None} for number in range(self.run.n)
        ]

    def piece(self, number: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        reason = _finish(piece)
        if self._plan.parses:
            choice = self._streamed.get(number)
            if choice is None:
                choice = self._streamed[number] = ChatChoice(self._plan, piece)
            delta = choice.delta(piece)
            reason = choice.finish_reason(reason)
        return {
            "index": number,
            "delta": delta,
            "logprobs": chat_logprobs(piece.logprobs or []),
            "finish_reason": reason,
        }


async def _stream(form: _AnswerForm, *, includes_usage: bool) -> Response:
    """Events; an error before the first token still has a status of its own."""
    pieces = form.run.pieces()
    try:
        first = await anext(pieces)
    except BaseException:
        await pieces.aclose()
        raise
    return EventStream(_events(form, pieces, first, includes_usage=includes_usage))


async def _events(
    form: _AnswerForm,
    pieces: AsyncGenerator[tuple[int, Piece], None],
    first: tuple[int, Piece],
    *,
    includes_usage: bool,
) -> AsyncGenerator[bytes, None]:
    no_usage: dict[str, Any] = {"usage": None} if includes_usage else {}
    async with aclosing(pieces):
        for choice in form.first_events():
            yield form.event([choice], **no_usage)
        yield form.event([form.piece(*first)], **no_usage)
        async for number, piece in pieces:
            yield form.event([form.piece(number, piece)], **no_usage)
    if includes_usage:
        yield form.event([], usage=form.run.usage.as_json())


async def _collect(run: PromptRequest) -> list[Choice]:
    choices = [Choice() for _ in range(len(run.prompts) * run.n)]
    async with aclosing(run.pieces()) as pieces:
        async for number, piece in pieces:
            choice = choices[number]
            choice.text.append(piece.text)
            choice.is_reasoning = piece.is_reasoning
            choice.logprobs += piece.logprobs or []
            choice.finish_reason = _finish(piece) or choice.finish_reason
    return choices


async def _merged(
    sources: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[tuple[int, Piece], None]:
    """(the source's number, its next piece) as they come; the first error ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for piece in only:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()

    async def read(number: int, source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    queue.put_nowait((number, piece))
            queue.put_nowait((number, None))
        except Exception as error:
            if isinstance(error, ServeError):  # to its source it is the only prompt
                error.message = error.message.replace("prompts[0]", f"prompts[{number}]", 1)
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(read(i, source)) for i, source in enumerate(sources)]
    num_open = len(tasks)
    try:
        while num_open:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _start(
    exchange: Exchange, facts: ModelFacts, prompts: Sequence[Any], options: dict[str, Any]
) -> PromptRequest:
    exchange.facts = facts
    num_outputs, most = options["n"] * len(prompts), exchange.site.settings.max_queued_requests
    if num_outputs > most:
        raise ServeError(
            "too_large",
            f"{num_outputs} outputs (n x prompts) are more than may be open at all, which is "
            f"{most} (--max-queued-requests): lower n, or send fewer prompts at a time",
            param="n",
        )
    price = _settle_max_tokens(facts, options, num_prompts=len(prompts))
    return PromptRequest(exchange, facts, prompts, options, options["n"], price)


def _checkpoint_limit(facts: ModelFacts) -> int | None:
    """The most tokens that generation_config.json gives an output, its prompt's perhaps among them;
    None where it gives none."""
    defaults = facts.info["generation_defaults"]
    limit: int | None = defaults.get("max_tokens") or defaults.get("max_length")
    return limit


def _settle_max_tokens(facts: ModelFacts, options: dict[str, Any], *, num_prompts: int) -> int:
    """Leaves an open max_tokens to the checkpoint, or limits it for log-probabilities.

    Returns how many of these the request may give in all; ServeError where they are too many.
    """
    logprobs, given, own = options["logprobs"], options["max_tokens"], _checkpoint_limit(facts)
    price = 0
    if logprobs is not None:
        options["max_tokens"], price = limit_tokens(
            given,
            logprobs=logprobs,
            num_outputs=options["n"] * num_prompts,
            most_tokens=int(facts.info["max_positions"]),
        )
    if given is None and own is not None and own <= (options["max_tokens"] or own):
        del options["max_tokens"]
    return price


def _options(
    body: CompletionRequest | ChatRequest, *, max_tokens: int | None, logprobs: int | None
) -> dict[str, Any]:
    """SamplingParams' arguments; null means the default, as OpenAI has it."""
    given = {
        "n": body.n or 1,
        "max_tokens": max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": _token_bias(body.logit_bias),
        "seed": body.seed,
        "stop": body.stop,
        "logprobs": logprobs,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "structured_outputs": structured_outputs(body),
    }
    may_be_none = ("max_tokens", "seed", "logprobs", "logit_bias")
    return {k: value for k, value in given.items() if value is not None or k in may_be_none}


def _token_bias(bias: dict[str, float] | None) -> dict[str, float] | None:
    wrong = next((token for token in bias or () if not _TOKEN_ID.fullmatch(token)), None)
    if wrong is not None:
        raise ServeError(
            "validation", f"logit_bias must map token ids to numbers, got {shown(wrong)}"
        )
    return bias


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Return what the chat template reads beside the messages, as Model.generate takes it."""
    given = dict(body.chat_template_kwargs or {})
    if given.pop("chat_template", None) is not None:
        raise ServeError(
            "unsupported",
            "chat_template is not supported: the checkpoint's own is used; leave it out",
            param="chat_template_kwargs",
        )
    named = {
        "tools": body.tools,
        "documents": body.documents,
        "reasoning_effort": body.reasoning_effort,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    return given | {name: value for name, value in named.items() if value is not None}


def _count_characters(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = (message.get("content") or "" for message in messages)
    return sum(
        len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
        for content in contents
    )


def _includes_usage(body: CompletionRequest | ChatRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _finish(piece: Piece) -> str | None:
    return None if piece.finish_reason is None else _FINISH[piece.finish_reason]
