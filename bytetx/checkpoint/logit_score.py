"""sentence-transformers' LogitScore: a causal model that scores pairs by the logits of one or two
tokens, and how a pair becomes its prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytetx.checkpoint.sentence_files import Schema, TransformerSettings
from bytetx.checkpoint.side_files import FLAG, check_fields, integer
from bytetx.errors import CheckpointError

_MODULE = Schema(
    used={"true_token_id": integer(0), "false_token_id": integer(0)},
    plain={"module_input_name": ("causal_logits",)},
)
_CHAT = {"restore_suffix": FLAG}
# Options of tokenizers among those of templates; pads are never computed here.
_OF_PADS = {"padding", "padding_side", "pad_to_multiple_of", "return_tensors"}
_OF_SIZES = {"truncation", "max_length"}


@dataclass(frozen=True, slots=True)
class LogitScoreSpec:
    """The score of a pair: logit(true_token_id) - logit(false_token_id) of the next token.

    false_token_id: None, the first logit alone.
    message_format: how the chat template gets a message's text: "flat", as text, or "structured",
    as a list of one part.  None: no chat, the tokenizer's own form of a pair.
    variables: of the template, beside the messages.  restores_suffix: a prompt that is cut keeps
    the template's last tokens.
    """

    true_token_id: int
    false_token_id: int | None = None
    message_format: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    restores_suffix: bool = True


def read_logit_score(
    module: Path, transformer: Path, settings: TransformerSettings
) -> LogitScoreSpec:
    """module: LogitScore's folder.  transformer: that of the Transformer module before it, with
    its settings.

    Raises CheckpointError for damaged files and for options that are not known.
    """
    config = _MODULE.read(module / "config.json")
    if "true_token_id" not in config:
        raise CheckpointError(f"{module / 'config.json'} lacks true_token_id")
    path, message_format = transformer / "sentence_bert_config.json", None
    if settings.chat is not None:
        message_format = settings.chat.get("format") or "structured"
        if message_format == "auto":
            raise CheckpointError(
                f"{path}: modality_config: message: format must be flat or structured, got 'auto'"
            )
    variables = dict(settings.variables)
    check_fields(path, variables, _CHAT)
    if sizes := sorted(_OF_SIZES & variables.keys()):
        raise CheckpointError(
            f"{path}: processing_kwargs.chat_template sets {', '.join(sizes)}, which bytetx does "
            "not take from there; write max_seq_length"
        )
    restores_suffix = variables.pop("restore_suffix", None) is not False
    return LogitScoreSpec(
        config["true_token_id"],
        config.get("false_token_id"),
        message_format,
        {key: value for key, value in variables.items() if key not in _OF_PADS},
        restores_suffix,
    )
