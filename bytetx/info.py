"""The facts of a loaded checkpoint as a dictionary, for programs and `bytetx info`."""

from typing import Any

from bytetx.checkpoint.names import checkpoint_name, checkpoint_path
from bytetx.nn.coded_cache import has_coded_cache
from bytetx.nn.held_memory import weights_bytes
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.ops.kv_codes import MAX_RELATIVE_ERROR
from bytetx.ops.native import tile_rows


def checkpoint_info(
    checkpoint: LoadedCheckpoint, *, max_tokens: int, token_budget: int, prefix_cache_bytes: int
) -> dict[str, Any]:
    """Family, sizes, dtype, device, ranks, heads and their labels, limits, tensors left unused.

    weights_formats are the bytes in the files by format, such as F32 or Q4_K, and weights_bits what
    a parameter has of them; held_bytes are those of all weights in this process's memory, and
    held_bits what a parameter has of them. dequantised_formats: of a checkpoint whose codes are
    kept, those that are not, and why.
    max_tokens: of one text.  token_budget: tokens of one forward pass.  prefix_cache_bytes: of
    prefixes that are kept.  kv_cache_max_error: of a number of a key or value that a cache keeps in
    fewer bits than the model's, relative.
    """
    spec, sentence, heads = checkpoint.spec, checkpoint.sentence, checkpoint.heads
    grid = checkpoint.executor.grid
    has_labels = heads.sequence is not None or heads.token is not None
    most_rows = tile_rows(token_budget) if checkpoint.device.type == "cpu" else token_budget
    named_heads = {
        "sequence classification": heads.sequence,
        "token classification": heads.token,
        "question answering": heads.question_answering,
        "masked language model": heads.masked_lm,
        "language model": heads.lm,
        "decision": heads.decision,
        "span extraction": heads.extraction,
        "listwise ranking": heads.ranking,
    }
    held_bytes = weights_bytes([checkpoint.transformer, heads])
    return {
        "path": str(checkpoint_path(checkpoint.folder)),
        "family": spec.family,
        "architectures": list(spec.architectures),
        "num_parameters": checkpoint.num_parameters,
        "weights_formats": dict(checkpoint.saved_formats),
        "weights_bits": _bits(checkpoint),
        "held_bytes": held_bytes,
        "held_bits": round(8 * held_bytes / max(checkpoint.num_parameters, 1), 2),
        "dequantised_formats": dict(checkpoint.dequantised),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_heads": spec.num_heads,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_tokens": max_tokens,
        "max_positions": spec.max_positions,
        "dtype": _dtype_name(checkpoint),
        "device": str(checkpoint.device),
        "batch_invariant": checkpoint.batch_invariant,
        "kv_cache_dtype": checkpoint.kv_cache_dtype,
        "kv_cache_max_error": MAX_RELATIVE_ERROR if has_coded_cache(checkpoint) else 0.0,
        "tp": grid.y,
        "grid": str(grid),
        "token_budget": token_budget,
        "prefix_cache_bytes": prefix_cache_bytes,
        "workspace_bytes": spec.workspace_bytes(most_rows, checkpoint.dtype.itemsize),
        "heads": [name for name, head in named_heads.items() if head is not None],
        # Where no head needs the labels, their numbers may have holes.
        "labels": list(spec.id2label.values()) if has_labels else [],
        "pooling": list(sentence.pooling),
        "sentence_modules": [kind for kind, _ in sentence.modules],
        "prompts": dict(sentence.prompts),
        "embedding_tasks": [] if checkpoint.tasks is None else list(checkpoint.tasks.adapters),
        "has_tokenizer": checkpoint.tokenizer is not None,
        "generation_defaults": checkpoint.generation.sampling.given(),
        "unused_tensors": list(checkpoint.unused_tensors),
    }


def _bits(checkpoint: LoadedCheckpoint) -> float:
    num_bytes = sum(checkpoint.saved_formats.values())
    return round(8 * num_bytes / max(checkpoint.num_parameters, 1), 2)


def checkpoint_line(checkpoint: LoadedCheckpoint, *, max_tokens: int) -> str:
    """The main facts in one line, such as "bert, 22.7M parameters, float32 on cpu, ..."."""
    num_ranks = checkpoint.executor.grid.size
    shared = "" if num_ranks == 1 else f" and {num_ranks - 1} more"
    return (
        f"{checkpoint.spec.family}, {_in_words(checkpoint.num_parameters)} parameters, "
        f"{_dtype_name(checkpoint)} on {checkpoint.device}{shared}, max {max_tokens} tokens, "
        f"{checkpoint_name(checkpoint.folder)}"
    )


def _in_words(number: int) -> str:
    """22.7M, 1.10B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _dtype_name(checkpoint: LoadedCheckpoint) -> str:
    name = str(checkpoint.dtype).removeprefix("torch.")
    if checkpoint.quantization is None:
        return name
    return f"{checkpoint.quantization} ({name} outside of GEMMs)"
