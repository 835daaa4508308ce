"""sentence-transformers' modules.json: how token rows become one vector per text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional as F

from bytetx.checkpoint.convert_tokenizer import has_vocabulary
from bytetx.checkpoint.files import (
    STATIC,
    TRANSFORMERS,
    adapter_base,
    load_config,
    module_folder,
    read_modules,
    transformer_folder,
)
from bytetx.checkpoint.logit_score import LogitScoreSpec, read_logit_score
from bytetx.checkpoint.multi_vector import MultiVectorSpec, load_multi_vector_spec
from bytetx.checkpoint.pickled import read_pickled
from bytetx.checkpoint.router import RouterSpec, read_router
from bytetx.checkpoint.sentence_files import (
    AUTO_ENCODER,
    DENSE,
    MODEL,
    NORM,
    NORMALIZE,
    POOLING,
    POOLING_FLAGS,
    Schema,
    TransformerSettings,
    read_transformer,
    transformer_file,
)
from bytetx.checkpoint.side_files import one_of, read_fields, read_json
from bytetx.checkpoint.static_embedding import StaticSpec, read_model2vec
from bytetx.checkpoint.weights import read_header
from bytetx.errors import CheckpointError, OptionError, shown
from bytetx.nn.splade import POOLING_STRATEGIES, SPARSE_ACTIVATIONS, SpladeSpec
from bytetx.ops.linear import LinearWeight, linear, prepare_linear
from bytetx.ops.norm import layer_norm
from bytetx.ops.pooling import POOLING_MODES, pool
from bytetx.ops.reference import activate, normalize_rows

# torch's sigmoid, softplus, Mish and ELU round differently in their vector code and in the scalar
# code for the last elements, so a row's result would depend on its index in the batch. exp, expm1,
# log1p and tanh in float32 do not.


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-x.float()).add_(1).reciprocal_().to(x.dtype)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return torch.log1p(torch.exp(-wide.abs())).add_(wide.clamp(min=0)).to(x.dtype)


def _mish(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return torch.tanh(_softplus(wide)).mul_(wide).to(x.dtype)


def _elu(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return torch.where(wide > 0, wide, torch.expm1(wide)).to(x.dtype)


# torch.nn activations that a config may name. A name is looked up here and never imported.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "Sigmoid": _sigmoid,
    "GELU": partial(activate, activation="gelu"),
    "ReLU": torch.relu,
    "SiLU": partial(activate, activation="silu"),
    "Mish": _mish,
    "ELU": _elu,
    "LeakyReLU": F.leaky_relu,
    "Softplus": _softplus,
}

_FIRST = (*TRANSFORMERS, STATIC)
# What reads the last hidden states of all tokens.
_OF_TOKEN_ROWS = ("Pooling", "SpladePooling", "LogitScore")
# What gives other rows in place of the last hidden states: right behind the transformer.
_LAYER_MEAN = "WeightedLayerPooling"
_SPARSE_STATIC = "SparseStaticEmbedding"
# The hub's code of Jina embeddings v3 and v5: the Transformer module with the adapters of tasks.
_JINA_TRANSFORMER = "custom_st.Transformer"
# The key of config.json that tells each; that of v5 also pools the last token, and normalises.
_JINA_TASKS, _JINA_POOLS = "lora_adaptations", "task_names"
# The hub's code of pplx-embed: its module after pooling, which has no files.
_TANH_QUANTIZER = "st_quantize.FlexibleQuantizer"

VectorSimilarity = Literal["cosine", "dot", "euclidean", "manhattan"]
# By the names in config files; others, as of functions of the user's own, count as none.
_SIMILARITIES: dict[str, VectorSimilarity] = {
    "cosine": "cosine",
    "dot": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
}

_SPLADE = Schema(
    used={
        "pooling_strategy": one_of(*POOLING_STRATEGIES),
        "activation_function": one_of(*SPARSE_ACTIVATIONS),
    },
    harmless=("embedding_dimension", "word_embedding_dimension"),
)
_SPLADE_NAMES = {"pooling_strategy": "strategy", "activation_function": "activation"}
_SPARSE_STATIC_WEIGHTS = Schema(used={}, harmless=("frozen",))
_DROPOUT = Schema(used={}, harmless=("dropout",))


@dataclass(frozen=True, slots=True)
class Dense:
    """act(x @ w.T + bias), plus x itself (or x projected) where the config asks for a residual."""

    weight: LinearWeight
    activation: Callable[[torch.Tensor], torch.Tensor]
    has_residual: bool
    residual: LinearWeight | None

    @property
    def in_features(self) -> int:
        return self.weight.k

    @property
    def out_features(self) -> int:
        return self.weight.n

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        d = self.activation(linear(x, self.weight))
        if not self.has_residual:
            return d
        return d + (x if self.residual is None else linear(x, self.residual))


@dataclass(frozen=True, slots=True)
class Projection:
    """x @ w.T + bias in the weight's dtype, as f32."""

    weight: LinearWeight

    @property
    def in_features(self) -> int:
        return self.weight.k

    @property
    def out_features(self) -> int:
        return self.weight.n

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight).float()


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: torch.Tensor
    bias: torch.Tensor

    @property
    def in_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, eps=1e-5)


@dataclass(frozen=True, slots=True)
class Normalize:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [n, size]. On a GPU one kernel, in which no row depends on how many there are."""
        if not x.is_cuda:
            return normalize_rows(x)
        ends = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
        return pool(x.contiguous(), ends, mode="cls", normalize=True, max_seqlen=1)


@dataclass(frozen=True, slots=True)
class AutoEncoder:
    """The largest k latents of a vector, those above 0, as a sparse vector (CSR).

    encoder: in_features -> out_features, with the latents' bias.  pre_bias: subtracted before,
    [in_features].  normalizes: whether a vector is centred and divided by its deviation first.
    Source: Beyond Matryoshka (arXiv 2503.01776), section 3.
    """

    encoder: LinearWeight
    pre_bias: torch.Tensor
    k: int
    normalizes: bool

    @property
    def in_features(self) -> int:
        return self.encoder.k

    @property
    def out_features(self) -> int:
        return self.encoder.n

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """All latents, f32 [num_vectors, out_features], before the choice of the largest."""
        if self.normalizes:
            x = x - x.mean(dim=-1, keepdim=True)
            x = x / (x.std(dim=-1, keepdim=True) + 1e-5)
        return linear(x - self.pre_bias, self.encoder)


@dataclass(frozen=True, slots=True)
class TanhQuantizer:
    """round(127 tanh(x)): f32 whole numbers that int8 holds."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).mul_(127).round_()


Module = Dense | Projection | LayerNorm | Normalize | AutoEncoder | TanhQuantizer


@dataclass(frozen=True, slots=True)
class SentenceSpec:
    """A checkpoint's settings for embeddings.

    folder: the transformer's files; changes to its weights are in the folder `adapter` where a LoRA
    adapter is used.  pooling: modes whose vectors are concatenated.
    is_declared: False where there is no modules.json: pooling is then sentence-transformers' own
    choice, the last token of a causal language model and the mean of others.
    max_seq_length: sentence-transformers' limit in tokens.  modules: kind and folder of each module
    after pooling, in order; `load_modules` reads their weights.
    splade: how a sparse encoder pools its logits.  max_active_dims: weights that a sparse vector
    keeps.  multi_vector: set where the model gives one vector per token.
    truncate_dim: the leading numbers of a dense vector that are kept after all modules.
    similarity: the function that compares vectors, where the checkpoint names one.
    logit_score: set where a causal model scores pairs.  sparse_static: the folder of a
    SparseStaticEmbedding, whose weights of tokens need no transformer.  static: set where the model
    is a table of token vectors, without layers.  default_task: of calls of a model with an adapter
    for each task.  layer_mean: the folder of a WeightedLayerPooling, whose rows are pooled.
    """

    folder: Path
    adapter: Path | None = None
    pooling: tuple[str, ...] = ("mean",)
    is_declared: bool = False
    include_prompt: bool = True
    max_seq_length: int | None = None
    do_lower_case: bool = False
    modules: tuple[tuple[str, Path], ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    activation_fn: str | None = None
    splade: SpladeSpec | None = None
    max_active_dims: int | None = None
    truncate_dim: int | None = None
    multi_vector: MultiVectorSpec | None = None
    similarity: VectorSimilarity | None = None
    logit_score: LogitScoreSpec | None = None
    sparse_static: Path | None = None
    static: StaticSpec | None = None
    default_task: str | None = None
    layer_mean: Path | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether it is a sparse encoder."""
        if self.splade is not None or self.sparse_static is not None:
            return True
        return any(k == "SparseAutoEncoder" for k, _ in self.modules)

    @property
    def may_lack_head(self) -> bool:
        """Whether the class that `architectures` names may have a head that nothing here reads."""
        return self.is_declared or self.multi_vector is not None

    @property
    def tokenizer_folder(self) -> Path:
        """The adapter's, where it brings a tokenizer."""
        adapter = self.adapter
        if adapter is None:
            return self.folder
        has_own = (adapter / "tokenizer.json").is_file() or has_vocabulary(adapter)
        return adapter if has_own else self.folder

    def prompt_text(self, prompt: str | None, prompt_name: str | None) -> str:
        """The text to put before every input. Raises OptionError for a name that is not known."""
        if prompt is not None:
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError as error:
                raise OptionError(
                    f"prompt holds half a surrogate pair at character {error.start}, which is no "
                    "text; give it as UTF-8"
                ) from error
            return prompt
        name = self.default_prompt_name if prompt_name is None else prompt_name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise OptionError(
                f"prompt_name {shown(name)} is not in this checkpoint; it has: {known}"
            )
        return self.prompts[name] or ""


def load_sentence_spec(folder: Path) -> SentenceSpec:
    """Reads modules.json and what it names; a folder without it is a plain transformer.

    Of a model with a Router, the route that calls without a task take.
    Raises CheckpointError for a module that is not known here: its embeddings would be wrong.
    """
    router = read_router(folder)
    if router is not None:
        return load_route_spec(folder, router, router.default or next(iter(router.routes)))
    path, own = folder / "modules.json", transformer_folder(folder)
    static = read_model2vec(folder)
    if static is not None:
        modules = (("Normalize", folder),) if static.normalizes else ()
        return SentenceSpec(folder, is_declared=True, modules=modules, static=static)
    entries = _entries(path) if path.is_file() else []
    if entries and entries[0].kind == STATIC:
        return _with_modules(SentenceSpec(own, **_model_config(folder)), entries, own=own)
    base, adapter = adapter_base(own), None
    if base is not None:
        if not path.is_file():
            return replace(load_sentence_spec(base), adapter=own)
        base, adapter = transformer_folder(base), own
    base = base or own
    gives_vectors = _is_retrieval(own)
    multi_vector = load_multi_vector_spec(folder, own, base=base, gives_vectors=gives_vectors)
    if multi_vector is not None:
        tasks = ("feature-extraction", "retrieval")
        settings = read_transformer(own, tasks=tasks, is_multi_vector=True)
        _refuse_chat(own, settings)
        config = _model_config(folder) | _limits(settings)
        config["prompts"] = multi_vector.prompts
        return SentenceSpec(base, adapter, multi_vector=multi_vector, **config)
    if not path.is_file():
        return SentenceSpec(folder, pooling=(_default_pooling(folder),))
    spec = SentenceSpec(base, adapter, **_model_config(folder))
    return _with_modules(spec, entries, own=own)


def _is_retrieval(own: Path) -> bool:
    """Whether a Transformer module's class gives the vectors of its tokens itself."""
    path = transformer_file(own)
    return path is not None and read_json(path).get("transformer_task") == "retrieval"


def _default_pooling(folder: Path) -> str:
    """sentence-transformers' choice for a checkpoint without modules.json."""
    config = load_config(folder)
    first = next(iter(config.get("architectures") or ()), "")
    return (
        "lasttoken" if first.endswith("ForCausalLM") and config.get("is_causal", True) else "mean"
    )


def load_route_spec(folder: Path, router: RouterSpec, route: str) -> SentenceSpec:
    """One route of a model that begins with a Router, and what follows the Router.

    Raises CheckpointError for a module that is not known here.
    """
    entries = [_Entry(name, router.path, place) for name, place in router.routes[route]]
    entries += _entries(folder / "modules.json")[1:]
    own = entries[0].folder
    if entries[0].kind == _SPARSE_STATIC:
        if others := [entry.kind for entry in entries[1:] if entry.kind != "Dropout"]:
            raise CheckpointError(
                f"{router.path}: route {route!r:.120} has {others[0]} after {_SPARSE_STATIC}, "
                "which is not supported"
            )
        _SPARSE_STATIC_WEIGHTS.read(own / "config.json", may_be_absent=True)
        return SentenceSpec(own, sparse_static=own, **_model_config(folder))
    base, adapter = adapter_base(own), None
    if base is not None:
        base, adapter = transformer_folder(base), own
    spec = SentenceSpec(base or own, adapter, **_model_config(folder))
    spec = _with_modules(spec, entries, own=own)
    if spec.layer_mean is not None:  # routes may share a transformer
        raise CheckpointError(f"{router.path}: {_LAYER_MEAN} in a route is not supported")
    return spec


@dataclass(frozen=True, slots=True)
class _Entry:
    """A module: its class, and the subfolder that the file at `path` names for it."""

    name: str
    path: Path
    subfolder: object

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def folder(self) -> Path:
        return module_folder(self.path, self.subfolder)


def _entries(path: Path) -> list[_Entry]:
    entries = read_modules(path)
    return [_Entry(str(entry.get("type")), path, entry.get("path")) for entry in entries]


def _with_modules(spec: SentenceSpec, entries: Sequence[_Entry], *, own: Path) -> SentenceSpec:
    """The spec with what its modules say.  own: the transformer's folder."""
    kinds = [_module_kind(entry, own) for entry in entries]
    settings = TransformerSettings()
    if kinds[0] == STATIC:
        if others := [kind for kind in kinds[1:] if kind in _OF_TOKEN_ROWS]:
            raise CheckpointError(f"{entries[0].path}: {others[0]} cannot follow {STATIC}")
        spec = replace(spec, is_declared=True, static=StaticSpec(is_model2vec=False))
    else:
        settings = read_transformer(
            own, tasks=_fitting_tasks(kinds), reads_logits="SpladePooling" in kinds
        )
        spec = replace(spec, **_limits(settings))
    if "LogitScore" not in kinds:
        _refuse_chat(own, settings)
    for index, (kind, entry) in enumerate(zip(kinds, entries, strict=True)):
        path = entry.path
        if (kind in _FIRST) != (index == 0):
            first = STATIC if kind == STATIC else "Transformer"
            raise CheckpointError(f"{path}: {first} must be the first module, and only there")
        if kind == "Pooling":
            pooling = _pooling_config(entry.folder)
            spec = replace(spec, is_declared=True, **pooling)
        elif kind == "SpladePooling":
            config = _SPLADE.read(entry.folder / "config.json")
            given = {_SPLADE_NAMES[key]: value for key, value in config.items()}
            spec = replace(spec, splade=SpladeSpec(**given))
        elif kind == "LogitScore":
            score = read_logit_score(entry.folder, own, settings)
            spec = replace(spec, logit_score=score)
        elif kind == _LAYER_MEAN:
            if index != 1 or kinds[0] == STATIC:
                raise CheckpointError(f"{path}: {kind} must come right behind the Transformer")
            # Without this key the transformer gives it no layers, and it changes nothing.
            if _config(own).get("output_hidden_states") is True:
                spec = replace(spec, layer_mean=entry.folder)
        elif kind == "Dropout":
            _DROPOUT.read(path.parent / str(entry.subfolder) / "config.json", may_be_absent=True)
        elif kind in _AFTER_POOLING:
            # Some have no weights, older ones no files, and hubs drop empty folders.
            is_plain = kind in _WITHOUT_WEIGHTS
            module = path.parent / str(entry.subfolder) if is_plain else entry.folder
            if not is_plain or module.resolve() != own.resolve():  # there it is the model's
                _SCHEMAS[kind].read(module / "config.json", may_be_absent=is_plain)
            spec = replace(spec, modules=(*spec.modules, (kind, module)))
    if len(entries) == 1 and entries[0].name == _JINA_TRANSFORMER and _JINA_POOLS in _config(own):
        modules = (("Normalize", own),)
        spec = replace(spec, is_declared=True, pooling=("lasttoken",), modules=modules)
    kinds = [kind for kind, _ in spec.modules]
    if "SparseAutoEncoder" in kinds[:-1]:
        raise CheckpointError(f"{entries[0].path}: SparseAutoEncoder must be the last module")
    return spec


def _fitting_tasks(kinds: Sequence[str]) -> tuple[str, ...]:
    """Tasks that a Transformer can have before modules of these kinds; the first is what a config
    without one means."""
    if "SpladePooling" in kinds:
        # Before version 5.4 the module's class said so, and not its config.
        if kinds[0] == "MLMTransformer":
            return ("fill-mask",)
        return ("feature-extraction", "fill-mask", "text-generation")
    if "LogitScore" in kinds:
        return ("feature-extraction", "text-generation")
    if len(kinds) == 1:
        return ("feature-extraction", "sequence-classification")
    return ("feature-extraction",)


def _limits(settings: TransformerSettings) -> dict[str, Any]:
    return {
        "max_seq_length": settings.max_seq_length,
        "do_lower_case": settings.do_lower_case,
        "default_task": settings.default_task,
    }


def _refuse_chat(own: Path, settings: TransformerSettings) -> None:
    """Raises CheckpointError where texts become chats before they are read."""
    if settings.chat is not None:
        raise CheckpointError(
            f"{own / 'sentence_bert_config.json'}: modality_config has message, by which "
            "sentence-transformers puts each text into the chat template; bytetx supports that "
            "before LogitScore only"
        )


def load_modules(
    modules: Iterable[tuple[str, Path]], *, device: torch.device
) -> tuple[Module, ...]:
    """Load the modules after pooling, in f32: vectors are few, and their precision matters."""
    return tuple(_AFTER_POOLING[kind](folder, device) for kind, folder in modules)


def activation_by_name(name: str, *, source: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A torch.nn activation from its dotted name; CheckpointError for any other name."""
    stem = name.rpartition(".")[2]
    if not name.startswith("torch.nn.") or stem not in ACTIVATIONS:
        raise CheckpointError(
            f"{source}: activation {name!r} is not supported (no code of a checkpoint is run); "
            f"known: torch.nn.{{{', '.join(ACTIVATIONS)}}}"
        )
    return ACTIVATIONS[stem]


def _model_config(folder: Path) -> dict[str, Any]:
    config = MODEL.read(folder / "config_sentence_transformers.json", may_be_absent=True)
    return {
        "prompts": config.get("prompts", {}),
        "default_prompt_name": config.get("default_prompt_name"),
        "activation_fn": config.get("activation_fn"),
        "max_active_dims": config.get("max_active_dims"),
        "truncate_dim": config.get("truncate_dim"),
        "similarity": _SIMILARITIES.get(config.get("similarity_fn_name", "")),
    }


def _module_kind(entry: _Entry, own: Path) -> str:
    """own: the transformer's folder."""
    name, kind, path = entry.name, entry.kind, entry.path
    if name == _JINA_TRANSFORMER and {_JINA_TASKS, _JINA_POOLS} & _config(own).keys():
        return "Transformer"
    if name == _TANH_QUANTIZER:
        return entry.kind
    known = (*_FIRST, *_OF_TOKEN_ROWS, _LAYER_MEAN, "Dropout", *_AFTER_POOLING)
    if not name.startswith("sentence_transformers.") or kind not in known:
        raise CheckpointError(
            f"{path}: module {name!r} is not supported; known: {', '.join(known)}"
        )
    return kind


def _config(own: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = read_json(own / "config.json", {})
    return content


def _pooling_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config = POOLING.read(path)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    modes = (modes,) if isinstance(modes, str) else tuple(modes)
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown or not modes:
        raise CheckpointError(
            f"{path}: pooling mode {unknown!r:.120} is not known; known: {', '.join(POOLING_MODES)}"
        )
    return {"pooling": modes, "include_prompt": config.get("include_prompt") is not False}


def _load_dense(folder: Path, device: torch.device) -> Dense:
    path = folder / "config.json"
    config = read_fields(path, DENSE.used)
    shape = (config.get("out_features"), config.get("in_features"))
    tensors = load_tensors(folder, device)
    has_residual = config.get("use_residual", False)
    residual = None
    if has_residual and shape[0] != shape[1]:
        residual = prepare_linear(_tensor(tensors, "residual.weight", shape, path), prepack=False)
    bias = None
    if config.get("bias", True):
        bias = _tensor(tensors, "linear.bias", shape[:1], path)
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    return Dense(
        prepare_linear(_tensor(tensors, "linear.weight", shape, path), bias, prepack=False),
        activation_by_name(name, source=str(path)),
        has_residual,
        residual,
    )


def _load_norm(folder: Path, device: torch.device) -> LayerNorm:
    path = folder / "config.json"
    shape = (read_fields(path, NORM.used).get("dimension"),)
    tensors = load_tensors(folder, device)
    return LayerNorm(
        _tensor(tensors, "norm.weight", shape, path), _tensor(tensors, "norm.bias", shape, path)
    )


def _load_auto_encoder(folder: Path, device: torch.device) -> AutoEncoder:
    path = folder / "config.json"
    config = read_fields(path, AUTO_ENCODER.used)
    shape = (config.get("hidden_dim", 512), config.get("input_dim"))
    tensors = load_tensors(folder, device)
    # safetensors saves a tensor once, and the decoder's is the encoder's.
    name = "encoder.weight" if "encoder.weight" in tensors else "decoder.linear.weight"
    weight = _tensor(tensors, name, shape, path)
    bias = _tensor(tensors, "latent_bias", shape[:1], path)
    return AutoEncoder(
        prepare_linear(weight, bias, prepack=False),
        _tensor(tensors, "pre_bias", shape[1:], path),
        min(config.get("k", 8), shape[0]),
        config.get("normalize", False),
    )


def load_static_weights(folder: Path) -> np.ndarray:
    """f32 [vocab_size], a weight for each token, of a SparseStaticEmbedding."""
    tensors = load_tensors(folder, torch.device("cpu"))
    weight = tensors.get("weight")
    if weight is None or weight.dim() != 1 or not torch.isfinite(weight).all():
        raise CheckpointError(
            f"{folder / 'model.safetensors'} must hold weight, finite [vocab_size]"
        )
    return weight.numpy()


def load_tensors(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """The floating tensors of a module, in f32: of model.safetensors, else of pytorch_model.bin."""
    path, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if path.is_file():
        saved = [tensor for tensor in read_header(path) if tensor.is_floating]
        tensors = {tensor.name: tensor.read(torch.float32) for tensor in saved}
    elif pickled.is_file():
        read = read_pickled(pickled)
        tensors = {
            name: tensor.float() for name, tensor in read.items() if tensor.is_floating_point()
        }
    else:
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor pytorch_model.bin; save the model again "
            "with sentence-transformers"
        )
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _tensor(
    tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[Any, ...], path: Path
) -> torch.Tensor:
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        got = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
        raise CheckpointError(f"{path} implies {name} of shape {shape}, got {got}")
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path.parent}: tensor {name!r} holds values that are not finite")
    return tensor.clone()


_SCHEMAS = {
    "Dense": DENSE,
    "LayerNorm": NORM,
    "SparseAutoEncoder": AUTO_ENCODER,
    "Normalize": NORMALIZE,
    "FlexibleQuantizer": NORMALIZE,
}
_WITHOUT_WEIGHTS = ("Normalize", "FlexibleQuantizer")
# Modules after pooling; Dropout does nothing in inference.
_AFTER_POOLING: dict[str, Callable[[Path, torch.device], Module]] = {
    "Dense": _load_dense,
    "LayerNorm": _load_norm,
    "SparseAutoEncoder": _load_auto_encoder,
    "Normalize": lambda folder, device: Normalize(),
    "FlexibleQuantizer": lambda folder, device: TanhQuantizer(),
}
