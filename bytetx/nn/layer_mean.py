"""sentence-transformers' WeightedLayerPooling: a token's vector is a weighted mean over layers."""

import torch

from bytetx.checkpoint.sentence_files import Schema
from bytetx.checkpoint.side_files import integer
from bytetx.errors import CheckpointError
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.layers import OnKv, OnLayer
from bytetx.nn.sentence_modules import SentenceSpec, load_tensors
from bytetx.nn.transformer import Placement, Transformer
from bytetx.packed import PackedBatch

_CONFIG = Schema(
    used={"layer_start": integer(0), "num_hidden_layers": integer(1)},
    harmless=("embedding_dimension", "word_embedding_dimension"),
)
# What the module takes where its file says nothing.
_LAYER_START, _NUM_LAYERS = 4, 12


class LayerMean(Placement):
    """Gives the mean over hidden states from `first` on in place of the last ones.

    Hidden state 0 is that of the embedding.  weights: f32 [num_layers + 1 - first], of each state.
    The sum is taken in f32, one layer at a time, and rounded to the dtype of the states.
    """

    def __init__(self, local: Transformer, weights: torch.Tensor, *, first: int):
        self._local, self._first = local, first
        shares = weights / weights.sum()
        self._shares: list[float] = shares.tolist()

    def forward(
        self,
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
    ) -> torch.Tensor:
        states, mean = 0, None

        def add(x: torch.Tensor) -> None:
            nonlocal states, mean
            if states == self._first:
                mean = x.float() * self._shares[0]
            elif mean is not None:
                mean.add_(x, alpha=self._shares[states - self._first])
            states += 1
            if on_layer is not None:
                on_layer(x)

        last = self._local.forward(batch, cache=cache, on_layer=add, on_kv=on_kv)
        assert mean is not None  # `first` is a layer
        return mean.to(last.dtype)


def with_layer_mean(transformer: Transformer, sentence: SentenceSpec) -> Transformer:
    """The transformer with the checkpoint's WeightedLayerPooling; itself where it has none.

    Raises CheckpointError where the module is of another number of layers, or its weights are none.
    """
    folder = sentence.layer_mean
    if folder is None:
        return transformer
    path = folder / "config.json"
    config = _CONFIG.read(path)
    first = config.get("layer_start", _LAYER_START)
    count, layers = config.get("num_hidden_layers", _NUM_LAYERS), transformer.spec.num_layers
    weights = load_tensors(folder, torch.device("cpu")).get("layer_weights")
    shape = (layers + 1 - first,)
    if count != layers or first > layers or weights is None or tuple(weights.shape) != shape:
        got = "none" if weights is None else f"shape {tuple(weights.shape)}"
        raise CheckpointError(
            f"{path}: num_hidden_layers {count} and layer_start {first} must fit the model's "
            f"{layers} layers, and layer_weights have shape {shape}; got {got}"
        )
    if not torch.isfinite(weights / weights.sum()).all():
        raise CheckpointError(f"{folder}: layer_weights must be finite, their sum not 0")
    return transformer.placed(LayerMean(transformer, weights, first=first))
