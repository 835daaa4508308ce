"""ModelShape: the sizes of a model that its costs depend on, of a checkpoint or by name."""

from dataclasses import dataclass
from pathlib import Path

from bytetx.checkpoint.families import check_families, read_families
from bytetx.checkpoint.layer_spec import is_gated
from bytetx.checkpoint.norm_kinds import NORM_KINDS
from bytetx.checkpoint.spec import ModelSpec, build_spec
from bytetx.errors import OptionError

_MODEL2VEC_TABLE = b'"embeddings"'  # the name of its tensor
_HEADER_START = 4096  # bytes of the header of a file with a few tensors


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that bytetx.parallel.layout shards, and what else costs time or memory.

    num_inner: linear layers that lead to the inner features, 2 of a gated feed-forward.
    num_positions: rows of the tables of positions and token types.  has_lm_head: whether a
    generation or a score multiplies with the vocabulary; is_tied: by the word embedding.
    norms_per_layer: norms over hidden features in a layer; has_first_norm: whether another one
    comes before all layers, of pre-norm models.  norm_statistics: sums of a row, 1 of RMS norms.
    sums_per_layer: sums over y, 1 where both halves of a layer are one sum.
    output_size: features of the last rows, 0: hidden_size.
    num_shared_layers: sets of weights that the layers take in turn, 0: each has its own.
    can_divide_hidden: whether x divides it.  norms_projections: of all heads of q and k at once.
    max_positions: the most tokens of a text, 0: any number.
    has_kv_codes: whether the KV cache is FP8, with a byte of scale a vector.
    kept_bits: of a weight's number where one process holds them all, 0: those of the dtype.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_inner: int
    vocab_size: int
    num_positions: int
    causal: bool
    has_lm_head: bool
    is_tied: bool
    embedding_size: int
    experts: None = None
    norms_per_layer: int = 2
    has_first_norm: bool = False
    norm_statistics: int = 2
    sums_per_layer: int = 2
    output_size: int = 0
    num_shared_layers: int = 0
    can_divide_hidden: bool = True
    norms_projections: bool = False
    max_positions: int = 0
    has_kv_codes: bool = False
    kept_bits: float = 0.0

    def kv_bytes(self, itemsize: int, num_kv_heads: int) -> int:
        """Bytes of a token's keys and values of some heads in a layer's cache."""
        vector = self.head_dim + 1 if self.has_kv_codes else self.head_dim * itemsize
        return 2 * num_kv_heads * vector

    @property
    def num_stored_layers(self) -> int:
        """Layers that have weights of their own."""
        return self.num_shared_layers or self.num_layers

    @property
    def layer_weights(self) -> int:
        """Numbers in the linear layers of one layer."""
        attended = self.num_heads * self.head_dim
        qkv = attended + 2 * self.num_kv_heads * self.head_dim
        inner = (self.num_inner + 1) * self.intermediate_size
        return self.hidden_size * (qkv + attended + inner)

    @property
    def embedding_weights(self) -> int:
        rows = self.vocab_size + self.num_positions
        head = 0 if self.is_tied or not self.has_lm_head else self.vocab_size
        return (rows + head) * self.embedding_size

    @property
    def num_parameters(self) -> int:
        """Without biases and norms, a thousandth of it."""
        return self.num_stored_layers * self.layer_weights + self.embedding_weights


def shape_of(
    model: "ModelShape | ModelSpec | str | Path", *, families: str | Path | None = None
) -> ModelShape:
    """A shape as it is, of a spec, of a checkpoint's folder, or by its name in SHAPES.

    families: the folder of the caller's own families, by which a checkpoint is read.
    Raises OptionError for an unknown name or a wrong `families`, CheckpointError for a folder that
    holds no model.
    """
    if families is not None:
        check_families(families)
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, ModelSpec):
        return _shape_of_spec(model)
    if str(model) in SHAPES:
        return SHAPES[str(model)]
    folder = Path(model)
    if not folder.is_dir():
        raise OptionError(
            f"model must be a checkpoint's folder or one of {', '.join(SHAPES)}, got {str(model)!r}"
        )
    # Imported here, for they import the hub's client.
    from bytetx.checkpoint.files import (
        adapter_base,
        begins_static,
        load_config,
        refuse_own_code,
        transformer_folder,
    )

    if begins_static(folder) or _is_model2vec(folder):
        raise OptionError(
            f"{folder.name} is a static embedding, which has no layers for several GPUs to share; "
            "load it on one device"
        )
    own = transformer_folder(folder)
    base = adapter_base(own)
    config_folder = own if base is None else transformer_folder(base)
    config = load_config(config_folder)
    known = read_families(families)
    refuse_own_code(config_folder, config, known)
    return _shape_of_spec(build_spec(config, known), name=folder.name)


def _is_model2vec(folder: Path) -> bool:
    """Whether load takes a folder without modules.json for a static embedding."""
    from bytetx.checkpoint.files import load_config

    if (folder / "modules.json").is_file() or not (folder / "model.safetensors").is_file():
        return False
    if load_config(folder).get("model_type") not in (None, "model2vec"):
        return False
    return _MODEL2VEC_TABLE in _header_start(folder / "model.safetensors")


def _header_start(path: Path) -> bytes:
    """The beginning of the names of a file's tensors."""
    with path.open("rb") as file:
        return file.read(8 + _HEADER_START)[8:]


def _shape_of_spec(spec: ModelSpec, *, name: str | None = None) -> ModelShape:
    if spec.experts is not None:
        raise OptionError(
            f"the planner costs dense layers, and {name or spec.family} has experts; give the "
            "shape of a dense model of its active parameters"
        )
    layers = spec.layer_spec
    if layers.mixer is not None:
        raise OptionError(
            f"the planner costs layers with attention, and {name or spec.family} has others; it "
            "runs on one device"
        )
    if not layers.can_share:
        raise OptionError(
            f"the planner costs layers that ranks can share, and those of {name or spec.family} "
            "have heads that differ or read the embedded tokens"
        )
    return ModelShape(
        name=name or spec.family,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        num_inner=2 if is_gated(spec.layer) else 1,
        vocab_size=spec.vocab_size,
        num_positions=(spec.max_positions if "position" in spec.embeddings else 0)
        + spec.num_token_types,
        causal=spec.is_causal,
        has_lm_head="lm" in spec.heads and spec.is_causal,
        is_tied=spec.tie_word_embeddings,
        embedding_size=spec.embedding_size,
        norms_per_layer=_norms_per_layer(spec),
        has_first_norm=layers.norm_placement != "post" and layers.has_first_norm,
        norm_statistics=NORM_KINDS[layers.norm].num_sums,
        sums_per_layer=1 if layers.norm_placement == "parallel" else 2,
        output_size=spec.output_size,
        num_shared_layers=spec.num_layer_groups * spec.layers_per_group,
        can_divide_hidden=layers.can_divide_hidden,
        norms_projections=layers.norms_projections and "q_norm" in spec.layer,
        max_positions=spec.max_positions,
    )


def _norms_per_layer(spec: ModelSpec) -> int:
    """As the layers compute them; one less where both halves of a layer read the same norm."""
    if spec.layer_spec.norm_placement == "parallel":
        return 2 if "ffn_norm" in spec.layer else 1
    return 4 if "attn_out_norm" in spec.layer and "attn_norm" in spec.layer else 2


def _gpt(name: str, num_layers: int, hidden: int, heads: int, *, vocab: int = 51200) -> ModelShape:
    """GPT-2's and GPT-3's design: 4 H inner features, learned positions, a tied head."""
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        num_inner=1,
        vocab_size=vocab,
        num_positions=2048,
        causal=True,
        has_lm_head=True,
        is_tied=True,
        embedding_size=hidden,
        has_first_norm=True,
    )


def _bert(name: str, num_layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        num_inner=1,
        vocab_size=30522,
        num_positions=514,
        causal=False,
        has_lm_head=False,
        is_tied=True,
        embedding_size=hidden,
    )


def _llama(name: str, num_layers: int, hidden: int, heads: int, inner: int) -> ModelShape:
    """Llama 3: 8 heads of keys and values, SwiGLU, an untied head."""
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=hidden // heads,
        intermediate_size=inner,
        num_inner=2,
        vocab_size=128256,
        num_positions=0,
        causal=True,
        has_lm_head=True,
        is_tied=False,
        embedding_size=hidden,
        has_first_norm=True,
        norm_statistics=1,
    )


# (layers, hidden, heads) of AxoNN's models: arXiv 2502.08145 and the authors' code.
AXONN_SIZES = {
    "5B": (24, 4096, 32),
    "10B": (32, 5120, 40),
    "20B": (32, 7168, 56),
    "40B": (38, 9216, 72),
    "60B": (56, 9216, 72),
    "80B": (42, 12288, 96),
    "160B": (84, 12288, 96),
    "320B": (96, 16384, 128),
    "640B": (192, 16384, 128),
}

SHAPES = {
    shape.name: shape
    for shape in (
        _bert("bert-base", 12, 768, 12),
        _bert("bert-large", 24, 1024, 16),
        _gpt("gpt2-xl", 48, 1600, 25, vocab=50257),
        _llama("llama-8b", 32, 4096, 32, 14336),
        _llama("llama-70b", 80, 8192, 64, 28672),
        _gpt("gpt3-175b", 96, 12288, 96, vocab=50257),
        *(_gpt(f"axonn-{name.lower()}", *sizes) for name, sizes in AXONN_SIZES.items()),
    )
}
