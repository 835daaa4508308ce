"""Suite `adapters`: texts of many LoRA adapters in one step, against peft and against none.

The model without adapters takes the time that one with a merged adapter takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import bytetx
from benchmarks.bert import SIZES
from benchmarks.causal import SHAPES, padded_generate, save_random_model
from benchmarks.gpu import DTYPES, Gpu, cpu_suite, gpu_suite, wall_us_in_turn
from benchmarks.lengths import Lengths
from benchmarks.rivals import BATCH_SIZE, mean_pooled, padded, quiet
from benchmarks.suite import Measurement, Suite, measured
from bytetx.model import Model
from bytetx.sampling_params import SamplingParams

_ROUNDS = 5
_RANK = 16
_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("Bert", SIZES["base"]),
    "minilm-l6": (
        "Bert",
        {
            "hidden_size": 384,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "intermediate_size": 1536,
        },
    ),
}
# What an adapter changes: queries and values, which is peft's default, or every linear layer.
_TARGETS = {
    ("Bert", "qv"): ["query", "value"],
    ("Bert", "all"): ["query", "key", "value", "dense"],
    ("Qwen3", "qv"): ["q_proj", "v_proj"],
    ("Qwen3", "all"): [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One case. The texts have the adapters in turn.

    tokens: that each prompt generates; 0: the texts are embedded, of lengths around 128 tokens.
    """

    model: str
    targets: str
    num_adapters: int
    num_texts: int
    tokens: int = 0
    dtype: str = "fp16"

    @property
    def name(self) -> str:
        load = f"{self.num_texts}x{self.tokens}" if self.tokens else f"ln128x{self.num_texts}"
        return f"{self.model}-{load}-{self.targets}-{self.num_adapters}"


_GPU_SHAPES = [
    *(Shape("bert-base", "qv", count, 256) for count in (1, 16, 100)),
    *(Shape("bert-base", "all", count, 256) for count in (16, 100)),
    Shape("qwen3-0.6b", "qv", 16, 64, 64, "bf16"),
    Shape("qwen3-0.6b", "all", 16, 64, 64, "bf16"),
]
_CPU_SHAPES = [Shape("minilm-l6", targets, 16, 64, dtype="fp32") for targets in ("qv", "all")]


def suite(*, patterns: list[str], device: str = "cuda") -> Suite:
    options: dict[str, Any] = {
        "patterns": patterns,
        "unit": "ms",
        "packages": ("transformers", "peft"),
    }
    if device == "cpu":
        return cpu_suite("adapters", _CPU_SHAPES, lambda s: _measure(s, "cpu"), **options)
    return gpu_suite("adapters", _GPU_SHAPES, _measure_gpu, **options)


def _measure_gpu(shape: Shape, gpu: Gpu) -> Measurement:
    return _measure(shape, "cuda")


def _measure(shape: Shape, device: str) -> Measurement:
    """Milliseconds from token ids to vectors, or to the last token, the host's work included."""
    dtype = {"fp32": torch.float32, **DTYPES}[shape.dtype]
    with _checkpoint(shape, dtype) as folder:
        adapters = {one.name: one for one in sorted((folder / "adapters").iterdir())}
        model = bytetx.load(folder, device=device, dtype=dtype, adapters=adapters)
        texts = _texts(shape, model.spec.vocab_size)
        each = [f"a{i % shape.num_adapters}" for i in range(shape.num_texts)]
        theirs = _peft(shape, folder, adapters, texts, each, device, dtype)
        runs = {
            "ours": lambda: _run(shape, model, texts, each),
            "without adapters": lambda: _run(shape, model, texts, None),
            "peft": theirs,
        }
        found = wall_us_in_turn(runs, rounds=_ROUNDS)
    sizes = {
        "texts": shape.num_texts,
        "tokens": sum(map(len, texts)),
        "new_tokens": shape.tokens * shape.num_texts,
        "adapters": shape.num_adapters,
        "rank": _RANK,
    }
    return measured(found, None, sizes, per=1e3)


def _run(shape: Shape, model: Model, texts: list[list[int]], each: list[str] | None) -> object:
    if not shape.tokens:
        return model.embed(texts, adapter=each)
    params = SamplingParams(temperature=0, max_tokens=shape.tokens, ignore_eos=True)
    return model.generate(texts, params, adapter=each)


def _texts(shape: Shape, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = [32] * shape.num_texts
    if not shape.tokens:
        lengths = Lengths().lognormal(128, 0.8, shape.num_texts, 4, 512).tolist()
    return [rng.integers(10, vocab_size, length).tolist() for length in lengths]


@contextmanager
def _checkpoint(shape: Shape, dtype: torch.dtype) -> Iterator[Path]:
    """A random model, and its random adapters in folders below `adapters`."""
    import peft

    stem, config = _ENCODERS.get(shape.model) or SHAPES[shape.model]
    with TemporaryDirectory(prefix="bytetx-bench-") as name:
        folder = Path(name)
        ending = "ForCausalLM" if shape.tokens else "Model"
        save_random_model(folder, stem, ending, config, dtype=dtype)
        targets = _TARGETS[stem, shape.targets]
        with quiet():
            base = _auto_class(shape).from_pretrained(folder, trust_remote_code=False)
            model = peft.get_peft_model(base, peft.LoraConfig(r=_RANK, target_modules=targets))
            for i in range(shape.num_adapters):
                with torch.no_grad():
                    for key, parameter in model.named_parameters():
                        if "lora_" in key:
                            parameter.normal_(0, 0.02)
                model.save_pretrained(str(folder / "adapters" / f"a{i}"))
        yield folder


def _auto_class(shape: Shape) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM if shape.tokens else transformers.AutoModel


def _peft(
    shape: Shape,
    folder: Path,
    adapters: dict[str, Path],
    texts: list[list[int]],
    each: list[str],
    device: str,
    dtype: torch.dtype,
) -> Callable[[], object]:
    """The same texts padded, those of about one length together, by peft (adapter_names)."""
    import peft

    with quiet():
        base = _auto_class(shape).from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        (first, path), *others = adapters.items()
        model = peft.PeftModel.from_pretrained(base, path, adapter_name=first)
        for name, other in others:
            model.load_adapter(other, adapter_name=name)
        model.to(device).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    size = len(texts) if shape.tokens else BATCH_SIZE
    batches = [order[i : i + size] for i in range(0, len(order), size)]

    @torch.inference_mode()
    def run() -> object:
        if shape.tokens:
            return padded_generate(model, texts, shape.tokens, adapter_names=each)
        found = []
        for rows in batches:
            ids, mask = (t.to(device) for t in padded([texts[i] for i in rows]))
            names = [each[i] for i in rows]
            outputs = model(input_ids=ids, attention_mask=mask, adapter_names=names)
            found.append(mean_pooled(outputs.last_hidden_state, mask).cpu())
        return found

    return run
