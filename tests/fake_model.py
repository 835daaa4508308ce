"""A model that takes no time: its next token is a hash of the whole prefix, read from the pages."""

from zlib import crc32

import numpy as np

from bytetx.engine.generation import StepPlan
from bytetx.engine.step_columns import StepColumns, columns_of

EMPTY = -1  # what a slot holds that nobody wrote


class FakeModel:
    """Keeps each token where a real model keeps its key and value.

    A page that is lost, shared by mistake or taken too early shows as another answer.
    """

    def __init__(self, *, num_pages: int, page_size: int, vocab_size: int = 97):
        self.cache = np.full(num_pages * page_size, EMPTY, dtype=np.int32)
        self.page_size, self.vocab_size = page_size, vocab_size

    def next_tokens(self, plan: StepPlan) -> list[int | None]:
        """One entry a row of the plan: its next token, None where it samples none."""
        columns = columns_of(plan, page_size=self.page_size)
        self.cache[columns.slot_mapping] = columns.input_ids
        return [
            self.hash(self.prefix(columns, number, columns.kv_seqlens[number]))
            if row.samples
            else None
            for number, row in enumerate(plan.rows)
        ]

    def alone(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The answer to a prompt without any cache."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.hash(np.array(tokens, dtype=np.int32)))
        return tokens[len(prompt) :]

    def hash(self, prefix: np.ndarray) -> int:
        return crc32(prefix.tobytes()) % self.vocab_size

    def prefix(self, columns: StepColumns, number: int, length: int) -> np.ndarray:
        """The first tokens of row `number` of a step, as its pages hold them."""
        places = np.arange(length)
        pages = columns.page_table[number, places // self.page_size]
        return self.cache[pages * self.page_size + places % self.page_size]
