"""Tokenizers of GGUF files give the ids of the tokenizers that their vocabularies come from."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from gguf import MODEL_ARCH
from gguf_files import fields_of, tensors_of, write_gguf
from sentencepiece import sentencepiece_model_pb2 as proto
from tiny_decoders import tiny_decoder
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from vocabulary_files import CORPUS, _word_pieces, texts

from bytetx.checkpoint.files import resolve_checkpoint
from bytetx.checkpoint.tokenizer import Tokenizer, load_tokenizer
from bytetx.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CORPUS_OF_NUMBERS = [*CORPUS, "a 1234 b 56 c 7890 2024 10 200 3000", "it's I'LL don't we've  x"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def write(path: Path, tokens: list[str], arch: str = "llama", **fields: Any) -> Path:
    """A model without layers of its own: only its vocabulary counts."""
    vocabulary = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    model = tiny_decoder("llama", num_hidden_layers=1, vocab_size=len(tokens))
    sizes = fields_of(model.config) | vocabulary | {"tokenizer.ggml.tokens": tokens}
    tensors = tensors_of(model.state_dict(), model.config, MODEL_ARCH.LLAMA)
    if arch == "bert":
        tensors = {"token_embd.weight": np.zeros((len(tokens), 48), np.float32)}
        sizes |= {"ARCH.attention.layer_norm_epsilon": 1e-5, "ARCH.attention.head_count_kv": 4}
    return write_gguf(path / "model.gguf", arch, sizes, tensors)


def tokenizer_of(file: Path) -> Tokenizer:
    found = load_tokenizer(resolve_checkpoint(file), max_positions=4096)
    assert found is not None
    return found


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.untruncated().encode_plain(text).ids


def sentencepiece_model(kind: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    settings = {"vocab_size": 400, "character_coverage": 0.98} | options
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=kind,
        minloglevel=2,
        **settings,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def pieces_of(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    size = range(model.get_piece_size())
    kinds = [
        UNKNOWN
        if model.is_unknown(i)
        else CONTROL
        if model.is_control(i)
        else BYTE
        if model.is_byte(i)
        else NORMAL
        for i in size
    ]
    return {
        "tokens": [model.id_to_piece(i) for i in size],
        "scores": [float(model.get_score(i)) for i in size],
        "token_type": kinds,
        "unknown_token_id": model.unk_id(),
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
    }


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_bpe(adds_space: bool, tmp_path: Path) -> None:
    model = sentencepiece_model(
        "bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        vocab_size=600,
        remove_extra_whitespaces=False,
        add_dummy_prefix=adds_space,
    )
    fields = pieces_of(model)
    file = write(
        tmp_path, fields.pop("tokens"), model="llama", add_space_prefix=adds_space, **fields
    )
    tokenizer = tokenizer_of(file)
    for text in texts():
        if any(special in text for special in ("<s>", "</s>", "<unk>")) or "▁" in text:
            continue  # they are control tokens in a text here, and words there
        assert ids(tokenizer, text) == model.encode(text), text
        assert tokenizer.backend.decode(ids(tokenizer, text)) == model.decode(model.encode(text))
    assert tokenizer.encode(["a"])[0].ids == [model.bos_id(), *model.encode("a")]


def test_sentencepiece_unigram(tmp_path: Path) -> None:
    model = sentencepiece_model("unigram", vocab_size=180)
    fields = pieces_of(model)
    spec = proto.ModelProto.FromString(model.serialized_model_proto()).normalizer_spec
    charsmap = np.frombuffer(spec.precompiled_charsmap, np.uint8).tolist()
    file = write(
        tmp_path,
        fields.pop("tokens"),
        model="t5",
        add_space_prefix=True,
        remove_extra_whitespaces=True,
        precompiled_charsmap=charsmap,
        **fields,
    )
    tokenizer = tokenizer_of(file)
    # Texts with characters that neither model knows, whose runs the two libraries cut elsewhere.
    differs = []
    for text in texts():
        if any(special in text for special in ("<s>", "</s>", "<unk>")) or "▁" in text:
            continue
        if ids(tokenizer, text) != model.encode(text):
            differs.append(text)
    assert len(differs) <= 2, differs
    assert tokenizer.encode(["a"])[0].ids == [*model.encode("a"), model.eos_id()]


def test_word_pieces(tmp_path: Path) -> None:
    """GGUF marks the beginnings of words, where BERT marks what continues them."""
    vocabulary = _word_pieces()
    tokens = [
        token
        if token.startswith("[") and token.endswith("]")
        else token[2:]
        if token.startswith("##")
        else f"▁{token}"
        for token in vocabulary
    ]
    kinds = [
        CONTROL if token in ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]") else NORMAL
        for token in vocabulary
    ]
    special = {
        "unknown_token_id": vocabulary.index("[UNK]"),
        "cls_token_id": vocabulary.index("[CLS]"),
        "seperator_token_id": vocabulary.index("[SEP]"),
        "padding_token_id": vocabulary.index("[PAD]"),
        "mask_token_id": vocabulary.index("[MASK]"),
    }
    file = write(tmp_path, tokens, "bert", model="bert", token_type=kinds, **special)
    tokenizer = tokenizer_of(file)
    plain = tokenizers.Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    plain.normalizer = normalizers.BertNormalizer(lowercase=False)
    plain.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    plain.add_special_tokens(["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"])
    for text in texts():
        assert ids(tokenizer, text) == plain.encode(text).ids, text
    pair = tokenizer.encode([("a", "b")])[0]
    assert [pair.tokens[i] for i in (0, 2, 4)] == ["[CLS]", "[SEP]", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 1, 1]
    assert tokenizer.has_token_types and tokenizer.mask_token_id == vocabulary.index("[MASK]")


def byte_level(splits: list[pre_tokenizers.PreTokenizer], *, ignores: bool = False) -> Any:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS_OF_NUMBERS, trainer)
    backend.model.ignore_merges = ignores
    return backend


def isolated(expression: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(expression), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
KINDS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2],
    "qwen2": isolated(PRETOKENIZE_REGEX),
    "llama-bpe": isolated(LLAMA3),
}


def write_byte_level(path: Path, backend: Any, **fields: Any) -> Path:
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    kinds = [CONTROL if token == "<|endoftext|>" else NORMAL for token in tokens]
    given = {"model": "gpt2", "merges": merges, "token_type": kinds, "eos_token_id": 0}
    return write(path, tokens, **given | fields)


@pytest.mark.parametrize("pre", KINDS)
def test_byte_level_bpe(pre: str, tmp_path: Path) -> None:
    backend = byte_level(KINDS[pre], ignores=pre == "llama-bpe")
    file = write_byte_level(tmp_path, backend, pre=pre, bos_token_id=0)
    tokenizer = tokenizer_of(file)
    for text in [*texts(), "12345 it's I'LL  we've\n\n x½² ３４"]:
        assert ids(tokenizer, text) == backend.encode(text).ids, text
        assert tokenizer.backend.decode(ids(tokenizer, text), skip_special_tokens=False) == text
    begins = tokenizer.encode(["a"])[0].ids
    assert (begins[0] == 0 and len(begins) == 2) == (pre == "llama-bpe")


def test_a_pre_tokenizer_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    backend = byte_level([GPT2])
    with pytest.raises(CheckpointError, match="pre 'new-one' names a way to split texts"):
        resolve_checkpoint(write_byte_level(tmp_path, backend, pre="new-one"))


def test_a_file_that_names_no_pre_tokenizer_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_of(write_byte_level(tmp_path, byte_level([GPT2])))
    assert "does not say how its tokenizer splits texts" in caplog.text
    assert tokenizer.backend.decode(ids(tokenizer, "a b")) == "a b"


def test_tokens_that_fill_the_table_and_those_of_users(tmp_path: Path) -> None:
    backend = byte_level([GPT2])
    vocabulary = backend.get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "<think>", "[PAD421]", "[PAD422]"]
    merges = [" ".join(p) for p in json.loads(backend.to_str())["model"]["merges"]]
    kinds = [CONTROL, *[NORMAL] * (len(vocabulary) - 1), USER_DEFINED, UNUSED, UNUSED]
    file = write(tmp_path, tokens, model="gpt2", pre="gpt-2", merges=merges, token_type=kinds)
    tokenizer = tokenizer_of(file)
    assert ids(tokenizer, "a<think>") == [*ids(tokenizer, "a"), len(vocabulary)]
    assert tokenizer.backend.token_to_id("[PAD421]") is None
    assert tokenizer.backend.decode([len(vocabulary)], skip_special_tokens=True) == "<think>"
    assert tokenizer.backend.decode([0], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"model": "gpt2", "pre": "gpt-2"}, "lacks tokenizer.ggml.merges"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["ab"]}, "the merge 'ab' is no pair"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["q z"]}, "is none of a 'gpt2' tokenizer"),
        ({"model": "llama"}, "lacks tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1 entries for 3 tokens"),
        ({"model": "t5", "scores": [0.0] * 3, "precompiled_charsmap": [1, 2]}, "damaged"),
    ],
)
def test_a_damaged_vocabulary_is_one_clear_error(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_checkpoint(write(tmp_path, ["a", "b", "c"], **fields))
    assert "\n" not in str(caught.value)
