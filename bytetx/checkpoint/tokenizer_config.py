"""tokenizer_config.json and special_tokens_map.json: what bytetx reads of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytetx.checkpoint.side_files import (
    FLAG,
    TABLE,
    TEXT,
    Field,
    either,
    list_of,
    number,
    one_of,
    read_fields,
)

SPECIAL_TOKENS = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def _is_added_token(value: Any) -> bool:
    return isinstance(value, dict) and TEXT.accepts(value.get("content"))


def _is_named_template(value: Any) -> bool:
    return isinstance(value, dict) and all(
        TEXT.accepts(value.get(key)) for key in ("name", "template")
    )


_TOKEN = either(TEXT, Field('{"content": text}', _is_added_token))
_TOKEN_FIELDS = dict.fromkeys(SPECIAL_TOKENS, _TOKEN)
_FIELDS = _TOKEN_FIELDS | {
    "add_bos_token": FLAG,
    "add_eos_token": FLAG,
    "auto_map": either(TABLE, list_of(TEXT)),
    "chat_template": either(
        TEXT, list_of(Field('{"name": text, "template": text}', _is_named_template))
    ),
    "clean_up_tokenization_spaces": FLAG,
    "model_input_names": list_of(TEXT),
    "model_max_length": number(1),  # transformers writes 1e30 for "none"
    "tokenizer_class": TEXT,
    "truncation_side": one_of("left", "right"),
}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The keys that are used, tokenizer_config.json's over special_tokens_map.json's.

    Either file may be missing, and a key that is null counts as absent. Raises CheckpointError
    where a file is damaged or a value is not what its key takes.
    """
    files = {"special_tokens_map.json": _TOKEN_FIELDS, "tokenizer_config.json": _FIELDS}
    found: dict[str, Any] = {}
    for name, fields in files.items():
        found |= read_fields(folder / name, fields, may_be_absent=True)
    return found


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token such as "pad_token"; None where the config names none."""
    token = config.get(name)
    return token["content"] if isinstance(token, Mapping) else token
