"""decision.json and decision_template.jinja: how a checkpoint asks questions and scores answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any

from bytetx.checkpoint.chat_template import ChatTemplate
from bytetx.checkpoint.side_files import (
    FLAG,
    PATH,
    TEXT,
    Field,
    list_of,
    read_fields,
    read_text,
    table_of,
)
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.checkpoint.tokenizer_config import read_special_tokens

DECISION_FILE, DECISION_TEMPLATE = "decision.json", "decision_template.jinja"
KINDS = ("noul", "choice", "score")

DIVISOR = Field(
    "a number above 0",
    lambda v: type(v) in (int, float) and v > 0 and math.isfinite(v) and v <= 1e38,
)
_FIELDS = {
    "labels": table_of(list_of(TEXT)),
    "temperature": table_of(DIVISOR),
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


def read_decision_config(
    folder: Path, defaults: Mapping[str, Any] = MappingProxyType({})
) -> DecisionConfig:
    """The decision files of a checkpoint's folder; the defaults where it has none.

    defaults: fields of DecisionConfig that the files need not name; labels and temperatures count
    by the type of a question.
    Raises CheckpointError where a file is damaged or a value is not what its key takes.
    """
    given = read_fields(folder / DECISION_FILE, _FIELDS, may_be_absent=True)
    path = folder / DECISION_TEMPLATE
    if path.is_file():
        given["chat_template"] = read_text(path)
    for key in ("labels", "temperature"):
        known = given.get(key, {}).items()
        own = {kind: value for kind, value in known if value is not None}
        given[key] = {**defaults.get(key, {}), **own}
    return DecisionConfig(**{**defaults, **given})
