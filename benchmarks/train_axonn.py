"""axonn 0.2.0, by AxoNN's authors, as a rival of training: on GPUs, where it is installed."""

import importlib
import importlib.util
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.train_rivals import (
    PlainGpt,
    SlotBatch,
    Weights,
    adamw,
    plain_name,
    relative_error,
)
from bytetx.parallel.grid import Grid
from bytetx.parallel.training import GptConfig


def why_no_axonn(device: torch.device) -> str | None:
    """None where it can run."""
    if importlib.util.find_spec("axonn") is None:
        return "it is not installed (pip install --no-deps axonn==0.2.0)"
    if device.type != "cuda":
        return "axonn 0.2.0 names NCCL and CUDA devices in its code, and needs GPUs"
    return None


class AxonnTrainer:
    """Trainer on a grid without x (axonn has no norms of divided features), with all its overlap.

    Not run on a GPU yet. axonn sums gradients of biases over depth only where a bias says by
    `needs_gradient_sync` that it needs that, which those of its own layers do not.
    """

    def __init__(
        self,
        config: GptConfig,
        weights: Weights,
        batch: SlotBatch,
        grid: Grid,
        device: torch.device,
    ):
        # An mpi4py without an MPI library raises what axonn does not expect.
        sys.modules.setdefault("mpi4py", None)  # type: ignore[arg-type]
        axonn = importlib.import_module("axonn.axonn")
        intra_layer = importlib.import_module("axonn.intra_layer")

        axonn.init(G_data=grid.data, G_intra_r=grid.y, G_intra_c=grid.x, G_intra_d=grid.z)
        self._batch, self._axonn, self._handle = batch, intra_layer, axonn.comm_handle
        linear = partial(intra_layer.Linear, expert_mode=True)  # features stay divided
        model = PlainGpt(config, linear, partial(linear, transpose=True))
        for name, p in model.named_parameters():
            whole = weights[plain_name(name)]
            p.data = self._part(name, whole, model).to(device, copy=True)
        for module in model.modules():
            if isinstance(module, intra_layer.Linear):
                module.bias.needs_gradient_sync = True
        self._model, self._optimizer = model, adamw(model.parameters())

    def _part(self, name: str, whole: Tensor, model: nn.Module) -> Tensor:
        """This rank's part of a weight or of its gradient, laid out as axonn's layers do."""
        prefix, _, kind = name.rpartition(".")
        layer = model.get_submodule(prefix)
        if not isinstance(layer, self._axonn.Linear):
            return whole
        if kind == "bias":
            return whole.chunk(layer.outer_group_size)[dist.get_rank(layer.outer_group)]
        columns = whole.chunk(layer.inner_group_size, 1)[dist.get_rank(layer.inner_group)]
        block = columns.chunk(layer.outer_group_size)[dist.get_rank(layer.outer_group)]
        return block.flatten().chunk(layer.depth_group_size)[dist.get_rank(layer.depth_group)]

    def backward(self) -> float:
        self._model.zero_grad()
        with self._axonn.optimize_communication(True, True, True, self._model):
            logits = self._model(self._batch.input_ids).flatten(0, 1)
            # It has no loss over a divided vocabulary.
            logits = self._axonn.Gather.apply(logits, self._handle.outer_intra_layer_parallel_group)
            losses = F.cross_entropy(logits, self._batch.targets.flatten(), reduction="sum")
            loss = losses / self._batch.total_tokens
            loss.backward()
        self._axonn.sync_gradients(self._model, expert_mode=True, vectorize=True)
        found, handle = loss.detach(), self._handle
        for group in (handle.data_parallel_group, handle.depth_intra_layer_parallel_group):
            dist.all_reduce(found, group=group)
        return float(found)

    def step(self) -> float:
        loss = self.backward()
        self._optimizer.step()
        return loss

    def gradient_error(self, wanted: Weights) -> float:
        found = []
        for name, p in self._model.named_parameters():
            assert p.grad is not None, name
            part = self._part(name, wanted[plain_name(name)], self._model)
            found.append(relative_error(p.grad, part))
        return max(found)
