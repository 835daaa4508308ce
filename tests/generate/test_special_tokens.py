"""Special tokens and stop strings in generated text: found, left out, shown."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import make_gemma_tokenizer, make_tokenizer
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.model import Model
from bytetx.sampling_params import SamplingParams
from bytetx.tasks.results import GeneratedText

PROMPT = "the quick"
SPECIAL = ["<|end|>", "<|call me|>"]


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "wordpiece", "unigram"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One detokenizer of each kind, with two special tokens of its own."""
    kinds = {"bytes": "bpe", "wordpiece": "wordpiece", "unigram": "unigram"}
    if request.param == "sentencepiece":
        tokenizer = make_gemma_tokenizer(max_tokens=96)
    else:
        tokenizer = make_tokenizer(kinds[request.param], max_tokens=96)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": SPECIAL}, replace_extra_special_tokens=False
    )
    folder = tmp_path_factory.mktemp(request.param)
    tiny_decoder("llama", vocab_size=len(tokenizer), eos_token_id=None).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return bytetx.load(folder, device="cpu")


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(Path(model.checkpoint.folder))


def ids_of(tokenizer: transformers.PreTrainedTokenizerFast, *parts: str) -> list[int]:
    return [i for part in parts for i in tokenizer(part, add_special_tokens=False)["input_ids"]]


def writing(
    token_ids: list[int],
) -> Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]:
    """Makes the model write these tokens, over and over."""
    first: list[int] = []

    def process(ids: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        first.append(len(ids)) if not first else None
        forced = torch.full_like(logits, -torch.inf)
        forced[token_ids[(len(ids) - first[0]) % len(token_ids)]] = 0
        return forced

    return process


def write(model: Model, token_ids: list[int], **options: object) -> GeneratedText:
    """The output, whole; streamed, it is the same, and no part of it is taken back."""
    params = SamplingParams(temperature=0, max_tokens=len(token_ids) + 2, ignore_eos=True)

    def forced() -> SamplingParams:
        return replace(params, logits_processors=[writing(token_ids)], **options)

    whole = model.generate([PROMPT], forced())[0].outputs[0]
    shown = ""
    for piece in model.generate([PROMPT], forced(), stream="pieces"):
        shown += piece.text
        assert whole.text.startswith(shown)
    assert shown == whole.text and piece.stop == whole.stop
    return whole


WORDS = ("the quick ", "brown fox ")


@pytest.mark.parametrize("special", SPECIAL)
def test_a_stop_string_of_one_special_token(
    model: Model, tokenizer: transformers.PreTrainedTokenizerFast, special: str
) -> None:
    before, after = ids_of(tokenizer, WORDS[0]), ids_of(tokenizer, WORDS[1])
    written = [*before, tokenizer.convert_tokens_to_ids(special), *after]
    free = write(model, before, max_tokens=len(before))
    output = write(model, written, stop=[special])
    assert output.finish_reason == "stop" and output.stop == special
    assert len(output.token_ids) == len(before) + 1 and output.text == free.text
    kept = write(model, written, stop=[special], include_stop_str_in_output=True)
    assert kept.text == free.text + special and kept.token_ids == output.token_ids
    shown = write(model, written, stop=[special], skip_special_tokens=False)
    free = write(model, before, max_tokens=len(before), skip_special_tokens=False)
    assert shown.text.rstrip() == free.text.rstrip()  # WordPiece puts a space before the token
    assert len(shown.token_ids) == len(before) + 1


@pytest.mark.parametrize("model", ["bytes", "sentencepiece", "unigram"], indirect=True)
def test_a_stop_string_across_special_tokens_and_text(
    model: Model, tokenizer: transformers.PreTrainedTokenizerFast
) -> None:
    first, second = (tokenizer.convert_tokens_to_ids(special) for special in SPECIAL)
    before, after = ids_of(tokenizer, WORDS[0]), ids_of(tokenizer, WORDS[1])
    written = [*before, first, second, *after]
    whole = write(model, written, skip_special_tokens=False, max_tokens=len(written)).text
    start = whole.index("<|end|>")
    hidden = write(model, written, max_tokens=len(written)).text
    assert hidden == whole.replace("<|end|>", "").replace("<|call me|>", "")
    for stop in (
        whole[start - 3 : start + 4],  # into a special token
        "<|end|><|call me|>",
        whole[start + 9 : start + 22],  # from the second one into the text
        whole[start - 4 : start + 21],  # over both
    ):
        output = write(model, written, stop=[stop])
        cut = whole.index(stop)
        assert output.stop == stop and output.finish_reason == "stop"
        wanted = whole[:cut].replace("<|end|>", "")
        assert output.text == wanted.partition("<|")[0]
        kept = write(model, written, stop=[stop], include_stop_str_in_output=True)
        assert kept.text == output.text + stop
        shown = write(model, written, stop=[stop], skip_special_tokens=False)
        assert shown.text == whole[:cut] and shown.token_ids == output.token_ids
    # and of the shown text alone, over the special tokens that it leaves out
    stop = hidden[start - 3 : start + 3]
    assert write(model, written, stop=[stop]).text == hidden[: hidden.index(stop)]
    assert write(model, written, stop=["<|end|>x", "no"]).finish_reason == "length"


def test_special_tokens_are_shown_as_decode_shows_them(
    model: Model, tokenizer: transformers.PreTrainedTokenizerFast
) -> None:
    first = tokenizer.convert_tokens_to_ids(SPECIAL[0])
    written = [*ids_of(tokenizer, WORDS[0]), first, *ids_of(tokenizer, WORDS[1]), first]
    prompt = model.encode_prompts([PROMPT])[0]
    for skips in (True, False):
        output = write(model, written, max_tokens=len(written), skip_special_tokens=skips)
        decode = model.tokenizer.decode_plain  # type: ignore[union-attr]
        wanted = decode(prompt + written, skip_special_tokens=skips)
        assert wanted == decode(prompt, skip_special_tokens=skips) + output.text


def test_a_stop_token_is_left_out_or_kept(
    model: Model, tokenizer: transformers.PreTrainedTokenizerFast
) -> None:
    special = tokenizer.convert_tokens_to_ids(SPECIAL[0])
    before, (word, *_) = ids_of(tokenizer, WORDS[0]), ids_of(tokenizer, WORDS[1])
    for token in (special, word):
        free = write(model, before, max_tokens=len(before), skip_special_tokens=False).text
        both = [*before, token]
        whole = write(model, both, max_tokens=len(both), skip_special_tokens=False).text
        for keeps in (False, True):
            output = write(
                model,
                both,
                stop_token_ids=[token],
                skip_special_tokens=False,
                include_stop_str_in_output=keeps,
            )
            assert output.stop == token and list(output.token_ids) == both
            assert output.text == (whole if keeps else free)


def test_special_tokens_before_min_tokens_do_not_stop(
    model: Model, tokenizer: transformers.PreTrainedTokenizerFast
) -> None:
    special = tokenizer.convert_tokens_to_ids(SPECIAL[0])
    written = [special, *ids_of(tokenizer, WORDS[0])]
    output = write(model, written, stop=[SPECIAL[0]], min_tokens=1)
    assert len(output.token_ids) == len(written) + 1 and output.stop == SPECIAL[0]
