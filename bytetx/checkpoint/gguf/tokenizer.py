"""A file's vocabulary as tokenizer.json: what llama.cpp tokenises by, for the library tokenizers.

GGUF says how a text is split by the name of a pre-tokenizer; the expressions are llama.cpp's
(src/llama-vocab.cpp), in the spelling of the models' own tokenizer.json.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from bytetx.checkpoint.gguf.file import GgufFile
from bytetx.checkpoint.side_files import FLAG, TEXT, Field, integer, list_of
from bytetx.errors import CheckpointError

logger = logging.getLogger("bytetx")

# ggml's kinds of tokens.
_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6
_SPACE = "\u2581"
# A word of the longest vocabularies in use has some 250 bytes. The merges of one that is longer
# would take the square of its length.
_MAX_WORD = 1024

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PLAIN_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_PLAIN_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = _REST.replace(r"[\r\n]*|", r"[\r\n/]*|", 1)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}{_CASED_REST}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_CASED_REST}"
)
_DIGIT, _THREE_DIGITS = r"\p{N}", r"[0-9][0-9][0-9]"


@dataclass(frozen=True, slots=True)
class _Splits:
    """How byte-level BPE splits a text: by each expression in turn.

    ignores_merges: whether a word of the vocabulary is one token, whatever its merges say.
    adds_bos: unless the file says otherwise.
    """

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_LLAMA3_SPLITS = _Splits((_LLAMA3,), ignores_merges=True, adds_bos=True)
# By tokenizer.ggml.pre.
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3_SPLITS),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Splits((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _Splits((_QWEN2,))),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jina-es", "jina-de"), _Splits((_GPT2,))),
    **dict.fromkeys(("jina-v2-es", "jina-v2-de", "roberta-bpe"), _Splits((_GPT2,))),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code"), _Splits((_GPT2,))),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm"), _Splits((_DIGIT, _GPT2))),
    **dict.fromkeys(("gpt-4o", "llama4"), _Splits((_GPT4O,))),
    # llama.cpp's own, of files that name none.
    "default": _Splits((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "tekken": _Splits((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "falcon": _Splits((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)),
}

_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # GGUF's spelling
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
# Tokens that end a turn, and that llama.cpp stops at by their text.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "<_EOT>", "< EOT >", "<|end_of_text|>", "<end_of_utterance>"),
)


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """config: tokenizer_config.json.  eos_token_ids: of all tokens that end a text."""

    backend: tokenizers.Tokenizer
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]


def read_tokenizer(file: GgufFile, *, max_positions: int) -> GgufTokenizer | None:
    """The tokenizer of a file; None where it has none.

    Raises CheckpointError for a kind, or a pre-tokenizer, that is not known, and where the
    vocabulary is damaged.
    """
    kind = file.get("tokenizer.ggml.model", TEXT)
    if kind in (None, "none", "no_vocab"):
        return None
    vocabulary = _Vocabulary(file)
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _word_piece, "t5": _unigram}
    if kind not in makers:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model is {kind!r:.60}, and bytetx knows: "
            f"{', '.join(makers)}; give the checkpoint in safetensors that it was made from"
        )
    try:
        backend = makers[kind](vocabulary)
        vocabulary.add_tokens(backend)
        frame = vocabulary.frame(kind)
        if frame is not None:
            backend.post_processor = frame
    except (CheckpointError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also panics of the library's Rust code
        raise CheckpointError(
            f"{file.path}: its vocabulary is none of a {kind!r} tokenizer: {error}"
        ) from error
    names = {name: vocabulary.special(key) for name, key in _TOKENS.items()}
    given = {name: token for name, token in names.items() if token is not None}
    config: dict[str, Any] = {
        **given,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"]
        + (["token_type_ids"] if kind == "bert" else []),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    return GgufTokenizer(backend, config, vocabulary.ends())


class _Vocabulary:
    """The arrays of a file's vocabulary, checked against each other."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.tokens: list[str] = file.need("tokenizer.ggml.tokens", list_of(TEXT))
        count = len(self.tokens)
        if not count:
            raise CheckpointError(f"{file.path}: its vocabulary is empty; convert the model again")
        number = Field("a number", lambda v: type(v) in (int, float))
        self.scores = self._as_many("scores", list_of(number))
        kinds = self._as_many("token_type", list_of(integer(0)))
        self.kinds: Sequence[int] = kinds or [1] * count
        longest = max(self.tokens, key=len)
        if len(longest) > _MAX_WORD:
            raise CheckpointError(
                f"{file.path}: its vocabulary has a token of {len(longest):,} characters; it is "
                "damaged"
            )

    def _as_many(self, key: str, field: Field) -> Any:
        found = self.file.get(f"tokenizer.ggml.{key}", field)
        if found is not None and len(found) != len(self.tokens):
            raise CheckpointError(
                f"{self.file.path}: tokenizer.ggml.{key} has {len(found):,} entries for "
                f"{len(self.tokens):,} tokens"
            )
        return found

    def need_scores(self) -> Sequence[float]:
        if self.scores is None:
            self.file.need("tokenizer.ggml.scores", list_of(TEXT))
        scores: Sequence[float] = self.scores
        return scores

    def ids(self, tokens: Sequence[str]) -> dict[str, int]:
        """Token -> id, without those that fill a table up; of two equal ones the first counts."""
        found: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if self.kinds[i] != _UNUSED or not re.fullmatch(r"\[PAD\d+\]", token):
                found.setdefault(token, i)
        return found

    def flag(self, key: str, default: bool) -> bool:
        given: bool | None = self.file.get(f"tokenizer.ggml.{key}", FLAG)
        return default if given is None else given

    def special(self, key: str) -> str | None:
        """The text of a special token; None without one."""
        if key == "seperator_token_id" and f"tokenizer.ggml.{key}" not in self.file.fields:
            key = "separator_token_id"
        given = self.file.get(f"tokenizer.ggml.{key}", integer(0))
        return None if given is None or given >= len(self.tokens) else self.tokens[given]

    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text or a turn: those that the file names, and those that llama.cpp
        knows by their text."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        given = (self.file.get(f"tokenizer.ggml.{key}", integer(0)) for key in keys)
        ids = [token for token in given if token is not None and token < len(self.tokens)]
        named = (i for i, kind in enumerate(self.kinds) if kind == _CONTROL)
        return tuple(dict.fromkeys([*ids, *(i for i in named if self.tokens[i] in _ENDS)]))

    def add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Tokens that are found in a text whole: control tokens, and those that users defined."""
        for kind, is_special in ((_USER_DEFINED, False), (_CONTROL, True)):
            tokens = (
                token for token, own in zip(self.tokens, self.kinds, strict=True) if own == kind
            )
            known = [token for token in tokens if backend.token_to_id(token) is not None]
            backend.add_tokens(
                [AddedToken(token, normalized=False, special=is_special) for token in known]
            )

    def frame(self, kind: str) -> processors.TemplateProcessing | None:
        """The special tokens around a text, and around a pair."""
        pre = self.file.get("tokenizer.ggml.pre", TEXT)
        splits = _SPLITS.get(pre) if kind == "gpt2" else None
        bos, eos = self.special("bos_token_id"), self.special("eos_token_id")
        is_encoder = "bert" in str(self.file.fields.get("general.architecture"))
        if kind == "bert":
            begin: str | None = self.special("cls_token_id") or bos or "[CLS]"
            end: str | None = self.special("seperator_token_id") or eos or "[SEP]"
        else:
            adds_bos = kind == "llama" or bool(splits and splits.adds_bos)
            begin = bos if is_encoder or self.flag("add_bos_token", adds_bos) else None
            end = eos if is_encoder or self.flag("add_eos_token", kind == "t5") else None
        first, second, special = _template(begin, end, kind=kind, is_encoder=is_encoder)
        if not special:
            return None
        named = [(token, self.tokens.index(token)) for token in special]
        return processors.TemplateProcessing(single=first, pair=second, special_tokens=named)


def _template(
    begin: str | None, end: str | None, *, kind: str, is_encoder: bool
) -> tuple[list[str], list[str], list[str]]:
    """(template of a text, of a pair, the special tokens in them)"""
    ahead, behind = [begin] if begin is not None else [], [end] if end is not None else []
    single = [*(f"{token}:0" for token in ahead), "$A:0", *(f"{token}:0" for token in behind)]
    if kind == "bert":
        pair = [*single, "$B:1", *(f"{token}:1" for token in behind)]
    elif is_encoder:  # RoBERTa's
        pair = [*single, *(f"{token}:0" for token in behind), "$B:0"]
        pair += [f"{token}:0" for token in behind]
    else:
        pair = [*single, *(f"{token}:1" for token in ahead), "$B:1"]
        pair += [f"{token}:1" for token in behind]
    return single, pair, list(dict.fromkeys([*ahead, *behind]))


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte is a character of the vocabulary."""
    file = vocabulary.file
    pre = file.get("tokenizer.ggml.pre", TEXT) or "default"
    if pre == "default":
        logger.warning(
            "%s does not say how its tokenizer splits texts; llama.cpp's default is taken, with "
            "which ids may differ from those that the model was trained with",
            file.path,
        )
    splits = _SPLITS.get(pre)
    if splits is None:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre {pre!r:.60} names a way to split texts that bytetx "
            f"does not know, and another one would give other ids; known: {', '.join(_SPLITS)}"
        )
    merges = [_pair(merge) for merge in file.need("tokenizer.ggml.merges", list_of(TEXT))]
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    spelling = _byte_characters()
    tokens = [
        token
        if kind in (_CONTROL, _USER_DEFINED) or alphabet.issuperset(token)
        else "".join(spelling[byte] for byte in token.encode())
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary.ids(tokens), merges=merges, ignore_merges=splits.ignores_merges)
    )
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated")
        for expression in splits.expressions
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    if not first or not second:
        raise ValueError(f"the merge {merge!r:.120} is no pair of tokens")
    return first, second


def _byte_characters() -> dict[int, str]:
    """The character of byte-level BPE for each byte: its own where it has a visible one."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in visible)
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: pieces that are merged by their scores, bytes for what is unknown."""
    is_gemma = str(vocabulary.file.fields.get("general.architecture")).startswith("gemma")
    # Runs of spaces are user-defined tokens there, with real spaces.
    tokens = [
        _SPACE * len(token) if is_gemma and len(token) > 1 and not token.strip(" ") else token
        for token in vocabulary.tokens
    ]
    ids = vocabulary.ids(tokens)
    # Gemma's scores do not follow the order of its merges; that of its tokens does.
    scores = range(0, -len(tokens), -1) if is_gemma else vocabulary.need_scores()
    merges = _merges(tokens, ids, scores, vocabulary.kinds)
    has_bytes = any(kind == _BYTE for kind in vocabulary.kinds)
    unknown = vocabulary.special("unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes
        )
    )
    adds_space = vocabulary.flag("add_space_prefix", not is_gemma)
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " ")]
    steps += [decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(
    tokens: Sequence[str], ids: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best-scored tokens first.

    Of the ways to make one token, that of tokens with lower ids comes first.
    """
    found: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for i, token in enumerate(tokens):
        if len(token) < 2 or kinds[i] in (_CONTROL, _UNUSED, _BYTE):
            continue
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            left, right = ids.get(pair[0]), ids.get(pair[1])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right, pair))
    return [entry[-1] for entry in sorted(found, key=lambda entry: entry[:4])]


def _word_piece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """BERT's: GGUF marks the beginnings of words, where BERT marks what continues them."""
    tokens = [
        token
        if kind in (_CONTROL, _USER_DEFINED, _UNUSED) or _is_bracketed(token)
        else token[1:]
        if token.startswith(_SPACE)
        else f"##{token}"
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    ids = vocabulary.ids(tokens)
    unknown = vocabulary.special("unknown_token_id") or "[UNK]"
    backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown))
    # llama.cpp lowercases every text; a vocabulary with capitals was not made for that.
    words = chain.from_iterable(
        token
        for token, kind in zip(tokens, vocabulary.kinds, strict=True)
        if kind not in (_CONTROL, _USER_DEFINED, _UNUSED) and not _is_bracketed(token)
    )
    is_cased = any(character.isupper() for character in words)
    backend.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _is_bracketed(token: str) -> bool:
    """[CLS], [unused1] and their like, which GGUF's converter leaves as they are."""
    return token.startswith("[") and token.endswith("]")


def _unigram(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's unigram model, of T5 and XLM-RoBERTa."""
    file, scores = vocabulary.file, vocabulary.need_scores()
    kinds = vocabulary.kinds
    unknown = vocabulary.special("unknown_token_id")
    pieces = [(token, float(score)) for token, score in zip(vocabulary.tokens, scores, strict=True)]
    backend = tokenizers.Tokenizer(
        models.Unigram(
            pieces,
            unk_id=None if unknown is None else vocabulary.tokens.index(unknown),
            byte_fallback=_BYTE in kinds,
        )
    )
    steps: list[normalizers.Normalizer] = []
    charsmap = file.get("tokenizer.ggml.precompiled_charsmap", list_of(integer(-128, 255)))
    if charsmap:
        packed = bytes(value & 255 for value in charsmap)
        steps.append(normalizers.Precompiled(_checked_map(packed)))
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if vocabulary.flag("add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    return backend


def _checked_map(packed: bytes) -> bytes:
    """A table of SentencePiece's normalizer; ValueError where its length contradicts it."""
    length = int.from_bytes(packed[:4], "little")
    if len(packed) < 4 or length % 4 or length + 4 > len(packed):
        raise ValueError(f"precompiled_charsmap of {len(packed):,} bytes is damaged")
    return packed
