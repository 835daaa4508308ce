"""Requests -> PackedBatch -> forward pass -> rows on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from bytetx.engine.request import Requests
from bytetx.packed import PackedBatch, pack_columns
from bytetx.transformer import Transformer

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of one forward pass and their packed tokens, in the same order."""

    requests: Requests
    batch: PackedBatch


class Task(Protocol[R_co]):
    """What to compute for a step, and how to make each request's result of it."""

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        """The forward pass and the head; tensors stay on the device, nothing waits for it."""
        ...

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> Sequence[R_co]:
        """One result a request of the step, from compute's tensors on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose forward pass was started; `outputs()` waits until it is done."""

    step: Step
    tensors: tuple[torch.Tensor, ...]
    is_done: torch.cuda.Event | None

    def is_ready(self) -> bool:
        """Whether `outputs()` returns at once."""
        return self.is_done is None or self.is_done.query()

    def outputs(self) -> tuple[np.ndarray, ...]:
        if self.is_done is not None:
            self.is_done.synchronize()
        return tuple(tensor.numpy() for tensor in self.tensors)


class Runner:
    """Runs steps on one device. Holds no state between steps."""

    def __init__(self, transformer: Transformer, *, device: torch.device):
        self.transformer, self.device = transformer, device

    def launch(self, requests: Requests, task: Task[R]) -> Launched:
        """Starts one forward pass. Raises MemoryError where the step does not fit the device."""
        spec, num_tokens = self.transformer.spec, requests.total_tokens
        try:
            batch = pack_columns(
                requests.token_ids,
                requests.seqlens,
                token_type_ids=requests.token_type_ids,
                has_token_types=spec.num_token_types > 0,
                position_offset=spec.position_offset,
                device=self.device,
            )
            step = Step(requests, batch)
            return self._to_host(step, task.compute(self.transformer, step))
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise MemoryError(
                f"a step of {len(requests)} texts with {num_tokens} tokens does not fit the memory "
                f"of {self.device}; load the model with a smaller token_budget"
            ) from error

    def _to_host(self, step: Step, tensors: tuple[torch.Tensor, ...]) -> Launched:
        """On CUDA the copies are queued behind the kernels, so that the next step can start."""
        if self.device.type != "cuda":
            return Launched(step, tensors, None)
        copies = []
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(host.copy_(tensor, non_blocking=True))
        is_done = torch.cuda.Event()
        is_done.record(torch.cuda.current_stream(self.device))
        return Launched(step, tuple(copies), is_done)


def _is_out_of_memory(error: Exception) -> bool:
    """torch's CPU allocator raises a plain RuntimeError; its text is all that tells it apart."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
