"""transformers' two ways to answer many prompts on a GPU: one padded batch, continuous batching."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.causal import padded_generate
from benchmarks.gpu import left_out
from benchmarks.rivals import quiet

_BLOCK_TOKENS = 256  # of its cache, by default
_STEP_TOKENS = (
    2048  # most of one forward pass: its mask has a row a token and a column a cached one
)
_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 8, 4

# (model, prompts, tokens of each answer) -> the answers, and the seconds that they took.
Generate = Callable[[Any, Sequence[list[int]], int], tuple[list[list[int]], float]]


def measure_transformers(
    folder: Path, dtype: torch.dtype, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[dict[str, float], list[str]]:
    """({name: seconds of greedy answers of num_tokens each}, what a reader must know)."""
    from transformers import AutoModelForCausalLM

    ways: dict[str, Generate] = {
        "transformers": _padded_generate,
        "transformers-continuous": continuous_generate,
    }
    found, notes = {}, []
    for name, generate in ways.items():
        try:
            with quiet():
                options = {"dtype": dtype, "trust_remote_code": False}
                model = AutoModelForCausalLM.from_pretrained(folder, **options).eval().to("cuda")
                generate(model, prompts[:_WARM_UP_PROMPTS], _WARM_UP_TOKENS)
                _, found[name] = generate(model, prompts, num_tokens)
        except Exception as error:  # a rival may raise anything, and costs no other number
            notes.append(left_out(name, error))
        model = None  # its memory is the next one's
        torch.cuda.empty_cache()
    return found, notes


def continuous_generate(
    model: Any, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[list[int]], float]:
    """Greedy answers of num_tokens each by transformers' generate_batch, in the prompts' order, and
    the seconds from the first request to the last token: setting up and winding up take more.

    Its cache holds these prompts and answers, not nine tenths of the memory as by default.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        model.set_attn_implementation("paged|sdpa")  # else it would look for kernels on the network
    config = ContinuousBatchingConfig(
        block_size=_BLOCK_TOKENS,
        num_blocks=sum(-(-(len(p) + num_tokens) // _BLOCK_TOKENS) + 1 for p in prompts),
        max_batch_tokens=_STEP_TOKENS,
    )
    greedy = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    found = model.generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=greedy,
        continuous_batching_config=config,
    )
    outputs = list(found.values())
    answers = [list(output.generated_tokens) for output in outputs]
    if len(answers) != len(prompts) or any(len(answer) != num_tokens for answer in answers):
        errors = [str(output.error) for output in outputs if output.error]
        whole = sum(len(answer) == num_tokens for answer in answers)
        reason = errors[0] if errors else "no error"
        raise RuntimeError(f"it gave {whole} whole answers of {len(prompts)}: {reason}")
    first = min(output.created_time for output in outputs)
    return answers, max(output.lifespan[1] for output in outputs) - first


def _padded_generate(
    model: Any, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[list[int]], float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    answers = padded_generate(model, prompts, num_tokens)  # on the host
    return answers, time.perf_counter() - began
