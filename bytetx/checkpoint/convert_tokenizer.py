"""A vocabulary without tokenizer.json -> a tokenizer, by transformers, which sees no other file.

transformers runs Python files of a checkpoint that its JSON files name, and asks for consent on
stdin, which may hold a job's texts. So it is given a folder with the vocabulary alone: there is
nothing in it that could name code, and nothing to ask about.
"""

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import tokenizers

from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.python_tokenizers import (
    OPTIONS,
    PythonBackend,
    check_options,
    python_backend,
    special_tokens_of,
)
from bytetx.checkpoint.side_files import MAX_TOKENIZER_BYTES, TEXT, read_bytes, read_json
from bytetx.checkpoint.tokenizer_config import SPECIAL_TOKENS, read_tokenizer_config
from bytetx.checkpoint.tokenizer_files import VOCABULARIES, VOCABULARY_PARTS
from bytetx.checkpoint.tokenizer_limits import check_vocabulary
from bytetx.checkpoint.tokenizer_options import class_name, is_python_class
from bytetx.errors import CheckpointError

# Keys of tokenizer_config.json that say how the vocabulary is used; none of them can name a file.
# A key that the tokenizer's class reads and that is neither here nor harmless is refused.
_KEYS = (
    *SPECIAL_TOKENS,
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "clean_text",
    "do_lower_case",
    "extra_ids",
    "extra_special_tokens",
    "keep_accents",
    "legacy",
    "legacy_behaviour",
    "mask_token_sent",
    "model_input_names",
    "offset",
    "remove_space",
    "split_by_punct",
    "split_special_tokens",
    "src_lang",
    "strip_accents",
    "tgt_lang",
    "tokenize_chinese_chars",
    "tokenizer_class",
    "trim_offsets",
    "unk_id",
    "wordpieces_prefix",
)
# Keys that classes read and that change no id: of decoding, of chats, and limits read elsewhere.
_HARMLESS = (
    "clean_up_tokenization_spaces",
    "errors",
    "model_max_length",
    "return_token_type_ids",
    "use_default_system_prompt",
)
# Keys of config.json by which transformers chooses the class.
_MODEL_KEYS = ("model_type", "tokenizer_class")

# Vocabularies that transformers gives any class.
_READ_BY_ALL = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json")

# Texts for which the class must give what its backend gives: some classes add Python to it.
_PROBES = ("", "a", " The Café's 2 dogs,\tand\n中文 <s> [SEP] </s> ", "A b\u200dc \U0001f642")


@dataclass(frozen=True, slots=True)
class ConvertedTokenizer:
    """input_names: what the tokenizer's class gives a model, such as token_type_ids.
    special_tokens: by their names, such as mask_token, also those that no file names."""

    backend: tokenizers.Tokenizer
    input_names: tuple[str, ...]
    special_tokens: Mapping[str, str]


def has_vocabulary(folder: Path) -> bool:
    """Whether there are files that convert_vocabulary reads."""
    return any((folder / name).is_file() for name in VOCABULARIES)


def convert_vocabulary(folder: Path, *, reason: str | None = None) -> ConvertedTokenizer:
    """The tokenizer that transformers makes of a folder's vocabulary.

    reason: why that of tokenizer.json is not taken as it is; None where there is no such file.

    It is of the class that tokenizer_config.json names, else config.json, else of that of the
    model's type.
    Raises CheckpointError where the tokenizer is code, of the checkpoint or of transformers, that
    more is computed by than by the library tokenizers; where transformers is missing; and where it
    cannot read the files.
    """
    why = reason or f"{folder} has no tokenizer.json"
    refuse_python_class(folder, read_tokenizer_config(folder), _model_config(folder))

    def read(made: Any, files: list[str], unread: set[str]) -> ConvertedTokenizer:
        _check_class(folder, made, files, unread)
        names = tuple(made.model_input_names)
        return ConvertedTokenizer(made.backend_tokenizer, names, special_tokens_of(made))

    return _by_transformers(folder, why, read, with_json=reason is not None)


def convert_python_class(folder: Path, name: str) -> PythonBackend:
    """The tokenizer of a class of python_tokenizers.OPTIONS; errors as of convert_vocabulary."""
    check_options(folder, name)

    def read(made: Any, files: list[str], unread: set[str]) -> PythonBackend:
        if type(made).__name__ != f"{name}Tokenizer":
            raise CheckpointError(f"it makes a {type(made).__name__} of them")
        return python_backend(folder, name, made)

    why = f"{folder} has the tokenizer {name}Tokenizer"
    return _by_transformers(folder, why, read, more=OPTIONS[name])


T = TypeVar("T")


def _by_transformers(
    folder: Path,
    why: str,
    read: Callable[[Any, list[str], set[str]], T],
    *,
    with_json: bool = False,
    more: Sequence[str] = (),
) -> T:
    """Return what `read` makes of the tokenizer of transformers, of the names of the files that it
    was given, and of the keys of tokenizer_config.json that it was not.

    more: keys besides _KEYS that it is given.
    """
    config, unread = _config(folder, more)
    model = _model_config(folder)
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"{why}; to follow it, bytetx needs transformers: pip install transformers"
            if with_json
            else f"{why}; converting its vocabulary needs transformers: pip install transformers"
        ) from error
    for where, values in (("tokenizer_config.json", config), ("config.json", model)):
        kind = values.get("tokenizer_class")
        if kind is not None and not _is_class_of(transformers, kind):
            raise CheckpointError(
                f"{folder / where}: tokenizer_class {kind!r:.120} is none of "
                f"transformers {transformers.__version__}; give a checkpoint with tokenizer.json"
            )
    with tempfile.TemporaryDirectory(prefix="bytetx-") as name:
        lone = Path(name)
        files = _copy_vocabulary(folder, lone, with_json=with_json)
        (lone / "tokenizer_config.json").write_text(json.dumps(config))
        (lone / "config.json").write_text(json.dumps(model))
        try:
            made = transformers.AutoTokenizer.from_pretrained(
                lone, local_files_only=True, trust_remote_code=False
            )
            return read(made, files, unread)
        except (CheckpointError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also panics of the Rust code, which are no Exceptions
            raise CheckpointError(
                f"{why}, and transformers cannot convert its vocabulary: {type(error).__name__}: "
                f"{' '.join(str(error).split()):.300}{_sentencepiece_hint(files)}"
                f"{_japanese_hint(error)}"
            ) from error


def refuse_python_class(folder: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a class that the library tokenizers has no equal of.

    config: tokenizer_config.json.  model: config.json.
    """
    name = class_name(config, model)
    if is_python_class(name):
        raise CheckpointError(
            f"{folder}: the tokenizer's class, {name}Tokenizer, is Python code that the library "
            f"tokenizers has no equal of, so bytetx cannot give its ids; {_ADVICE}"
        )


_ADVICE = (
    "give a checkpoint with a tokenizer.json that gives the same, and with tokenizer_class "
    "PreTrainedTokenizerFast"
)


def _copy_vocabulary(folder: Path, lone: Path, *, with_json: bool) -> list[str]:
    """Copies a vocabulary to where nothing else is; the names that its files have there."""
    names = [name for name in VOCABULARIES if (folder / name).is_file()]
    # Mistral's names of tokenizer.model have its version behind them: transformers knows the bare
    # one only, and would make a tokenizer without words of the others.
    versions = [name for name in names if name.startswith("tokenizer.model.")]
    copies = {name: name for name in names if name not in versions}
    if versions:
        copies.setdefault("tokenizer.model", versions[-1])
    if with_json:
        copies["tokenizer.json"] = "tokenizer.json"
    parts = {name: name for name in VOCABULARY_PARTS if (folder / name).is_file()}
    for copy, name in (copies | parts).items():
        raw = read_bytes(folder / name, max_bytes=MAX_TOKENIZER_BYTES)
        if name != "tokenizer.json":
            check_vocabulary(folder / name, raw)
        (lone / copy).write_bytes(raw)
    return list(copies)


def _check_class(folder: Path, converted: Any, files: list[str], unread: set[str]) -> None:
    """Raises CheckpointError where the ids are not the backend's alone, or of other files.

    unread: keys of tokenizer_config.json that transformers was not given.
    """
    kind = type(converted)
    advice = "give a checkpoint with tokenizer.json"
    if getattr(converted, "backend_tokenizer", None) is None:
        raise CheckpointError(
            f"{folder}: the tokenizer's class, {kind.__name__}, is Python code that the library "
            f"tokenizers has no equal of, so bytetx cannot give its ids; {_ADVICE}"
        )
    wanted = kind.vocab_files_names.get("vocab_file", "tokenizer.json")
    if wanted not in files and not any(name in files for name in _READ_BY_ALL):
        raise CheckpointError(
            f"{folder}: the tokenizer's class, {kind.__name__}, reads {wanted}, which is not there "
            f"(there is {', '.join(files)}); write the tokenizer_class of that vocabulary into "
            f"tokenizer_config.json, or {advice}"
        )
    read = {name for base in kind.__mro__ for name in _parameters(base)}
    if options := sorted(unread & read):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: {options[0]} is an option of {kind.__name__} "
            f"that bytetx does not read; {advice}"
        )
    backend = converted.backend_tokenizer
    for text in _PROBES:
        if converted(text)["input_ids"] != backend.encode(text).ids:
            raise CheckpointError(
                f"{folder}: the tokenizer's class, {kind.__name__}, adds Python code to what the "
                f"library tokenizers computes, so bytetx cannot give its ids; {advice}"
            )


def _parameters(kind: type) -> list[str]:
    """Names of the arguments that a class's own constructor takes."""
    own = vars(kind).get("__init__")
    return [] if own is None else list(inspect.signature(own).parameters)


def _sentencepiece_hint(files: list[str]) -> str:
    """Return the advice that transformers, which asks for tiktoken instead, leaves out."""
    models = [name for name in files if ".model" in name]
    if not models:
        return ""
    return (
        f"; if {models[0]} is a SentencePiece model, run: pip install sentencepiece protobuf, or "
        "give a checkpoint with tokenizer.json"
    )


def _japanese_hint(error: BaseException) -> str:
    """Return which packages MeCab needs, where transformers says that one of them is missing."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return "; run: pip install 'bytetx[japanese]', which is fugashi, unidic-lite and ipadic"


def _config(folder: Path, more: Sequence[str] = ()) -> tuple[dict[str, Any], set[str]]:
    """(tokenizer_config.json without what is not the vocabulary's business, other keys in it)"""
    path = folder / "tokenizer_config.json"
    read_tokenizer_config(folder)  # the types of what is used later on, too
    content = read_json(path) if path.is_file() else {}
    if content.get("auto_map"):
        raise CheckpointError(
            f"{path}: auto_map says that the tokenizer is code of the checkpoint's own, and bytetx "
            "never runs such code; give a checkpoint with tokenizer.json"
        )
    given = {key: value for key, value in content.items() if value is not None}
    config = {key: given[key] for key in (*_KEYS, *more) if key in given}
    # Tokens of names of a class's or the checkpoint's own are tokens, too.
    config |= {
        key: value
        for key, value in given.items()
        if key.endswith("_token") and key not in config and TEXT.accepts(value)
    }
    return config, given.keys() - config.keys() - set(_HARMLESS)


def _model_config(folder: Path) -> dict[str, Any]:
    config = load_config(folder)
    return {key: config[key] for key in _MODEL_KEYS if config.get(key) is not None}


def _is_class_of(transformers: ModuleType, kind: str) -> bool:
    """Whether this is a tokenizer's name that transformers has; later ones left out ...Fast."""
    stem = kind.removesuffix("Fast")
    is_name = re.fullmatch(r"\w*Token\w*", kind) is not None
    return is_name and any(hasattr(transformers, name) for name in (stem, f"{stem}Fast"))
