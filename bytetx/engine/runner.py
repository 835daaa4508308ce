"""Requests -> PackedBatch -> forward pass -> rows on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from bytetx.engine.request import Request
from bytetx.packed import PackedBatch, pack
from bytetx.transformer import Transformer

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of one forward pass and their packed tokens, in the same order."""

    requests: Sequence[Request]
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

    def outputs(self) -> tuple[np.ndarray, ...]:
        if self.is_done is not None:
            self.is_done.synchronize()
        return tuple(tensor.numpy() for tensor in self.tensors)


class Runner:
    """Runs steps on one device. Holds no state between steps."""

    def __init__(self, transformer: Transformer, *, device: torch.device):
        self.transformer, self.device = transformer, device

    def launch(self, requests: Sequence[Request], task: Task[R]) -> Launched:
        """Starts one forward pass. Raises MemoryError where the step does not fit the device."""
        spec = self.transformer.spec
        num_tokens = sum(request.num_tokens for request in requests)
        has_types = any(request.token_type_ids is not None for request in requests)
        try:
            batch = pack(
                [request.token_ids for request in requests],
                token_type_ids=[_type_ids(request) for request in requests] if has_types else None,
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


def _type_ids(request: Request) -> Sequence[int]:
    if request.token_type_ids is not None:
        return request.token_type_ids
    return np.zeros(request.num_tokens, dtype=np.int32)


def _is_out_of_memory(error: Exception) -> bool:
    """torch's CPU allocator raises a plain RuntimeError; its text is all that tells it apart."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
