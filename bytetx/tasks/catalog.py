"""The tasks that bytetx has: importing this module declares them all."""

from bytetx.tasks import (  # noqa: F401  (imported to be declared)
    answer,
    classify,
    decide,
    embed,
    embed_all,
    embed_chunks,
    embed_sparse,
    embed_tokens,
    fill_mask,
    generate,
    hidden_states,
    rerank,
    score,
    tag,
)
from bytetx.tasks.methods import AsyncModelTasks, ModelTasks

__all__ = ["AsyncModelTasks", "ModelTasks"]
