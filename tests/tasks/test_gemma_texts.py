"""Whole Gemma checkpoints: texts that begin by <bos>, chats of turns, and the tokens that end an
answer, against transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from chat_templates import GEMMA
from checkpoints import SENTENCES, edit_json, save_gemma
from tiny import one_thread  # noqa: F401  (autouse)
from torch.nn import functional as F

import bytetx
from bytetx.model import Model
from bytetx.sampling_params import SamplingParams

TEXTS = [text for text in SENTENCES if text]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "who jumps over the lazy dog?"},
    {"role": "assistant", "content": "the fox"},
    {"role": "user", "content": "  is it quick?  "},
]


@pytest.fixture(scope="module", params=["gemma2", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_gemma(tmp_path_factory.mktemp("model"), request.param)
    (folder / "chat_template.jinja").write_text(GEMMA)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return bytetx.load(folder, device="cpu", token_budget=64)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def greedy(theirs: torch.nn.Module, ids: list[int], **options: object) -> list[int]:
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    return theirs.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist()


def test_texts_begin_by_bos(folder: Path, model: Model, theirs: torch.nn.Module) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, answer in zip(TEXTS, model.generate(TEXTS, GREEDY), strict=True):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1
        wanted = greedy(theirs, ids, min_new_tokens=12, eos_token_id=None)
        assert (answer.num_prompt_tokens, answer.token_ids) == (len(ids), wanted)
        assert answer.text == tokenizer.decode(wanted, skip_special_tokens=True)


def test_chats(folder: Path, model: Model, theirs: torch.nn.Module) -> None:
    """A chat's template writes the one <bos> itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids.count(tokenizer.convert_tokens_to_ids("<start_of_turn>")) == 4
    answer = model.generate([CHAT], GREEDY)[0]
    assert answer.num_prompt_tokens == len(ids)
    assert answer.token_ids == greedy(theirs, ids, min_new_tokens=12, eos_token_id=None)


def test_any_of_the_ends_of_generation_config(
    folder: Path, model: Model, theirs: torch.nn.Module
) -> None:
    tokens = model.generate([TEXTS[0]], GREEDY)[0].token_ids
    ends = list(dict.fromkeys(tokens))[2:4]
    path = folder / "generation_config.json"
    before = path.read_text()
    edit_json(path, eos_token_id=ends)
    ended = bytetx.load(folder, device="cpu")
    path.write_text(before)
    params = SamplingParams(temperature=0, max_tokens=12)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, answer in zip(TEXTS, ended.generate(TEXTS, params), strict=True):
        wanted = greedy(theirs, tokenizer(text)["input_ids"], eos_token_id=ends)
        assert answer.token_ids == wanted
        assert answer.finish_reason == ("stop" if wanted[-1] in ends else "length")


def test_scores_and_logprobs_are_of_capped_logits(
    folder: Path, model: Model, theirs: torch.nn.Module
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, score in zip(TEXTS, model.score(TEXTS), strict=True):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        with torch.no_grad():
            logits = theirs(ids[None]).logits[0]
        wanted = -F.cross_entropy(logits[:-1], ids[1:], reduction="none")
        np.testing.assert_allclose(score.token_log_likelihoods, wanted, atol=1e-4)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=3)
    ids = tokenizer(TEXTS[0])["input_ids"]
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0, -1].log_softmax(0)
    found = model.generate([ids], params)[0].logprobs[0]
    assert len(found.top) == 3 and found.logprob == max(found.top.values())
    for token, logprob in found.top.items():
        assert abs(logprob - wanted[token]) < 1e-4
