"""A vocabulary without tokenizer.json -> a tokenizer, by transformers, which sees no other file.

transformers runs Python files of a checkpoint that its JSON files name, and asks for consent on
stdin, which may hold a job's texts. So it is given a folder with the vocabulary alone: there is
nothing in it that could name code, and nothing to ask about.
"""

import json
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import tokenizers

from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.side_files import MAX_TOKENIZER_BYTES, read_bytes, read_json
from bytetx.checkpoint.tokenizer_config import SPECIAL_TOKENS, read_tokenizer_config
from bytetx.checkpoint.tokenizer_files import VOCABULARIES, VOCABULARY_PARTS
from bytetx.errors import CheckpointError

# Keys of tokenizer_config.json that say how the vocabulary is used; none of them can name a file.
_KEYS = (
    *SPECIAL_TOKENS,
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "do_lower_case",
    "extra_special_tokens",
    "legacy",
    "strip_accents",
    "tokenize_chinese_chars",
    "tokenizer_class",
    "trim_offsets",
)


def has_vocabulary(folder: Path) -> bool:
    """Whether there are files that convert_vocabulary reads."""
    return any((folder / name).is_file() for name in VOCABULARIES)


def convert_vocabulary(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer that transformers makes of a folder's vocabulary.

    It is of the class that tokenizer_config.json names, else of that of the model's type.
    Raises CheckpointError where the tokenizer is code of the checkpoint's own, where transformers
    is missing, and where it cannot read the files.
    """
    config = _config(folder)
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json; converting its vocabulary needs transformers: "
            "pip install transformers"
        ) from error
    kind: str | None = config.get("tokenizer_class")
    if kind is not None and not _is_class_of(transformers, kind):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class {kind!r:.120} is none of "
            f"transformers {transformers.__version__}; give a checkpoint with tokenizer.json"
        )
    with tempfile.TemporaryDirectory(prefix="bytetx-") as name:
        lone = Path(name)
        for path in (folder / name for name in (*VOCABULARIES, *VOCABULARY_PARTS)):
            if path.is_file():
                (lone / path.name).write_bytes(read_bytes(path, max_bytes=MAX_TOKENIZER_BYTES))
        (lone / "tokenizer_config.json").write_text(json.dumps(config))
        model = {"model_type": load_config(folder).get("model_type")}
        (lone / "config.json").write_text(json.dumps(model))
        try:
            return transformers.AutoTokenizer.from_pretrained(
                lone, local_files_only=True, trust_remote_code=False
            ).backend_tokenizer
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also panics of the Rust code, which are no Exceptions
            raise CheckpointError(
                f"{folder} has no tokenizer.json, and transformers cannot convert its vocabulary: "
                f"{type(error).__name__}: {error}{_sentencepiece_hint(folder)}"
            ) from error


def _sentencepiece_hint(folder: Path) -> str:
    """What transformers, which asks for tiktoken instead, does not say."""
    found = [name for name in VOCABULARIES if (folder / name).is_file()]
    if not found[0].endswith(".model"):
        return ""
    return (
        f"; if {found[0]} is a SentencePiece model, run: pip install sentencepiece protobuf, or "
        "give a checkpoint with tokenizer.json"
    )


def _config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json without what is not the vocabulary's business."""
    path = folder / "tokenizer_config.json"
    read_tokenizer_config(folder)  # the types of what is used later on, too
    content = read_json(path) if path.is_file() else {}
    if content.get("auto_map"):
        raise CheckpointError(
            f"{path}: auto_map says that the tokenizer is code of the checkpoint's own, and bytetx "
            "never runs such code; give a checkpoint with tokenizer.json"
        )
    return {key: content[key] for key in _KEYS if content.get(key) is not None}


def _is_class_of(transformers: ModuleType, kind: str) -> bool:
    """Whether this is a tokenizer's name that transformers has; later ones left out ...Fast."""
    stem = kind.removesuffix("Fast")
    is_name = re.fullmatch(r"\w*Token\w*", kind) is not None
    return is_name and any(hasattr(transformers, name) for name in (stem, f"{stem}Fast"))
