"""A model that takes no time: its next token is a hash of the whole prefix, read from the pages."""

from zlib import crc32

import numpy as np

from bytetx.generate.input_batch_builder import InputBatchBuilder
from bytetx.generate.scheduler import SchedulerOutput
from bytetx.runtime.input_batch import InputBatch

EMPTY = -1  # what a slot holds that nobody wrote
_MAX_NUM_SEQS = 256


class FakeModel:
    """Keeps each token where a real model keeps its key and value.

    A page that is lost, shared by mistake or taken too early shows as another answer.
    """

    def __init__(self, *, num_pages: int, page_size: int, vocab_size: int = 97):
        self.cache = np.full(num_pages * page_size, EMPTY, dtype=np.int32)
        self.page_size, self.vocab_size = page_size, vocab_size
        self._input_batches = InputBatchBuilder(page_size=page_size, max_num_seqs=_MAX_NUM_SEQS)
        self.last_tokens = np.full(_MAX_NUM_SEQS, EMPTY, dtype=np.int32)  # by slot index

    def compute(self, plan: SchedulerOutput) -> InputBatch:
        """The arrays of a step, whose tokens the cache now holds."""
        input_batch = self._input_batches.build(plan)
        ids = input_batch.input_ids
        ids = np.where(ids < 0, self.last_tokens[np.where(ids < 0, ~ids, 0)], ids)
        self.cache[input_batch.slot_mapping] = ids
        return input_batch

    def next_tokens(self, plan: SchedulerOutput) -> list[int | None]:
        """One entry a row of the plan: its next token, None where it samples none."""
        if not plan.rows:
            return []
        input_batch = self.compute(plan)
        tokens = [
            self.hash(self.prefix(input_batch, number, input_batch.kv_seqlens[number]))
            if row.samples
            else None
            for number, row in enumerate(plan.rows)
        ]
        for row, token in zip(plan.rows, tokens, strict=True):
            if token is not None:
                self.last_tokens[row.sequence.slot_index] = token
        return tokens

    def alone(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The answer to a prompt without any cache."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.hash(np.array(tokens, dtype=np.int32)))
        return tokens[len(prompt) :]

    def hash(self, prefix: np.ndarray) -> int:
        return crc32(prefix.tobytes()) % self.vocab_size

    def prefix(self, input_batch: InputBatch, number: int, length: int) -> np.ndarray:
        """The first tokens of row `number` of a step, as its pages hold them."""
        places = np.arange(length)
        pages = input_batch.page_table[number, places // self.page_size]
        return self.cache[pages * self.page_size + places % self.page_size]
