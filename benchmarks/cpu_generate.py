"""The generation cases of suite `cpu`: a ragged batch of prompts against transformers' generate,
and prompts of one length against llama.cpp, with weights in bf16 or those of a GGUF file."""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bytetx
from benchmarks import llama_cpp, measure, texts
from benchmarks.causal import SHAPES, padded_generate, save_random_model
from benchmarks.rivals import quiet
from benchmarks.suite import Measurement, measured
from bytetx.model import Model
from bytetx.tasks.results import Generation

CASE = "gpt2-124m-fp32-generate"
# Sequences of 128 tokens that get more, SmolLM2-135M's shape in bf16.
LLAMA_CASES = {f"smollm2-135m-bf16-generate-{count}": count for count in (1, 8, 32)}
_LLAMA_PROMPT = 128
_PROFILE = "ln128"
_MAX_PROMPT = 512  # tokens, the profile's longest


def measure_generate(
    num_prompts: int, num_tokens: int, *, min_rounds: int, max_rounds: int, seconds: float
) -> Measurement:
    """Greedy answers of num_tokens tokens to ragged prompts of token ids; GPT-2's shape, fp32.

    transformers gets the prompts as users give them: one batch, padded on the left.
    """
    prompts = _prompts(num_prompts)
    with tempfile.TemporaryDirectory(prefix="bytetx-bench-") as folder, quiet():
        theirs = _random_gpt2(Path(folder))
        model = bytetx.load(folder, device="cpu", dtype="float32")
    params = bytetx.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def ours() -> Sequence[Generation]:
        # A model of its own each time, which has no pages of these prompts yet.
        return Model(model.checkpoint).generate(prompts, params)

    rival = partial(padded_generate, theirs, prompts, num_tokens)
    notes = _differences([list(answer.token_ids) for answer in ours()], rival())
    timing = measure.alternate(
        ours,
        {"transformers": rival},
        min_rounds=min_rounds,
        max_rounds=max_rounds,
        seconds=seconds,
    )
    lengths = [len(prompt) for prompt in prompts]
    sizes: dict[str, int | float | str] = {
        "prompts": num_prompts,
        "prompt_tokens": sum(lengths),
        "max_prompt": max(lengths),
        "new_tokens": num_tokens,
        "profile": _PROFILE,
        "rounds": timing.rounds,
    }
    return measured(timing.found, None, sizes, notes, per=num_prompts * num_tokens / 1e6)


def measure_llama(
    num_prompts: int, num_tokens: int, *, min_rounds: int, max_rounds: int, seconds: float
) -> Measurement:
    """Greedy answers to prompts of one length; llama.cpp has the same weights in its own format."""
    stem, config = SHAPES["smollm2-135m"]
    with tempfile.TemporaryDirectory(prefix="bytetx-bench-") as name, quiet():
        folder, path = Path(name), Path(name) / "model.gguf"
        save_random_model(folder, stem, "ForCausalLM", config, dtype=torch.bfloat16)
        model = bytetx.load(folder, device="cpu", dtype="bfloat16")
        if llama_cpp.why_missing() is None:
            llama_cpp.write_llama(folder, path)
        return _beside_llama_cpp(
            model,
            path,
            (num_prompts, _LLAMA_PROMPT, num_tokens),
            min_rounds=min_rounds,
            max_rounds=max_rounds,
            seconds=seconds,
        )


def gguf_cases(path: Path) -> dict[str, tuple[int, int, int]]:
    """A GGUF file's model in int4: (prompts, tokens of each, new tokens of each) by case."""
    name = path.resolve().stem
    return {
        f"{name}-int4-prefill-512": (1, 512, 1),
        f"{name}-int4-decode-1": (1, 8, 64),
        **{f"{name}-int4-generate-{n}": (n, _LLAMA_PROMPT, 64) for n in (1, 8, 32)},
    }


def measure_gguf(
    path: Path,
    shape: tuple[int, int, int],
    *,
    min_rounds: int,
    max_rounds: int,
    seconds: float,
) -> Measurement:
    """Greedy answers of a GGUF file's model in int4; llama.cpp reads the same file."""
    with quiet():
        model = bytetx.load(path, device="cpu", dtype="int4")
    return _beside_llama_cpp(
        model, path, shape, min_rounds=min_rounds, max_rounds=max_rounds, seconds=seconds
    )


def _beside_llama_cpp(
    model: Model,
    path: Path,
    shape: tuple[int, int, int],
    *,
    min_rounds: int,
    max_rounds: int,
    seconds: float,
) -> Measurement:
    """shape: as of gguf_cases. Ours gets other prompts each time, whose pages it does not have."""
    count, length, num_tokens = shape
    vocab_size = model.spec.vocab_size
    missing, notes, rivals = llama_cpp.why_missing(), list[str](), {}
    first, *others = (
        texts.random_token_ids([length] * count, vocab_size=vocab_size, seed=seed)
        for seed in range(2 + max_rounds)
    )
    if missing is None:
        with quiet():
            theirs = llama_cpp.LlamaCpp(
                path,
                num_sequences=count,
                max_tokens=length + num_tokens,
                num_threads=torch.get_num_threads(),
            )
        rivals[llama_cpp.NAME] = partial(theirs.generate, first, num_tokens)
    params = bytetx.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    answers = [list(answer.token_ids) for answer in model.generate(first, params)]
    if missing is not None:
        notes.append(missing)
    else:
        notes += _differences(answers, rivals[llama_cpp.NAME](), llama_cpp.NAME)
    prompts = iter(others)
    timing = measure.alternate(
        lambda: model.generate(next(prompts), params),
        rivals,
        min_rounds=min_rounds,
        max_rounds=max_rounds,
        seconds=seconds,
    )
    sizes: dict[str, int | float | str] = {
        "prompts": count,
        "prompt_tokens": length * count,
        "new_tokens": num_tokens,
        "rounds": timing.rounds,
    }
    tokens = length if num_tokens == 1 else num_tokens
    return measured(timing.found, None, sizes, notes, per=count * tokens / 1e6)


def _prompts(count: int) -> list[list[int]]:
    lengths = texts.profile_lengths(_PROFILE, total_tokens=_MAX_PROMPT * count)[:count]
    return texts.random_token_ids(lengths, vocab_size=50257)


def _random_gpt2(folder: Path) -> Any:
    """The shape of openai-community/gpt2 with random weights, saved to folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(eos_token_id=None, bos_token_id=None)).eval()
    model.save_pretrained(folder)
    return model


def _differences(
    ours: list[list[int]], theirs: list[list[int]], rival: str = "transformers"
) -> tuple[str, ...]:
    """Return notes on answers that are not the same, token by token."""
    differing = sum(list(a) != list(b) for a, b in zip(ours, theirs, strict=True))
    return (f"{differing} of {len(ours)} answers differ from those of {rival}",) * bool(differing)
