"""Suite `decide`: texts of a causal model with common prefixes, against transformers' pipeline.

Questions about one state, documents of one query, continuations of one context.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import bytetx
from benchmarks.causal import SHAPES, Request, prefill_work, save_random_model
from benchmarks.gpu import DTYPES, Gpu, Work, cpu_suite, gpu_suite, wall_us_in_turn
from benchmarks.rivals import quiet
from benchmarks.suite import Measurement, Suite
from bytetx.model import Model

_ROUNDS = 3
_WORDS = 20_000
_TEMPLATE = (
    "{% for message in messages %}user {{ message['content'] }} end\n{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
_TOKEN_BUDGET = 1 << 15


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: a model of SHAPES, and groups of texts that begin alike.

    kind: decide, rerank or score.  prefix, own: tokens that a group has in common, and of each text
    alone.  pipeline: groups that transformers' pipeline runs, one prompt at a time; 0: none.
    """

    name: str
    kind: str
    groups: int
    prefix: int
    texts: int
    own: int
    model: str = "qwen3-0.6b"
    dtype: str = "bf16"
    pipeline: int = 0
    batch_invariant: bool = False
    note: str | None = None


_GPU_SHAPES = [
    Shape("qwen3-0.6b-32x20", "decide", 32, 600, 20, 40, pipeline=1),
    Shape("qwen3-0.6b-32x20-invariant", "decide", 32, 600, 20, 40, batch_invariant=True),
    Shape("qwen3-0.6b-1x20", "decide", 1, 600, 20, 40),
    Shape("qwen3-0.6b-rerank-64x32", "rerank", 64, 80, 32, 120),
    Shape("qwen3-0.6b-score-1000x4", "score", 1000, 400, 4, 20),
]
_CPU_SHAPES = [
    Shape("smollm2-135m-1x10", "decide", 1, 500, 10, 30, "smollm2-135m", "fp32", pipeline=1),
]


def suite(*, patterns: list[str], device: str = "cuda") -> Suite:
    packages = ("transformers",)
    if device == "cpu":
        return cpu_suite(
            "decide", _CPU_SHAPES, _measure_cpu, patterns=patterns, unit="ms", packages=packages
        )
    return gpu_suite(
        "decide", _GPU_SHAPES, measure, patterns=patterns, unit="ms", packages=packages
    )


def measure(shape: Shape, gpu: Gpu) -> Measurement:
    """Milliseconds from the texts to their answers, the host's work included."""
    return _measure(shape, "cuda", lambda spec: gpu.rates.floor_us(_work(spec, shape)))


def _measure_cpu(shape: Shape) -> Measurement:
    return _measure(shape, "cpu", lambda spec: None)


def _measure(shape: Shape, device: str, floor: Callable[[Any], float | None]) -> Measurement:
    dtype = {"fp32": torch.float32, **DTYPES}[shape.dtype]
    notes = [shape.note] if shape.note else []
    with _checkpoint(shape, dtype) as folder:
        options: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "token_budget": _TOKEN_BUDGET,
            "prefix_cache_bytes": 0,  # or the second round would find the first one's prefixes
        }
        model = bytetx.load(folder, batch_invariant=shape.batch_invariant, **options)
        own, alone = _runs(shape, model)
        runs = {"ours": own, "unshared": alone}
        if shape.pipeline:
            runs["generate, one token"] = _generate(shape, model)
        found = wall_us_in_turn(runs, rounds=_ROUNDS)
        if shape.batch_invariant:
            plain = bytetx.load(folder, **options)
            found["without batch_invariant"] = wall_us_in_turn(
                {"plain": _runs(shape, plain)[0]}, rounds=_ROUNDS
            )["plain"]
        if shape.pipeline:
            seconds, difference = _measure_pipeline(shape, folder, dtype, device, model)
            found["transformers pipeline"] = seconds * 1e6 * shape.groups / shape.pipeline
            notes.append(
                f"transformers ran {shape.pipeline} of {shape.groups} states, its time is scaled; "
                f"largest difference of a probability {difference:.1e}"
            )
        floor_us, spec = floor(model.spec), model.spec
    ours = found.pop("ours")
    return Measurement(
        ours=ours / 1e3,
        rivals={name: us / 1e3 for name, us in found.items()},
        floor=None if floor_us is None else floor_us / 1e3,
        shape={
            "groups": shape.groups,
            "texts": shape.groups * shape.texts,
            "prefix_tokens": shape.prefix,
            "own_tokens": shape.own,
            "layers": spec.num_layers,
            "token_budget": _TOKEN_BUDGET,
        },
        notes=tuple(notes),
    )


def _work(spec: Any, shape: Shape) -> Work:
    """FLOP of all rows with each prefix once; a text's rows attend their prefix, too."""
    prefixes = [Request(shape.prefix, 1)] * shape.groups
    texts = shape.groups * shape.texts
    own = prefill_work(spec, [Request(shape.own, 1)] * texts)
    pairs = texts * shape.own * shape.prefix
    attention = 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * pairs
    return Work(0.0, prefill_work(spec, prefixes).flop + own.flop + attention)


def _runs(shape: Shape, model: Model) -> tuple[Callable[[], object], Callable[[], object]]:
    """The call of a case, and the same with prefixes computed for each text."""
    run = _call(shape, model)
    engine = model.encoder
    runner = engine.runner

    def alone() -> object:
        multiple, runner.prefix_multiple = runner.prefix_multiple, 0
        engine.shares_prefixes = False
        try:
            return run()
        finally:
            runner.prefix_multiple, engine.shares_prefixes = multiple, multiple > 0

    return run, alone


def _call(shape: Shape, model: Model) -> Callable[[], object]:
    if shape.kind == "decide":
        requests = _requests(shape)
        return lambda: model.decide(requests)
    if shape.kind == "rerank":
        chance = random.Random(0)
        queries = [_words(chance, shape.prefix) for _ in range(shape.groups)]
        documents = [[_words(chance, shape.own) for _ in range(shape.texts)] for _ in queries]
        pairs = [(q, d) for q, own in zip(queries, documents, strict=True) for d in own]
        return lambda: model.classify(pairs)
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(shape.groups):
        context = rng.integers(100, _WORDS, shape.prefix).tolist()
        for _ in range(shape.texts):
            texts.append(context + rng.integers(100, _WORDS, shape.own).tolist())
    return lambda: model.score(texts)


def _generate(shape: Shape, model: Model) -> Callable[[], object]:
    """One greedy token after each prompt, by engines whose page caches start empty."""
    chats = [
        [{"role": "user", "content": f"{state}\n\n{instructions}\nAnswer Yes or No only."}]
        for state, questions in ((one["state"], one["questions"]) for one in _requests(shape))
        for instructions in (question["instructions"] for question in questions.values())
    ]
    params = bytetx.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return lambda: Model(model.checkpoint).generate(chats, params)


def _requests(shape: Shape) -> list[dict[str, Any]]:
    """States and questions whose prompts have about so many tokens."""
    chance = random.Random(0)
    closing = 12  # words that a prompt has behind the instructions
    return [
        {
            "state": _words(chance, shape.prefix - 2),
            "questions": {
                f"q{i}": {
                    "type": "noul",
                    "instructions": _words(chance, max(shape.own - closing, 1)),
                }
                for i in range(shape.texts)
            },
        }
        for _ in range(shape.groups)
    ]


def _words(chance: random.Random, count: int) -> str:
    return " ".join(f"w{chance.randrange(100, _WORDS)}" for _ in range(count))


@contextmanager
def _checkpoint(shape: Shape, dtype: torch.dtype) -> Iterator[Path]:
    """Random weights of a real shape, and a tokenizer of words with a chat template."""
    stem, config = SHAPES[shape.model]
    ending = "ForSequenceClassification" if shape.kind == "rerank" else "ForCausalLM"
    extra = {"num_labels": 1} if shape.kind == "rerank" else {}
    with TemporaryDirectory(prefix="bytetx-bench-") as name:
        folder = Path(name)
        save_random_model(folder, stem, ending, {**config, **extra, "pad_token_id": 0}, dtype=dtype)
        _save_tokenizer(folder)
        yield folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<unk>", "user", "end", "assistant", "Answer", "Yes", "No", "or", "only", "."]
    words += [f"w{i}" for i in range(_WORDS - len(words))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _measure_pipeline(
    shape: Shape, folder: Path, dtype: torch.dtype, device: str, model: Model
) -> tuple[float, float]:
    """Seconds of transformers' pipeline for its share, and the largest difference to ours."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    requests = _requests(shape)[: shape.pipeline]
    with quiet():
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False
        )
        theirs.to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
        ask = pipeline("decision", model=theirs, tokenizer=tokenizer, device=device)
        ask(requests[:1])
        began = time.perf_counter()
        answers = ask(requests)
        seconds = time.perf_counter() - began
    if parallelism is None:  # pipelines end the parallel work of tokenizers in the whole process
        os.environ.pop("TOKENIZERS_PARALLELISM", None)
    return seconds, _difference(answers, model.decide(requests))


def _difference(theirs: Sequence[Any], ours: Sequence[Any]) -> float:
    return max(
        abs(float(answer["noul"]) - float(own[name]["noul"]))
        for found, own in zip(theirs, ours, strict=True)
        for name, answer in found.items()
    )
