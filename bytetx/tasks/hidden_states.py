"""Hidden states of chosen layers, one array a text."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch

from bytetx.arguments import chosen_layers
from bytetx.encode.step import Step, are_finite
from bytetx.errors import InputError
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import largest
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import Results
from bytetx.tasks.task import PromptOptions, TextOptions, Texts, option, task


@dataclass(frozen=True, kw_only=True)
class StatesOptions(PromptOptions, TextOptions):
    """Options of hidden_states."""

    layers: Sequence[int] = option(
        (-1,), "Layers to return: 0 is the embeddings' output, -1 that of the last layer."
    )


@task(item=np.ndarray)
def hidden_states(
    context: TaskContext, texts: Texts, options: StatesOptions
) -> TaskCall[Results[np.ndarray]]:
    """The hidden states of each text: f32 [len(layers), num_tokens, hidden_size].

    Texts have the task's adapter and the prompts that embed gives them.
    Raises InputError for a route that looks up weights of tokens, without layers.
    """
    if context.checkpoint.static_weights is not None:
        raise InputError(
            "this route has weights of tokens and no hidden states; name the task of another route"
        )
    job = HiddenStatesTask(chosen_layers(options.layers, num_states=context.spec.num_layers + 1))
    reader = context.reader(options)
    context.set_prompts(reader, options)
    return TaskCall("hidden_states", texts, job, reader, list_sink)


@dataclass(frozen=True, slots=True)
class HiddenStatesTask:
    """layers: 0 is the embeddings, num_layers the last layer; all from 0."""

    layers: tuple[int, ...]

    @property
    def key(self) -> Hashable:
        return ("hidden_states", self.layers)

    @property
    def capture(self) -> None:
        """None: a graph owns its outputs, and these are as large as all other memory together."""
        return None

    @torch.inference_mode()
    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        selected: dict[int, torch.Tensor] = {}
        num_seen = 0

        def select(x: torch.Tensor) -> None:
            nonlocal num_seen
            if num_seen in self.layers:
                selected[num_seen] = x.float()
            num_seen += 1

        transformer.forward(step.batch, on_layer=select)
        layers = tuple(selected[layer] for layer in self.layers)
        return (*layers, reduce(torch.maximum, map(largest, layers)))

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[-1], step.requests.seqlens)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[np.ndarray]:
        """f32 [len(layers), num_tokens, hidden_size] a text."""
        ends = np.cumsum(step.requests.seqlens)[:-1]
        pieces = [np.split(layer, ends) for layer in outputs[:-1]]
        return [np.stack(rows) for rows in zip(*pieces, strict=True)]
