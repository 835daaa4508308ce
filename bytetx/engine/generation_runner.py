"""GenerationRunner: planned steps through the real model, from host columns to chosen tokens."""

from collections.abc import Sequence

import numpy as np
import torch

from bytetx.cache import KvCache
from bytetx.engine.faults import blame, is_of_device, is_out_of_memory
from bytetx.engine.generation import StepPlan
from bytetx.engine.outputs import RowResult
from bytetx.engine.sampler import Sampler
from bytetx.engine.step_columns import StepColumns, columns_of
from bytetx.errors import DeviceMemoryError, StepError
from bytetx.heads import LmHead
from bytetx.packed import PackedBatch, Past
from bytetx.transformer import Transformer


class GenerationRunner:
    """A causal model with its LM head, a paged cache and a sampler; see engine.StepRunner.

    Steps run one at a time, in the order of their plans, for each reads what the last ones wrote.
    """

    def __init__(
        self,
        transformer: Transformer,
        head: LmHead,
        *,
        cache: KvCache,
        max_num_seqs: int,
        device: torch.device | str = "cpu",
    ):
        """max_num_seqs: the scheduler's.  device: of the weights and the cache."""
        self.vocab_size, self.device = transformer.spec.vocab_size, torch.device(device)
        self.cache = cache
        self._transformer, self._head = transformer, head
        self._sampler = Sampler(
            max_num_seqs=max_num_seqs, vocab_size=self.vocab_size, device=self.device
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sequence[RowResult]:
        """One result a row; StepError where the device could not run the step."""
        try:
            results = self._sampler.sample(plan, self._logits(plan))
            self._transformer.check()
            return results
        except Exception as error:
            if not is_of_device(error, self.device):
                raise
            raise self._step_error(error, plan) from error

    def _logits(self, plan: StepPlan) -> torch.Tensor:
        """Of the rows that the plan wants them of: [num_logits, vocab_size]."""
        columns = columns_of(plan, page_size=self.cache.page_size)
        offset = self._transformer.spec.position_offset
        batch, rows = batch_of(columns, position_offset=offset, device=self.device)
        hidden_states = self._transformer.forward(batch, cache=self.cache)
        if not len(rows):
            return hidden_states.new_empty((0, self.vocab_size))
        if len(rows) < batch.total_tokens:
            hidden_states = hidden_states[rows]
        return self._head.forward(hidden_states)

    def _step_error(self, error: Exception, plan: StepPlan) -> StepError:
        is_memory = is_out_of_memory(error)
        where = blame(error)
        reason = str(error).strip().partition("\n")[0]
        step = f"a step of {plan.total_tokens} tokens of {len(plan.rows)} texts"
        if is_memory:
            return DeviceMemoryError(
                f"{step} does not fit the memory of {self.device} beside the cache of "
                f"{self.cache.num_bytes >> 20} MiB ({where}: {reason}); give the cache fewer "
                "tokens (kv_cache_tokens), or load the model with a smaller token_budget"
            )
        return StepError(f"a kernel failed on {self.device} in {step}, {where}: {reason}")


def batch_of(
    columns: StepColumns, *, position_offset: int, device: torch.device
) -> tuple[PackedBatch, torch.Tensor]:
    """(the batch with its past, int32 rows whose logits are wanted), in one copy to the device.

    position_offset: position id of a sequence's first token.
    """
    arrays = (
        columns.input_ids,
        columns.positions + np.int32(position_offset),
        columns.slot_mapping,
        columns.cu_seqlens,
        columns.kv_seqlens,
        columns.page_table.ravel(),
        columns.logits_rows,
    )
    flat = torch.from_numpy(np.concatenate(arrays, dtype=np.int32))
    if device.type == "cuda":  # pinned, or the copy would wait for the device
        flat = flat.pin_memory().to(device, non_blocking=True)
    ids, positions, slots, cu_seqlens, kv_seqlens, pages, rows = flat.split(list(map(len, arrays)))
    past = Past(
        pages.view(columns.page_table.shape),
        kv_seqlens,
        slots,
        columns.page_size,
        int(columns.kv_seqlens.max()),
    )
    batch = PackedBatch(
        input_ids=ids,
        position_ids=positions,
        token_type_ids=None,
        cu_seqlens=cu_seqlens,
        seqlens=torch.from_numpy(columns.seqlens),
        max_seqlen=int(columns.seqlens.max()),
        past=past,
    )
    return batch, rows
