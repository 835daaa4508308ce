"""Static embeddings: a table of token vectors, whose mean over a text is the text's vector.

model2vec and sentence-transformers give one folder different vectors. A folder with a modules.json
that begins with StaticEmbedding is read as sentence-transformers does, another as model2vec does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import tokenizers

from bytetx.checkpoint.layer_spec import LayerSpec
from bytetx.checkpoint.model_spec import ModelSpec
from bytetx.checkpoint.side_files import FLAG, TEXT, integer, read_json
from bytetx.checkpoint.static_table import TABLE, table_names
from bytetx.checkpoint.text_prefix import state_of
from bytetx.checkpoint.tokenizer import Tokenizer, Tokens, read_backend
from bytetx.checkpoint.weights import read_header
from bytetx.errors import CheckpointError

# The rows of a text with so many tokens are 1 GiB where a vector has 256 numbers.
_MAX_TOKENS = 1 << 20
# config.json of model2vec.
_MODEL2VEC = {"model_type": TEXT, "normalize": FLAG, "max_length": integer(1)}
_MAX_LENGTH = 512  # where config.json does not say it


@dataclass(frozen=True, slots=True)
class StaticSpec:
    """How texts become tokens of a static embedding, which has none that frame a text.

    is_model2vec: unknown tokens are left out, and a text is cut to as many characters as
    max_length tokens of the vocabulary's median length have, before it is cut to max_length.
    max_length: tokens, of model2vec's config.json; None: no limit.  normalizes: as that file says.
    Where is_model2vec is false, the limit is tokenizer.json's own.
    """

    is_model2vec: bool
    max_length: int | None = None
    normalizes: bool = False

    @property
    def max_tokens(self) -> int:
        """The most tokens of one text, but for tokenizer.json's own limit."""
        return min(self.max_length or _MAX_TOKENS, _MAX_TOKENS)


def read_model2vec(folder: Path) -> StaticSpec | None:
    """The settings of a folder that model2vec reads and no modules.json describes; else None.

    Raises CheckpointError for settings of a wrong type.
    """
    path, weights = folder / "config.json", folder / "model.safetensors"
    if (folder / "modules.json").is_file() or not (path.is_file() and weights.is_file()):
        return None
    config = read_json(path)
    if config.get("model_type") not in (None, "model2vec"):
        return None
    if all(tensor.name != TABLE for tensor in read_header(weights)):
        return None
    config = read_json(path, _MODEL2VEC)
    max_length = config.get("max_length", _MAX_LENGTH)
    return StaticSpec(True, max_length, bool(config.get("normalize")))


def static_spec(folder: Path, static: StaticSpec) -> ModelSpec:
    """The spec of a model without layers, whose hidden states are the vectors of its tokens.

    Raises CheckpointError where the folder has no table.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no model.safetensors; pickle weights are refused: load the model with "
            "sentence-transformers once and save it again"
        )
    names, (vocab_size, size) = table_names({one.name: one for one in read_header(path)})
    return ModelSpec(
        family="static_embedding",
        model_type="static_embedding",
        prefixes=(),
        hidden_size=size,
        embedding_size=size,
        num_layers=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        intermediate_size=0,
        vocab_size=vocab_size,
        max_positions=static.max_tokens,
        position_offset=0,
        num_token_types=0,
        relative_bias_rows=0,
        relative_bias_buckets=0,
        relative_bias_max_distance=0,
        activation="gelu",
        norm_eps=1e-12,
        pad_token_id=0,
        tie_word_embeddings=False,
        architectures=("StaticModel" if static.is_model2vec else "StaticEmbedding",),
        id2label={},
        problem_type=None,
        embeddings=names,
        layer={},
        layer_spec=LayerSpec(
            causal=False,
            norm_placement="post",
            norm="layer_norm",
            rotary=None,
            qkv="separate",
            weight_layout="linear",
            biases=frozenset(),
            window=0,
            window_pattern=(),
            first_windowed_layer=0,
            softmax_scale=1.0,
            final={},
        ),
    )


class Model2VecTokenizer(Tokenizer):
    """Reads texts as model2vec does; `skipped_id` is for whoever packs tokens.

    max_characters: that are read of a text; None: all.
    """

    def __init__(self, backend: tokenizers.Tokenizer, static: StaticSpec, *, name: str):
        """name: of its file, for errors."""
        super().__init__(backend, max_tokens=static.max_tokens, config={}, name=name)
        self.skipped_id = _unk_token_id(backend)
        self.max_characters: int | None = None
        if static.max_length is not None:
            self.max_characters = static.max_length * int(median(map(len, backend.get_vocab())))

    def encode_ids(self, texts: Sequence[str]) -> Tokens:
        most = self.max_characters
        if most is None or max(map(len, texts), default=0) <= most:
            return super().encode_ids(texts)
        tokens = super().encode_ids([text[:most] for text in texts])
        is_cut = np.fromiter((len(text) > most for text in texts), dtype=bool, count=len(texts))
        return replace(tokens, is_truncated=tokens.is_truncated | is_cut)


def load_static_tokenizer(folder: Path, static: StaticSpec) -> Tokenizer:
    """The tokenizer of a static embedding: tokenizer.json alone, whatever lies beside it.

    Raises CheckpointError where it is missing or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json; save the model again")
    backend = read_backend(path)
    if not backend.get_vocab_size():
        raise CheckpointError(f"{path} has a vocabulary without tokens; save the model again")
    backend.post_processor = tokenizers.processors.Sequence([])
    if static.is_model2vec:
        return Model2VecTokenizer(backend, static, name=str(path))
    truncation = backend.truncation or {}
    return Tokenizer(
        backend,
        max_tokens=min(truncation.get("max_length", static.max_tokens), static.max_tokens),
        config={"truncation_side": truncation.get("direction", "right")},
        name=str(path),
    )


def _unk_token_id(backend: tokenizers.Tokenizer) -> int | None:
    model = backend.model
    if isinstance(model, tokenizers.models.Unigram):
        found: int | None = (state_of(model) or {}).get("unk_id")
        return found
    token = model.unk_token
    return None if token is None else backend.token_to_id(token)
