"""The errors of the texts of a failed step."""

import torch

from bytetx.encode.request import Requests
from bytetx.errors import DeviceMemoryError, StepError
from bytetx.runtime.faults import first_line


def memory_error(
    error: Exception, requests: Requests, device: torch.device, *, where: str
) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"{_describe_step(requests)} does not fit the memory of {device}, not even alone in a "
        f"step ({where}: {first_line(error)}); free memory there, cut the text "
        "(truncate=True), or load the model in float16 or on another device"
    )


def step_error(
    error: Exception, requests: Requests, device: torch.device, *, where: str
) -> StepError:
    return StepError(
        f"a kernel failed on {device} in a step of {_describe_step(requests)}, {where}: "
        f"{first_line(error)}; other steps are not affected. `bytetx info` lists the kernels; "
        "cuda_graphs=False and a smaller token_budget rule out two causes"
    )


def _describe_step(requests: Requests) -> str:
    texts = f"text {requests.indices[0]}" if len(requests) == 1 else f"{len(requests)} texts"
    return f"{texts} with {requests.total_tokens} tokens"
