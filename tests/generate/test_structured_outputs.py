"""Structured outputs: whatever the model prefers, an answer has the form that was asked for."""

import asyncio
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from checkpoints import make_gemma_tokenizer, make_tokenizer
from generation_engines import VOCAB_SIZE, decode, engine_of, run, whole
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.errors import InputError, OptionError
from bytetx.generate import grammar_check, guidance
from bytetx.generate.async_engine import AsyncEngine
from bytetx.generate.grammar_check import GrammarSource, check_grammar
from bytetx.generate.guidance import GrammarCompiler, GuidedRow, TokenMasks
from bytetx.model import Model
from bytetx.ops.sampling import mask_logits
from bytetx.sampling_params import SamplingParams, StructuredOutputsParams

EOS = VOCAB_SIZE - 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# Catastrophic for a reader of patterns: all of them hold at once.
ENDLESS = {
    "allOf": [{"type": "string", "pattern": f".*a{{{number}}}.*b.*"} for number in range(1, 25)]
}


def compiler() -> GrammarCompiler:
    """A compiler for the tokens of the fake model, each a character."""
    tokens = [decode([token]).encode() for token in range(VOCAB_SIZE)]
    return GrammarCompiler(lambda: (tokens, [EOS]), eos_token_ids=[EOS])


@pytest.fixture(scope="module")
def shared() -> GrammarCompiler:
    return compiler()


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


FORMS = [
    form(json=PERSON),
    form(json=json.dumps(PERSON), disable_any_whitespace=True),
    form(regex="[a-c]{2,5}-[0-9]+x"),
    form(choice=["yes", "no", "perhaps"]),
    form(grammar='start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"'),
    form(grammar='root ::= "ab" root "c" | "d"'),
]


def fits(text: str, wanted: StructuredOutputsParams) -> bool:
    if wanted.json is not None:
        schema = json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json
        jsonschema.validate(json.loads(text), schema)
        return True
    if wanted.choice is not None:
        return text in wanted.choice
    if wanted.grammar is not None and "root" in wanted.grammar:
        middle = text.count("ab")
        return text == "ab" * middle + "d" + "c" * middle
    if wanted.grammar is not None:
        return re.fullmatch(r"[0-9()+]+", text) is not None and text.count("(") == text.count(")")
    assert wanted.regex is not None
    return re.fullmatch(wanted.regex, text) is not None


@pytest.mark.feature("Generation", "structured outputs")
@pytest.mark.parametrize("num_speculative_tokens", [0, 4])
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize("num_pages", [200, 24])
def test_answers_have_their_form_and_do_not_depend_on_others(
    num_pages: int, runs_ahead: bool, num_speculative_tokens: int, shared: GrammarCompiler
) -> None:
    """24 pages of 4 tokens preempt; a guide must survive that, and drafts that do not fit."""
    options: dict[str, Any] = {"eos_token_ids": (EOS,), "compiler": shared}
    requests = []
    for number in range(4 * len(FORMS)):
        wanted = FORMS[number % len(FORMS)]
        greedy = number % 5 == 0
        sampling = {"temperature": 0} if greedy else {"seed": number, "temperature": 1.5}
        if number % 4 == 1:
            sampling |= {"repetition_penalty": 1.5, "presence_penalty": 0.5}
        if number % 4 == 2:
            sampling |= {"logprobs": 2, "top_k": 5}
        params = SamplingParams(max_tokens=60, structured_outputs=wanted, **sampling)
        requests.append(([3, 1, 4, 1, 5][: 1 + number % 5], params))
        requests.append(([2, 7, 1][: 1 + number % 3], replace(params, structured_outputs=None)))
    expected = []
    for prompt, params in requests:
        engine, _, _ = engine_of(**options)
        engine.add_request(prompt, params)
        expected.append(whole(run(engine)[0, 0]))
    engine, _, scheduler = engine_of(
        num_pages=num_pages,
        runs_ahead=runs_ahead,
        num_speculative_tokens=num_speculative_tokens,
        **options,
    )
    for prompt, params in requests:
        engine.add_request(prompt, params)
    pieces = run(engine)
    num_whole = 0
    for number, (_, params) in enumerate(requests):
        found = whole(pieces[number, 0])
        assert found == expected[number], params
        if params.structured_outputs is not None and found[2] == "stop":
            assert fits(found[0], params.structured_outputs), found
            num_whole += 1
    assert num_whole > len(FORMS)
    assert scheduler.num_preempted or num_pages == 200
    assert scheduler.pages.num_available == num_pages


def answer(shared: GrammarCompiler, runs_ahead: bool = True, **options: Any) -> Any:
    engine, _, _ = engine_of(eos_token_ids=(EOS,), compiler=shared, runs_ahead=runs_ahead)
    engine.add_request([1, 2], SamplingParams(**{"seed": 3, "max_tokens": 40} | options))
    return whole(run(engine)[0, 0])


def test_an_answer_ends_where_its_form_is_complete(shared: GrammarCompiler) -> None:
    text, tokens, reason, stop = answer(shared, structured_outputs=form(regex="ab"))
    assert (text, reason, stop, tokens[-1]) == ("ab", "stop", EOS, EOS)
    text, _, reason, _ = answer(shared, structured_outputs=form(regex="a{60}"))
    assert (text, reason) == ("a" * 40, "length")


def test_min_tokens_and_ignore_eos_hold_while_something_else_fits(
    shared: GrammarCompiler,
) -> None:
    prefers_end = {"logit_bias": {EOS: 80.0}, "temperature": 0}
    runs = form(regex="[ab]{1,9}")
    assert len(answer(shared, structured_outputs=runs, **prefers_end)[0]) == 1
    assert len(answer(shared, structured_outputs=runs, min_tokens=4, **prefers_end)[0]) == 4
    for more in ({"min_tokens": 30}, {"ignore_eos": True}):
        text, _, reason, _ = answer(shared, structured_outputs=runs, **more, **prefers_end)
        assert (len(text), reason) == (9, "stop")


def test_rules_may_stand_before_the_form(shared: GrammarCompiler) -> None:
    begin = 'begin: thought "="\nthought: /[x-z]{2}/'
    for wanted, end in (
        (form(regex="ab", begin=begin), "ab"),
        (form(json={"const": [1]}, begin=begin), r"\[1\]"),
        (form(choice=["yes"], begin=begin), "yes"),
        (form(grammar='start: "a" "b"', begin=begin), "ab"),
    ):
        text, _, reason, _ = answer(shared, structured_outputs=wanted)
        assert reason == "stop" and re.fullmatch(f"[x-z]{{2}}={end}", text), text


def test_stop_strings_and_tokens_end_an_answer_early(shared: GrammarCompiler) -> None:
    wanted = form(regex="a{3}b{9}")
    text, _, reason, stop = answer(shared, structured_outputs=wanted, stop=["ab"])
    assert (text, reason, stop) == ("aa", "stop", "ab")
    b = ord("b") - ord("!")
    text, _, reason, stop = answer(shared, structured_outputs=wanted, stop_token_ids=[b])
    assert (text, reason, stop) == ("aaa", "stop", b)


def test_a_logits_processor_cannot_break_the_form(shared: GrammarCompiler) -> None:
    def wants_z(ids: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        logits[ord("z") - ord("!")] = 1e9
        return logits

    wanted = form(regex="[a-c]{4}")
    assert fits(answer(shared, structured_outputs=wanted, logits_processors=[wants_z])[0], wanted)


def test_forbidding_all_that_fits_is_an_error(shared: GrammarCompiler) -> None:
    engine, _, _ = engine_of(eos_token_ids=(EOS,), compiler=shared)
    forbidden = {ord("a") - ord("!"): -np.inf}
    params = SamplingParams(structured_outputs=form(regex="ab"), logit_bias=forbidden)
    engine.add_request([1], params)
    ((piece, *_),) = run(engine).values()
    assert "structured_outputs left none" in str(piece.error)


def test_outputs_of_one_request_have_guides_of_their_own(shared: GrammarCompiler) -> None:
    engine, _, _ = engine_of(eos_token_ids=(EOS,), compiler=shared, runs_ahead=True)
    wanted = form(regex="[a-c]{2,5}-[0-9]{2}")
    engine.add_request([1], SamplingParams(n=6, seed=1, structured_outputs=wanted))
    texts = {whole(pieces)[0] for pieces in run(engine).values()}
    assert len(texts) > 3
    assert all(fits(text, wanted) for text in texts)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (form(json={"type": "strin"}), "structured_outputs.json: .*strin"),
        (form(json={"not": {"type": "string"}}), 'Unimplemented keys: \\["not"\\]'),
        (form(json="{"), "structured_outputs.json: "),
        (form(json="[" * 9000 + "]" * 9000), "recursion"),
        (form(json={"$ref": "#"}), "no text but the empty one"),
        (form(json={"type": "string", "minLength": 5, "maxLength": 2}), "greater than"),
        (form(json=False), "Unsatisfiable"),
        (form(regex="(a"), "structured_outputs.regex: .*unclosed group"),
        (form(regex="(?=a)b"), "look-ahead"),
        (form(grammar='start: "a" b'), "structured_outputs.grammar: .*unknown name"),
        (form(grammar='root ::= "a" b'), "structured_outputs.grammar: "),
        (form(grammar="nonsense"), "structured_outputs.grammar: "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_grammar_is_refused(
    wanted: StructuredOutputsParams, words: str, shared: GrammarCompiler
) -> None:
    engine, _, _ = engine_of(eos_token_ids=(EOS,), compiler=shared)
    for _ in range(2):  # the second is one that is known
        with pytest.raises(InputError, match=f"(?s){words}"):
            engine.add_request([1], SamplingParams(structured_outputs=wanted))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": ["a", ""]}, "choice must be a list of texts"),
        ({"choice": "ab"}, "choice must be a list of texts"),
        ({"json": 5}, "json must be a JSON schema"),
        ({"json": {"a": {1, 2}}}, "json is no JSON"),
        ({"regex": ""}, "regex must be a text"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"json": {}, "whitespace_pattern": 5}, "whitespace_pattern must be a text"),
        ({"json": {}, "disable_any_whitespace": 5}, "disable_any_whitespace must be True or"),
        ({"regex": "a" * 2_000_000}, "at most 1,048,576"),
        ({"regx": "a"}, "must have the fields .*regex.*, got 'regx'"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        SamplingParams(structured_outputs=fields)  # type: ignore[arg-type]


def test_a_grammar_that_takes_too_long_is_given_up() -> None:
    source = GrammarSource("json", json.dumps(ENDLESS), "", None)
    with pytest.raises(InputError, match="more than 0.5 s or 1 GiB to read; simplify it"):
        check_grammar(source, seconds=0.5)


def test_the_engine_runs_others_while_a_grammar_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    check = guidance.check_grammar

    def slow(source: GrammarSource) -> str:
        assert may_end.wait(60)
        return check(source)

    monkeypatch.setattr(guidance, "check_grammar", slow)
    engine, _, scheduler = engine_of(eos_token_ids=(EOS,), compiler=compiler())
    guided = SamplingParams(structured_outputs=form(regex="ab"))

    async def texts(runner: AsyncEngine, params: SamplingParams) -> str:
        return "".join([piece.text async for piece in runner.generate([1], params)])

    async def main() -> None:
        with AsyncEngine(engine) as runner:
            waiting = asyncio.create_task(texts(runner, guided))
            cancelled = asyncio.create_task(texts(runner, guided))
            assert len(await texts(runner, SamplingParams(max_tokens=30, ignore_eos=True))) == 30
            assert not waiting.done()
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert cancelled.cancelled()
            may_end.set()  # the one that waits for the same grammar gets it
            assert await waiting == "ab"

    asyncio.run(main())
    assert not scheduler.has_work


def test_grammars_that_nobody_waits_for_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that leave hold up no others; one whose grammar another waits for leaves it."""
    may_end, check, begun = threading.Event(), guidance.check_grammar, list[str]()

    def slow(source: GrammarSource) -> str:
        begun.append(source.text)
        assert may_end.wait(60)
        return check(source)

    monkeypatch.setattr(guidance, "check_grammar", slow)
    engine, _, scheduler = engine_of(eos_token_ids=(EOS,), compiler=compiler())

    async def text(runner: AsyncEngine, regex: str) -> str:
        params = SamplingParams(structured_outputs=form(regex=regex))
        return "".join([piece.text async for piece in runner.generate([1], params)])

    async def main() -> None:
        with AsyncEngine(engine) as runner:
            regexes = [*(f"a{{{number + 3}}}" for number in range(8)), "ab"]
            gone = [asyncio.create_task(text(runner, regex)) for regex in regexes]
            waiting = asyncio.create_task(text(runner, "ab"))
            while len(begun) < 2:
                await asyncio.sleep(0.001)
            for task in gone:
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            again = asyncio.create_task(text(runner, "a{5}"))
            await asyncio.sleep(0)
            may_end.set()
            assert await waiting == "ab" and await again == "aaaaa"

    asyncio.run(main())
    assert sorted(begun[2:]) == ["ab", "a{5}"] and not scheduler.has_work


def test_a_grammar_that_the_machine_did_not_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, wanted = compiler(), form(regex="ab")

    def fails(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(grammar_check.subprocess, "run", fails)
        with pytest.raises(InputError, match="Cannot allocate memory"):
            own.compile(wanted).result()
    assert isinstance(own.compile(wanted).result(), guidance.Guide)


def test_a_tokenizer_whose_texts_depend_on_what_follows_is_refused(tmp_path: Path) -> None:
    letters = [letter + end for letter in "abc" for end in ("", "</w>")]
    ids = {token: number for number, token in enumerate(["</s>", *letters])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], end_of_word_suffix="</w>"))
    backend.decoder = tokenizers.decoders.BPEDecoder("</w>")
    tiny_decoder("llama", eos_token_id=0, vocab_size=len(ids)).save_pretrained(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=9, structured_outputs=form(choice=["abc"]))
    with pytest.raises(InputError, match="depends on the one behind it"):
        bytetx.load(tmp_path, device="cpu").generate(["abc"], params)


def test_few_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "check_grammar", lambda source: _regex(source.text))
    made = compiler()
    for number in range(200):
        made.compile(form(regex=f"a{number}")).result()
    assert len(made._grammars) == 64
    assert made.compile(form(regex="a199")) is made.compile(form(regex="a199"))


def _regex(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{text}/"}]})


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, shared: GrammarCompiler
) -> None:
    monkeypatch.setattr(guidance, "find_spec", lambda name: None)
    engine, _, _ = engine_of(eos_token_ids=(EOS,), compiler=shared)
    with pytest.raises(OptionError, match=r"pip install 'bytetx\[guided\]'"):
        engine.add_request([1], SamplingParams(structured_outputs=form(regex="a")))


def test_a_checkpoint_without_an_end_cannot_be_guided() -> None:
    without = GrammarCompiler(lambda: ([b"a"], []), eos_token_ids=[])
    with pytest.raises(InputError, match="add eos_token_id to its generation_config.json"):
        without.compile(form(regex="a"))
    with pytest.raises(InputError, match="the checkpoint has none"):
        GrammarCompiler(None, eos_token_ids=[0]).compile(form(regex="a"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_packed_masks_leave_tokens_out(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    for vocab_size in (1, 31, 32, 97, 50_257):
        logits = torch.randn(5, vocab_size).to(dtype)
        stays = torch.rand(5, vocab_size) < 0.5
        padded = np.zeros((5, -(-vocab_size // 32) * 32), dtype=bool)
        padded[:, :vocab_size] = stays
        packed = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
        masks, given = torch.from_numpy(packed).to(device), logits.to(device)
        expected = torch.where(stays, logits, -torch.inf)
        assert torch.equal(mask_logits(given, masks).cpu(), expected)
        some = torch.tensor([3, 1], device=device)
        found = mask_logits(given, masks[some], rows=some).cpu()
        assert torch.equal(found[[1, 3]], expected[[1, 3]])
        assert torch.equal(found[[0, 2, 4]], logits[[0, 2, 4]])
        assert torch.equal(given.cpu(), logits)


def test_masks_of_many_rows_are_those_of_one(shared: GrammarCompiler) -> None:
    masks, rows = TokenMasks(VOCAB_SIZE), []
    for number in range(20):
        wanted = FORMS[number % len(FORMS)]
        guide = shared.compile(wanted).result()
        assert not isinstance(guide, InputError)
        drafts = [ord(c) - ord("!") for c in ('{"n' if wanted.json else "ye!")]
        draft = drafts if number % 3 == 0 else []
        rows.append(GuidedRow(guide.copy(), draft, [()] * (1 + len(draft))))
    together = masks.fill(rows)
    assert np.array_equal(together, np.concatenate([masks.fill([row]) for row in rows]))
    assert len(together) == sum(1 + len(row.draft) for row in rows)


@pytest.mark.parametrize("num_speculative_tokens", [0, 4])
def test_a_vocabulary_without_the_characters_is_an_error(num_speculative_tokens: int) -> None:
    """Where no token fits, none is chosen, even if a draft or the library has one."""
    without = engine_of(
        eos_token_ids=(EOS,),
        compiler=compiler(),
        num_speculative_tokens=num_speculative_tokens,
        runs_ahead=True,
    )[0]
    params = SamplingParams(max_tokens=60, structured_outputs=form(regex="(abc){9} {3}d"))
    without.add_request([1], params)
    *_, last = run(without)[0, 0]
    assert last.finish_reason == "error" and "structured_outputs left none" in str(last.error)


def _first_tokens(tokens: list[bytes], wanted: StructuredOutputsParams, before: str) -> set[bytes]:
    """The tokens that may follow.  before: each character is a token.  tokens: the last ends."""
    end = len(tokens) - 1
    guide = GrammarCompiler(lambda: (tokens, [end]), eos_token_ids=[end]).compile(wanted).result()
    assert isinstance(guide, guidance.Guide), guide
    guide.take([tokens.index(letter.encode()) for letter in before])
    mask = TokenMasks(len(tokens)).fill([GuidedRow(guide, [], [()])])[0]
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {tokens[place] for place in np.flatnonzero(bits[: len(tokens)])}


@pytest.mark.parametrize("has_all_bytes", [True, False])
def test_any_tokens_may_spell_the_only_text_that_fits(has_all_bytes: bool) -> None:
    """A model writes "name" with the tokens that it learnt, and characters without their bytes."""
    single = [bytes([byte]) for byte in range(256 if has_all_bytes else 128)]
    tokens = [*single, b'"na', b"na", b"name", "\u00e9".encode(), "\u00fc".encode(), b"</s>"]
    wanted = form(json=PERSON, disable_any_whitespace=True)
    assert _first_tokens(tokens, wanted, "{") == {b'"', b'"na'}
    assert _first_tokens(tokens, wanted, '{"') == {b"n", b"na", b"name"}
    assert _first_tokens(tokens, form(choice=["name"]), "") == {b"n", b"na", b"name"}
    both = {"\u00e9".encode(), "\u00fc".encode()}
    found = _first_tokens(tokens, form(regex="a(\u00e9|\u00fc)[0-9]{2}"), "a")
    assert found == (both | {b"\xc3"} if has_all_bytes else both)
    found = _first_tokens(tokens, form(regex="[ab]\u00e9[0-9]{2}"), "a")
    assert found - {b"\xc3"} == {"\u00e9".encode()}


def test_a_draft_that_leads_nowhere_leaves_the_guide_as_it_was() -> None:
    """Behind one choice no token fits, for the vocabulary lacks its characters."""
    guide = compiler().compile(form(choice=["a \u00e9", "bb"])).result()
    assert isinstance(guide, guidance.Guide)
    a, b = ord("a") - ord("!"), ord("b") - ord("!")
    masks = TokenMasks(VOCAB_SIZE)
    alone = masks.fill([GuidedRow(guide, [], [()])])
    found = masks.fill([GuidedRow(guide, [a, b], [(), (), ()])])
    assert np.array_equal(found[:1], alone) and not found[1].any()
    guide.take([b, b])
    assert guide.error() is None
    assert masks.fill([GuidedRow(guide, [], [()])])[0].any()


# Schemas of bounded answers, so that a random model comes to an end.
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 500),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.sampled_from(["a", "b\n", 1, None, True, {"k": [1]}]), min_size=1, max_size=3),
    ),
    st.builds(lambda value: {"const": value}, st.sampled_from(["x", 0, [], {"a": "b"}])),
    st.just({"type": "string", "pattern": "^[a-f]{1,3}$"}),
    st.just({"type": "string", "format": "date"}),
)
NAMES = st.sampled_from(["a", "name", "x y", "k\u00e9y", 'q"', "$ref2"])


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def make(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        }

    return st.builds(make, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3))


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda kinds: {"anyOf": kinds}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda inner: {"$defs": {"d": inner}, "type": "array", "items": inner, "maxItems": 2},
            inner,
        ),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "wordpiece", "unigram"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random model over a tokenizer of each kind, and vocabulary rows that no token has."""
    if request.param == "sentencepiece":
        tokenizer = make_gemma_tokenizer(max_tokens=600)
    else:
        kinds = {"bytes": "bytes", "wordpiece": "wordpiece", "unigram": "unigram"}
        tokenizer = make_tokenizer(kinds[request.param], max_tokens=600)
    end = tokenizer.eos_token_id or tokenizer.sep_token_id
    folder = tmp_path_factory.mktemp(request.param)
    size = {"vocab_size": len(tokenizer) + 37, "max_position_embeddings": 600}
    tiny_decoder("llama", eos_token_id=end, **size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return bytetx.load(folder, device="cpu")


def test_a_random_model_writes_what_fits(model: Model) -> None:
    """Tokens of several characters, of parts of characters, and of texts that a decoder cleans."""
    wanted = [FORMS[2], FORMS[3], form(json=PERSON, disable_any_whitespace=True)]
    tokenizer = model.checkpoint.tokenizer
    assert tokenizer is not None
    if "{" not in tokenizer.backend.get_vocab():
        wanted = wanted[1:2]
    params = [
        SamplingParams(seed=seed, max_tokens=400, temperature=1.0, structured_outputs=one)
        for one in wanted
        for seed in range(4)
    ]
    for given_params, found in zip(
        params, model.generate(["a fox"] * len(params), params), strict=True
    ):
        output = found.outputs[0]
        assert given_params.structured_outputs is not None
        assert output.finish_reason == "stop"
        assert fits(output.text, given_params.structured_outputs), output.text


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_any_schema_is_kept(schema: dict[str, Any], seed: int, shared: GrammarCompiler) -> None:
    engine, _, _ = engine_of(
        eos_token_ids=(EOS,), compiler=shared, runs_ahead=True, num_pages=200, max_positions=700
    )
    wanted = form(json=schema)
    engine.add_request([1, 2], SamplingParams(seed=seed, max_tokens=600, structured_outputs=wanted))
    text, _, reason, _ = whole(run(engine)[0, 0])
    assert reason == "stop", text
    jsonschema.validate(json.loads(text), schema)


def test_the_checking_process_starts_by_itself() -> None:
    """It has no path to packages but those of bytetx and llguidance."""
    started = time.perf_counter()
    grammar = check_grammar(GrammarSource("json", "true", " ?", None))
    assert json.loads(grammar)["grammars"][1]["json_schema"]["x-guidance"]
    assert time.perf_counter() - started < grammar_check._START_SECONDS
    assert Path(grammar_check.__file__).is_file()
