"""Checkpoints that make much of little: each is refused by name, before it costs memory or time.

Without the limits some of these take minutes, all of the memory, or end the process.
"""

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import SENTENCES, make_tokenizer, save_checkpoint
from tiny import one_thread  # noqa: F401  (autouse)
from tokenizers import normalizers, pre_tokenizers

import bytetx
from bytetx.checkpoint import tokenizer_limits, weights
from bytetx.checkpoint.lora import MAX_ALPHA
from bytetx.checkpoint.tokenizer import load_tokenizer
from bytetx.checkpoint.weights import read_header
from bytetx.errors import CheckpointError

# Of this thread's own time. The slowest takes half a second, of writing its file.
SECONDS = 20


@pytest.fixture(autouse=True)
def bounded_time() -> Iterator[None]:
    start = time.thread_time()
    yield
    assert time.thread_time() - start < SECONDS


TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
WORD_LEVEL = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
EMPTY = {
    "version": "1.0",
    **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")),
    "decoder": None,
    "added_tokens": [],
    "model": WORD_LEVEL,
}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(key: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(parts)}


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def template(*single: dict[str, Any], ids: int = 1) -> dict[str, Any]:
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    special = {"a": {"id": "a", "ids": [0] * ids, "tokens": ["a"] * ids}}
    parts = {"single": list(single), "pair": texts, "special_tokens": special}
    return {"type": "TemplateProcessing", **parts}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"SpecialToken": {"id": "a", "type_id": 0}}
DOUBLING = [replace("a", "aa")] * 40
NESTED: dict[str, Any] = {"type": "NFC"}
for _ in range(60):
    NESTED = sequence("normalizers", *[NESTED] * (2 if _ < 9 else 1))

TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "replacement of megabytes": (
        {"normalizer": replace("a", "b" * 10_000_000)},
        "a text of 10,000,000 bytes",
    ),
    "replacement": ({"normalizer": replace("a", "b" * 1000)}, "more than 64 characters for one"),
    "replacement of nothing": ({"normalizer": replace("", "b" * 100)}, "more than 64 characters"),
    "replacement of a class": (
        {"normalizer": replace(r"\w", "b" * 100, "Regex")},
        "more than 64 characters",
    ),
    "replacements in a row": ({"normalizer": sequence("normalizers", *DOUBLING)}, "more than 64"),
    "nested replacements": (
        {"normalizer": sequence("normalizers", *[sequence("normalizers", *DOUBLING[:4])] * 3)},
        "more than 64 characters",
    ),
    "prefixes": (
        {"normalizer": sequence("normalizers", *[{"type": "Prepend", "prepend": "b" * 8000}] * 9)},
        "more than 64 characters",
    ),
    "many normalizers": (
        {"normalizer": sequence("normalizers", *[{"type": "NFKD"}] * 5000)},
        "more than 256 normalizers",
    ),
    "nested normalizers": ({"normalizer": NESTED}, "more than 256 normalizers"),
    "many splits": (
        {"pre_tokenizer": sequence("pretokenizers", *[split("a")] * 5000)},
        "more than 256 pretokenizers",
    ),
    "backtracking": ({"pre_tokenizer": split("(a+)+b")}, "exponential"),
    "backtracking of alternatives": ({"pre_tokenizer": split("(?:a|a)*b")}, "exponential"),
    "backtracking in a replacement": (
        {"normalizer": replace("(.*)*x", "", "Regex")},
        "exponential",
    ),
    "backtracking in a decoder": (
        {"decoder": sequence("decoders", replace("(x+x+)+y", "", "Regex"))},
        "exponential",
    ),
    "template": ({"post_processor": template(TEXT, *[SPECIAL] * 100_000)}, "100,001 pieces"),
    "template of one token": ({"post_processor": template(TEXT, SPECIAL, ids=1500)}, "1,500"),
    "template that repeats": ({"post_processor": template(TEXT, TEXT, SPECIAL)}, "repeats a text"),
    "templates in a row": (
        {"post_processor": sequence("processors", *[template(TEXT, *[SPECIAL] * 100)] * 100)},
        "10,000 special tokens",
    ),
    "decoder": ({"decoder": replace("a", "b" * 5000)}, "a decoder that may write"),
    "decoders in a row": ({"decoder": sequence("decoders", *DOUBLING)}, "a decoder that may write"),
    "long words": (
        {
            "model": {
                "type": "WordPiece",
                "vocab": {"[UNK]": 0},
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 1 << 40,
            }
        },
        "max_input_chars_per_word",
    ),
    "long token": (
        {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b" * 300_000, 0.0]], "unk_id": 0}},
        "a text of 300,000 bytes",
    ),
    "long token of quotation marks": (
        {"model": {"type": "Unigram", "vocab": [["a", 0.0], ['"' * 300_000, 0.0]], "unk_id": 0}},
        "a text of 600,000 bytes",
    ),
    "long token of a type that is left out": (
        {"model": {"vocab": [["a", 0.0], ["é" * 100_000, 0.0]], "unk_id": 0}},
        "a text of 600,000 bytes",
    ),
    "many added tokens": (
        {
            "added_tokens": [
                {"id": 3 + i, "content": f"<{i}>", "special": True, **TOKEN} for i in range(140_000)
            ]
        },
        "added tokens",
    ),
}


@pytest.mark.parametrize(("parts", "message"), TOKENIZERS.values(), ids=list(TOKENIZERS))
def test_tokenizers(parts: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**EMPTY, **parts}))
    with pytest.raises(CheckpointError, match=rf"tokenizer.json has .*{message}"):
        load_tokenizer(tmp_path, max_positions=512)


# Regular expressions of published tokenizers: GPT-2, cl100k, o200k, DeepSeek, BLOOM, CLIP.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
PUBLISHED = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS}{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}]+[\r\n/]*",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    r"(?=(\d{3})+(?!\d))",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+",
    r"(?:\p{L}\p{M}*)+|(?:\r?\n)+(?!\r?\n)",
    r" {2,}",
]


@pytest.mark.parametrize("expression", PUBLISHED)
def test_published_expressions_pass(expression: str, tmp_path: Path) -> None:
    backend = make_tokenizer("bpe").backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(use_regex=False),
        ]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, max_positions=512) is not None


def test_large_tokenizers_pass(tmp_path: Path) -> None:
    """A vocabulary of Gemma's size, with thousands of added tokens, and long runs of spaces."""
    vocabulary = {f"t{i}": i for i in range(262_000)} | {" " * 512: 262_000, '"\\': 262_001}
    added = [
        {"id": 262_002 + i, "content": f"<unused{i}>", "special": False, **TOKEN}
        for i in range(6500)
    ]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    normalizer = sequence(
        "normalizers", {"type": "NFKC"}, replace(" ", "▁"), replace(r"\n", "<newline>", "Regex")
    )
    content = {**EMPTY, "model": model, "added_tokens": added, "normalizer": normalizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path, max_positions=512) is not None


def test_character_maps_of_sentencepiece(tmp_path: Path) -> None:
    """A map is large, and no text; one that writes much for one character does not pass."""
    backend = make_tokenizer("unigram").backend_tokenizer
    trie = struct.pack("<I", 4) + bytes(4)
    for length, passes in ((33, True), (4000, False)):
        texts = b"".join(b"x" * length + b"\0" for _ in range(40_000 // length))
        backend.normalizer = normalizers.Precompiled(trie + texts)
        backend.save(str(tmp_path / "tokenizer.json"))
        if passes:
            assert load_tokenizer(tmp_path, max_positions=512) is not None
        else:
            with pytest.raises(CheckpointError, match="writes 4,000 bytes for one character"):
                load_tokenizer(tmp_path, max_positions=512)


def field(number: int, content: bytes) -> bytes:
    """A field of bytes of a protocol buffer."""
    size, length = bytearray(), len(content)
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + content


VOCABULARIES: dict[str, tuple[str, bytes]] = {
    "SentencePiece": (
        "tokenizer.model",
        field(1, field(1, b"a")) + field(1, field(1, b"b" * 99_999)),
    ),
    "vocab.json": ("vocab.json", json.dumps({"a": 0, "b" * 99_999: 1}).encode()),
    "vocab.txt": ("vocab.txt", b"[UNK]\n" + b"b" * 99_999),
}


@pytest.mark.parametrize(("name", "raw"), VOCABULARIES.values(), ids=list(VOCABULARIES))
def test_long_tokens_of_vocabularies(name: str, raw: bytes, tmp_path: Path) -> None:
    """To make merges of a token takes a time of the square of its length."""
    (tmp_path / name).write_bytes(raw)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=rf"{name} has a token of more than 4,096"):
        load_tokenizer(tmp_path, max_positions=512)


def write_header(path: Path, entries: str) -> None:
    raw = entries.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


def test_a_million_empty_tensors(tmp_path: Path) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    path = tmp_path / "model.safetensors"
    write_header(path, "{" + ",".join(f'"{i}":{entry}' for i in range(1_000_000)) + "}")
    with pytest.raises(CheckpointError, match="more than 262,144 tensors"):
        read_header(path)


def test_shards_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint(tmp_path)
    monkeypatch.setattr(weights, "_MAX_TENSORS", 20)
    with pytest.raises(CheckpointError, match="more than 20 tensors"):
        bytetx.load(folder)


@pytest.mark.parametrize(
    "entry",
    [
        f'{{"dtype":"F32","shape":[{",".join(["2147483647"] * 100_000)}],"data_offsets":[0,0]}}',
        f'{{"dtype":"F32","shape":[0],"data_offsets":[0,{"9" * 4000}]}}',
        f'{{"dtype":"F32","shape":[0],"data_offsets":[{"[" * 5000}0{"]" * 5000}]}}',
    ],
    ids=["shape", "offset", "nesting"],
)
def test_headers(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_header(path, f'{{"a":{entry}}}')
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read_header(path)


def test_an_index_of_very_many_shards(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    for count, message in (
        (100_000, "names 100,000 files, more than 4,096"),
        (4000, "names files that are not there: .* and 3,988 more"),
    ):
        weight_map = {f"t{i}": f"model-{i}.safetensors" for i in range(count)}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message) as error:
            bytetx.load(folder)
        assert len(str(error.value)) < 1000


NUMBERS = ["1e308", "1e39", "-1", "NaN", "Infinity", "1" + "0" * 400, str(MAX_ALPHA + 1), "true"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("key", ["lora_alpha", "alpha_pattern", "r", "rank_pattern"])
def test_numbers_of_adapters(key: str, number: str, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    value = f'{{"query": {number}}}' if key.endswith("pattern") else number
    (folder / "adapter_config.json").write_text(
        f'{{"peft_type": "LORA", "base_model_name_or_path": {json.dumps(str(base))}, '
        f'"{key}": {value}}}'
    )
    write_header(folder / "adapter_model.safetensors", "{}")
    with pytest.raises(CheckpointError, match=rf"adapter_config.json: {key} must be"):
        bytetx.load(folder)


def test_modules_without_end(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    entry = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    more = {**entry, "type": "sentence_transformers.models.Normalize"}
    (folder / "modules.json").write_text(json.dumps([entry, *[more] * 20_000]))
    with pytest.raises(CheckpointError, match="20,001 modules, more than 256"):
        bytetx.load(folder)


SIZES = ["1000000000", "2147483647", str(1 << 40), "1e400", "9" * 5000, "0", "-1"]
KEYS = ["vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "type_vocab_size"]


@pytest.mark.parametrize("key", [*KEYS, "num_attention_heads", "max_position_embeddings"])
def test_sizes_of_a_config(key: str, tmp_path: Path) -> None:
    """Nothing is allocated by what config.json says alone."""
    folder = save_checkpoint(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for size in SIZES:
        path.write_text(json.dumps(config | {key: "SIZE"}).replace('"SIZE"', size))
        try:
            bytetx.load(folder)
        except CheckpointError:
            continue
        assert (key, size) in (("type_vocab_size", "0"),), f"{key} {size} was taken"


def test_json_that_is_too_large(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    with (folder / "config.json").open("a") as file:
        file.write(" " * (17 << 20))
    with pytest.raises(CheckpointError, match=r"config.json has more than 16 MiB"):
        bytetx.load(folder)


def test_a_text_after_all_limits(tmp_path: Path) -> None:
    """The most that passes: 64 characters for one, on a text of a request's size."""
    content = {**EMPTY, "normalizer": replace("a", "b" * 64)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path, max_positions=512)
    assert tokenizer is not None
    assert len(tokenizer.encode(["a" * 10_000, *SENTENCES])) == 1 + len(SENTENCES)


def test_limits_are_not_met_by_the_tests_own_tokenizers(tmp_path: Path) -> None:
    check: Callable[[Path, tokenizers.Tokenizer], None] = tokenizer_limits.check_tokenizer
    for kind in ("wordpiece", "bpe", "unigram"):
        check(tmp_path, make_tokenizer(kind).backend_tokenizer)
