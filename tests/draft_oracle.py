"""A drafter that knows the outputs, so that tests accept and reject drafts at every place."""

from collections.abc import Sequence
from random import Random

import pytest
from tiny import VOCAB_SIZE

from bytetx.generate import scheduler

MAX_DRAFT = 5


class Oracle:
    """Drafts of outputs that it knows; some are wrong in a random token, and some are missing.

    answers: prompts with what follows.  errs: False gives whole, right drafts.
    """

    answers: list[list[int]] = []
    errs = True
    rng = Random(0)

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        rng, tokens, count = self.rng, list(token_ids), len(token_ids)
        known = [answer[count:] for answer in self.answers if answer[:count] == tokens]
        draft = (rng.choice(known) if known else [])[: max(most, 0)]
        if not self.errs:
            return draft
        draft = draft[: rng.randint(0, max(most, 0))]
        if draft and rng.random() < 0.5:
            draft[rng.randrange(len(draft))] = rng.randrange(VOCAB_SIZE)
        return draft

    def count(self, num_accepted: int, num_tokens: int) -> None:
        assert 0 <= num_accepted <= MAX_DRAFT and num_tokens > 1


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> type[Oracle]:
    """The drafter of sequences that are queued from now on."""
    monkeypatch.setattr(scheduler, "NgramDrafter", Oracle)
    for name, value in (("answers", []), ("errs", True), ("rng", Random(0))):
        monkeypatch.setattr(Oracle, name, value)
    return Oracle
