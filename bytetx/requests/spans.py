"""Texts with spans of characters that the caller names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bytetx.checkpoint.tokenizer import Text
from bytetx.encode.request import Requests, Span
from bytetx.requests.inputs import InputReader
from bytetx.requests.token_ids import Errors


@dataclass(slots=True)
class SpanReader(InputReader):
    """Gives the alignment of each text its spans.

    spans: (start, end) characters without the prompt, by the index of a text.
    """

    spans: Sequence[Sequence[Span]] = ()

    def read_texts(self, texts: Mapping[int, Text], errors: Errors) -> Requests:
        requests = InputReader.read_texts(self, texts, errors)
        if requests.alignments is None:
            return requests
        aligned = zip(requests.indices.tolist(), requests.alignments, strict=True)
        alignments = [replace(one, spans=self._placed(index)) for index, one in aligned]
        return replace(requests, alignments=alignments)

    def _placed(self, index: int) -> list[Span]:
        """The spans of a text behind its prompt."""
        size = len(self.prompt_of(index))
        return [(start + size, end + size) for start, end in self.spans[index]]
