"""Grammars of tool calls: what an answer may be, by the format of the model that writes it."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import edit_json, save_causal

import bytetx
from bytetx.checkpoint.answer_format import AnswerFormat, find_answer_format
from bytetx.errors import InputError, OptionError
from bytetx.generate.guidance import GrammarCompiler, made_guide
from bytetx.sampling_params import SamplingParams, StructuredOutputsParams

EOS, CALLS, ARGS, THINK, END_THINK = range(256, 261)
SPECIAL = {"[TOOL_CALLS]": CALLS, "[ARGS]": ARGS}
THINKS = {"[THINK]": THINK, "[/THINK]": END_THINK}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
STRICT: Any = {"type": "function", "function": WEATHER["function"] | {"strict": True}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokens = [bytes([byte]) for byte in range(256)] + [b"", *map(str.encode, SPECIAL | THINKS)]
    return GrammarCompiler(
        lambda: (tokens, [EOS, *SPECIAL.values(), *THINKS.values()]), eos_token_ids=[EOS]
    )


def fits(compiler: GrammarCompiler, form: StructuredOutputsParams, *parts: str | int) -> bool:
    """Whether an answer has a form. parts: texts, and ids of special tokens."""
    matcher = made_guide(compiler.compile(form).result()).matcher.deep_copy()
    for part in parts:
        for token in [part] if isinstance(part, int) else part.encode():
            matcher.compute_bitmask()
            if not matcher.try_consume_tokens([token]):
                return False
    matcher.compute_bitmask()
    return bool(matcher.is_accepting())


F, NO = '"arguments": {"a": 1}}', '"arguments": {}}'
HERMES = f'<tool_call>\n{{"name": "f", {F}\n</tool_call>'
WRONG = f'<tool_call>\n{{"name": "f", {NO}\n</tool_call>'
EMPTY = f'<tool_call>\n{{"name": "now", {NO}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
CASES: list[tuple[str, dict[str, Any], list[tuple[Any, ...]], list[tuple[Any, ...]]]] = [
    (
        "hermes",
        {},
        [(HERMES,), (HERMES, "\n", EMPTY)],
        [("a",), (WRONG,), (HERMES, "a"), ("a", HERMES), ("",)],
    ),
    ("hermes", {"parallel": False}, [(HERMES,), (EMPTY,)], [(HERMES, "\n", EMPTY)]),
    ("hermes", {"name": "now"}, [(EMPTY,)], [(HERMES,)]),
    (
        "hermes",
        {"choice": "auto"},
        [("",), ("a <tool_",), (HERMES,), ("a", HERMES, "b", EMPTY, "c"), (WRONG,)],
        [("a<tool_call>a",), (HERMES.replace('"f"', '"g"'),)],
    ),
    ("hermes", {"choice": "auto", "tools": [STRICT, NOW]}, [("a", HERMES)], [(WRONG,)]),
    (
        "hermes",
        {"choice": "auto", "parallel": False},
        [("a", HERMES), ("a",)],
        [(HERMES, EMPTY), (HERMES, "a")],
    ),
    (
        "hermes",
        {"choice": "auto", "answer": {"enum": [1]}},
        [("1",), (HERMES, "\n", HERMES)],
        [("2",), ("1", HERMES), ("",)],
    ),
    ("llama3_json", {}, [(LLAMA,), (LLAMA, "; ", LLAMA)], [("a",), (LLAMA, LLAMA)]),
    (
        "llama3_json",
        {"choice": "auto"},
        [("a {",), ("",), (" \na",), (LLAMA,), (LLAMA, "; ", LLAMA)],
        [("{",), (' {"a": 1}',)],
    ),
    (
        "mistral",
        {},
        [
            (CALLS, f'[{{"name": "f", {F}]'),
            (CALLS, f' [{{"name": "f", {F}, {{"name": "now", {NO}]'),
        ],
        [("[TOOL_CALLS]", f'[{{"name": "f", {F}]'), (CALLS, f'{{"name": "f", {F}'), ("a",)],
    ),
    (
        "mistral_args",
        {},
        [(CALLS, "f", ARGS, '{"a": 1}'), (CALLS, "f", ARGS, '{"a": 1}', CALLS, "now", ARGS, "{}")],
        [("f",), (CALLS, "f[ARGS]{}"), (CALLS, "f", ARGS, "{}")],
    ),
    (
        "mistral_args",
        {"choice": "auto"},
        [("a",), ("a", CALLS, "f", ARGS, "{}", "b")],
        [(CALLS, "a"), (CALLS, "f", ARGS, "[]")],
    ),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_an_answer_fits_or_does_not(number: int, compiler: GrammarCompiler) -> None:
    name, options, good, bad = CASES[number]
    tools = options.get("tools", [WEATHER, NOW])
    more = {key: value for key, value in options.items() if key != "tools"}
    format = AnswerFormat(name, "", SPECIAL)
    form = format.tool_grammar(tools, **more)
    assert [parts for parts in good if not fits(compiler, form, *parts)] == []
    assert [parts for parts in bad if fits(compiler, form, *parts)] == []
    names = {"[TOOL_CALLS]": CALLS, "[ARGS]": ARGS}
    texts = {number: text for text, number in names.items()}
    for parts in good:  # what fits is parsed, too
        text = "".join(texts.get(part, part) for part in parts)
        calls = format.parse(text, names={"f", "now"}).tool_calls
        assert len(calls) == text.count('"name"') + text.count("[ARGS]")


def test_forms_begin_after_reasoning(compiler: GrammarCompiler) -> None:
    for format, end in (
        (AnswerFormat("", "think"), ("</think>",)),
        (AnswerFormat("", "mistral", THINKS), (END_THINK,)),
    ):
        thinking = format.thinking
        assert thinking is not None
        opened = format.begin(f"<user>a{thinking.begin}\n")
        form = StructuredOutputsParams(json={"enum": [1]}, begin=opened)
        for good in (("hm", *end, "1"), ("hm</thin", *end, "\n\n1"), (*end, "1")):
            assert fits(compiler, form, *good), good
        for bad in (("1",), ("hm", *end), ("hm", *end, "2"), ("hm", *end, "\n" * 30, "1")):
            assert not fits(compiler, form, *bad), bad
        form = StructuredOutputsParams(json={"enum": [1]}, begin=format.begin("<user>a\n"))
        start = (THINK,) if format.special_ids else ("<think>",)
        assert fits(compiler, form, "1") and fits(compiler, form, *start, "hm", *end, "1")
        assert not fits(compiler, form, "hm", *end, "1")
        assert format.begin(f"{thinking.begin}\n\n{thinking.end}\n\n") is None
    assert AnswerFormat("hermes", "none").begin("<think>") is None


def test_tools_that_no_grammar_has(compiler: GrammarCompiler) -> None:
    format = AnswerFormat("hermes")
    for tools, words in (
        ([], "tools are empty"),
        ([{"name": "f"}], "a tool must be"),
        ([{"function": {"name": 'f"'}}], "the name of a tool must be"),
        ([{"function": {"name": "f", "parameters": {"type": "array"}}}], "schema of an object"),
        ([{"function": {"name": "f", "parameters": {"enum": [print]}}}], "no JSON"),
    ):
        with pytest.raises(InputError, match=words):
            format.tool_grammar(tools)
    with pytest.raises(InputError, match="no format of tool calls"):
        AnswerFormat().tool_grammar([WEATHER])
    with pytest.raises(InputError, match="no tool 'g'"):
        format.tool_grammar([WEATHER], name="g")
    with pytest.raises(OptionError, match="must be auto, none or one of hermes"):
        format.changed(tool_calls="x")
    many = [{"function": {"name": f"f{number}"}} for number in range(1024)]
    assert fits(compiler, format.tool_grammar(many), HERMES.replace('"f"', '"f1023"')) is False
    assert fits(compiler, format.tool_grammar(many), EMPTY.replace("now", "f1023"))
    deep: Any = {"type": "object"}
    for _ in range(3000):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(InputError):
        form = format.tool_grammar([{"function": {"name": "f", "parameters": deep}}])
        made_guide(compiler.compile(form).result())


def test_a_format_is_found_by_the_template() -> None:
    for source, special, found in (
        ("{{ messages }}", {}, ("", "")),
        ("<tool_call> {{ x }} </think>", {}, ("hermes", "think")),
        ("<tool_call><function=", {}, ("", "")),
        ('<|start_header_id|> "parameters": ', {}, ("llama3_json", "")),
        ("[TOOL_CALLS]", {}, ("mistral", "")),
        ("[TOOL_CALLS] [ARGS] [/THINK]", {}, ("mistral_args", "mistral")),
        ("a", {"[TOOL_CALLS]": 5}, ("mistral", "")),
    ):
        format = find_answer_format([source], special)
        assert (format.tool_calls, format.reasoning) == found
    assert find_answer_format([], {"[TOOL_CALLS]": 5}) == AnswerFormat()


@pytest.mark.feature("Python", "`model.answer_format`: calls of tools, and forms after reasoning")
def test_a_model_calls_a_tool_after_its_reasoning(tmp_path: Path) -> None:
    marker = transformers.AddedToken("</think>", special=False, normalized=False)
    folder = save_causal(tmp_path, "gpt2", kind="bytes", n_positions=1500, added_tokens=[marker])
    edit_json(folder / "tokenizer_config.json", model_max_length=1500)
    template = "<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    (folder / "chat_template.jinja").write_text(template)
    model = bytetx.load(folder, device="cpu")
    assert (model.answer_format.tool_calls, model.answer_format.reasoning) == ("hermes", "think")
    end = model.tokenizer.backend.token_to_id("</think>")
    bias = {end: 4.0}  # random models think for ever
    form = model.answer_format.tool_grammar([STRICT], parallel=False)
    params = SamplingParams(structured_outputs=form, max_tokens=900, logit_bias=bias, seed=1)
    chat = [{"role": "user", "content": "a fox"}]
    outputs = model.generate([chat, "a fox"], params)
    parse = model.answer_format.parse
    found = parse(outputs[0].text, is_reasoning=True)
    assert [call.name for call in found.tool_calls] == ["f"] and found.content is None
    assert "</think>" in outputs[0].text and "</think>" not in outputs[1].text
    assert [call.name for call in parse(outputs[1].text).tool_calls] == ["f"]
    model.answer_format = model.answer_format.changed(reasoning="none")
    assert model.generate([chat], params)[0].text.startswith("<tool_call>")


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"type": "integer"}}}}},
        {"anyOf": [{"type": "string"}, {"properties": {"a": {"type": "integer"}}}]},
        {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    ],
)
def test_arguments_are_an_object_whatever_the_schema_joins(
    compiler: GrammarCompiler, parameters: dict[str, Any]
) -> None:
    """Else an answer that is held to a call would have none that can be parsed."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    form = AnswerFormat("hermes").tool_grammar([tool])
    assert fits(compiler, form, HERMES)
    for other in ('"a"', "[]", "1", '{"a": "b"}'):
        assert not fits(compiler, form, HERMES.replace('{"a": 1}', other))
