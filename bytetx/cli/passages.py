"""Real English passages of chosen lengths, seeded, without a download: inputs of measurements."""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pydoc_data.topics import topics

# WordPiece cuts at every border of letters, digits and signs, and rare words further: tokens of
# BERT's uncased vocabulary per piece of this prose, measured.
_PIECES = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_")
_TOKENS_PER_PIECE = 1.1
_SPECIAL_TOKENS = 2  # [CLS] and [SEP]
_MIN_PARAGRAPH_WORDS = 8


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths drawn from a lognormal and clipped to [lo, hi]; `mean` is the unclipped mean."""

    mean: float
    sigma: float
    lo: int
    hi: int

    def draw(self, rng: random.Random) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(max(round(rng.lognormvariate(mu, self.sigma)), self.lo), self.hi)


# As wide as mixed real traffic: padded batches of 32 in arrival order are then 60 to 65 % padding.
PASSAGE_TEXTS = Lognormal(90, 0.7, 4, 220)


def english_passages(count: int, *, lengths: Lognormal = PASSAGE_TEXTS, seed: int = 0) -> list[str]:
    """`count` passages of real English prose, about `lengths` tokens each, in arrival order.

    The prose is the Python language reference that ships with the interpreter (pydoc_data.topics):
    its paragraphs without code, grammar and tables, cut at word borders into consecutive passages.
    It is read again from its start where it runs out, which cuts it at other places. The same
    interpreter version and seed give the same passages.
    """
    rng = random.Random(seed)
    words = cycle(_prose_words())
    return [_passage(words, lengths.draw(rng) - _SPECIAL_TOKENS) for _ in range(count)]


def _passage(words: Iterator[tuple[str, float]], tokens: int) -> str:
    """The next words, until about `tokens` tokens are reached; at least one word."""
    word, size = next(words)
    taken = [word]
    while size < tokens:
        word, more = next(words)
        taken.append(word)
        size += more
    return " ".join(taken)


@cache
def _prose_words() -> tuple[tuple[str, float], ...]:
    """The prose word by word, each with its estimated number of tokens."""
    paragraphs = (p for _, topic in sorted(topics.items()) for p in topic.split("\n\n"))
    words = (word for p in paragraphs if _is_prose(p) for word in _plain(p).split())
    return tuple((word, _TOKENS_PER_PIECE * len(_PIECES.findall(word))) for word in words)


def _is_prose(paragraph: str) -> bool:
    """Whether a paragraph is running text: not indented, no grammar, a sentence's punctuation."""
    return (
        bool(paragraph)
        and not paragraph[0].isspace()
        and "::=" not in paragraph
        and len(paragraph.split()) >= _MIN_PARAGRAPH_WORDS
        and paragraph.rstrip()[-1] in ".:;?!)"
    )


def _plain(paragraph: str) -> str:
    """The paragraph without the reference's markup for emphasis, code and list items."""
    return paragraph.replace("*", "").replace("`", "").replace('"', "")
