"""Chats over HTTP: what the template reads reaches it, as in transformers' apply_chat_template."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from chat_templates import CALL, CHATS, DEEPSEEK, GEMMA, OPTIONS, QWEN3, RAG, WEATHER
from checkpoints import edit_json, save_causal
from serving import InProcess

from bytetx.serve.loading import close_models, load_models
from bytetx.serve.settings import ServeSettings, model_sources

TEMPLATES = {"qwen 3": QWEN3, "deepseek": DEEPSEEK, "rag": RAG, "gemma": GEMMA}
USER = {"role": "user", "content": "a fox"}


class Chats:
    """A server of one model, its tokenizer in transformers, and the prompts that it reads."""

    def __init__(self, folder: Path, template: str):
        save_causal(folder, "gpt2", n_positions=4000)
        edit_json(folder / "tokenizer_config.json", model_max_length=4000)
        (folder / "chat_template.jinja").write_text(template)
        self.theirs = transformers.AutoTokenizer.from_pretrained(folder)
        # Templates that write no format of calls that is known take tools all the same.
        settings = ServeSettings(
            model_sources([f"writer={folder}"]), device="cpu", tool_call_parser="none"
        )
        self.server = InProcess(settings, load_models(settings))
        model = self.server.model("writer")
        self.prompts: list[list[int]] = []
        encode = model.encode_prompts

        def recorded(*args: Any, **options: Any) -> list[list[int]]:
            self.prompts = encode(*args, **options)
            return self.prompts

        model.encode_prompts = recorded

    def post(self, messages: Any, **more: Any) -> Any:
        body = {"messages": messages, "max_tokens": 1, "model": "writer"}
        return self.server.post("/v1/chat/completions", body | more)


@pytest.fixture(scope="module", params=TEMPLATES)
def chats(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chats]:
    made = Chats(tmp_path_factory.mktemp("chats"), TEMPLATES[request.param])
    yield made
    asyncio.run(close_models(made.server.served))


def as_json(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat as OpenAI's clients send it: the arguments of calls are text."""
    sent: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


def fields(options: dict[str, Any]) -> dict[str, Any]:
    """Options of apply_chat_template as fields of a request."""
    own = ("tools", "documents", "add_generation_prompt", "continue_final_message")
    more = {name: options[name] for name in options if name not in own}
    return {k: options[k] for k in options if k in own} | {"chat_template_kwargs": more}


@pytest.mark.parametrize("chat", [name for name in CHATS if name not in ("parts", "texts")])
def test_the_prompt_is_that_of_apply_chat_template(chats: Chats, chat: str) -> None:
    for name, options in OPTIONS.items():
        if isinstance(options.get("continue_final_message"), str):
            continue  # over HTTP it is the content
        given = {"add_generation_prompt": not options.get("continue_final_message")} | options
        answer = chats.post(as_json(CHATS[chat]), **fields(options))
        try:
            wanted = chats.theirs.apply_chat_template(CHATS[chat], **given)["input_ids"]
        except Exception:
            assert answer.status_code == 400, name
            assert "the chat template refuses it" in answer.json()["error"]["message"]
            continue
        assert answer.status_code == 200, answer.text
        assert chats.prompts == [wanted], name
        assert answer.json()["usage"]["prompt_tokens"] == len(wanted)


def test_contents_are_texts_or_lists(chats: Chats) -> None:
    for parts, text in ((["a fox"], "a fox"), (["a fox", "the dog"], "a fox\nthe dog")):
        listed = [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]
        assert chats.post(listed).status_code == 200
        found = chats.prompts
        takes_lists = "item['type'] == 'text'" in chats.theirs.chat_template
        chat = listed if takes_lists else [{"role": "user", "content": text}]
        assert found == [
            chats.theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        ]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages"),
        ([{"content": "a"}], "[0].role must be a string"),
        ([{"role": "user"}], "message 0 of the chat"),
        ([USER, {"role": "user", "content": 5}], "[1].content must be a string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "[0].content[0].type must be text, as other parts are not supported, got 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "got 'input_audio'"),
        ([{"role": "user", "content": ["a"]}], "[0].content[0] must be a part"),
        ([{"role": "user", "content": [{"type": "text"}]}], "[0].content[0] must be a part"),
        ([USER, {"role": "assistant", "tool_calls": 5}], "[1].tool_calls must be a list"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{a"}}]}],
            "[1].tool_calls[0].function.arguments must be JSON, got '{a'",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "NaN"}}]}],
            "must be JSON, got 'NaN'",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 10**5}}]}],
            "must be JSON",
        ),
    ],
)
def test_a_wrong_message_is_named(in_process: InProcess, messages: Any, words: str) -> None:
    body = {"messages": messages, "model": "writer", "max_tokens": 1}
    answer = in_process.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"chat_template": "{{ messages }}"}, "chat_template is not supported"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template is not supported"),
        ({"chat_template_kwargs": {"tokenize": False}}, "takes no tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "takes no messages"),
        ({"chat_template_kwargs": {"tools": 5}}, "tools must be a list"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"tools": [WEATHER]}, "--tool-call-parser"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "--tool-call-parser"),
        ({"tools": [WEATHER], "tool_choice": CALL}, "tool_choice"),
        ({"documents": ["a"]}, "documents"),
    ],
)
def test_a_wrong_option_of_the_template_is_named(
    in_process: InProcess, more: dict[str, Any], words: str
) -> None:
    body = {"messages": [USER], "model": "writer", "max_tokens": 1} | more
    answer = in_process.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_what_asks_for_nothing_is_taken(in_process: InProcess) -> None:
    body = {"messages": [USER], "model": "writer", "max_tokens": 1}
    for more in (
        {"tools": [], "tool_choice": "auto"},
        {"tools": [WEATHER], "tool_choice": "none", "parallel_tool_calls": True},
        {"tools": None, "documents": None, "chat_template_kwargs": None},
        {"chat_template_kwargs": {"chat_template": None}, "chat_template": None},
        {"reasoning_effort": "low", "response_format": {"type": "text"}},
    ):
        assert in_process.post("/v1/chat/completions", body | more).status_code == 200, more
