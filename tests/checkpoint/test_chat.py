"""Chat templates against transformers' own rendering, and what they may not do."""

import json
from pathlib import Path

import pytest
import transformers
from checkpoints import make_tokenizer

from bytetx.checkpoint.chat_template import ChatTemplate, load_chat_template
from bytetx.errors import CheckpointError, InputError

CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": 'what is "é < ü"?', "tags": ["a", {"b": 1}]},
    {"role": "assistant", "content": "nothing"},
    {"role": "user", "content": "  why?  "},
]
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "special tokens": "{{ cls_token }}{{ messages[0].content }}{{ sep_token }}{{ missing_token }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "sorted json": "{{ messages[1] | tojson(sort_keys=True, separators=(',', ':')) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}\n  {% generation %}\n{{ m.content }}\n  "
    "{% endgeneration %}\n{% endfor %}",
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n"
    "    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n<answer>\n{% endif %}",
    "tools": "{% if tools is not none or documents is not none %}tools{% endif %}none",
    "date": "{{ strftime_now('%Y') }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers_renders(name: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bpe", max_tokens=96)
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert load_chat_template(tmp_path).render(CHAT) == wanted


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={}, name="a test")


def test_a_template_that_refuses_or_breaks() -> None:
    with pytest.raises(InputError, match="no system message here"):
        template("{{ raise_exception('no system message here') }}").render(CHAT)
    with pytest.raises(InputError, match="refuses"):
        template("{{ messages[0].content + 1 }}").render(CHAT)
    with pytest.raises(CheckpointError, match="a test: the chat template is broken"):
        template("{% if %}").render(CHAT)


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, {"role": 1}, "text", None])
def test_what_is_no_message(message: object) -> None:
    with pytest.raises(InputError, match="message 1 of the chat"):
        template("").render([CHAT[0], message])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_outside(source: str) -> None:
    with pytest.raises(InputError):
        template(source).render(list(CHAT))


def test_folders_without_a_template(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    for value in (None, []):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        assert load_chat_template(tmp_path) is None


@pytest.mark.parametrize("value", [5, True, ["default"], [{"name": "default"}], {"default": "x"}])
def test_a_template_of_a_wrong_type_is_named(value: object, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match="chat_template must be text or a list"):
        load_chat_template(tmp_path)


def test_a_template_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ messages }} \xff")
    with pytest.raises(CheckpointError, match="chat_template.jinja is not UTF-8"):
        load_chat_template(tmp_path)
