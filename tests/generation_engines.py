"""The generation engine over a fake model whose logits are a hash of the tokens so far."""

from collections import defaultdict
from functools import partial

import numpy as np
import torch
from fake_model import FakeModel

from bytetx.errors import StepError
from bytetx.generate.engine import GenerationEngine
from bytetx.generate.output_processor import WindowDetokenizer
from bytetx.generate.outputs import RequestOutput
from bytetx.generate.sampler import Sampler, SamplerOutput
from bytetx.generate.scheduler import Scheduler, SchedulerOutput

VOCAB_SIZE = 97


class FakeRunner:
    """Logits that are random numbers of a hash of the prefix, sampled by the real sampler.

    bad_token: a prefix that ends in it has NaN logits.  breaks_at: the step that fails whole.
    """

    vocab_size, num_graphs = VOCAB_SIZE, 0

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        runs_ahead: bool = False,
        device: str = "cpu",
    ):
        self.model = FakeModel(num_pages=num_pages, page_size=page_size, vocab_size=2**31)
        self.sampler = Sampler(max_num_seqs=max_num_seqs, vocab_size=VOCAB_SIZE, device=device)
        self.bad_token, self.breaks_at, self.num_steps = None, None, 0
        self.runs_ahead = runs_ahead

    def start(self, plan: SchedulerOutput) -> SamplerOutput:
        self.num_steps += 1
        if self.num_steps == self.breaks_at:
            raise StepError("a kernel failed")
        input_batch = self.model.compute(plan)
        metadata = self.sampler.prepare(plan, input_batch)
        owners = np.searchsorted(input_batch.cu_seqlens, input_batch.logits_rows, side="right") - 1
        prefixes = [
            self.model.prefix(input_batch, owner, input_batch.positions[row] + 1)
            for owner, row in zip(owners, input_batch.logits_rows, strict=True)
        ]
        logits = [torch.empty(0, VOCAB_SIZE), *(self.logits(p)[None] for p in prefixes)]
        sampled = self.sampler.sample(metadata, torch.cat(logits).to(self.sampler.device))
        if sampled.tokens is not None:
            self.model.last_tokens[metadata.slot_indices] = sampled.tokens.cpu()
        return sampled

    def logits(self, prefix: list[int] | np.ndarray) -> torch.Tensor:
        if prefix[-1] == self.bad_token:
            return torch.full((VOCAB_SIZE,), torch.nan)
        state = self.model.hash(np.array(prefix, dtype=np.int32))
        return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(state)) * 2


def decode(token_ids: list[int]) -> str:
    return "".join(chr(ord("!") + token) for token in token_ids)


def engine_of(
    *,
    num_pages: int = 64,
    max_positions: int = 200,
    eos_token_ids: tuple[int, ...] = (),
    runs_ahead: bool = False,
    device: str = "cpu",
    num_speculative_tokens: int = 0,
    **options,
) -> tuple:
    sizes = {"num_pages": num_pages, "page_size": 4}
    runner = FakeRunner(**sizes, max_num_seqs=8, runs_ahead=runs_ahead, device=device)
    limits = {"token_budget": 24, "max_num_seqs": 8, "max_positions": max_positions}
    scheduler = Scheduler(**sizes, **limits, num_speculative_tokens=num_speculative_tokens)
    settings = {
        "new_detokenizer": partial(WindowDetokenizer, decode),
        "eos_token_ids": eos_token_ids,
        "seed": 0,
    } | options
    return GenerationEngine(runner, scheduler, **settings), runner, scheduler


def run(engine: GenerationEngine) -> dict[tuple[int, int], list[RequestOutput]]:
    """All pieces, by request and answer."""
    pieces = defaultdict(list)
    while engine.has_work:
        for piece in engine.step():
            pieces[piece.request_id, piece.index].append(piece)
    return pieces


def whole(pieces: list[RequestOutput]) -> tuple:
    """(text, token ids, finish reason, stop) of an answer's pieces, the last of which ends it."""
    assert [piece.finish_reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    token_ids = [token for piece in pieces for token in piece.token_ids]
    text = "".join(piece.text for piece in pieces)
    return text, token_ids, pieces[-1].finish_reason, pieces[-1].stop
