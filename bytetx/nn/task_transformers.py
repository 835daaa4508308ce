"""A model with the adapter of each of its tasks: one Transformer a task, made when it is needed."""

import threading
from collections.abc import Mapping
from dataclasses import replace

import torch

from bytetx.checkpoint.task_adapters import Added, TaskAdapters
from bytetx.checkpoint.weights import Weights
from bytetx.errors import CheckpointError, OptionError, shown
from bytetx.nn.blocks import LocalBlocks
from bytetx.nn.layer_weights import load_layers
from bytetx.nn.tensors import TensorLoader
from bytetx.nn.transformer import Transformer, WordAdapter
from bytetx.ops.linear import prepare_linear
from bytetx.runtime.faults import is_out_of_memory


class TaskTransformers:
    """The base model and its adapters; may be used from several threads.

    A task's layers have the adapter merged into their weights, so that they run as fast as the base
    model's.  They are read from the checkpoint's files when the task is first used, and kept: each
    used task holds the weights of all layers once more.  The word table, which is nearly half of
    Jina embeddings v3, is shared; its low-rank change is added to the rows that a text needs.
    """

    def __init__(
        self,
        adapters: TaskAdapters,
        weights: Weights,
        base: Transformer,
        *,
        quantization: str | None = None,
    ):
        """weights: of the base model, in its dtype; their files must stay as they are."""
        self._adapters, self._weights, self._base = adapters, weights, base
        self._quantization = quantization
        self._made: dict[str, Transformer] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters.added)

    @property
    def prompts(self) -> Mapping[str, str]:
        return self._adapters.prompts

    def transformer(self, task: str) -> Transformer:
        """The model with a task's adapter.

        Raises OptionError for a name that is none, CheckpointError where the files were changed or
        the layers do not fit the memory.
        """
        if not isinstance(task, str) or task not in self._adapters.added:
            raise OptionError(
                f"task must be one of {', '.join(map(repr, self.names))} (or None for the model "
                f"without an adapter), got {shown(task)}"
            )
        if self._base.blocks.shard is not None:
            raise OptionError(
                f"task {shown(task)} has an adapter, which a model loaded with tp does not merge; "
                "load it with tp=1"
            )
        with self._lock:
            found = self._made.get(task)
            if found is None:
                found = self._made[task] = self._make(task)
            return found

    def _make(self, task: str) -> Transformer:
        base, spec, added = self._base, self._base.spec, self._adapters.added[task]
        word = base.embeddings.word
        device = word.device
        load = TensorLoader(
            self._weights.changed(added),
            dtype=word.dtype,
            device=device,
            prepack=device.type == "cpu",
        )
        blocks = LocalBlocks(spec)
        token_type = base.embeddings.token_type
        try:
            if token_type is not None:
                token_type = load.tensor(spec.embeddings["token_type"], tuple(token_type.shape))
            embeddings = replace(
                base.embeddings,
                token_type=token_type,
                word_adapter=_word_adapter(added, spec.embeddings["word"], device),
            )
            layers = load_layers(spec, load, blocks=blocks, quantization=self._quantization)
            if device.type == "cuda":  # steps run on a stream of their own
                torch.cuda.current_stream(device).synchronize()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"the layers of task {shown(task)} do not fit the memory of {device} beside "
                f"those of the model and of {len(self._made)} other tasks: {error}; free memory "
                "there, or load the model in a half type"
            ) from error
        return Transformer(spec, embeddings, layers)


def _word_adapter(added: Added, name: str, device: torch.device) -> WordAdapter | None:
    if name not in added:
        return None
    (low_rank,) = added[name]
    rows, columns = low_rank.factors()
    out = columns.t().mul(low_rank.scaling).contiguous().to(device)
    return WordAdapter(rows.contiguous().to(device), prepare_linear(out, prepack=False))
