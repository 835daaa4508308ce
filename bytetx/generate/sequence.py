"""SequenceState: one text being generated, as the scheduler knows it."""

from dataclasses import dataclass, field
from enum import Enum

from bytetx.generate.kv_cache import page_keys
from bytetx.sampling_params import SamplingParams


class Status(Enum):
    """Where a sequence is; preemption sends it from RUNNING back to WAITING.

    ENDING: its last token is being computed, and it holds no pages any more.
    """

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SequenceState:
    """Tokens, pages and progress of one sequence; the scheduler alone changes it.

    token_ids: the prompt, then what was generated; it only grows.  num_tokens: with those behind
    them that planned steps will give, and nobody knows yet.  max_tokens: the most tokens that are
    generated, max_num_tokens with the prompt's.  priority: lower ones run first.  scores_prompt:
    whether logits of the prompt's tokens are wanted, too.
    num_computed: tokens whose keys and values are in the pages once the planned steps have run.
    stop_token_ids: end the answer.  eos_token_ids: the checkpoint's; min_tokens holds for both.
    own_pages: those of its pages that it wrote, and did not find written.
    seat: a number below max_num_seqs that is this sequence's while it is running, for what a
    runner keeps a row (its last token, its sampling parameters).
    """

    token_ids: list[int]
    max_tokens: int
    priority: int = 0
    params: SamplingParams = SamplingParams()
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    arrival: int = -1
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    num_computed: int = 0
    num_scored: int = 0
    num_preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    own_pages: list[int] = field(default_factory=list)
    seat: int = -1
    status: Status = Status.WAITING
    _page_keys: list[bytes] = field(default_factory=list)
    _num_published: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether logits of the prompt's tokens are wanted, too."""
        return self.params.prompt_logprobs is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the lower priority number, then the earlier arrival."""
        return self.priority, self.arrival

    @property
    def num_left(self) -> int:
        """Tokens that are not computed: 1 in decode."""
        return self.num_tokens - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def page_keys(self, start: int, stop: int, *, page_size: int) -> list[bytes]:
        """Keys of the full pages start to stop, each worked out once."""
        keys = self._page_keys
        if len(keys) < stop:
            tokens = self.token_ids[len(keys) * page_size : stop * page_size]
            keys += page_keys(tokens, page_size=page_size, before=keys[-1] if keys else b"")
        return keys[start:stop]

    def take_unpublished(self, num_full_pages: int) -> range:
        """Full pages that were not published before; the next call starts behind them."""
        fresh = range(self._num_published, num_full_pages)
        self._num_published = max(self._num_published, num_full_pages)
        return fresh

    def skip_to(self, num_pages: int, *, page_size: int) -> None:
        """Counts the first pages as computed: they were found, published already."""
        self.num_computed = num_pages * page_size
        self._num_published = num_pages

    def forget_pages(self) -> None:
        """What was computed is gone, and what comes of it; the tokens and their keys stay."""
        self.pages, self.own_pages = [], []
        self.num_computed = self._num_published = 0
        self.num_tokens = len(self.token_ids)
        self.seat = -1
