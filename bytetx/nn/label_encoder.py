"""Labels of GLiNER's bi-encoders: an encoder of their own, and attention between them and words."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from torch.nn import functional as F

from bytetx.checkpoint.extraction import LABELS_ENCODER, ExtractionSpec, LabelsSpec
from bytetx.checkpoint.files import GLINER_CONFIG, GLINER_SAVE
from bytetx.checkpoint.tokenizer import Tokenizer, load_tokenizer
from bytetx.checkpoint.weights import Weights
from bytetx.errors import CheckpointError
from bytetx.nn.tensors import TensorLoader
from bytetx.nn.transformer import Transformer
from bytetx.ops.linear import LinearWeight, linear
from bytetx.ops.norm import layer_norm
from bytetx.ops.pooling import pool
from bytetx.packed import pack_columns

# Labels whose vectors are kept: 8 MiB with 512 features.
_MOST_KEPT = 4096
# Tokens of one forward pass over labels.
_TOKEN_BUDGET = 8192
_EPS = 1e-5  # torch's default


@dataclass(slots=True)
class LabelEncoder:
    """Vectors of labels, the means of their tokens' hidden states; those in use lately are kept.

    tokenizer: of labels.  projection: of the means, where words have another size.
    """

    transformer: Transformer
    tokenizer: Tokenizer
    projection: LinearWeight | None
    _kept: OrderedDict[bytes, torch.Tensor] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)

    def vectors(self, labels: Sequence[np.ndarray]) -> torch.Tensor:
        """labels: int32 token ids of each.  Returns f32 [num_labels, hidden_size]."""
        keys = [ids.tobytes() for ids in labels]
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
        missing = {key: ids for key, ids in zip(keys, labels, strict=True) if key not in found}
        for chunk in _chunks(list(missing.items())):
            vectors = self._encode([ids for _, ids in chunk])
            found |= {key: row for (key, _), row in zip(chunk, vectors, strict=True)}
        self._keep({key: found[key] for key in keys})
        return torch.stack([found[key] for key in keys])

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def _keep(self, used: dict[bytes, torch.Tensor]) -> None:
        with self._lock:
            self._kept |= used
            for key in used:
                self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)

    @torch.inference_mode()
    def _encode(self, labels: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        spec = self.transformer.spec
        batch = pack_columns(
            np.concatenate(labels),
            np.array([len(ids) for ids in labels], dtype=np.int32),
            has_token_types=spec.num_token_types > 0,
            position_offset=spec.position_offset,
            device=self.transformer.embeddings.word.device,
        )
        means = pool(self.transformer.forward(batch), batch.cu_seqlens, mode="mean")
        if self.projection is not None:
            means = linear(means, self.projection)
        # Rows of their own, so that one that is kept does not keep the others.
        return tuple(row.clone() for row in means)


def load_labels_encoder(
    spec: ExtractionSpec, labels: LabelsSpec, load: TensorLoader
) -> LabelEncoder:
    """Raises CheckpointError where tensors are missing or wrong, or there is no tokenizer."""
    assert isinstance(load.tensors, Weights)
    transformer = Transformer.from_tensors(
        labels.encoder,
        load.tensors.below(LABELS_ENCODER),
        dtype=load.dtype,
        device=load.device,
        prepack=load.prepack,
        batch_invariant=load.batch_invariant,
    )
    tokenizer = load_tokenizer(labels.folder, max_positions=labels.encoder.max_positions)
    if tokenizer is None:
        raise CheckpointError(
            f"{labels.folder} has no tokenizer.json; save the model again, in the folder of "
            f"{GLINER_CONFIG}: {GLINER_SAVE}"
        )
    size, in_features, projection = spec.hidden_size, labels.encoder.output_size, None
    if in_features != size:
        name = "token_rep_layer.labels_projection"
        projection = load.in_float32().linear(name, size, in_features)
    return LabelEncoder(transformer, tokenizer, projection)


def _chunks(
    labels: list[tuple[bytes, np.ndarray]],
) -> list[list[tuple[bytes, np.ndarray]]]:
    """Labels of at most _TOKEN_BUDGET tokens together, in their order."""
    chunks: list[list[tuple[bytes, np.ndarray]]] = []
    room = 0
    for label in labels:
        if not chunks or len(label[1]) > room:
            chunks.append([])
            room = _TOKEN_BUDGET
        chunks[-1].append(label)
        room -= len(label[1])
    return chunks


@dataclass(frozen=True, slots=True)
class FusionLayer:
    """Attention of labels or words to themselves or to the others, between two layer norms.

    reads_words, writes_words: whether keys, and queries, are words; labels else.
    query, key, value: of the normed queries and of the keys; two linear layers each, multiplied.
    """

    reads_words: bool
    writes_words: bool
    num_heads: int
    query: LinearWeight
    key: LinearWeight
    value: LinearWeight
    before: tuple[torch.Tensor, torch.Tensor]
    behind: tuple[torch.Tensor, torch.Tensor]

    def __call__(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """x: f32 [n, hidden_size], queries.  other: keys, where these are not the queries."""
        x = layer_norm(x, *self.before, eps=_EPS)
        keys = other if self.reads_words != self.writes_words else x
        heads = (self._heads(x, self.query), self._heads(keys, self.key))
        found = F.scaled_dot_product_attention(*heads, self._heads(keys, self.value))
        mixed = found.transpose(0, 1).reshape(x.shape)
        return layer_norm(mixed, *self.behind, eps=_EPS, residual=x)

    def _heads(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return linear(x, weight).view(len(x), self.num_heads, -1).transpose(0, 1)


def fuse(
    layers: Sequence[FusionLayer], words: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(words, labels) of one text.  words: f32 [n, hidden_size].  labels: f32 [m, hidden_size]."""
    for layer in layers:
        if layer.writes_words:
            words = layer(words, labels)
        else:
            labels = layer(labels, words)
    return words, labels


def load_fusion(
    spec: ExtractionSpec, load: TensorLoader, *, num_heads: int
) -> tuple[FusionLayer, ...]:
    """Raises CheckpointError where tensors are missing or wrong.

    num_heads: of the text's encoder, as the package has it.
    """
    if spec.fusion and spec.hidden_size % num_heads:
        raise CheckpointError(
            f"gliner_config.json: hidden_size {spec.hidden_size} is no multiple of the encoder's "
            f"{num_heads} heads, which post_fusion_schema needs"
        )
    return tuple(
        _load_layer(
            kind,
            load,
            f"cross_fuser.layers.{layer}.{place}",
            size=spec.hidden_size,
            num_heads=num_heads,
        )
        for layer, kinds in enumerate(spec.fusion)
        for place, kind in enumerate(kinds)
    )


def _load_layer(
    kind: str, load: TensorLoader, stem: str, *, size: int, num_heads: int
) -> FusionLayer:
    is_own = kind[0] == kind[-1]
    attention = f"{stem}.{'self_attn' if is_own else 'cross_attn'}"

    def parameters(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return load.tensor(f"{name}.weight", (size, size)), load.tensor(f"{name}.bias", (size,))

    def projection(name: str, *, is_double: bool) -> LinearWeight:
        weight, bias = parameters(f"{attention}.{name}_layer")
        if is_double:
            first, first_bias = parameters(f"{stem}.{name[0]}_proj")
            bias = bias + weight @ first_bias
            weight = weight @ first
        return load.linear_from(weight, bias)

    def norm(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return load.tensor(f"{stem}.{name}.weight", (size,)), load.tensor(
            f"{stem}.{name}.bias", (size,)
        )

    return FusionLayer(
        reads_words=kind[-1] == "t",
        writes_words=kind[0] == "t",
        num_heads=num_heads,
        query=projection("query", is_double=is_own),
        key=projection("key", is_double=is_own),
        value=projection("value", is_double=True),
        before=norm("pre_norm"),
        behind=norm("post_norm"),
    )
