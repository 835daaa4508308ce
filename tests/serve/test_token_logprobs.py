"""Log-probabilities over HTTP: the tokens' own bytes, places in the text, one key each, a price."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tokenizers
import torch
import transformers
from checkpoints import make_gemma_tokenizer, make_tokenizer
from serving import InProcess
from tiny_decoders import tiny_decoder
from tokenizers import decoders, models

from bytetx.checkpoint.byte_level import TokenBytes
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.generate.outputs import RequestOutput, TokenLogprob
from bytetx.serve.errors import ServeError
from bytetx.serve.loading import load_models
from bytetx.serve.logprobs import MAX_LOGPROBS, MAX_OPEN_LOGPROBS, limit_tokens
from bytetx.serve.settings import ServeSettings, model_sources
from bytetx.serve.token_logprobs import OutputLogprobs, TokenTexts

TEXT = "the quick brown fox é 你好 😀 naïve"


def rows_of(
    tokenizer: Tokenizer, token_ids: list[int], *, is_chat: bool, **options: Any
) -> list[list[Any]]:
    """The entries of tokens that come one by one, with the same two alternatives each."""
    writer = OutputLogprobs(TokenTexts(tokenizer), is_chat=is_chat, **options)
    rows = []
    for token in token_ids:
        entry = TokenLogprob(token, -0.5, 1, {token: -0.5, token_ids[0]: -1.0})
        rows += writer.rows(RequestOutput(0, 0, "", [token], [entry]))
    return rows


def letters() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, so that nearly all tokens are parts of characters."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.mark.parametrize("kind", ["letters", "sentencepiece", "unigram"])
def test_bytes_join_to_the_text_and_offsets_count_its_characters(kind: str) -> None:
    made = {"letters": letters, "sentencepiece": make_gemma_tokenizer}
    saved = make_tokenizer(kind) if kind == "unigram" else made[kind]()
    tokenizer = Tokenizer(saved.backend_tokenizer, max_tokens=96, config={})
    text = "the quick brown fox" if kind == "unigram" else TEXT
    words, ids = (tokenizer.encode_plain(given).ids for given in ("the", text))
    context = tokenizer.decode_plain(words, skip_special_tokens=True)
    whole = tokenizer.decode_plain(words + ids, skip_special_tokens=True)[len(context) :]
    chat = [json.loads(entry) for (entry,) in rows_of(tokenizer, ids, is_chat=True)]
    joined = b"".join(bytes(entry["bytes"]) for entry in chat)
    assert joined.decode() == whole
    num_bytes = 0
    rows = rows_of(tokenizer, ids, is_chat=False)
    for entry, (token_text, logprob, offset, _) in zip(chat, rows, strict=True):
        own = bytes(entry["bytes"])
        assert offset == len(joined[:num_bytes].decode(errors="ignore"))
        assert logprob == -0.5 and token_text == entry["token"]
        num_bytes += len(own)
        try:
            assert token_text == own.decode()
        except UnicodeDecodeError:
            assert token_text == "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def test_the_bytes_of_each_kind_of_token() -> None:
    tokenizer = make_tokenizer("wordpiece").backend_tokenizer
    known = TokenBytes(tokenizer)
    for token, token_id in tokenizer.get_vocab().items():
        special = token.startswith("[")
        wanted = token.removeprefix("##") if special or token.startswith("##") else f" {token}"
        if token.isalnum() or special or token.startswith("##"):
            assert known[token_id].decode() == wanted
    known = TokenBytes(make_gemma_tokenizer().backend_tokenizer)
    backend = make_gemma_tokenizer().backend_tokenizer
    assert known[backend.token_to_id("<0xE9>")] == b"\xe9"
    assert known[backend.token_to_id("<bos>")] == b"<bos>" and known[10**7] == b""
    fallback = tokenizers.Tokenizer(models.WordLevel({"<0xC3>": 0, "a": 1, "?": 2}, unk_token="?"))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert [TokenBytes(fallback)[token] for token in range(3)] == [b"\xc3", b"a", b"?"]
    suffix = tokenizers.Tokenizer(models.WordLevel({"hi</w>": 0, "h": 1, "?": 2}, unk_token="?"))
    suffix.decoder = decoders.BPEDecoder("</w>")
    assert TokenBytes(suffix)[1] == b"h"


def test_tokens_that_the_text_leaves_out_add_no_bytes() -> None:
    tokenizer = Tokenizer(make_tokenizer("bpe").backend_tokenizer, max_tokens=96, config={})
    end, ids = tokenizer.backend.token_to_id("</s>"), tokenizer.encode_plain("the fox").ids
    for options, wanted in (({}, b""), ({"skip_special_tokens": False}, b"</s>")):
        rows = rows_of(tokenizer, [end, *ids], is_chat=True, **options)
        chat = [json.loads(entry) for (entry,) in rows]
        assert chat[0]["token"] == "</s>" and bytes(chat[0]["bytes"]) == wanted
        offset = rows_of(tokenizer, [end, *ids], is_chat=False, **options)[1][2]
        assert offset == len(wanted)
    entry = TokenLogprob(ids[0], -0.5, 1, {})
    for keeps, wanted in ((False, b""), (True, b"t")):
        writer = OutputLogprobs(TokenTexts(tokenizer), is_chat=True, keeps_stop=keeps)
        output = RequestOutput(0, 0, "", ids[:1], [entry], None, "stop", ids[0])
        assert bytes(json.loads(writer.rows(output)[0][0])["bytes"]) == wanted


def test_two_tokens_of_one_text_have_two_keys() -> None:
    vocabulary = {"<0x61>": 0, "a": 1, "token_id:1": 2, "b": 3, "?": 4, "\u2581": 5, " ": 6}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    texts = TokenTexts(Tokenizer(backend, max_tokens=9, config={}))
    writer = OutputLogprobs(texts, is_chat=False)

    def keys(sampled: int, *top: int) -> list[str]:
        entry = TokenLogprob(sampled, -9.0, 9, {token: -float(token) for token in top})
        ((text, logprob, _, found),) = writer.rows(RequestOutput(0, 0, "", [sampled], [entry]))
        tops = json.loads(found)
        assert logprob == -9.0 and list(tops.values()) == [-float(token) for token in top]
        assert (text in tops) == (sampled in top)
        return list(tops)

    assert keys(1, 0, 1, 2) == ["token_id:0", "a", "token_id:1"]
    assert keys(0, 0, 1, 2) == ["a", "token_id:1", "token_id:2"]
    assert keys(0, 2, 1, 3)[0] == "token_id:1" and len(set(keys(0, 2, 1, 3))) == 3
    assert keys(3, 5, 6) == [" ", "token_id:6"]
    assert keys(3) == []


def test_numbers_that_json_does_not_have_are_those_of_openai() -> None:
    tokenizer = Tokenizer(make_tokenizer("bpe").backend_tokenizer, max_tokens=96, config={})
    entry = TokenLogprob(9, -np.inf, 3, {8: -0.1, 9: -np.inf})
    for is_chat in (False, True):
        writer = OutputLogprobs(TokenTexts(tokenizer), is_chat=is_chat)
        text = json.dumps(writer.rows(RequestOutput(0, 0, "", [9], [entry])))
        assert "-9999.0" in text and "null" not in text and "Infinity" not in text
    bare = OutputLogprobs(TokenTexts(None), is_chat=True)
    found = json.loads(bare.rows(RequestOutput(0, 0, "", [9], [entry]))[0][0])
    assert found["token"] == "token_id:9" and found["bytes"] is None


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    """A model of letters, with an end of text."""
    folder, tokenizer = tmp_path_factory.mktemp("letters"), letters()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    tiny_decoder("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    settings = ServeSettings(model_sources([f"letters={folder}"]), device="cpu")
    return InProcess(settings, load_models(settings))


SAMPLED = {"max_tokens": 20, "temperature": 2.0, "seed": 7, "n": 2, "ignore_eos": True}


def stream(server: InProcess, path: str, body: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The choices of a stream, by index."""
    choices: dict[int, list[dict[str, Any]]] = {}
    for event in server.post(path, body | {"stream": True}).text.split("\n\n"):
        if event.startswith("data: {"):
            for choice in orjson.loads(event.removeprefix("data: "))["choices"]:
                choices.setdefault(choice["index"], []).append(choice)
    return choices


@pytest.mark.feature("Server", "log-probabilities of tokens")
def test_whole_and_streamed_answers_agree_with_an_oracle_in_float64(writer: InProcess) -> None:
    body = SAMPLED | {"prompt": "é", "logprobs": 5}
    whole = writer.post("/v1/completions", body).json()["choices"]
    pieces = stream(writer, "/v1/completions", body)
    model = writer.model("letters")
    (prompt,) = model.encode_prompts(["é"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        Path(model.checkpoint.folder), dtype=torch.float64
    ).eval()
    table = TokenBytes(model.tokenizer.backend)
    names = {TokenTexts(model.tokenizer).text(token): token for token in range(257)}
    for choice in whole:
        found = choice["logprobs"]
        for key, column in found.items():
            streamed = [
                value for piece in pieces[choice["index"]] for value in piece["logprobs"][key]
            ]
            assert streamed == column
        assert "".join(piece["text"] for piece in pieces[choice["index"]]) == choice["text"]
        tokens = [names[text] for text in found["tokens"]]
        data = b"".join(b"" if token == 256 else table[token] for token in tokens)
        assert data.decode(errors="replace") == choice["text"]
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)
        for place, token in enumerate(tokens):
            assert abs(found["token_logprobs"][place] - wanted[place, token].item()) < 1e-5
            top = {names[text]: value for text, value in found["top_logprobs"][place].items()}
            values, ids = wanted[place].topk(5)
            assert list(top) == ids.tolist()
            np.testing.assert_allclose(list(top.values()), values.numpy(), atol=1e-5)


def test_chats_whole_and_streamed(writer: InProcess) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = SAMPLED | {"messages": messages, "logprobs": True, "top_logprobs": 3}
    whole = writer.post("/v1/chat/completions", body).json()["choices"]
    pieces = stream(writer, "/v1/chat/completions", body)
    for choice in whole:
        content = choice["logprobs"]["content"]
        own = pieces[choice["index"]][1:]
        assert content == [entry for piece in own for entry in piece["logprobs"]["content"]]
        joined = bytes(byte for entry in content for byte in entry["bytes"])
        assert joined.decode(errors="replace") == choice["message"]["content"]
        assert len(content) == 20 and all(len(entry["top_logprobs"]) == 3 for entry in content)


def test_a_request_has_a_price() -> None:
    wants = {"logprobs": 1000, "num_outputs": 4, "most_tokens": 4096}
    with pytest.raises(ServeError, match=r"4 outputs .* of 500 tokens .* 2,002,000 .* 1,048,576"):
        limit_tokens(500, **wants)
    assert limit_tokens(200, **wants) == (200, 4 * 200 * 1001)
    assert limit_tokens(10**9, **wants | {"most_tokens": 100}) == (10**9, 4 * 100 * 1001)
    most, price = limit_tokens(None, **wants)
    assert most == MAX_LOGPROBS // 4004 and price <= MAX_LOGPROBS
    with pytest.raises(ServeError, match="at most 1,048,576"):
        limit_tokens(None, logprobs=1024, num_outputs=4096, most_tokens=10)
    assert limit_tokens(None, logprobs=20, num_outputs=1, most_tokens=131072)[0] > 49_000


def test_what_costs_too_much_is_refused_at_once(writer: InProcess) -> None:
    many = {"prompt": ["a"] * 32, "n": 128, "logprobs": 1000, "max_tokens": 90}
    refused = writer.post("/v1/completions", many)
    assert refused.status_code == 400 and "log-probabilities" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "logprobs"
    for logprobs in (1025, 10**4000):
        refused = writer.post("/v1/completions", {"prompt": "a", "logprobs": logprobs})
        assert refused.status_code == 400 and "logprobs" in refused.json()["error"]["message"]
        assert len(refused.content) < 600
    writer.site.open_logprobs(MAX_OPEN_LOGPROBS)
    try:
        body = {"prompt": "a", "max_tokens": 2, "logprobs": 1}
        busy = writer.post("/v1/completions", body)
        assert busy.status_code == 429 and "retry-after" in busy.headers
        assert writer.post("/v1/completions", body | {"logprobs": None}).status_code == 200
    finally:
        writer.site.close_logprobs(MAX_OPEN_LOGPROBS)
    assert writer.post("/v1/completions", body).status_code == 200
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    answer = writer.post("/v1/chat/completions", chat | {"n": 128, "seed": 1}).json()
    most = MAX_LOGPROBS // (128 * 21)
    assert max(len(choice["logprobs"]["content"]) for choice in answer["choices"]) <= most
    assert writer.site._num_logprobs == 0


@pytest.mark.parametrize(
    "bias",
    ['{"5": -Infinity}', '{"5": NaN}', '{"5": 1e999}', f'{{"{"9" * 5000}": 1}}', '{"05": 1}']
    + ['{"5.0": 1}', '{"-1": 1}', '{"\u0665": 1}', '{"": 1}', '{"300": 1}', '{"5": "1"}'],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_logit_bias_that_is_none(writer: InProcess, path: str, bias: str) -> None:
    given = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    body = json.dumps(given)[:-1] + f', "max_tokens": 2, "logit_bias": {bias}}}'
    answer = writer.request("POST", path, content=body)
    assert answer.status_code == 400 and "logit_bias" in answer.json()["error"]["message"]
    assert len(answer.content) < 600


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("key", ["temperature", "top_p", "min_p", "frequency_penalty", "seed"])
def test_numbers_that_json_does_not_have(writer: InProcess, key: str, number: str) -> None:
    body = f'{{"prompt": "x", "max_tokens": 2, "{key}": {number}}}'
    answer = writer.request("POST", "/v1/completions", content=body)
    assert answer.status_code == 400 and len(answer.content) < 600
