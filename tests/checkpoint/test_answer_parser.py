"""Answers taken apart: calls of tools and reasoning, however their text arrives."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytetx.checkpoint.answer_format import TOOL_FORMATS, AnswerFormat
from bytetx.checkpoint.answer_parser import AnswerDelta, AssistantMessage, ToolCall

F = ToolCall("f", '{"a": 1}')
G = ToolCall("g", '{"b": {"c": ["]}", "\\"}"]}}')
H = '{"name": "f", "arguments": {"a": 1}}'
J = '{"name": "g", "arguments": {"b": {"c": ["]}", "\\"}"]}}}'
NAMES = {"f", "g"}


def fmt(tools: str, reasoning: str = "think") -> AnswerFormat:
    return AnswerFormat(tools, reasoning)


def message(
    content: str | None, *calls: ToolCall, reasoning: str | None = None
) -> AssistantMessage:
    return AssistantMessage(content, reasoning, calls)


def streamed(format: AnswerFormat, pieces: Iterable[str], **options: bool) -> list[AnswerDelta]:
    parser = format.parser(names=NAMES, **options)
    return [*map(parser.feed, pieces), parser.finish()]


CASES = {
    "text": ("hermes", "no call, <tool and <thi", message("no call, <tool and <thi")),
    "space stays": ("hermes", "\n a b \n", message("\n a b \n")),
    "nothing": ("hermes", "", message(None)),
    "one call": ("hermes", f"<tool_call>\n{H}\n</tool_call>", message(None, F)),
    "text before": ("hermes", f"I look.\n\n<tool_call>{H}</tool_call>\n", message("I look.", F)),
    "two calls": (
        "hermes",
        f"<tool_call>\n{H}\n</tool_call>\n<tool_call>\n{J}\n</tool_call>",
        message(None, F, G),
    ),
    "text between and after": (
        "hermes",
        f"a <tool_call>{H}</tool_call> b <tool_call>{J}</tool_call> c",
        message("a\nb\nc", F, G),
    ),
    "no end": ("hermes", f"<tool_call>{H}", message(None, F)),
    "no brace": ("hermes", f"<tool_call>{H[:-1]}</tool_call>", message(None, F)),
    "keys in another order": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        message(None, F),
    ),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        message(None, F),
    ),
    "more keys": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call>x',
        message("x", F),
    ),
    "no arguments": (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call>',
        message(None, ToolCall("f", "{}")),
    ),
    "an escaped name": (
        "hermes",
        '<tool_call>{"name": "f\\u00e9\\"", "arguments": {}}</tool_call>',
        message(None, ToolCall('fé"', "{}")),
    ),
    "no JSON": (
        "hermes",
        "x\n<tool_call>f(1)</tool_call>",
        message("x\n<tool_call>f(1)</tool_call>"),
    ),
    "no JSON, then a call": (
        "hermes",
        f"<tool_call>f(1)</tool_call><tool_call>{H}</tool_call>",
        message("<tool_call>f(1)</tool_call>", F),
    ),
    "quotes of Python": (
        "hermes",
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        message("<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    ),
    "no name": (
        "hermes",
        '<tool_call>{"arguments": {}}</tool_call>',
        message('<tool_call>{"arguments": {}}</tool_call>'),
    ),
    "arguments are a list": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        message('<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ),
    "brackets that do not match": (
        "hermes",
        '<tool_call>{"name": ]}</tool_call>',
        message('<tool_call>{"name": ]}</tool_call>'),
    ),
    "cut off before the arguments": (
        "hermes",
        'x <tool_call>{"name": "f", "argu',
        message('x <tool_call>{"name": "f", "argu'),
    ),
    "cut off in the arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        message(None, ToolCall("f", '{"a": "b')),
    ),
    "arguments that are no JSON": (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": [1}} }}}}</tool_call> <tool_call>{H}',
        message(None, ToolCall("f", '{"a": [1} }}'), F),
    ),
    "a marker within a string": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        message(None, ToolCall("f", '{"a": "</tool_call>"}')),
    ),
    "reasoning": (
        "hermes",
        f"<think>\nhm <tool_call>\n</think>\n\nSo.\n<tool_call>{H}</tool_call>",
        message("So.", F, reasoning="hm <tool_call>"),
    ),
    "reasoning alone": ("hermes", "\n<think>\nhm \n", message(None, reasoning="hm")),
    "empty reasoning": ("", "<think>\n\n</think>\n\nSo. ", message("So. ")),
    "no reasoning": ("", "so <think>hm</think>", message("so <think>hm</think>")),
    "llama": (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}',
        message(None, F),
    ),
    "llama with a marker": (
        "llama3_json",
        'x <|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        message("x", F),
    ),
    "llama, two": ("llama3_json", f" {H}; {J}\n", message(None, F, G)),
    "llama, reasoning": ("llama3_json", f"<think>a</think>{H}", message(None, F, reasoning="a")),
    "llama, later": ("llama3_json", f"x {H}", message(f"x {H}")),
    "llama, an object": (
        "llama3_json",
        ' {"answer": {"a": 1}} x',
        message(' {"answer": {"a": 1}} x'),
    ),
    "llama, no tool": (
        "llama3_json",
        '{"name": "Bob", "parameters": {"a": 1}}',
        message('{"name": "Bob", "parameters": {"a": 1}}'),
    ),
    "llama, no second": ("llama3_json", f"{H}; no", message("; no", F)),
    "llama, code": ("llama3_json", "<|python_tag|>f.call()", message("<|python_tag|>f.call()")),
    "mistral": ("mistral", f"[TOOL_CALLS] [{H}, {J}]", message(None, F, G)),
    "mistral, ids": (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}] x',
        message("x", F),
    ),
    "mistral, an object": ("mistral", f"a[TOOL_CALLS]{H}", message("a", F)),
    "mistral, names": (
        "mistral_args",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]' + G.arguments,
        message(None, F, G),
    ),
    "mistral, no [ARGS]": ("mistral_args", '[TOOL_CALLS]f {"a": 1}', message(None, F)),
    "mistral, no object": ("mistral", "[TOOL_CALLS] [f]", message("[TOOL_CALLS] [f]")),
    "mistral, no name": ("mistral", "[TOOL_CALLS] f()", message("[TOOL_CALLS] f()")),
    "mistral, a second that is none": (
        "mistral",
        f"[TOOL_CALLS] [{H}, x]",
        message(", x]", F),
    ),
}


@pytest.mark.feature("Generation", "calls of tools and reasoning parsed out of an answer")
@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_taken_apart_wherever_it_is_split(case: str) -> None:
    tools, text, wanted = CASES[case]
    format = fmt(tools)
    assert format.parse(text, names=NAMES) == wanted
    assert AssistantMessage.of(streamed(format, text)) == wanted
    for place in range(len(text) + 1):
        assert AssistantMessage.of(streamed(format, [text[:place], text[place:]])) == wanted, place


@pytest.mark.parametrize("case", CASES)
def test_no_part_of_a_marker_is_shown(case: str) -> None:
    """All that was given so far is the start of what there is in the end."""
    tools, text, wanted = CASES[case]
    content, reasoning = wanted.content or "", wanted.reasoning_content or ""
    shown, thought = "", ""
    for delta in streamed(fmt(tools), text):
        shown, thought = shown + delta.content, thought + delta.reasoning
        assert content.startswith(shown) and reasoning.startswith(thought)


def test_arguments_come_as_they_are_written() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"text": "a long text"}}\n</tool_call>'
    calls = [delta.calls for delta in streamed(fmt("hermes"), text)]
    parts = [call for found in calls for call in found]
    assert parts[0].name == "f" and {part.name for part in parts[1:]} == {None}
    assert len(parts) >= len('{"text": "a long text"}')


@pytest.mark.parametrize("tools", ["hermes", "mistral", "llama3_json"])
def test_an_answer_that_is_cut_off_shows_no_part_of_the_end_of_a_call(tools: str) -> None:
    format = fmt(tools)
    kind = TOOL_FORMATS[tools]
    middle = f"{kind.opening}{kind.head}f{kind.middle}"
    arguments, end = '{"a": 1}', f"{kind.tail}{kind.closing}{kind.end}"
    start = f"{kind.begin}{middle}"
    for place in range(len(end) + 1):
        found = format.parse(f"{start}{arguments}{end[:place]}", names=["f"])
        assert found == message(None, ToolCall("f", arguments)), place
    parser = format.parser(names=["f"])
    parser.feed(start + arguments[:-1])
    assert not parser.has_called  # its arguments go on
    parser.feed(arguments[-1])
    assert parser.has_called


def test_reasoning_that_the_prompt_opened() -> None:
    format = fmt("hermes")
    for text in ("hm\n</think>\n\nSo.", "<think>\nhm</think>So."):
        for pieces in ([text], text):
            found = AssistantMessage.of(streamed(format, pieces, is_reasoning=True))
            assert found == message("So.", reasoning="hm")
    assert format.opens_reasoning("<|Assistant|><think>\n") and not format.opens_reasoning(
        "<think>a"
    )
    assert AssistantMessage.of(streamed(format, ["hm"], is_reasoning=True)).content is None
    off = format.changed(reasoning="none")
    assert not off.opens_reasoning("<think>")
    assert off.parse("<think>a</think>b") == message("<think>a</think>b")


def test_without_tools_calls_are_text() -> None:
    text = f"<think>a</think><tool_call>{H}</tool_call>"
    found = fmt("hermes").parse(text, has_tools=False)
    assert found == message(f"<tool_call>{H}</tool_call>", reasoning="a")


PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>"),
    *(
        "</think>",
        H,
        J,
        H[:20],
        H[20:],
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        '"',
        "\\",
        " ",
        "\n",
        "f",
        "x",
    ),
]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12),
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.randoms(),
)
def test_any_text_is_the_same_in_pieces_and_nothing_is_lost(
    parts: list[str], tools: str, random: random.Random
) -> None:
    text = "".join(parts)
    for is_reasoning in (False, True):
        options = {"is_reasoning": is_reasoning}
        format = fmt(tools)
        whole = format.parse(text, names=NAMES, **options)
        assert AssistantMessage.of(streamed(format, text, **options)) == whole
        places = sorted(random.randrange(len(text) + 1) for _ in range(3))
        ends = [0, *places, len(text)]
        pieces = [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        assert AssistantMessage.of(streamed(format, pieces, **options)) == whole
        shown = (whole.content or "") + (whole.reasoning_content or "")
        shown += "".join(call.name + call.arguments for call in whole.tool_calls)
        assert shown.count("x") == text.count("x")


def test_hostile_answers_take_time_in_proportion() -> None:
    """Deep nesting, a name without an end, markers without number."""
    for text in (
        "<tool_call>" + '{"a":' * 20_000,
        '<tool_call>{"name": "' + "f" * 50_000,
        "<tool_call>" * 10_000,
        "<tool_call>{" * 10_000,
        '<tool_call>{"name": "f", "arguments": ' + "[{" * 20_000,
        "<think>" + "</thin" * 10_000,
    ):
        found = AssistantMessage.of(streamed(fmt("hermes"), text))
        assert len((found.content or "") + (found.reasoning_content or "")) >= len(text) - 10
    deep = '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 20_000 + "}" * 20_001
    assert AssistantMessage.of(streamed(fmt("hermes"), deep)).tool_calls[0].name == "f"
