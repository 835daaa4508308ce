"""GenerationRunner: planned steps through the real model, from host columns to chosen tokens."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from bytetx.errors import DeviceMemoryError, StepError
from bytetx.generate.cuda_steps import CudaSteps
from bytetx.generate.input_batch_builder import ColumnWriter
from bytetx.generate.last_tokens import LastTokens
from bytetx.generate.sampler import Sampler, SamplingRows
from bytetx.generate.sampler_output import Sampled
from bytetx.generate.scheduler import StepPlan, StepRow
from bytetx.nn.heads import LmHead, LogitRows
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch, Past
from bytetx.runtime.faults import blame, is_of_device, is_out_of_memory
from bytetx.runtime.forking import computing
from bytetx.runtime.input_batch import StepColumns
from bytetx.runtime.on_stream import OnStream
from bytetx.runtime.upload import Uploader


class GenerationRunner:
    """A causal model with its LM head, a paged cache and a sampler; see engine.StepRunner.

    Steps run one at a time, in the order of their plans, for each reads what the last ones wrote.
    On a GPU they queue up behind one another on a stream of their own, and decode rows read the
    tokens they stand for from the device.
    """

    def __init__(
        self,
        transformer: Transformer,
        head: LmHead,
        *,
        cache: KvCache,
        max_num_seqs: int,
        device: torch.device | str = "cpu",
        cuda_graphs: bool = True,
    ):
        """max_num_seqs: the scheduler's.  device: of the weights and the cache.

        cuda_graphs: whether small steps are captured where the device's kernels allow it.
        """
        self.vocab_size, self.device = transformer.spec.vocab_size, torch.device(device)
        self.cache = cache
        self._transformer, self._head = transformer, head
        self._columns = ColumnWriter(page_size=cache.page_size, max_num_seqs=max_num_seqs)
        self._sampler = Sampler(
            max_num_seqs=max_num_seqs, vocab_size=self.vocab_size, device=self.device
        )
        self._last_tokens = LastTokens(max_num_seqs, device=self.device)
        self._upload = Uploader(self.device).upload
        self._stream: torch.cuda.Stream | None = None
        self._steps: CudaSteps | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            self.follow_caller()
            self._steps = CudaSteps(
                transformer,
                head,
                cache=cache,
                last_tokens=self._last_tokens,
                device=self.device,
                has_graphs=cuda_graphs,
            )

    def follow_caller(self) -> None:
        """Steps from now on run behind what the current stream was given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    @property
    def runs_ahead(self) -> bool:
        return self._steps is not None

    @property
    def is_capturable(self) -> bool:
        """Whether this device's kernels let small steps be captured."""
        return self._steps is not None and self._steps.is_capturable

    @property
    def num_graphs(self) -> int:
        return 0 if self._steps is None else self._steps.num_graphs

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Sampled:
        """Runs the step, or queues it; StepError where the device could not run it."""
        try:
            with computing(self.device), self._on_stream():
                columns = self._columns.columns_of(plan)
                sampled = self._run_twice(columns, self._sampler.read(plan, columns)).to_host()
                sampled.check = self._transformer.check
                return sampled
        except Exception as error:
            if not is_of_device(error, self.device):
                raise
            raise self._step_error(error, plan) from error

    def _give_memory_back(self) -> bool:
        """Lets go of what steps can do without; False where there was nothing."""
        return self._steps is not None and self._steps.give_memory_back()

    def _run_twice(self, columns: StepColumns, wanted: SamplingRows) -> Sampled:
        """The second time without the memory of graphs, where that was missing."""
        try:
            return self._run(columns, wanted)
        except RuntimeError as error:
            if not (is_out_of_memory(error) and self._give_memory_back()):
                raise
        return self._run(columns, wanted)

    def _on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else OnStream(self._stream)

    def _run(self, columns: StepColumns, wanted: SamplingRows) -> Sampled:
        if self._steps is None or not self._steps.takes(columns, wanted):
            sampled = self._sampler.sample(wanted, self._logits(columns, wanted.rows))
        elif wanted.is_greedy:
            return Sampled(wanted.rows, wanted.numbers, self._steps.tokens(columns))
        else:
            hidden_states = self._steps.hidden_states(columns)
            sampled = self._sampler.sample(wanted, self._head.forward(hidden_states))
        if sampled.tokens is not None:
            (seats,) = self._upload(wanted.seat_ids)
            self._last_tokens.remember(seats, sampled.tokens)
        return sampled

    def _logits(self, columns: StepColumns, rows: Sequence[StepRow]) -> LogitRows:
        """Of the rows that the plan wants them of."""
        offset = self._transformer.spec.position_offset
        batch, wanted = self._batch_of(columns, position_offset=offset)
        hidden_states = self._transformer.forward(self._with_prompts(batch, rows), cache=self.cache)
        if len(wanted) < batch.total_tokens:
            hidden_states = hidden_states[wanted]
        return LogitRows(self._head, hidden_states)

    def _with_prompts(self, batch: PackedBatch, rows: Sequence[StepRow]) -> PackedBatch:
        """The batch, with the prompts' lengths where they turn its tokens."""
        limit = self._transformer.spec.max_plain_prompt
        if limit is None:
            return batch
        lengths = [row.sequence.num_prompt_tokens for row in rows]
        if max(*lengths, batch.past.max_kv_seqlen) <= limit:
            return batch
        prompts = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        return replace(batch, past=replace(batch.past, prompt_seqlens=prompts))

    def _batch_of(
        self, columns: StepColumns, *, position_offset: int
    ) -> tuple[PackedBatch, torch.Tensor]:
        """(the batch with its past, int32 rows whose logits are wanted), in one copy.

        position_offset: position id of a sequence's first token.
        """
        ids, positions, slots, cu_seqlens, kv_seqlens, table, rows = self._upload(
            columns.input_ids,
            columns.positions + np.int32(position_offset),
            columns.slot_mapping,
            columns.cu_seqlens,
            columns.kv_seqlens,
            columns.page_table,
            columns.logits_rows,
        )
        ids = self._last_tokens.fill_in(ids)
        max_kv_seqlen = int(columns.kv_seqlens.max())
        batch = PackedBatch(
            input_ids=ids,
            position_ids=positions,
            token_type_ids=None,
            cu_seqlens=cu_seqlens,
            seqlens=torch.from_numpy(columns.seqlens),
            max_seqlen=int(columns.seqlens.max()),
            past=Past(table, kv_seqlens, slots, columns.page_size, max_kv_seqlen),
        )
        return batch, rows

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
