"""Texts as the words that GLiNER reads, behind a prompt of labels."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bytetx.checkpoint.extraction import ExtractionSpec
from bytetx.checkpoint.tokenizer import Text, Tokenizer
from bytetx.encode.request import Alignment, Requests
from bytetx.errors import CheckpointError, InputError, TooLongError, shown
from bytetx.requests.inputs import Input, InputReader, no_requests
from bytetx.requests.token_ids import Errors
from bytetx.sequence_tree import rows_of

# Words with hyphens and underscores, and single characters that are none.
_WORDS = re.compile(r"\w+(?:[-_]\w+)*|\S")


@dataclass(frozen=True, slots=True)
class WordAlignment(Alignment):
    """The words of a text, behind its prompt.

    words: int64 [num_words, 2], (start, end) characters.  num_tokens: int64 [num_words]; the tokens
    of a text's words are the last ones but for what ends every text.
    """

    words: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    num_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class LabelPrompt:
    """The tokens before and behind the words of every text.

    before, behind: int32 token ids.  labels: int64 [num_labels], the token of each label.
    apart: int32 token ids of each label, where labels have an encoder of their own; labels is empty
    then.
    relations: int64, the token of each relation.
    words: int64, how many tokens each word has that is read with those of every text; they are the
    last ones of `before`.
    """

    before: np.ndarray
    behind: np.ndarray
    labels: np.ndarray
    apart: tuple[np.ndarray, ...] = ()
    relations: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    words: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def num_labels(self) -> int:
        return len(self.labels) or len(self.apart)

    @property
    def key(self) -> bytes:
        """Equal for prompts that are read as the same."""
        places = (self.labels, self.relations, self.words)
        parts = (self.before, *(x.astype(np.int32) for x in places), *self.apart)
        lengths = np.array([len(part) for part in parts], dtype=np.int32)
        return b"".join(part.tobytes() for part in (lengths, *parts))

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.behind)


def label_prompt(
    spec: ExtractionSpec,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    relations: Sequence[str] = (),
    *,
    most: int,
) -> LabelPrompt:
    """The prompt of some labels, and of relations between their spans, each with its marker.

    most: tokens that a text may have.
    Raises CheckpointError where the tokenizer lacks a marker, TooLongError for too many labels.
    """
    before, behind = frame(tokenizer)
    parts = [(spec.marker, spec.reads_label, labels)]
    if spec.relations is not None:
        parts.append((spec.relations.marker, spec.relations.reads_label, relations))
    places: list[np.ndarray] = []
    for mark, reads_label, names in parts:
        marker = tokenizer.backend.token_to_id(mark)
        if marker is None:
            raise CheckpointError(
                f"{tokenizer.name} has no token {mark!r:.120}, which marks labels; save the "
                "model again with the gliner package"
            )
        words = tokenizer.encode_all_plain([*names, spec.separator])
        rows = []
        for word in words[:-1]:
            rows.append(len(before) + reads_label)
            before += [marker, *word]
        before += words[-1]
        places.append(np.array(rows, dtype=np.int64))
    prompt = LabelPrompt(
        np.array(before, dtype=np.int32), np.array(behind, dtype=np.int32), places[0]
    )
    if spec.relations is not None:
        prompt = replace(prompt, relations=places[1])
    if prompt.num_tokens >= most:
        raise TooLongError(
            f"labels have {prompt.num_tokens} tokens, and the model takes {most} with those of a "
            "text; give fewer or shorter ones"
        )
    return prompt


def apart_prompt(
    tokenizer: Tokenizer, labels_tokenizer: Tokenizer, labels: Sequence[str]
) -> LabelPrompt:
    """The prompt of labels that have an encoder of their own.

    Raises TooLongError for a label with more tokens than that takes.
    """
    before, behind = frame(tokenizer)
    tokens = labels_tokenizer.encode_ids(labels)
    for label, is_cut in zip(labels, tokens.is_truncated.tolist(), strict=True):
        if is_cut:
            raise TooLongError(
                f"label {shown(label)} has more than the {labels_tokenizer.max_tokens} tokens that "
                "the labels' encoder takes; shorten it"
            )
    ends = np.cumsum(tokens.seqlens)[:-1]
    return LabelPrompt(
        np.array(before, dtype=np.int32),
        np.array(behind, dtype=np.int32),
        np.empty(0, dtype=np.int64),
        tuple(np.split(np.asarray(tokens.token_ids, dtype=np.int32), ends)) if labels else (),
    )


def frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens (before, behind) a text."""
    found = tokenizer.untruncated().backend.encode("a")
    own = [place for place, is_special in enumerate(found.special_tokens_mask) if not is_special]
    return found.ids[: own[0]], found.ids[own[-1] + 1 :]


@dataclass(slots=True)
class WordReader(InputReader):
    """Splits texts into words and puts the prompt before them.

    A text without words has no tokens.  max_words: of a text, None for no limit.
    max_tokens: of a text with its prompt, None is the tokenizer's limit.
    words: of a text.  reads_sentences: whether words are read in lower case, and a text has an end
    of a sentence.
    """

    label_prompt: LabelPrompt | None = None
    max_words: int | None = None
    max_tokens: int | None = None
    words: re.Pattern[str] = _WORDS
    reads_sentences: bool = False

    def read_texts(self, texts: Mapping[int, Text], errors: Errors) -> Requests:
        tokenizer, prompt = self.tokenizer, self.label_prompt
        assert tokenizer is not None and prompt is not None  # the task made the prompt
        for index, text in texts.items():
            if not isinstance(text, str):
                errors[index] = _no_text(index)
        found = self.checked_texts(
            {index: text for index, text in texts.items() if index not in errors}, errors
        )
        given = {index: str(text) for index, text in found.items()}
        if not given:
            return no_requests()
        read = [ended(text) if self.reads_sentences else text for text in given.values()]
        split = [[match.span() for match in self.words.finditer(text)] for text in read]
        words, token_ids, lengths = _tokenize(tokenizer, read, split, lowers=self.reads_sentences)
        starts = np.cumsum(lengths) - lengths
        room = (self.max_tokens or tokenizer.max_tokens) - prompt.num_tokens
        rows: list[np.ndarray] = []
        alignments: list[WordAlignment] = []
        truncated: list[bool] = []
        seqlens: list[int] = []
        begin = 0
        for text, spans in zip(given.values(), split, strict=True):
            own = words[begin : begin + len(spans)]
            begin += len(spans)
            sizes = lengths[own]
            kept = np.flatnonzero(sizes)[: self.max_words]
            kept = kept[np.cumsum(sizes[kept]) <= room]
            truncated.append(bool(len(kept) < np.count_nonzero(sizes)))
            own, sizes = own[kept], sizes[kept]
            ids = token_ids[rows_of(starts[own], sizes)]
            is_read = len(kept) and prompt.num_labels
            seqlens.append(prompt.num_tokens + len(ids) if is_read else 0)
            rows += [prompt.before, ids, prompt.behind] if is_read else [ids[:0]]
            places = np.array(spans, dtype=np.int64).reshape(-1, 2)[kept].clip(max=len(text))
            alignments.append(WordAlignment(text, None, None, [], words=places, num_tokens=sizes))
        requests = Requests(
            np.fromiter(given, dtype=np.int64, count=len(given)),
            np.array(seqlens, dtype=np.int32),
            np.concatenate(rows),
            np.array(truncated),
            alignments=alignments,
        )
        self._check_lengths(requests, room, errors)
        self.check_range(requests, errors)
        return requests

    def _check_lengths(self, requests: Requests, room: int, errors: Errors) -> None:
        if self.truncate:
            return
        limit = "" if self.max_words is None else f"{self.max_words} words or the "
        for index in requests.indices[requests.is_truncated].tolist():
            errors[index] = TooLongError(
                f"texts[{index}] has more than the {limit}{room} tokens that this model takes "
                "behind these labels; shorten it, or pass truncate=True"
            )

    def read_ids(self, items: Mapping[int, object], errors: Errors) -> Requests:
        errors.update((index, _no_text(index)) for index in items)
        return no_requests()

    def estimate_tokens(self, item: Input) -> int:
        prompt = self.label_prompt
        return InputReader.estimate_tokens(self, item) + (
            0 if prompt is None else prompt.num_tokens
        )

    def _learn_density(self, texts: Iterable[Text], num_tokens: int) -> None:
        texts, prompt = list(texts), self.label_prompt
        own = 0 if prompt is None else len(texts) * prompt.num_tokens
        InputReader._learn_density(self, texts, max(num_tokens - own, 0))


def _no_text(index: int) -> InputError:
    return InputError(f"texts[{index}] must be a str: spans are extracted from words")


def ended(text: str) -> str:
    """The text with an end of a sentence."""
    return text if text.endswith((".", "!", "?")) else text + "."


def _tokenize(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    split: Sequence[Sequence[tuple[int, int]]],
    *,
    lowers: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each different word is tokenised once, for no word's tokens depend on the others.

    Returns (int64 [total_words], the number of each word among the different ones; int32, the
    tokens of these; int64, how many each has).
    """
    numbers: dict[str, int] = {}
    words = [
        numbers.setdefault(text[start:end].lower() if lowers else text[start:end], len(numbers))
        for text, spans in zip(texts, split, strict=True)
        for start, end in spans
    ]
    found = tokenizer.untruncated().encode_all_plain(list(numbers)) if numbers else []
    lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
    token_ids = np.array([token for ids in found for token in ids], dtype=np.int32)
    return np.array(words, dtype=np.int64), token_ids, lengths
