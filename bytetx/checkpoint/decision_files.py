"""decision.json and decision_template.jinja: how a checkpoint asks questions and scores answers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any

from bytetx.checkpoint.chat_template import ChatTemplate
from bytetx.checkpoint.side_files import (
    FLAG,
    PATH,
    TABLE,
    TEXT,
    Field,
    check_fields,
    integer,
    list_of,
    number,
    read_fields,
    read_text,
    table_of,
)
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.checkpoint.tokenizer_config import read_special_tokens
from bytetx.errors import CheckpointError

DECISION_FILE, DECISION_TEMPLATE = "decision.json", "decision_template.jinja"
KINDS = ("noul", "choice", "score")

_DIVISOR = Field(
    "a number above 0",
    lambda v: type(v) in (int, float) and v > 0 and math.isfinite(v) and v <= 1e38,
)
_FIELDS = {
    "labels": table_of(list_of(TEXT)),
    "temperature": table_of(_DIVISOR),
    "chat_template": TEXT,
    "noul_options": Field(
        '["true", "false"] in either order', lambda v: v in (["true", "false"], ["false", "true"])
    ),
    "sanitize_control_tokens": FLAG,
    "adapter": PATH,
}


@dataclass(frozen=True, slots=True)
class DecisionConfig:
    """How questions become prompts, and scores become probabilities.

    labels: by the type of a question, the token that stands for each option.
    temperature: by the type of a question; its scores are divided by it, by 1 where there is none.
    chat_template: the source of a template that writes whole prompts; None is the default prompt.
    noul_options: the order in which a template gets the two options of a noul question.
    sanitize_control_tokens: control tokens in requests are plain text.
    adapter: the subfolder of a LoRA adapter.
    """

    labels: Mapping[str, Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
    temperature: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    chat_template: str | None = None
    noul_options: Sequence[str] = ("true", "false")
    sanitize_control_tokens: bool = True
    adapter: str | None = None

    def labels_of(self, kind: str) -> Sequence[str]:
        """All labels of a type of question, as many as it may have options."""
        own = self.labels.get(kind)
        if own:
            return own
        return ("Yes", "No") if kind == "noul" else tuple(ascii_uppercase)

    def temperature_of(self, kind: str) -> float:
        """The divisor of the scores of a type of question."""
        return float(self.temperature.get(kind) or 1.0)

    def label_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The token of each label that is one token."""
        labels = list(dict.fromkeys(label for kind in KINDS for label in self.labels_of(kind)))
        found = zip(labels, tokenizer.encode_all_plain(labels), strict=True)
        known = {label: ids[0] for label, ids in found if len(ids) == 1}
        return {label: own for label, own in known.items() if own != tokenizer.unk_token_id}

    def template(self, folder: Path) -> ChatTemplate | None:
        """The template, ready to render; None where the default prompt is used.

        folder: of the checkpoint, whose special tokens templates may name.
        """
        if self.chat_template is None:
            return None
        tokens = read_special_tokens(folder)
        name = str(folder / DECISION_TEMPLATE)
        return ChatTemplate(self.chat_template, special_tokens=tokens, name=name)

    def save(self, folder: Path) -> None:
        """Writes both files into an existing folder; the template only where there is one."""
        content = asdict(self) | {"labels": dict(self.labels), "noul_options": [*self.noul_options]}
        content["labels"] = {kind: [*own] for kind, own in self.labels.items()}
        content["temperature"] = dict(self.temperature)
        source = content.pop("chat_template")
        if source is not None:
            (folder / DECISION_TEMPLATE).write_text(source, encoding="utf-8")
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / DECISION_FILE).write_text(f"{text}\n", encoding="utf-8")


def read_decision_config(folder: Path) -> DecisionConfig:
    """The decision files of a checkpoint's folder; the defaults where it has none.

    Raises CheckpointError where a file is damaged or a value is not what its key takes.
    """
    given = read_fields(folder / DECISION_FILE, _FIELDS, may_be_absent=True)
    path = folder / DECISION_TEMPLATE
    if path.is_file():
        given["chat_template"] = read_text(path)
    for key in ("labels", "temperature"):
        known = given.get(key, {}).items()
        given[key] = {kind: value for kind, value in known if value is not None}
    return DecisionConfig(**given)


# JEV's head: rows of one matrix score the options of a question, from a row for its type on.
_JEV_HEAD = {
    "num_verbalizers": integer(1, 1 << 16),
    "offsets": table_of(integer(0)),
    "softcap": number(0),
    "text_config": TABLE,
}
_JEV_OFFSETS = {"noul": 0, "score": 2, "choice": 8}


@dataclass(frozen=True, slots=True)
class DecisionHeadSpec:
    """num_verbalizers: scores of a row.  offsets: by the type of a question, that of its first
    option.  softcap: scores x become softcap * tanh(x / softcap); 0: they stay."""

    num_verbalizers: int
    offsets: Mapping[str, int]
    softcap: float


def read_decision_head(config: Mapping[str, Any]) -> DecisionHeadSpec | None:
    """The head of a config.json of model_type jev; None of another one. Raises CheckpointError."""
    if config.get("model_type") != "jev":
        return None
    check_fields("config.json", config, _JEV_HEAD)
    count = config.get("num_verbalizers") or 24
    offsets = config.get("offsets") or _JEV_OFFSETS
    if any(offsets.get(kind) is None or offsets[kind] >= count for kind in KINDS):
        raise CheckpointError(
            f"config.json: offsets must name a row below num_verbalizers ({count}) for each of "
            f"{', '.join(KINDS)}, got {offsets!r:.120}"
        )
    return DecisionHeadSpec(count, offsets, float(config.get("softcap") or 0.0))


def trunk_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the model that a decision head reads; of a model without one, its own."""
    if read_decision_head(config) is None:
        return config
    inner = config.get("text_config")
    if not inner:
        raise CheckpointError("config.json: text_config must be the config of JEV's own model")
    kept = {key: config[key] for key in ("architectures",) if key in config}
    return {**inner, **kept}
