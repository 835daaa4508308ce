"""Settings of vectors of tokens, in the files of three libraries."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytetx.checkpoint.files import TRANSFORMERS, load_config, module_folder, read_modules
from bytetx.checkpoint.side_files import (
    FLAG,
    TABLE,
    TEXT,
    check_fields,
    either,
    integer,
    list_of,
    number,
    one_of,
    read_json,
)
from bytetx.errors import CheckpointError

MAXSIM_FUNCTIONS = ("maxsim", "meanmaxsim")

_EXPANSION = {
    "strategy": one_of("fixed", "min"),
    "attend": FLAG,
    "token": TEXT,
    "length": integer(1),
}
_LENGTHS = {"query_length": integer(1), "document_length": integer(1), "query_expansion": TABLE}
_MODEL = _LENGTHS | {
    "model_type": TEXT,
    "query_prefix": TEXT,
    "document_prefix": TEXT,
    "prompts": TABLE,
    "do_query_expansion": FLAG,
    "attend_to_expansion_tokens": FLAG,
    "attend_to_mask_tokens": FLAG,
    "skiplist_words": list_of(TEXT),
    "similarity_fn_name": TEXT,
}
_MASK = {
    "skiplist_words": list_of(TEXT),
    "skiplist_tasks": either(TEXT, list_of(TEXT)),
    "keep_only_token_ids": list_of(integer(0)),
}
_METADATA = {
    "query_token_id": TEXT,
    "doc_token_id": TEXT,
    "query_maxlen": integer(1),
    "doc_maxlen": integer(1),
    "attend_to_mask_tokens": FLAG,
    "mask_punctuation": FLAG,
}
_TOKEN_POOLING = {
    "pool_factor": number(1, 1 << 20),
    "num_protected_tokens": integer(0),
    "normalize_embeddings": FLAG,
    "tasks": either(TEXT, list_of(TEXT)),
}
_TOKEN_MODULE = {"module_input_name": TEXT}
_POOLING = "HierarchicalTokenPooling"
_PUNCTUATION = tuple(string.punctuation)
# transformers' classes whose forward gives these vectors, with the tensor that projects tokens.
_PROJECTIONS = {"NeoMMEForRetrieval": "multi_vector_head.proj.weight"}
# PyLate's length of a query, where it says none.
_QUERY_LENGTH = 32


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Mask tokens behind a query, whose vectors count like those of its own tokens.

    length: tokens of a query with its expansion, special tokens included.  is_fixed: longer
    queries are cut to it.  attends: whether other tokens see the expansion's.  token: None is the
    mask token, or the last one of a text where there is none.
    """

    length: int
    is_fixed: bool = True
    attends: bool = False
    token: str | None = None


@dataclass(frozen=True, slots=True)
class TokenPoolingSpec:
    """HierarchicalTokenPooling: a text's vectors become len // factor means of clusters.

    num_protected: vectors at the start that stay as they are.  normalizes: all vectors, at the
    end.  tasks: those of texts whose vectors are pooled.
    """

    factor: float = 1.0
    num_protected: int = 1
    normalizes: bool = False
    tasks: tuple[str, ...] = ("document",)


@dataclass(frozen=True, slots=True)
class MultiVectorSpec:
    """One vector for each token of a text (ColBERT).

    modules: (kind, folder) of what follows the transformer, as SentenceSpec.modules.
    projection: a tensor of the transformer's own file, as Stanford's ColBERT has it.
    query_length, document_length: tokens, None for the tokenizer's own limit.
    skiplist_words: tokens without a vector, in texts of skiplist_tasks (query, document).
    prefixes: tokens that are put before texts, each one token of the vocabulary.
    prompts: put before the texts of each task.  mean: scores are divided by the query's tokens.
    token_pooling: of a text's vectors, after all else.
    """

    modules: tuple[tuple[str, Path], ...] = ()
    projection: str | None = None
    query_length: int | None = None
    document_length: int | None = None
    expansion: QueryExpansion | None = None
    skiplist_words: tuple[str, ...] = ()
    skiplist_tasks: tuple[str, ...] = ("document",)
    prefixes: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    mean: bool = False
    token_pooling: TokenPoolingSpec | None = None


def load_multi_vector_spec(
    folder: Path, own: Path, *, base: Path, gives_vectors: bool
) -> MultiVectorSpec | None:
    """The spec of a multi-vector checkpoint; None where the checkpoint is none.

    own: the folder of its transformer's settings.  base: that of the transformer's config.json,
    another one where `own` holds an adapter.  gives_vectors: these settings say that the model's
    own class gives the vectors.
    Raises CheckpointError for damaged files and for modules that are not known.
    """
    architectures = load_config(base).get("architectures") or ()
    if "HF_ColBERT" in architectures:
        return _stanford(base)
    path = folder / "modules.json"
    projection = next((_PROJECTIONS[name] for name in architectures if name in _PROJECTIONS), None)
    if not path.is_file():
        if projection is None:
            return None
        return MultiVectorSpec((("Normalize", base),), projection, skiplist_tasks=())
    entries = read_modules(path)
    names = [str(entry.get("type")) for entry in entries]
    config = _config(folder / "config_sentence_transformers.json", _MODEL)
    is_pylate = config.get("model_type") == "ColBERT" or any(
        name.startswith("pylate.") for name in names
    )
    has_mask = any(name.endswith(".MultiVectorMask") for name in names)
    if not (is_pylate or has_mask or config.get("model_type") == "MultiVectorEncoder"):
        return None
    limits = _config(_transformer_config(own), _LENGTHS)
    modules, mask, pooling = _modules(path, entries)
    words = mask.get("skiplist_words", config.get("skiplist_words"))
    if words is None:
        words = _PUNCTUATION if is_pylate else ()
    if is_pylate and not any(kind == "Normalize" for kind, _ in modules):
        modules = (*modules, ("Normalize", folder))
    if not gives_vectors:
        projection = None
    elif projection is not None:
        modules = (("Normalize", base), *modules)
    else:
        raise CheckpointError(
            f"{own}: transformer_task 'retrieval' is not supported of "
            f"{', '.join(map(str, architectures)) or 'a model that names no class'}; known: "
            f"{', '.join(_PROJECTIONS)}"
        )
    tasks = mask.get("skiplist_tasks") or ["document"]
    prefixes, prompts = _prefixes(config)
    lengths = {name: limits.get(name) or config.get(name) for name in _LENGTHS}
    expansion = _expansion(path, limits, config)
    if expansion is not None and "query_expansion" not in limits:
        lengths["query_length"] = None  # it is the expansion's
    return MultiVectorSpec(
        modules,
        projection,
        lengths["query_length"],
        lengths["document_length"],
        expansion,
        tuple(words),
        (tasks,) if isinstance(tasks, str) else tuple(tasks),
        prefixes,
        prompts,
        config.get("similarity_fn_name") == "meanmaxsim",
        pooling,
    )


def _config(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object with these fields checked, null ones too; {} without the file."""
    return read_json(path, fields) if path.is_file() else {}


def _transformer_config(base: Path) -> Path:
    return base / "sentence_bert_config.json"


def _modules(
    path: Path, entries: Sequence[Mapping[str, Any]]
) -> tuple[tuple[tuple[str, Path], ...], dict[str, Any], TokenPoolingSpec | None]:
    """Return what follows the transformer, the config of MultiVectorMask ({} without one), and how
    the vectors of a text are pooled, if they are."""
    pooling: TokenPoolingSpec | None = None
    modules: list[tuple[str, Path]] = []
    mask: dict[str, Any] = {}
    known = (*TRANSFORMERS, "Dense", "Normalize", "MultiVectorMask", "Dropout", _POOLING)
    for place, entry in enumerate(entries):
        name = str(entry.get("type"))
        kind = name.rpartition(".")[2]
        is_known = name.startswith("sentence_transformers.") or name == "pylate.models.Dense.Dense"
        if not is_known or kind not in known:
            raise CheckpointError(
                f"{path}: module {name!r} of a multi-vector model is not supported; known: "
                f"{', '.join(known)}"
            )
        if (kind in TRANSFORMERS) != (place == 0):
            raise CheckpointError(f"{path}: Transformer must be the first module, and only there")
        if pooling is not None and kind != "Dropout":
            raise CheckpointError(
                f"{path}: {_POOLING} must be the last module, got {kind} after it"
            )
        if kind == _POOLING:
            pooling = _token_pooling(module_folder(path, entry.get("path")) / "config.json")
        elif kind in ("Dense", "Normalize"):
            module = module_folder(path, entry.get("path"))
            config = _config(module / "config.json", _TOKEN_MODULE)
            source = config.get("module_input_name") or "token_embeddings"
            if source != "token_embeddings":
                raise CheckpointError(
                    f"{module / 'config.json'}: a {kind} of {source!r:.120} in a multi-vector "
                    "model is not supported"
                )
            modules.append((kind, module))
        elif kind == "MultiVectorMask":
            mask = _config(module_folder(path, entry.get("path")) / "config.json", _MASK)
            if mask.get("keep_only_token_ids"):
                raise CheckpointError(
                    f"{path}: MultiVectorMask keeps the tokens of images only, which bytetx does "
                    "not read"
                )
    return tuple(modules), mask, pooling


def _token_pooling(path: Path) -> TokenPoolingSpec:
    """A config that is silent of normalize_embeddings is of before that option."""
    config = _config(path, _TOKEN_POOLING)
    tasks = config.get("tasks") or ["document"]
    protected = config.get("num_protected_tokens")
    return TokenPoolingSpec(
        config.get("pool_factor") or 1.0,
        1 if protected is None else protected,
        bool(config.get("normalize_embeddings")),
        (tasks,) if isinstance(tasks, str) else tuple(tasks),
    )


def _prefixes(config: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """PyLate's prefixes, and the prompts of each task with them."""
    prefixes: list[str] = []
    prompts = {key: value or "" for key, value in (config.get("prompts") or {}).items()}
    for key, task in (("query_prefix", "query"), ("document_prefix", "document")):
        if key in config:
            prefix = config[key] or ""
            prefixes.append(prefix)
            prompts[task] = prefix + prompts.get(task, "").removeprefix(prefix)
    return tuple(prefixes), prompts


def _expansion(
    path: Path, own: Mapping[str, Any], config: Mapping[str, Any]
) -> QueryExpansion | None:
    """Read it from the Transformer module, else from PyLate's keys, which expand unless they say
    not to."""
    for source in (own, config):
        if "query_expansion" in source:
            given = source["query_expansion"]
            if given is None:
                return None
            check_fields(f"{path.parent}: query_expansion", given, _EXPANSION)
            if given.get("length") is None:
                raise CheckpointError(f"{path.parent}: query_expansion lacks its length")
            return QueryExpansion(
                given["length"],
                given.get("strategy", "fixed") == "fixed",
                bool(given.get("attend")),
                given.get("token"),
            )
    markers = (
        *("query_length", "document_length", "do_query_expansion", "query_prefix"),
        *("document_prefix", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
        "skiplist_words",
    )
    if not any(marker in config for marker in markers):
        return None
    if config.get("do_query_expansion") is False:
        return None
    attends = config.get("attend_to_expansion_tokens", config.get("attend_to_mask_tokens"))
    return QueryExpansion(config.get("query_length") or _QUERY_LENGTH, attends=bool(attends))


def _stanford(base: Path) -> MultiVectorSpec:
    """ColBERT's own layout: its settings in artifact.metadata, its projection in the weights."""
    metadata = _config(base / "artifact.metadata", _METADATA)
    prefixes = (
        f"{metadata.get('query_token_id') or '[unused0]'} ",
        f"{metadata.get('doc_token_id') or '[unused1]'} ",
    )
    expansion = QueryExpansion(
        metadata.get("query_maxlen") or _QUERY_LENGTH,
        attends=bool(metadata.get("attend_to_mask_tokens")),
    )
    skips = metadata.get("mask_punctuation") is not False
    return MultiVectorSpec(
        modules=(("Normalize", base),),
        projection="linear.weight",
        document_length=metadata.get("doc_maxlen"),
        expansion=expansion,
        skiplist_words=_PUNCTUATION if skips else (),
        prefixes=prefixes,
        prompts=dict(zip(("query", "document"), prefixes, strict=True)),
    )
