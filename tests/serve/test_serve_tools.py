"""Tools and reasoning over HTTP: OpenAI's client against a server of small random models."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import transformers
from chat_templates import LLAMA3, MISTRAL, QWEN3
from checkpoints import edit_json, save_causal
from serving import start_server

USER: Any = {"role": "user", "content": "a fox"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather ::= of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Köln", 'a "b" \\ c', "</tool_call>", "::="]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "description": "The time"}}
TOOLS = [WEATHER, NOW]
SCHEMAS = {
    "get_weather": WEATHER["function"]["parameters"],
    "now": {"type": "object", "maxProperties": 0},
}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATES = {
    "hermes": QWEN3,
    "llama": LLAMA3,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS]f[ARGS]"),
    "plain": PLAIN,
    # It opens the reasoning, as that of DeepSeek-R1 does, unless it is told not to.
    "thinks": PLAIN
    + "{{ '<tool_call>' if tools }}<think>{% if no_thinking %}</think>{% endif %}\n",
}
# Marker to whether it is a special token, which texts leave out.
MARKERS = {
    "hermes": {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False},
    "mistral-args": {"[TOOL_CALLS]": True, "[ARGS]": True},
    "thinks": {"</think>": False, "<think>": True},
}
WITH_CALLS = ["hermes", "llama", "mistral", "mistral-args"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chats")
    folders = {}
    for name, template in TEMPLATES.items():
        tokens = [
            transformers.AddedToken(text, special=special, normalized=False)
            for text, special in MARKERS.get(name, {}).items()
        ]
        folder = save_causal(
            root / name, "gpt2", kind="bytes", n_positions=3000, added_tokens=tokens
        )
        edit_json(folder / "tokenizer_config.json", model_max_length=3000)
        (folder / "chat_template.jinja").write_text(template)
        folders[name] = folder
    return folders


@pytest.fixture(scope="module")
def client(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """Front-ends take answers apart; the engine's process holds them to calls."""
    options = [part for name, path in folders.items() for part in ("--model", f"{name}={path}")]
    options += ["--frontends", "2"]
    with start_server(options, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def token_id(folder: Path, text: str) -> int:
    found: int = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(text)
    return found


def ask(client: openai.OpenAI, model: str, **options: Any) -> Any:
    given = {"messages": [USER], "max_tokens": 300, "tools": TOOLS, "seed": 1}
    # Models that think may do so for ever: their marker is unlikely.
    more = {"chat_template_kwargs": {"enable_thinking": True}}
    return client.chat.completions.create(model=model, **given | {"extra_body": more} | options)


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMAS[call.function.name])
    assert call.type == "function" and call.id


@pytest.mark.feature("Server", "calls of tools: tool_choice required or a function, auto, none")
@pytest.mark.parametrize("model", WITH_CALLS)
def test_what_a_random_model_must_call_is_valid(client: openai.OpenAI, model: str) -> None:
    names = set()
    for seed in range(4):
        answer = ask(client, model, tool_choice="required", seed=seed, parallel_tool_calls=False)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        check(call)
        assert len(call.id) == 9 or not model.startswith("mistral")
        names.add(call.function.name)
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(client, model, tool_choice=named, n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        check(call)


@pytest.mark.parametrize("model", WITH_CALLS)
def test_streamed_calls_are_those_of_whole_answers(client: openai.OpenAI, model: str) -> None:
    """OpenAI's form of deltas: index, id, type and name first, then pieces of the arguments."""
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        options: Any = {"tool_choice": choice, "n": 2, "logprobs": True}
        whole = ask(client, model, **options)
        calls: list[dict[int, dict[str, str]]] = [{}, {}]
        reasons: list[Any] = [None, None]
        num_pieces = 0
        for chunk in ask(client, model, stream=True, **options):
            (part,) = chunk.choices
            assert not part.delta.content
            reasons[part.index] = part.finish_reason or reasons[part.index]
            for call in part.delta.tool_calls or ():
                found = calls[part.index]
                num_pieces += 1
                if call.index not in found:
                    assert call.id and call.type == "function" and call.function.name
                    assert call.index == len(found)
                    found[call.index] = {"name": call.function.name, "arguments": ""}
                else:
                    assert call.id is None and call.function.name is None
                found[call.index]["arguments"] += call.function.arguments or ""
        for number, answer in enumerate(whole.choices):
            wanted = [
                {"name": call.function.name, "arguments": call.function.arguments}
                for call in answer.message.tool_calls
            ]
            assert list(calls[number].values()) == wanted
            assert reasons[number] == answer.finish_reason
        assert num_pieces > 4


@pytest.mark.parametrize("model", WITH_CALLS)
def test_an_answer_that_is_cut_has_what_was_written(client: openai.OpenAI, model: str) -> None:
    """By max_tokens or by a stop string, whole or as a stream: no cut call is said to be one."""
    named: Any = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    (whole,) = ask(client, model, **named).choices
    text = whole.message.tool_calls[0].function.arguments
    cuts: list[dict[str, Any]] = [{"max_tokens": n} for n in (1, 12, 30, 40, 50)]
    for cut in [*cuts, {"stop": [text[1:]]}]:
        (answer,) = ask(client, model, **named | cut).choices
        assert answer.finish_reason == ("stop" if "stop" in cut else "length")
        calls = answer.message.tool_calls or []
        assert all(text.startswith(call.function.arguments) for call in calls)
        assert all(call.function.name == "get_weather" for call in calls)
        content, arguments, reason = "", "", None
        for chunk in ask(client, model, stream=True, **named | cut):
            (part,) = chunk.choices
            content += part.delta.content or ""
            for call in part.delta.tool_calls or ():
                arguments += call.function.arguments or ""
            reason = part.finish_reason or reason
        assert reason == answer.finish_reason
        assert content == (answer.message.content or "")
        assert arguments == "".join(call.function.arguments for call in calls)
        assert content or calls or cut == {"max_tokens": 1}


def test_the_client_accumulates_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="hermes", messages=[USER], tools=TOOLS, tool_choice="required", max_tokens=400, seed=3
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content is None and message.tool_calls
    for call in message.tool_calls:
        json.loads(call.function.arguments)


@pytest.mark.parametrize("model", ["hermes", "mistral-args"])
def test_auto_is_text_until_the_marker(
    client: openai.OpenAI, folders: dict[str, Path], model: str
) -> None:
    begin = next(iter(MARKERS[model]))
    marker = token_id(folders[model], begin)
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    num_calls = 0
    for seed in range(6):
        options: Any = {
            "tools": [strict],
            "logit_bias": {str(marker): 2.5},
            "parallel_tool_calls": False,
            "seed": seed,
            "max_tokens": 200,
        }
        answer = ask(client, model, **options).choices[0]
        chunks = [chunk.choices[0] for chunk in ask(client, model, stream=True, **options)]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        assert text == (answer.message.content or "")
        assert chunks[-1].finish_reason == answer.finish_reason
        if answer.finish_reason == "tool_calls":
            num_calls += 1
            (call,) = answer.message.tool_calls
            check(call)
            assert begin not in text
    assert num_calls > 2


def test_auto_without_a_call_is_an_answer(client: openai.OpenAI) -> None:
    for more in ({}, {"tool_choice": "none"}, {"tools": []}):
        answer = ask(client, "hermes", max_tokens=8, logit_bias={}, **more).choices[0]
        assert answer.message.tool_calls is None and answer.finish_reason == "length"
        assert answer.message.content


def test_an_answer_has_its_form_or_is_a_call(
    client: openai.OpenAI, folders: dict[str, Path]
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    marker = token_id(folders["hermes"], "<tool_call>")
    kinds = set()
    for bias in (-100, 100):
        answer = ask(
            client, "hermes", response_format=form, logit_bias={str(marker): bias}, max_tokens=900
        ).choices[0]
        kinds.add(answer.finish_reason)
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content), schema)
    assert "stop" in kinds and len(kinds) == 2
    with pytest.raises(openai.BadRequestError, match="no other form"):
        ask(client, "hermes", extra_body={"guided_regex": "a+"})


@pytest.mark.feature("Server", "reasoning_content apart from content; forms begin after it")
def test_reasoning_is_apart_and_forms_begin_after_it(
    client: openai.OpenAI, folders: dict[str, Path]
) -> None:
    end = token_id(folders["thinks"], "</think>")
    form = {"type": "json_object"}
    options: Any = {
        "response_format": form,
        "tools": openai.NOT_GIVEN,
        "logit_bias": {str(end): 3},
        "max_tokens": 60,
    }
    num_reasoned = 0
    for seed in range(4):
        answer = ask(client, "thinks", seed=seed, **options).choices[0].message
        reasoning, text = "", ""
        for chunk in ask(client, "thinks", seed=seed, stream=True, **options):
            delta = chunk.choices[0].delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            text += delta.content or ""
        assert (reasoning or None, text or None) == (answer.reasoning_content, answer.content)
        assert "</think>" not in reasoning
        if answer.content:
            assert answer.content.startswith("{")
            num_reasoned += bool(answer.reasoning_content)
    assert num_reasoned > 1
    off = {"chat_template_kwargs": {"no_thinking": True}}
    answer = ask(client, "thinks", extra_body=off, **options).choices[0].message
    assert answer.reasoning_content is None and answer.content.startswith("{")


def test_a_call_comes_after_the_reasoning(client: openai.OpenAI, folders: dict[str, Path]) -> None:
    end = token_id(folders["thinks"], "</think>")
    options: Any = {"tool_choice": "required", "logit_bias": {str(end): 6}, "max_tokens": 900}
    answer = ask(client, "thinks", parallel_tool_calls=False, **options).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    check(answer.message.tool_calls[0])


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_a_bad_request(client: openai.OpenAI, stream: bool) -> None:
    def tool(name: Any, **more: Any) -> Any:
        return {"type": "function", "function": {"name": name, **more}}

    def nested(depth: int) -> Any:
        schema: Any = {"type": "object"}
        for _ in range(depth):
            schema = {"type": "object", "properties": {"a": schema}}
        return tool("a", parameters=schema)

    named = {"type": "function", "function": {"name": "other"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [tool("a b")]}, "1 to 128 letters"),
        ({"tools": [tool('a"}')]}, "1 to 128 letters"),
        ({"tools": [tool("")]}, "1 to 128 letters"),
        ({"tools": [tool("é")]}, "1 to 128 letters"),
        ({"tools": [tool("a" * 129)]}, "1 to 128 letters"),
        ({"tools": [tool("a"), tool("a")]}, "another name"),
        ({"tools": [tool(f"a{n}") for n in range(5000)]}, "at most 1024"),
        ({"tools": [tool("a", parameters=[])]}, "a JSON schema of an object"),
        ({"tools": [tool("a", strict="yes")]}, "strict must be true or false"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "other tools are not supported"),
        ({"tools": ["a"]}, "a list of tools"),
        ({"tools": [nested(100)]}, "recursion limit"),
        ({"tool_choice": named}, "none of the tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude"),
        (
            {"tools": [tool("a", parameters={"type": "string"})], "tool_choice": "required"},
            "must be a schema of an object",
        ),
        (
            {"tools": [tool("a", parameters={"not": {}})], "tool_choice": "required"},
            "tools: .*Unimplemented keys",
        ),
        (
            {"tools": [tool("a", parameters={"type": 5})], "tool_choice": "required"},
            "must be a schema",
        ),
        (
            {
                "tools": [tool(f"a{n}", parameters={"enum": ["x" * 2000]}) for n in range(900)],
                "tool_choice": "required",
            },
            "tools has .* characters",
        ),
    ]
    for options, words in cases:
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, "hermes", stream=stream, **options)
        assert re.search(words, str(error.value)), (words, error.value)
    for more in ({}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            ask(client, "plain", stream=stream, **more)
    answer = client.chat.completions.create(
        model="hermes", messages=[USER], tools=[nested(40)], tool_choice="required", max_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("model", ["hermes", "llama"])
def test_chats_with_calls_go_to_the_template(client: openai.OpenAI, model: str) -> None:
    """Whatever their order: tools' answers first or twice, contents that are null or parts."""
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    parts = answer | {"content": [{"type": "text", "text": "noon"}]}
    for messages in (
        [USER, assistant, answer],
        [USER, assistant, parts, answer, USER],
        [answer, USER],
        [USER, assistant | {"content": ""}, USER],
        [{"role": "system", "content": "b"}, USER, assistant, answer, assistant, answer],
    ):
        found = ask(client, model, messages=messages, max_tokens=2)
        assert found.choices[0].finish_reason in ("length", "stop")


def test_batch_mates_change_nothing(client: openai.OpenAI) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def answer(seed: int) -> Any:
        options: Any = {"tool_choice": "required"} if seed % 2 else {"max_tokens": 40}
        message = ask(client, "hermes", seed=seed, temperature=1.2, **options).choices[0].message
        calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        return message.content, calls

    alone = list(map(answer, range(6)))
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(answer, range(6))) == alone


def test_formats_can_be_named_or_switched_off(folders: dict[str, Path], tmp_path: Path) -> None:
    def run(name: str, *options: str) -> Any:
        return start_server(["--model", f"m={folders[name]}", *options], log=tmp_path / "log")

    with run("plain", "--tool-call-parser", "hermes") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = ask(client, "m", tool_choice="required", parallel_tool_calls=False).choices[0]
        check(answer.message.tool_calls[0])
    with run("thinks", "--tool-call-parser", "none", "--reasoning-parser", "none") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = ask(client, "m", max_tokens=4).choices[0].message
        assert answer.content and not hasattr(answer, "reasoning_content")
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser none"):
            ask(client, "m", tool_choice="required")
