"""What a loaded checkpoint is, as one table for programs and for `bytetx info`."""

from typing import Any

from bytetx.loading import LoadedCheckpoint


def checkpoint_info(
    checkpoint: LoadedCheckpoint, *, max_tokens: int, token_budget: int
) -> dict[str, Any]:
    """Family, sizes, dtype, device, ranks, heads, limits, tensors left unused.

    max_tokens: of one text.  token_budget: tokens of one forward pass.
    """
    spec, sentence, heads = checkpoint.spec, checkpoint.sentence, checkpoint.heads
    split = checkpoint.transformer.blocks.split
    named_heads = {
        "sequence classification": heads.sequence,
        "token classification": heads.token,
        "masked language model": heads.masked_lm,
        "language model": heads.lm,
    }
    return {
        "path": str(checkpoint.folder),
        "family": spec.family,
        "architectures": list(spec.architectures),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_heads": spec.num_heads,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_tokens": max_tokens,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "device": str(checkpoint.device),
        "tp": 1 if split is None else split.size,
        "token_budget": token_budget,
        "workspace_bytes": spec.workspace_bytes(token_budget, checkpoint.dtype.itemsize),
        "heads": [name for name, head in named_heads.items() if head is not None],
        "labels": [spec.id2label[i] for i in range(spec.num_labels)],
        "pooling": list(sentence.pooling),
        "sentence_modules": [kind for kind, _ in sentence.modules],
        "prompts": dict(sentence.prompts),
        "has_tokenizer": checkpoint.tokenizer is not None,
        "unused_tensors": list(checkpoint.unused_tensors),
    }
