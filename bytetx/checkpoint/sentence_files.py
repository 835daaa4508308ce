"""sentence-transformers' JSON files: every key that version 6.2 reads, and what becomes of it.

A schema lists the keys of one file. A key that bytetx uses is a Field; one that changes no result
is harmless; one that would change results is known with the values that do not, and refused by name
with others. A key that is in no schema is of a newer version, and named in a warning.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytetx.checkpoint.side_files import (
    FLAG,
    TABLE,
    TEXT,
    Field,
    check_fields,
    either,
    integer,
    list_of,
    one_of,
    read_json,
    table_of,
)
from bytetx.errors import CheckpointError

logger = logging.getLogger("bytetx")


@dataclass(frozen=True, slots=True)
class Schema:
    """The keys of one file: used: read and checked.  harmless: ignored.  plain: key -> values that
    change nothing (null is always one); others are refused."""

    used: Mapping[str, Field]
    harmless: Collection[str] = ()
    plain: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, where: Path | str, content: Mapping[str, Any]) -> None:
        """Raises CheckpointError for values that bytetx would give other results with."""
        check_fields(where, content, self.used)
        for key, values in self.plain.items():
            value = content.get(key)
            if value is not None and not any(_is_same(value, plain) for plain in values):
                known = " or ".join(map(repr, (None, *values)))
                raise CheckpointError(
                    f"{where}: {key} {value!r:.120} is not supported, and leaving it out would "
                    f"change results; bytetx takes {known}"
                )
        known_keys = {*self.used, *self.harmless, *self.plain}
        if unknown := sorted(content.keys() - known_keys):
            logger.warning(
                "%s: bytetx does not know %s, and ignores what it says",
                where,
                ", ".join(f"{key[:60]!r}" for key in unknown[:12]),
            )

    def read(self, path: Path, *, may_be_absent: bool = False) -> dict[str, Any]:
        """The used keys of a file that are not null; {} without it where it may be absent."""
        if may_be_absent and not path.is_file():
            return {}
        content = read_json(path)
        self.check(path, content)
        return {key: content[key] for key in self.used if content.get(key) is not None}


def _is_same(value: Any, plain: Any) -> bool:
    """Equal, and of one type: 1 is not true."""
    return type(value) is type(plain) and value == plain


_MULTI_VECTOR = (
    *("query_prefix", "document_prefix", "query_length", "document_length", "do_query_expansion"),
    *("attend_to_expansion_tokens", "attend_to_mask_tokens", "skiplist_words", "query_expansion"),
)
# config_sentence_transformers.json.  The keys of multi-vector models are read with their modules.
MODEL = Schema(
    used={
        "prompts": table_of(TEXT),
        "default_prompt_name": TEXT,
        "activation_fn": TEXT,
        "max_active_dims": integer(1),
        "similarity_fn_name": TEXT,
        "truncate_dim": integer(1),
    },
    harmless=("__version__", "model_type", "requirements", "keep_in_fp32_modules", *_MULTI_VECTOR),
)
POOLING_FLAGS = {
    # sentence-transformers wrote one flag a mode before it wrote "pooling_mode".
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SIZES = ("embedding_dimension", "word_embedding_dimension")
POOLING = Schema(
    used={
        "pooling_mode": either(TEXT, list_of(TEXT)),
        **dict.fromkeys(POOLING_FLAGS, FLAG),
        "include_prompt": FLAG,
    },
    harmless=_SIZES,
)
_OF_VECTORS = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding",),
}
DENSE_FIELDS = {
    "in_features": integer(1),
    "out_features": integer(1),
    "bias": FLAG,
    "use_residual": FLAG,
    "activation_function": TEXT,
}
DENSE = Schema(used=DENSE_FIELDS, plain=_OF_VECTORS)
NORMALIZE = Schema(used={}, plain=_OF_VECTORS)
_OF_TOKENS = {name: ("token_embeddings",) for name in _OF_VECTORS}
TOKEN_DENSE = Schema(used=DENSE_FIELDS, plain=_OF_TOKENS)
TOKEN_NORMALIZE = Schema(used={}, plain=_OF_TOKENS)
NORM = Schema(used={"dimension": integer(1)})
AUTO_ENCODER = Schema(
    used={
        "input_dim": integer(1),
        "hidden_dim": integer(1),
        "k": integer(1),
        "normalize": FLAG,
    },
    harmless=("k_aux", "dead_threshold"),  # only training reads them
)

# The config file of the Transformer module, under its names over the years.
TRANSFORMER_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
_EXPANSIONS = ("query_length", "document_length", "query_expansion")
_OLD_NAMES = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}
# Each task, the output that it takes of the model, and the name of what comes next.
_TASKS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "fill-mask": ("logits", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
    "retrieval": ("embeddings", "token_embeddings"),
}
_TRANSFORMER = Schema(
    used={
        "max_seq_length": integer(1),
        "do_lower_case": FLAG,
        "transformer_task": one_of(*_TASKS),
        "modality_config": TABLE,
        "module_output_name": TEXT,
        "processing_kwargs": TABLE,
        **dict.fromkeys((*_OLD_NAMES, *_OLD_NAMES.values()), TABLE),
    },
    harmless=("unpad_inputs", *_EXPANSIONS),
    plain={"tokenizer_name_or_path": ()},
)
_PADS = ("padding", "padding_side", "pad_to_multiple_of", "return_tensors")
_PROCESSING = Schema(
    used={"text": TABLE, "common": TABLE, "chat_template": TABLE},
    harmless=("audio", "image", "video"),  # which bytetx does not take
)
# How the tokenizer is called.
_TEXT = Schema(
    used={"max_length": integer(1)},
    harmless=(*_PADS, "return_attention_mask", "return_token_type_ids", "verbose", "return_length"),
    plain={
        "truncation": (True, "longest_first"),
        "add_special_tokens": (True,),
        "stride": (0,),
        "logits_to_keep": (1,),
        "is_split_into_words": (False,),
        "return_overflowing_tokens": (False,),
        "split_special_tokens": (),
        "text_pair": (),
        "truncation_side": (),
    },
)
# Options that the tokenizer, the model and its config are made with, and that change no result:
# where they come from, and how the same is computed, in a dtype that bytetx.load chooses.
_HUB = ("trust_remote_code", "revision", "token", "cache_dir", "local_files_only", "subfolder")
_OPTIONS = {
    "processor_kwargs": (
        *("model_max_length", "padding_side", "use_fast", "clean_up_tokenization_spaces"),
        *("min_pixels", "max_pixels"),
    ),
    "model_kwargs": (
        *("attn_implementation", "torch_dtype", "dtype", "device_map", "low_cpu_mem_usage"),
        *("use_safetensors", "unpad_inputs", "use_memory_efficient_attention", "use_cache"),
        *("add_pooling_layer", "default_task"),
    ),
    "config_kwargs": ("use_cache", "add_pooling_layer"),
}


@dataclass(frozen=True, slots=True)
class TransformerSettings:
    """Settings in the config of a Transformer module.

    max_seq_length: tokens.  chat: of modality_config, how messages become a prompt.
    variables: of a chat template.  default_task: of a model with an adapter for each task.
    """

    task: str = "feature-extraction"
    max_seq_length: int | None = None
    do_lower_case: bool = False
    chat: Mapping[str, Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    default_task: str | None = None


def transformer_file(folder: Path) -> Path | None:
    """The config of the Transformer module in a folder: the first that says anything."""
    paths = (folder / name for name in TRANSFORMER_FILES)
    return next((path for path in paths if path.is_file() and read_json(path)), None)


def read_transformer(
    folder: Path,
    *,
    tasks: Collection[str],
    is_multi_vector: bool = False,
    reads_logits: bool = False,
) -> TransformerSettings:
    """The settings of the Transformer module in a folder.

    tasks: those of _TASKS that the modules behind it can have; the first one is what a file means
    that names none.  is_multi_vector: its settings of lengths are read elsewhere.
    reads_logits: what follows reads the logits of all tokens, of whichever task.
    Raises CheckpointError for a setting that bytetx would give other results with.
    """
    path = transformer_file(folder)
    if path is None:
        return TransformerSettings(task=next(iter(tasks)))
    config = _TRANSFORMER.read(path)
    for old, new in _OLD_NAMES.items():
        config[new] = config.get(old, config.get(new, {}))
    task = config.get("transformer_task", next(iter(tasks)))
    if task not in tasks:
        raise CheckpointError(
            f"{path}: transformer_task {task!r} does not fit the modules that follow, which need "
            f"{' or '.join(tasks)}"
        )
    if not is_multi_vector:
        raw = read_json(path)
        given = [key for key in _EXPANSIONS if raw.get(key) is not None]
        if given:
            raise CheckpointError(
                f"{path}: {given[0]} {raw[given[0]]!r:.120} is supported of multi-vector models "
                "only; write max_seq_length"
            )
    processing = config.get("processing_kwargs", {})
    _PROCESSING.check(f"{path}: processing_kwargs", processing)
    output, name = _TASKS[task]
    if reads_logits and task == "text-generation":
        name, processing = "token_embeddings", _of_all_tokens(path, processing)
        config.setdefault("modality_config", {"text": {}})  # which names another output
    chat = _check_modalities(path, config, task, output=output, name=name)
    for key, harmless in _OPTIONS.items():
        others = sorted(config[key].keys() - {*_HUB, *harmless})
        if others:
            raise CheckpointError(
                f"{path}: {key}: {others[0]} {config[key][others[0]]!r:.120} is not supported, and "
                "leaving it out would change results; write it into the checkpoint's own "
                "config.json or tokenizer_config.json"
            )
    check_fields(f"{path}: processor_kwargs", config["processor_kwargs"], _MAX_LENGTH)
    check_fields(f"{path}: model_kwargs", config["model_kwargs"], {"default_task": TEXT})
    limit = config["processor_kwargs"].get("model_max_length") or config.get("max_seq_length")
    for part in ("text", "common"):
        options = processing.get(part) or {}
        _TEXT.check(f"{path}: processing_kwargs: {part}", options)
        if is_multi_vector and options.get("max_length") is not None:
            raise CheckpointError(
                f"{path}: processing_kwargs: {part}: max_length is not supported of a multi-vector "
                "model; write query_length and document_length"
            )
        limit = options.get("max_length") or limit
    return TransformerSettings(
        task,
        limit,
        bool(config.get("do_lower_case")),
        chat,
        processing.get("chat_template") or {},
        config["model_kwargs"].get("default_task"),
    )


def _of_all_tokens(path: Path, processing: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings without logits_to_keep. Raises CheckpointError where the causal model gives the
    logits of some tokens alone."""
    text = dict(processing.get("text") or {})
    if (kept := text.pop("logits_to_keep", 1)) != 0:
        raise CheckpointError(
            f"{path}: processing_kwargs: text: logits_to_keep is {kept!r:.120}, and the module "
            "that follows reads the logits of all tokens; it must be 0"
        )
    return {**processing, "text": text}


def _check_modalities(
    path: Path, config: Mapping[str, Any], task: str, *, output: str, name: str
) -> Mapping[str, Any] | None:
    """The entry of messages. Raises CheckpointError for another output of the model than `output`,
    or another name of it than `name`."""
    modalities = config.get("modality_config")
    if modalities is None:
        return None
    if config.get("module_output_name") != name:
        raise CheckpointError(
            f"{path}: module_output_name {config.get('module_output_name')!r:.120} is not "
            f"supported with transformer_task {task!r}; bytetx takes {name!r}"
        )
    chat: dict[str, Any] | None = modalities.get("message")
    if chat is None and "text" not in modalities:
        raise CheckpointError(f"{path}: modality_config has no text, and bytetx reads texts only")
    for modality in ("text", "message"):
        entry = modalities.get(modality)
        if entry is None:
            continue
        where = f"{path}: modality_config: {modality}"
        if not isinstance(entry, dict):
            raise CheckpointError(f"{where} must be a table, got {entry!r:.120}")
        _MODALITY.check(where, entry)
        given = entry.get("method_output_name")
        if (given if isinstance(given, list) else [given]) != [output]:
            raise CheckpointError(
                f"{where}: method_output_name {given!r:.120} is not supported, and leaving it out "
                f"would change results; bytetx takes {output!r}"
            )
    return chat


_MAX_LENGTH = {"model_max_length": integer(1)}
_MODALITY = Schema(
    used={"format": one_of("flat", "structured", "auto")},
    harmless=("method_output_name",),
    plain={"method": ("forward",)},
)
