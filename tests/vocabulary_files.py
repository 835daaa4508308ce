"""Vocabularies in the forms that transformers' slow tokenizers have, trained on a small corpus."""

import functools
import io
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog; the dog's bark isn't loud.",
    "Transformers read packed tokens without padding, and nothing else is computed.",
    "Ärger über den Öltanker: Straße, Größe, naïve café, façade, São Paulo, Zürich.",
    "Привет, мир! Как дела? Το γρήγορο καφέ αλεπού. שלום עולם مرحبا بالعالم",
    "東京は日本の首都です。我们在北京学习自然语言处理。안녕하세요 세계 テスト",
    "Hugging faces 🙂🙃👩‍👩‍👧 flags 🇩🇪 and numbers 1234567890 3.14 50% $20 #tag @user",
    "def main(x): return [x ** 2 for _ in range(10)]  # code\twith\ttabs",
    "low lower lowest new newer newest wide wider widest read reader reading",
] * 4
_MARKS = ["\u0301", "\u0308", "\u200d", "\ufe0f", "\u00ad", "\u200b", "\ufeff", "\u2028"]
_CONTROLS = ["\t", "\n", "\r\n", "\x00", "\x07", "\x1b", "\x7f", "\x85", "\u00a0", "\u3000"]
_SPECIALS = ["[CLS]", "[SEP]", "[MASK]", "[UNK]", "<s>", "</s>", "<unk>", "<pad>", "<mask>"]
_OTHERS = ["<extra_id_0>", "<extra_id_7>", "<eos>", "<bos>", "<|endoftext|>", "<new>", "[NEW]"]


def texts(count: int = 200) -> list[str]:
    """Words of the corpus and what breaks tokenizers: spaces, controls, marks, special tokens."""
    rng = random.Random(5)
    words = [word for line in CORPUS[:8] for word in line.split()]
    rare = [*_MARKS, *_CONTROLS, *_SPECIALS, *_OTHERS, "``quoted''", "▁", "##s", "Ġ", "ﬁ", "Ⅷ"]
    rare += ["İ", "ß", "ǅ", "𝔘𝔫𝔦", "ｆｕｌｌ", "각", "é", "𐍈", "\U000e0001", "x" * 120]
    found = ["", " ", "   ", "\t", "\n\n", "a", ".", "  lead", "trail  ", "[CLS] a [SEP] b", "中"]
    found += [f"{special}" for special in (*_SPECIALS, *_OTHERS)]
    found += [f"a {special} b{special}c" for special in (*_SPECIALS, *_OTHERS)]
    while len(found) < count:
        parts = [
            rng.choice(words if rng.random() < 0.75 else rare) for _ in range(rng.randint(1, 9))
        ]
        joined = "".join(part + rng.choice([" ", " ", " ", "  ", ""]) for part in parts)
        form = rng.choice([None, None, "NFD", "NFC"])
        found.append(joined if form is None else unicodedata.normalize(form, joined))
    return found


@functools.cache
def _word_pieces() -> list[str]:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    lines = CORPUS + [line.lower() for line in CORPUS]
    backend.train_from_iterator(lines, trainer)
    vocabulary = backend.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def word_pieces(folder: Path, *, special: dict[str, str] | None = None) -> None:
    """vocab.txt; special: other names of the first tokens."""
    names = special or {}
    lines = [names.get(token, token) for token in _word_pieces()]
    (folder / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@functools.cache
def _byte_pairs(special: tuple[str, ...]) -> tuple[dict[str, int], list[list[str]]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], model["merges"]


def byte_pairs(folder: Path, special: tuple[str, ...]) -> None:
    """vocab.json and merges.txt of GPT-2's byte level; special: the first tokens."""
    vocabulary, merges = _byte_pairs(special)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@functools.cache
def _pieces(options: tuple[tuple[str, object], ...]) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        minloglevel=2,
        hard_vocab_limit=False,
        num_threads=1,
        **{"vocab_size": 380, **dict(options)},
    )
    return model.getvalue()


def pieces(folder: Path, name: str, **options: object) -> None:
    """A SentencePiece model; options: of its trainer."""
    (folder / name).write_bytes(_pieces(tuple(sorted(options.items()))))


Maker = Callable[[Path], None]
