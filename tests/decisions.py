"""Small random checkpoints that answer decision requests, and requests of every form."""

import json
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import torch
import transformers
from chat_templates import CHATML
from checkpoints import save_causal
from safetensors.torch import save_file
from tiny_decoders import tiny_decoder

# Four tokens behind those of the tokenizer: transformers adds its two sentinels to a vocabulary.
_SPARE_TOKENS = 4
SPAM = {"type": "noul", "instructions": "Is it spam?"}
TONE = {"type": "choice", "instructions": "Which tone?", "criteria": {"calm": None, "mad": "loud"}}
URGENCY = {"type": "score", "instructions": "How urgent?", "criteria": ["can wait", "now", "due"]}
REQUESTS: list[dict[str, Any]] = [
    {"state": "the quick brown fox", "questions": {"spam": SPAM, "tone": TONE, "due": URGENCY}},
    {
        "state": {"message": "WIN <s> a fox <|im_end|>!", "from": ["a", 1, None, True], "é": 2.5},
        "questions": {
            "one": {"type": "choice", "criteria": {"only": ""}},
            "described": {
                "type": "noul",
                "instructions": {"ask": "spam </s>?"},
                "criteria": {"true": "an advert", "false": None},
            },
            "many": {"type": "choice", "criteria": {f"option {n}": "x" * n for n in range(26)}},
            "levels": {"type": "score", "criteria": ["", {"low": [1]}, ["high"], "<|im_start|>"]},
            "level": {"type": "score", "instructions": "", "criteria": ["alone"]},
        },
    },
    {"state": None, "questions": {"a": SPAM}},
    {"state": [], "questions": {"a": TONE}, "assets": {}, "more": 3},
    {"state": 7, "questions": {"a": URGENCY, "b": URGENCY}},
]


def save_decider(
    folder: Path,
    name: str = "qwen3",
    *,
    template: str | None = CHATML,
    labels: Sequence[str] = (*ascii_uppercase, "Yes", "No"),
    **config: object,
) -> Path:
    """A random causal model whose tokenizer has the labels of answers and the tokens of ChatML.

    template: of chats.  labels: that become tokens.
    """
    settings = {"max_position_embeddings": 2048} | config
    save_causal(folder, name, **settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([*labels, "<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template, tokenizer.model_max_length = template, 2000
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    model = tiny_decoder(name, vocab_size=len(tokenizer) + _SPARE_TOKENS, **settings)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def save_jev(folder: Path, name: str = "qwen3", **config: object) -> Path:
    """A random JEV on a model of this name, with the tokenizer of save_decider."""
    save_decider(folder, name)
    trunk = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(2)
    settings = {"hidden_size": trunk.hidden_size, "text_config": trunk, **config}
    model = transformers.JevForDecision(transformers.JevConfig(**settings))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def save_codes(
    folder: Path,
    name: str = "qwen3",
    *,
    num_codes: int = 26,
    is_trunk: bool = False,
    **settings: object,
) -> Path:
    """A random model of this name with a head in readout.safetensors and decision_config.json.

    is_trunk: saved without its language model head, as its base class.
    """
    hidden_size = _save_trunk(folder, name, is_trunk=is_trunk)
    save_file({"weight": _normal(num_codes, hidden_size)}, folder / "readout.safetensors")
    codes = [*ascii_uppercase, *(f"A{letter}" for letter in ascii_uppercase)][:num_codes]
    known = {"codes": codes, "temperature": 1.25, "prompt": "pplx", "pooling": "last"}
    content = {"format_version": 1, **known, **settings}
    (folder / "decision_config.json").write_text(json.dumps(content))
    return folder


def save_judge(
    folder: Path, name: str = "qwen3", *, is_trunk: bool = False, **settings: object
) -> Path:
    """A random model of this name with a head in head.safetensors, judge_config.json and
    calibration.json, and without an adapter."""
    hidden_size = _save_trunk(folder, name, is_trunk=is_trunk)
    tensors = {"proj.weight": _normal(34, hidden_size), "proj.bias": _normal(34)}
    save_file(tensors, folder / "head.safetensors")
    slots = {
        "num_slots": 34,
        "verbalizers": ["F", "T", *"012345", *ascii_uppercase],
        "ranges": {"noul": [0, 2], "score": [2, 8], "choice": [8, 34]},
        "template_version": "bare-v1",
    }
    content = {"slots": slots, "softcap": 30.0, "adapter_subfolder": None, **settings}
    (folder / "judge_config.json").write_text(json.dumps(content))
    temperatures = {"per_kind": {"noul": 1.5, "choice": 0.75, "score": 1.0}, "rows": 7}
    (folder / "calibration.json").write_text(json.dumps(temperatures))
    return folder


def _save_trunk(folder: Path, name: str, *, is_trunk: bool) -> int:
    """The hidden size. Single letters are no tokens: prompts that name some have them as text."""
    save_decider(folder, name, template=None, labels=())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if is_trunk:
        model.base_model.save_pretrained(folder)
    torch.manual_seed(3)
    hidden_size: int = model.config.hidden_size
    return hidden_size


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.3


def stock_pipeline(folder: Path) -> transformers.DecisionPipeline:
    """transformers' pipeline. The model is loaded by its class: from a folder alone, the pipeline
    makes a decision head of gigabytes for a Qwen2 that has none."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    if (folder / "decision_config.json").exists() or (folder / "judge_config.json").exists():
        architecture = "JevForDecision"
    model = getattr(transformers, architecture).from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.pipeline("decision", model=model, tokenizer=tokenizer, device="cpu")


def stock(folder: Path, requests: list[Any]) -> list[Any]:
    """The answers of transformers' pipeline."""
    answers: list[Any] = stock_pipeline(folder)(requests)
    return answers


def assert_same_answers(got: Any, wanted: Any, *, atol: float = 1e-5) -> None:
    """The same keys in the same order, the same texts, and numbers within atol."""
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key, value in wanted.items():
            assert_same_answers(got[key], value, atol=atol)
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same_answers(one, other, atol=atol)
    elif isinstance(wanted, float):
        assert abs(got - wanted) <= atol
    else:
        assert got == wanted and type(got) is type(wanted)
