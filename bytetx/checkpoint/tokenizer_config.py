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
    read_json,
    table_of,
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
_TOKEN_FIELDS = dict.fromkeys(SPECIAL_TOKENS, _TOKEN) | {
    "additional_special_tokens": list_of(_TOKEN),
    "extra_special_tokens": either(list_of(_TOKEN), table_of(_TOKEN)),
}
_FIELDS = _TOKEN_FIELDS | {
    "add_bos_token": FLAG,
    "add_eos_token": FLAG,
    "add_prefix_space": FLAG,
    "added_tokens_decoder": table_of(Field('{"content": text}', _is_added_token)),
    "auto_map": either(TABLE, list_of(TEXT)),
    "chat_control_tokens": list_of(TEXT),
    "chat_template": either(
        TEXT, list_of(Field('{"name": text, "template": text}', _is_named_template))
    ),
    "clean_up_tokenization_spaces": FLAG,
    "do_lower_case": FLAG,
    "keep_accents": FLAG,
    "legacy": FLAG,
    "model_input_names": list_of(TEXT),
    "model_max_length": number(1),  # transformers writes 1e30 for "none"
    "remove_space": FLAG,
    "split_by_punct": FLAG,
    "split_special_tokens": FLAG,
    "strip_accents": FLAG,
    "tokenize_chinese_chars": FLAG,
    "tokenizer_class": TEXT,
    "truncation_side": one_of("left", "right"),
}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The keys that are used, and tokens under names of the checkpoint's own.

    As in transformers, special_tokens_map.json is over tokenizer_config.json, unless that one has
    added_tokens_decoder: then the other file is of before, and not read.
    Either file may be missing, and a key that is null counts as absent. Raises CheckpointError
    where a file is damaged or a value is not what its key takes.
    """
    path, tokens = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    found = read_fields(path, _FIELDS, may_be_absent=True)
    if path.is_file():
        found |= _own_tokens(read_json(path))
    if "added_tokens_decoder" not in found and tokens.is_file():
        found |= read_fields(tokens, _TOKEN_FIELDS) | _own_tokens(read_json(tokens))
    return found


def _own_tokens(content: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens that transformers knows no name of: keys that end in _token, with a text."""
    return {
        key: value
        for key, value in content.items()
        if key.endswith("_token") and key not in SPECIAL_TOKENS and TEXT.accepts(value)
    }


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token such as "pad_token"; None where the config names none."""
    token: Any = config.get(name)
    text: str | None = token["content"] if isinstance(token, Mapping) else token
    return text


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Each special token by its name, with those that only this checkpoint has (image_token)."""
    config, path = read_tokenizer_config(folder), folder / "tokenizer_config.json"
    given = {**(read_json(path) if path.is_file() else {}), **config}
    given = {name: value for name, value in given.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    given |= extra if isinstance(extra, dict) else {}
    return {
        name: str(special_token(given, name))
        for name, value in given.items()
        if _TOKEN.accepts(value)
    }
