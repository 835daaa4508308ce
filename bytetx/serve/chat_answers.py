"""Answers to chats: what the request's tools make of them, and the messages they become."""

import uuid
from dataclasses import dataclass
from typing import Any

from bytetx.checkpoint.answer_format import AnswerFormat
from bytetx.checkpoint.answer_parser import AnswerDelta, AnswerParser, AssistantMessage, CallDelta
from bytetx.serve.calls import ModelFacts, Piece
from bytetx.serve.errors import ServeError
from bytetx.serve.schemas_generate import ChatRequest
from bytetx.serve.schemas_tools import NamedTool


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """How the answers to a chat are taken apart.

    names: of the tools that they may call; None: calls stay text.
    """

    format: AnswerFormat
    names: frozenset[str] | None

    @property
    def parses(self) -> bool:
        """Whether there is anything to take apart."""
        return self.names is not None or self.format.thinking is not None

    def parser(self, *, is_reasoning: bool) -> AnswerParser:
        """A parser of one answer.  is_reasoning: whether its prompt has opened the reasoning."""
        return self.format.parser(
            has_tools=self.names is not None, is_reasoning=is_reasoning, names=self.names
        )


def plan_chat(body: ChatRequest, facts: ModelFacts, options: dict[str, Any]) -> ChatPlan:
    """The plan of a request; options get what holds its answers to calls.

    Raises ServeError where tools are asked for in a way that cannot be.
    """
    format = AnswerFormat(facts.tool_calls, facts.reasoning)
    tools = body.tools or []
    names = frozenset(tool["function"]["name"] for tool in tools)
    choice = body.tool_choice or ("auto" if tools else "none")
    is_forced = choice == "required" or isinstance(choice, NamedTool)
    if is_forced and not tools:
        raise ServeError("validation", "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ServeError(
            "validation",
            f"tool_choice names {choice.function.name!r}, which is none of the tools",
            param="tool_choice",
        )
    plan = ChatPlan(format, None if choice == "none" or not tools else names)
    if plan.names is not None and format.tools is None:
        if format.tool_calls != "none" or is_forced:
            raise _no_format(facts)
        plan = ChatPlan(format, None)
    if plan.parses:
        options["parses"] = True
    if plan.names is None:
        return plan
    is_strict = any(tool["function"].get("strict") for tool in tools)
    has_form = options.get("structured_outputs") is not None
    if has_form and is_forced:
        raise ServeError(
            "validation",
            "tool_choice and a form of the answer exclude each other: the answer is a call",
            param="tool_choice",
        )
    if is_forced or is_strict or has_form or body.parallel_tool_calls is False:
        name = choice.function.name if isinstance(choice, NamedTool) else None
        options["tool_grammar"] = {
            "choice": "required" if is_forced else "auto",
            "name": name,
            "parallel": body.parallel_tool_calls is not False and name is None,
        }
    return plan


def _no_format(facts: ModelFacts) -> ServeError:
    why = (
        "the server was started with --tool-call-parser none"
        if facts.tool_calls == "none"
        else "its chat template writes none that is known here"
    )
    return ServeError(
        "unsupported",
        f"the format of the tool calls of {facts.name} is not known: {why}. Start the server with "
        "--tool-call-parser and a format (hermes, llama3_json, mistral, mistral_args), or with "
        'none to get calls as text; or send "tool_choice": "none"',
        param="tools",
    )


class ChatChoice:
    """One answer on its way: its pieces to deltas, as OpenAI's streams have them."""

    def __init__(self, plan: ChatPlan, piece: Piece):
        """piece: the first one."""
        self._parser = plan.parser(is_reasoning=piece.is_reasoning)
        tools = plan.format.tools
        self._id_length = None if tools is None else tools.id_length

    def delta(self, piece: Piece) -> dict[str, Any]:
        """The delta of the next piece."""
        parts = [self._parser.feed(piece.text)]
        if piece.finish_reason is not None:
            parts.append(self._parser.finish())
        reasoning = "".join(part.reasoning for part in parts)
        content = "".join(part.content for part in parts)
        calls = [_call_json(call, self._id_length) for call in _joined(parts)]
        found = {"reasoning_content": reasoning, "content": content, "tool_calls": calls}
        return {name: value for name, value in found.items() if value}

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's: tool_calls of an answer that has ended with whole calls."""
        return "tool_calls" if reason == "stop" and self._parser.has_called else reason


def message_json(
    plan: ChatPlan, text: str, *, is_reasoning: bool, reason: str | None
) -> tuple[dict[str, Any], str | None]:
    """The message of a whole answer, and OpenAI's finish_reason.  reason: why its text ended."""
    if not plan.parses:
        return {"role": "assistant", "content": text, "refusal": None}, reason
    parser = plan.parser(is_reasoning=is_reasoning)
    message = AssistantMessage.of([parser.feed(text), parser.finish()])
    tools = plan.format.tools
    length = None if tools is None else tools.id_length
    content = message.content
    if content is None and not message.tool_calls and message.reasoning_content is None:
        content = ""
    found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if plan.format.thinking is not None:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call_id(length),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return found, "tool_calls" if reason == "stop" and parser.has_called else reason


def call_id(length: int | None) -> str:
    """A new id of a call.  length: that the model's template wants, None for any."""
    random = uuid.uuid4().hex
    return f"call_{random[:24]}" if length is None else random[:length]


def _joined(parts: list[AnswerDelta]) -> list[CallDelta]:
    """The new parts of calls, one for each call."""
    calls: dict[int, CallDelta] = {}
    for call in (call for part in parts for call in part.calls):
        before = calls.get(call.index)
        calls[call.index] = (
            call
            if before is None
            else CallDelta(call.index, before.name, before.arguments + call.arguments)
        )
    return list(calls.values())


def _call_json(call: CallDelta, id_length: int | None) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call_id(id_length),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
