"""Texts that lose their beginning where they are too long."""

from collections.abc import Sequence
from typing import Any

from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.ops.host import release_heap_after


class LeftTruncation:
    """Token ids of texts that lose their beginning where they are too long."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[Any], *, prompt: str) -> tuple[list[Any], int]:
        """(token ids of each str that is too long, all else as it is; how many were cut)."""
        if self._tokenizer is None:
            return list(texts), 0
        places = [i for i, text in enumerate(texts) if isinstance(text, str)]
        given = [prompt + texts[i] for i in places]
        # Lengths of all, and then the ends of long ones: what is cut off comes as objects of the
        # library, and for a million tokens these would hold up every other thread.
        whole = self._tokenizer.untruncated().encode(given)
        limit = self._tokenizer.max_tokens
        too_long = [place for place, one in enumerate(whole) if len(one) > limit]
        result = list(texts)
        if too_long:
            ends = self._tokenizer.limited(limit, direction="left")
            for place, encoding in zip(
                too_long, ends.encode([given[place] for place in too_long]), strict=True
            ):
                result[places[place]] = encoding.ids
        num_tokens = sum(map(len, whole))
        del whole
        release_heap_after(num_tokens)
        return result, len(too_long)
