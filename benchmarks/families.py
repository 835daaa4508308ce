"""Suite `families`: encoders of many families at published sizes, against transformers' classes.

Models have random weights, four to six layers and a small vocabulary: each layer's time is what a
published model's takes. A whole pass runs from packed token ids to hidden states.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.flash_attn import flash_attn_package
from benchmarks.gpu import DTYPES, Gpu, cpu_suite, gpu_suite, left_out, wall_us_in_turn
from benchmarks.lengths import Lengths
from benchmarks.rivals import BATCH_SIZE, quiet
from benchmarks.suite import Measurement, Suite, measured
from benchmarks.whole_models import TokenInputs, padded_run
from bytetx.nn.loading import load_checkpoint

_ROUNDS = 5
_GPU_TEXTS, _CPU_TEXTS, _CPU_BATCH_SIZE = 256, 32, 8
_VOCAB_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Family:
    """transformers' class and the sizes of a published model.

    is_packed: whether the class takes packed tokens with FlashAttention-2.
    """

    name: str
    config: str
    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    is_packed: bool = False


def _pattern(*kinds: str) -> list[str]:
    return [
        f"{kind}_attention" if kind in ("full", "sliding", "linear") else kind for kind in kinds
    ]


_LIQUID = _pattern("conv", "conv", "full", "conv", "conv", "full")
FAMILIES = (
    Family(
        "embeddinggemma-2",
        "EmbeddingGemma2TextConfig",
        "EmbeddingGemma2TextModel",
        {"num_hidden_layers": 6, "layer_types": _pattern(*["sliding"] * 5, "full")},
    ),
    Family(
        "neomme",
        "NeoMMEConfig",
        "NeoMMEModel",
        {"num_hidden_layers": 6, "layer_types": _pattern(*["sliding"] * 5, "full")},
    ),
    Family(
        "privacy-filter",
        "OpenAIPrivacyFilterConfig",
        "OpenAIPrivacyFilterModel",
        {"num_hidden_layers": 4},
    ),
    Family(
        "ministral3-bidirectional",
        "Ministral3Config",
        "Ministral3Model",
        {
            "hidden_size": 3072,
            "intermediate_size": 9216,
            "num_hidden_layers": 4,
            "is_causal": False,
        },
        is_packed=True,
    ),
    Family(
        "qwen3-bidirectional-0.6b",
        "Qwen3Config",
        "Qwen3Model",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_hidden_layers": 6,
            "is_causal": False,
        },
        is_packed=True,
    ),
    Family(
        "lfm2-350m",
        "Lfm2Config",
        "Lfm2Model",
        {
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_hidden_layers": 6,
            "layer_types": _LIQUID,
        },
    ),
    Family(
        "qwen3.5-0.8b",
        "Qwen3_5TextConfig",
        "Qwen3_5TextModel",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "num_hidden_layers": 4,
            "layer_types": _pattern("linear", "linear", "linear", "full"),
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: texts with lengths around 128 tokens, in the order of their arrival."""

    family: Family
    num_texts: int
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.family.name}-ln128x{self.num_texts}"


def suite(*, patterns: list[str], device: str = "cuda") -> Suite:
    options: dict[str, Any] = {
        "patterns": patterns,
        "unit": "ms",
        "packages": ("transformers",),
    }
    if device == "cpu":
        shapes = [Shape(family, _CPU_TEXTS, "fp32") for family in FAMILIES]
        return cpu_suite("families", shapes, lambda s: _measure(s, "cpu"), **options)
    shapes = [Shape(family, _GPU_TEXTS, "bf16") for family in FAMILIES]
    return gpu_suite("families", shapes, _measure_gpu, **options)


def _measure_gpu(shape: Shape, gpu: Gpu) -> Measurement:
    return _measure(shape, "cuda")


@torch.inference_mode()
def _measure(shape: Shape, device: str) -> Measurement:
    dtype = {"fp32": torch.float32, **DTYPES}[shape.dtype]
    notes: list[str] = []
    theirs = _random_model(shape.family, dtype, device)
    with TemporaryDirectory(prefix="bytetx-bench-") as folder:
        theirs.save_pretrained(folder)
        loaded = load_checkpoint(Path(folder), device=device, dtype=dtype)
    lengths = Lengths().lognormal(128, 0.8, shape.num_texts, 4, 512)
    inputs = TokenInputs(lengths, vocab_size=_VOCAB_SIZE, device=device)
    size = _CPU_BATCH_SIZE if device == "cpu" else BATCH_SIZE
    runs: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: loaded.transformer.forward(inputs.batch),
        "transformers": padded_run(theirs, inputs, batch_size=size),
        "transformers-sorted": _sorted_run(theirs, inputs, size),
    }
    if shape.family.is_packed and device != "cpu":
        runs |= _packed(shape.family, theirs, inputs, dtype, notes)
    found = wall_us_in_turn(runs, rounds=_ROUNDS)
    sizes = {
        "sequences": shape.num_texts,
        "tokens": int(lengths.sum()),
        "layers": loaded.spec.num_layers,
        "rounds": _ROUNDS,
    }
    return measured(found, None, sizes, notes, per=1e3)


def _random_model(family: Family, dtype: torch.dtype, device: str, **config: object) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": _VOCAB_SIZE, "pad_token_id": 0} | family.sizes | config
    with quiet(), torch.device(device):
        made: Any = getattr(transformers, family.model)(
            getattr(transformers, family.config)(**sizes)
        )
        return made.to(dtype).eval()


def _sorted_run(model: Any, inputs: TokenInputs, size: int) -> Callable[[], Tensor]:
    """The same over texts that are sorted by length first, which pads less."""
    order = inputs.lengths.argsort()
    return padded_run(model, inputs.taken(order), batch_size=size)


def _packed(
    family: Family, padded: Any, inputs: TokenInputs, dtype: torch.dtype, notes: list[str]
) -> dict[str, Callable[[], Tensor]]:
    name = "transformers-fa2-packed"
    try:
        with flash_attn_package():
            model = _random_model(family, dtype, "cuda", attn_implementation="flash_attention_2")
        model.load_state_dict(padded.state_dict())

        def run() -> Tensor:
            out = model(input_ids=inputs.packed_ids, position_ids=inputs.position_ids)
            return cast(Tensor, out.last_hidden_state[0])

        run()
    except Exception as error:  # a rival may raise anything, and costs no other number
        notes.append(left_out(name, error))
        return {}
    return {name: run}
