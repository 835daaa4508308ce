"""ModelRunner: runs planned steps on the model, from the plan to the sampled tokens."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from bytetx.errors import DeviceMemoryError, StepError
from bytetx.generate.cuda_steps import CudaSteps
from bytetx.generate.input_batch_builder import InputBatchBuilder
from bytetx.generate.sampler import LastTokens, Sampler, SamplerOutput, SamplingMetadata
from bytetx.generate.scheduler import ScheduledRow, SchedulerOutput
from bytetx.nn.cpu_steps import MAX_SEQUENCES, CpuSteps
from bytetx.nn.executor import Executor
from bytetx.nn.heads import LmHead, LogitRows
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.transformer import Transformer
from bytetx.ops.linear import LinearWeight
from bytetx.ops.panels import PanelFinder
from bytetx.packed import PackedBatch, Past
from bytetx.runtime.faults import (
    failed_op,
    first_line,
    is_of_device,
    is_out_of_memory,
    lost_error,
)
from bytetx.runtime.forking import computing
from bytetx.runtime.input_batch import InputBatch
from bytetx.runtime.on_stream import OnStream
from bytetx.runtime.upload import Uploader


class ModelRunner:
    """A causal model with its LM head, a paged cache and a sampler; see engine.StepRunner.

    Steps run one at a time, in the order of their plans, because each reads the keys and values
    that earlier steps wrote.  On a GPU they are queued on one stream, and decode rows read the last
    tokens on the device.
    """

    def __init__(
        self,
        transformer: Transformer,
        head: LmHead,
        *,
        executor: Executor,
        cache: KvCache,
        max_num_seqs: int,
        max_samples: int,
        device: torch.device | str = "cpu",
        cuda_graphs: bool = True,
    ):
        """max_num_seqs: the scheduler's.  max_samples: the most tokens that a step samples.

        device: of the weights and the cache.
        cuda_graphs: whether small steps are captured where the device's kernels allow it.
        """
        self.vocab_size, self.device = transformer.spec.vocab_size, torch.device(device)
        self.cache = cache
        self._max_plain_prompt = transformer.spec.max_plain_prompt
        self._transformer, self._head, self._executor = transformer, head, executor
        self._input_batches = InputBatchBuilder(
            page_size=cache.page_size, max_num_seqs=max_num_seqs
        )
        self._sampler = Sampler(
            max_num_seqs=max_num_seqs, vocab_size=self.vocab_size, device=self.device
        )
        self._last_tokens = LastTokens(max_num_seqs, device=self.device)
        self._upload = Uploader(self.device).upload
        self._stream: torch.cuda.Stream | None = None
        self._steps: CudaSteps | None = None
        self._cpu_steps = CpuSteps.of(transformer, cache)
        if self._cpu_steps is not None and isinstance(head.decoder, LinearWeight):
            PanelFinder().find_few_rows(head.decoder)
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            self.wait_for_current_stream()
            self._steps = CudaSteps(
                transformer,
                head,
                executor=executor,
                cache=cache,
                last_tokens=self._last_tokens,
                max_samples=max_samples,
                device=self.device,
                has_graphs=cuda_graphs,
            )

    def wait_for_current_stream(self) -> None:
        """Steps from now on wait for the work that is on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    @property
    def runs_ahead(self) -> bool:
        return self._steps is not None

    @property
    def is_capturable(self) -> bool:
        """Whether small steps can be captured on this device."""
        return self._steps is not None and self._steps.is_capturable

    @property
    def num_graphs(self) -> int:
        return 0 if self._steps is None else self._steps.num_graphs

    @torch.inference_mode()
    def start(self, plan: SchedulerOutput) -> SamplerOutput:
        """Runs the step, or queues it; StepError where the device could not run it.

        Raises DeviceLostError where the device, or a rank, no longer answers.
        """
        try:
            with computing(self.device), self._on_stream():
                input_batch = self._input_batches.build(plan)
                metadata = self._sampler.prepare(plan, input_batch)
                output = self._run_or_retry(input_batch, metadata).to_host()
                if self._executor.has_workers:
                    output.check = self._executor.check
                return output
        except Exception as error:
            if not is_of_device(error, self.device):
                raise
            self._check_device(error, len(plan.rows))
            raise self._step_error(error, plan) from error

    def _check_device(self, error: Exception, num_texts: int) -> None:
        """Raises DeviceLostError where nothing can run after the step that failed."""
        if self._stream is None:
            return
        try:
            self._stream.synchronize()
        except RuntimeError as dead:
            self._executor.check()  # it knows which rank is lost
            raise lost_error(dead, num_texts, self.device) from error

    def _run_or_retry(self, input_batch: InputBatch, metadata: SamplingMetadata) -> SamplerOutput:
        """Runs the step; where memory is short, once more after the graphs are freed."""
        try:
            return self._run(input_batch, metadata)
        except RuntimeError as error:
            # A step that ran halfway has moved states on: it must not run twice.
            if not is_out_of_memory(error) or self._steps is None or self.cache.states:
                raise
            if not self._steps.release_memory():
                raise
        return self._run(input_batch, metadata)

    def _on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else OnStream(self._stream)

    def _run(self, input_batch: InputBatch, metadata: SamplingMetadata) -> SamplerOutput:
        steps = self._steps
        if steps is None or not steps.can_run(input_batch, metadata):
            output = self._sampler.sample(metadata, self._logits(input_batch, metadata.rows))
        elif metadata.is_greedy:
            tokens = steps.sample_greedy(input_batch)
            return SamplerOutput(metadata.rows, metadata.sampling_rows, tokens)
        else:
            hidden_states = steps.hidden_states(input_batch)
            output = self._sampler.sample(metadata, self._head.forward(hidden_states))
        if output.tokens is not None:
            (slot_indices,) = self._upload(metadata.slot_indices)
            self._last_tokens.store(slot_indices, output.tokens)
        return output

    def _logits(self, input_batch: InputBatch, rows: Sequence[ScheduledRow]) -> LogitRows:
        """The logits that the plan needs, one row each."""
        batch, logits_rows = self._packed_batch(input_batch, rows)
        is_decode = input_batch.is_decode and batch.total_tokens <= MAX_SEQUENCES
        if is_decode and self._cpu_steps is not None and batch.adapters is None:
            hidden_states = self._cpu_steps.forward(batch)
        else:
            hidden_states = self._transformer.forward(batch, cache=self.cache)
        if len(logits_rows) < batch.total_tokens:
            hidden_states = hidden_states[logits_rows]
        return LogitRows(self._head, hidden_states)

    def _packed_batch(
        self, input_batch: InputBatch, rows: Sequence[ScheduledRow]
    ) -> tuple[PackedBatch, torch.Tensor]:
        """(the batch with its past, int32 rows whose logits are needed), uploaded in one copy."""
        offset = np.int32(self._transformer.spec.position_offset)
        arrays = (
            input_batch.input_ids,
            input_batch.positions + offset,
            input_batch.slot_mapping,
            input_batch.cu_seqlens,
            input_batch.kv_seqlens,
            input_batch.page_table,
            input_batch.logits_rows,
            *((input_batch.slot_indices,) if self.cache.states else ()),
        )
        ids, positions, slots, cu_seqlens, kv_seqlens, table, logits_rows, *state_slots = (
            self._upload(*arrays)
        )
        max_kv_seqlen = int(input_batch.kv_seqlens.max())
        past = Past(
            page_table=table,
            kv_seqlens=kv_seqlens,
            slot_mapping=slots,
            page_size=input_batch.page_size,
            max_kv_seqlen=max_kv_seqlen,
            prompt_seqlens=self._prompt_seqlens(rows, max_kv_seqlen),
            state_slots=state_slots[0] if state_slots else None,
        )
        batch = PackedBatch(
            input_ids=self._last_tokens.resolve(ids),
            position_ids=positions,
            token_type_ids=None,
            cu_seqlens=cu_seqlens,
            seqlens=torch.from_numpy(input_batch.seqlens),
            max_seqlen=int(input_batch.seqlens.max()),
            past=past,
            adapters=input_batch.adapters,
        )
        return batch, logits_rows

    def _prompt_seqlens(
        self, rows: Sequence[ScheduledRow], max_kv_seqlen: int
    ) -> torch.Tensor | None:
        """The lengths of the prompts, where the rotary embedding depends on them."""
        limit = self._max_plain_prompt
        if limit is None:
            return None
        lengths = [row.sequence.num_prompt_tokens for row in rows]
        if max(*lengths, max_kv_seqlen) <= limit:
            return None
        return torch.tensor(lengths, dtype=torch.int32, device=self.device)

    def _step_error(self, error: Exception, plan: SchedulerOutput) -> StepError:
        is_memory = is_out_of_memory(error)
        where, reason = failed_op(error), first_line(error)
        step = f"a step of {plan.total_tokens} tokens of {len(plan.rows)} texts"
        if is_memory:
            return DeviceMemoryError(
                f"{step} does not fit the memory of {self.device} beside the cache of "
                f"{self.cache.num_bytes >> 20} MiB ({where}: {reason}); give the cache fewer "
                "tokens (kv_cache_tokens), or load the model with a smaller token_budget"
            )
        return StepError(f"a kernel failed on {self.device} in {step}, {where}: {reason}")
