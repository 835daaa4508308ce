"""The decision head of a checkpoint: config.json of JEV describes one, and files beside a trunk.

Two layouts of files make a head of any trunk: decision_config.json with readout.safetensors, one
code for each option, and judge_config.json with head.safetensors and calibration.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bytetx.checkpoint.decision_files import DECISION_FILE, DECISION_TEMPLATE, DIVISOR, KINDS
from bytetx.checkpoint.decision_prompts import CODES_PROMPTS, JEV_PROMPT
from bytetx.checkpoint.side_files import (
    PATH,
    TABLE,
    TEXT,
    Field,
    check_fields,
    integer,
    list_of,
    number,
    one_of,
    read_json,
    table_of,
)
from bytetx.errors import CheckpointError

CODES_FILE, JUDGE_FILE = "decision_config.json", "judge_config.json"
CALIBRATION_FILE = "calibration.json"
# Every JSON file that says how a checkpoint decides.
DECISION_FILES = (DECISION_FILE, CODES_FILE, JUDGE_FILE, CALIBRATION_FILE)
_MAX_SCORES = 1 << 16
_NONCAUSAL = "noncausal_full_attention"

_JEV = {
    "num_verbalizers": integer(1, _MAX_SCORES),
    "offsets": table_of(integer(0)),
    "softcap": number(0),
    "text_config": TABLE,
}
_JEV_OFFSETS = {"noul": 0, "score": 2, "choice": 8}

_CODES = {
    "codes": Field(
        f"a list of 1 to {_MAX_SCORES} texts",
        lambda v: list_of(TEXT).accepts(v) and 0 < len(v) <= _MAX_SCORES,
    ),
    "temperature": DIVISOR,
    "prompt": TEXT,
    "prompt_layout": TEXT,
    "attention_mode": one_of("causal", _NONCAUSAL),
    "pooling": one_of("last"),
}
_JUDGE = {"slots": TABLE, "softcap": number(0), "adapter_subfolder": PATH}
_RANGE = Field(
    "[first, last + 1]",
    lambda v: (
        isinstance(v, list)
        and len(v) == 2
        and all(type(end) is int for end in v)
        and 0 <= v[0] < v[1] <= _MAX_SCORES
    ),
)
_SLOTS = {
    "num_slots": integer(1, _MAX_SCORES),
    "verbalizers": list_of(TEXT),
    "ranges": table_of(_RANGE),
    "template_version": one_of("bare-v1"),
}


@dataclass(frozen=True, slots=True)
class DecisionHeadSpec:
    """Rows of one matrix score the options of a question, from a row for its type on.

    num_verbalizers: scores of a row.  offsets: by the type of a question, that of its first
    option.  softcap: scores x become softcap * tanh(x / softcap); 0: they stay.
    file: the name, without .safetensors, of the file beside the trunk that holds the matrix; None:
    it is among the model's tensors.
    settings: fields of DecisionConfig that its questions are asked by.
    is_bidirectional: every token of a prompt sees all of it; None: as the trunk's config says.
    """

    num_verbalizers: int
    offsets: Mapping[str, int]
    softcap: float = 0.0
    file: str | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    is_bidirectional: bool | None = None


def read_decision_head(folder: Path, config: Mapping[str, Any]) -> DecisionHeadSpec | None:
    """The decision head of a checkpoint, by its config.json or the files beside it; None: it has
    none. Raises CheckpointError."""
    if config.get("model_type") == "jev":
        return _jev_head(config)
    codes = folder / CODES_FILE
    given = read_json(codes, _CODES) if codes.is_file() else {}
    if given.get("codes") is not None:
        return _codes_head(codes, given)
    if (folder / "readout.safetensors").is_file():
        raise CheckpointError(
            f"{folder / 'readout.safetensors'} is a decision head, and {CODES_FILE} beside it does "
            "not name its codes; download both again"
        )
    return _judge_head(folder, config) if (folder / JUDGE_FILE).is_file() else None


def trunk_config(config: Mapping[str, Any], head: DecisionHeadSpec | None) -> Mapping[str, Any]:
    """The config of the model that a decision head reads; of a model without one, its own."""
    if head is None:
        return config
    if head.file is None:
        inner = config.get("text_config")
        if not inner:
            raise CheckpointError("config.json: text_config must be the config of JEV's own model")
        kept = {key: config[key] for key in ("architectures",) if key in config}
        return {**inner, **kept}
    if head.is_bidirectional is None:
        return config
    changed = {**config, "is_causal": not head.is_bidirectional}
    if isinstance(inner := config.get("text_config"), Mapping):  # with the models of other inputs
        changed["text_config"] = {**inner, "is_causal": not head.is_bidirectional}
    return changed


def check_mask(head: DecisionHeadSpec | None, *, family: str, is_causal: bool) -> None:
    """Raises CheckpointError where the trunk's attention is not that of its decision head."""
    if head is not None and head.is_bidirectional and is_causal:
        raise CheckpointError(
            f"{CODES_FILE}: attention_mode is {_NONCAUSAL}, which bytetx does not run in {family}"
        )


def _jev_head(config: Mapping[str, Any]) -> DecisionHeadSpec:
    check_fields("config.json", config, _JEV)
    count = config.get("num_verbalizers") or 24
    offsets = config.get("offsets") or _JEV_OFFSETS
    if any(offsets.get(kind) is None or offsets[kind] >= count for kind in KINDS):
        raise CheckpointError(
            f"config.json: offsets must name a row below num_verbalizers ({count}) for each of "
            f"{', '.join(KINDS)}, got {offsets!r:.120}"
        )
    return DecisionHeadSpec(count, offsets, float(config.get("softcap") or 0.0))


def _codes_head(path: Path, given: Mapping[str, Any]) -> DecisionHeadSpec:
    """The head of decision_config.json: each option has a code, and questions of all types begin
    with the first."""
    codes, name = given["codes"], given.get("prompt") or "pplx"
    prompt = CODES_PROMPTS.get(name)
    if given.get("prompt_layout") is not None:
        name, prompt = f"of prompt_layout {given['prompt_layout']}", None
    if prompt is None and not (path.parent / DECISION_TEMPLATE).is_file():
        raise CheckpointError(
            f"{path}: the prompt {name!s:.80} is not known, only {', '.join(CODES_PROMPTS)}; write "
            f"it into {DECISION_TEMPLATE}"
        )
    settings = {
        "labels": dict.fromkeys(KINDS, codes),
        "temperature": dict.fromkeys(KINDS, given.get("temperature") or 1.0),
        "chat_template": prompt,
        "noul_options": ["false", "true"],
    }
    return DecisionHeadSpec(
        len(codes),
        dict.fromkeys(KINDS, 0),
        file="readout",
        settings=settings,
        is_bidirectional=given.get("attention_mode") == _NONCAUSAL,
    )


def _judge_head(folder: Path, config: Mapping[str, Any]) -> DecisionHeadSpec:
    """The head of judge_config.json: each type of question has slots of its own."""
    path = folder / JUDGE_FILE
    given = read_json(path, _JUDGE)
    slots = given.get("slots") or {}
    check_fields(f"{path}: slots", slots, _SLOTS)
    count, names = slots.get("num_slots") or 0, slots.get("verbalizers") or []
    ranges: dict[str, Any] = {kind: (slots.get("ranges") or {}).get(kind) for kind in KINDS}
    if any(own is None or own[1] > min(count, len(names)) for own in ranges.values()):
        raise CheckpointError(
            f"{path}: slots.ranges must name slots below num_slots ({count}), each with one of the "
            f"{len(names)} verbalizers, for each of {', '.join(KINDS)}, got {ranges!r:.120}"
        )
    calibration = folder / CALIBRATION_FILE
    temperatures = read_json(calibration, {"per_kind": table_of(DIVISOR)}).get("per_kind")
    if temperatures is None:
        raise CheckpointError(f"{calibration}: per_kind must be a table of temperatures by type")
    adapter = given.get("adapter_subfolder", "adapter")
    if adapter is not None and not (folder / adapter / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path}: its LoRA is in the subfolder {adapter!r:.120}, which has no "
            "adapter_config.json; download it, or write null where the weights have it merged"
        )
    settings = {
        "labels": {kind: names[start:end] for kind, (start, end) in ranges.items()},
        "temperature": {kind: value for kind, value in temperatures.items() if value},
        # Gemma reads every prompt behind its first token.
        "chat_template": ("<bos>" if "gemma" in str(config.get("model_type")) else "") + JEV_PROMPT,
        "noul_options": ["false", "true"],
        "adapter": adapter,
    }
    return DecisionHeadSpec(
        count,
        {kind: start for kind, (start, _) in ranges.items()},
        float(given.get("softcap") or 0.0),
        file="head",
        settings=settings,
    )
