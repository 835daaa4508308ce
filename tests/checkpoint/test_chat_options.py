"""Everything that a chat template reads: options, tools, named templates, parts, special tokens."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from chat_templates import CALL, CHATML, CHATS, GEMMA, OPEN, OPTIONS, QWEN3, REAL, WEATHER
from checkpoints import make_tokenizer, save_checkpoint

from bytetx.checkpoint.chat_template import ChatTemplate, load_chat_template
from bytetx.errors import CheckpointError, InputError, OptionError

Tokenizer = transformers.PreTrainedTokenizerBase
USER = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module", params=list(REAL))
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ChatTemplate, Tokenizer]:
    """A template in both."""
    folder = tmp_path_factory.mktemp("real")
    save_checkpoint(folder)
    (folder / "chat_template.jinja").write_text(REAL[request.param])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    tokenizer.save_pretrained(folder)
    template = load_chat_template(folder)
    assert template is not None
    return template, tokenizer


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chat", CHATS)
def test_what_a_template_reads_reaches_it(
    chat: str, options: str, real: tuple[ChatTemplate, Tokenizer]
) -> None:
    """Equal to apply_chat_template, or refused by both."""
    ours, theirs = real
    given = OPTIONS[options]
    begins = {} if "continue_final_message" in given else {"add_generation_prompt": True}
    try:
        wanted = theirs.apply_chat_template(CHATS[chat], tokenize=False, **begins | given)
    except Exception:
        with pytest.raises(InputError, match="the chat template refuses it"):
            ours.render(CHATS[chat], given)
        return
    assert ours.render(CHATS[chat], given) == wanted


def one(source: str, **more: Any) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}, name="a test", **more)


def test_options_replace_special_tokens_and_defaults() -> None:
    template = one("{{ bos_token }}{{ add_generation_prompt }}{{ tools }}{{ n }}")
    assert template.render(USER) == "<s>TrueNone"
    given = {"bos_token": "<b>", "add_generation_prompt": False, "n": np.int64(7), "tools": []}
    assert template.render(USER, given) == "<b>False[]7"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"messages": []}, "takes no messages"),
        ({"tokenize": True}, "takes no tokenize"),
        ({"max_length": 5}, "takes no max_length"),
        ({"tools": "search"}, "tools must be a list of tables"),
        ({"tools": [print]}, "get_json_schema"),
        ({"documents": ["text"]}, "documents must be a list of tables"),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be True or False, got 1"),
        ({"continue_final_message": 1}, "continue_final_message must be True, False"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"chat_template": 5}, "the name of one of the checkpoint's templates"),
        ({"chat_template": "{{ messages }}"}, "there is no chat template '{{ messages }}'"),
        ({5: 1}, "a table by name"),
        ([("a", 1)], "a table by name"),
        ({"x": object()}, "holds builtins.object"),
        ({"continue_final_message": True, "x": "z" * 9}, "refuses it"),
    ],
)
def test_a_wrong_option_is_named(options: Any, words: str) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}]
    with pytest.raises(InputError) as raised:
        one("{{ messages[0].content }}").render(chat, options)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", CHATML, QWEN3, GEMMA])
def test_texts_of_a_list_are_joined_where_the_template_takes_none(source: str) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    template, chat = one(source), [{"role": "user", "content": parts}]
    written = template.render(chat, joins_parts=True)
    if source is GEMMA:  # it does
        assert "firstsecond" in written and written == template.render(chat)
    else:
        joined = [{"role": "user", "content": "first\nsecond"}]
        assert written == template.render(joined)


@dataclass
class Reply:
    """As a client returns it."""

    role: str = "assistant"
    content: str | None = None
    tool_calls: list[Any] = field(default_factory=list)


def test_messages_may_be_objects_of_a_client() -> None:
    call = SimpleNamespace(model_dump=lambda: {"function": {"name": "f"}})
    template = one("{{ messages[1].tool_calls[0].function.name }}{{ messages[1] | length }}")
    assert template.render([*USER, Reply(tool_calls=[call])]) == "f2"


def save_named(folder: Path, templates: Any) -> Tokenizer:
    tokenizer = make_tokenizer("bpe", max_tokens=96)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


NAMED = {
    "default": "default {{ messages[0].content }}",
    "tool_use": "tools {{ tools | length }}{{ cls_token }}",
    "rag": "rag {{ documents | length }}",
}


@pytest.mark.parametrize("form", ["files", "a list"])
def test_templates_with_names(form: str, tmp_path: Path) -> None:
    theirs = save_named(tmp_path, NAMED)
    if form == "a list":
        for path in tmp_path.rglob("*.jinja"):
            path.unlink()
        path = tmp_path / "tokenizer_config.json"
        entries = [{"name": name, "template": text} for name, text in NAMED.items()]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": entries}))
    else:
        assert (tmp_path / "additional_chat_templates" / "rag.jinja").is_file()
    ours = load_chat_template(tmp_path)
    assert ours is not None
    for given in (
        {},
        {"tools": [WEATHER]},
        {"tools": []},
        {"chat_template": "rag", "documents": [{"text": "a"}]},
        {"chat_template": "default", "tools": [WEATHER]},
    ):
        wanted = theirs.apply_chat_template(USER, tokenize=False, **given)
        assert ours.render(USER, given) == wanted
    with pytest.raises(InputError, match="chat template 'none'.*rag, tool_use, default"):
        ours.render(USER, {"chat_template": "none"})


def test_templates_without_a_default(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    config = {"chat_template": "of the config, which files replace"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(tmp_path)
    assert template is not None and template.render(USER, {"tools": [WEATHER]}) == "tools"
    with pytest.raises(InputError, match="must be one of: tool_use"):
        template.render(USER)


def test_a_broken_template_leaves_the_others(tmp_path: Path) -> None:
    entries = [{"name": "default", "template": "fine"}, {"name": "tool_use", "template": "{% if"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    template = load_chat_template(tmp_path)
    assert template is not None and template.render(USER) == "fine"
    with pytest.raises(CheckpointError, match="tool_use: the chat template is broken"):
        template.render(USER, {"tools": [WEATHER]})
    assert template.render(USER) == "fine"


def test_special_tokens_of_a_checkpoints_own(tmp_path: Path) -> None:
    save_named(
        tmp_path, "{{ think_token }}|{{ image }}|{{ call_token }}|{{ cls_token }}|{{ add_x }}"
    )
    path = tmp_path / "tokenizer_config.json"
    more = {
        "think_token": "<think>",
        "extra_special_tokens": {"image": "<img>"},
        "call_token": {"content": "<call>", "__type": "AddedToken", "special": True},
        "add_x_token": True,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_chat_template(tmp_path)
    assert ours is not None
    wanted = theirs.apply_chat_template(USER, tokenize=False)
    assert ours.render(USER) == wanted == "<think>|<img>|<call>|<s>|"


def test_a_message_that_ends_in_spaces_goes_on_where_it_ends() -> None:
    chat = [*USER, OPEN]
    kept = one("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}")
    cut = one("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}")
    given = {"continue_final_message": True}
    assert kept.render(chat, given) == "<user>a</><assistant>It is warm, \n"
    assert cut.render(chat, given) == "<user>a</><assistant>It is warm,"
    with pytest.raises(InputError, match="leaves out the last message"):
        one("{{ messages[0].content }}").render(chat, given)
    with pytest.raises(OptionError, match="exclude each other"):
        kept.render(chat, given | {"add_generation_prompt": True})
