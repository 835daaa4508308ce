"""Plan: a Transformer over a base model's parameters, and a check that the model is unchanged."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, repeat
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import nn

from bytetx.checkpoint.config import Values
from bytetx.checkpoint.families import Families
from bytetx.checkpoint.layer_spec import LINEARS
from bytetx.checkpoint.rope_spec import RotarySpec
from bytetx.checkpoint.spec import ModelSpec, build_module_spec
from bytetx.errors import CheckpointError, OptionError
from bytetx.hf.pooler import APART
from bytetx.hf.saving import hook_state_dict, unhook_state_dict
from bytetx.nn.layer_names import copied_tensor_names, tensor_names
from bytetx.nn.quantization import WEIGHT_FORMATS, weight_format
from bytetx.nn.rotary import frequencies_of, rotary_tables
from bytetx.nn.tensors import fuse_rows
from bytetx.nn.transformer import Transformer
from bytetx.ops.check import HALF_DTYPES, addresses, version_of
from bytetx.runtime.forking import computing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Modules that a family's own layers are made of, beside the classes of its modeling file.
_MODELESS_MODULES = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.ModuleList, nn.Conv1d)
_PLAIN_MODULES = (*_MODELESS_MODULES, nn.Dropout, nn.Identity)
_CONV1D_FILE = "transformers.pytorch_utils"
# Keys of a family's layer whose weights run as one.
_FUSED = (("q", "k", "v"), ("ffn_gate", "ffn_in"))
_ATTENTIONS = {None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"}
# Classes that leave their causal mask out where use_bidirectional_attention says so.
_READ_BIDIRECTIONAL = ("Gemma3TextModel",)
_BUILD_LOCK = threading.Lock()  # fusing re-points parameters: one thread at a time


@dataclass(frozen=True, slots=True)
class PassPlan:
    """A Transformer over a base model's own parameters, or the reason why there is none."""

    transformer: Transformer | None
    reason: str | None
    snapshot: "Snapshot"


class Snapshot:
    """The modules, hooks, parameters and values that a plan was made from; compared on every call.

    Plain lists compared by C loops: about 60 us for the 12 layers of BERT-base.
    """

    def __init__(self, base: "PreTrainedModel", spec: ModelSpec | None, *, copies: bool = False):
        """spec: None of a model that is refused.  copies: whether the plan copies every weight."""
        from bytetx.hf.stock import ReadValues

        links = list(_inner_modules(base))
        self.parents = [parent._modules for parent, _, _ in links]
        self.names = [name for _, name, _ in links]
        self.modules = [module for _, _, module in links]
        self.num_children = list(map(len, self.parents))
        self.types = [type(module) for module in self.modules]
        self.dicts = [module.__dict__ for module in self.modules]
        # The rest computes the same in either mode, and new containers start in training mode.
        self.modal_dicts = [m.__dict__ for m in self.modules if type(m) not in _MODELESS_MODULES]
        self.own_forwards = [module.get("forward") for module in self.dicts]
        self.hooks = [
            hooks
            for module in self.modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self.num_hooks = [len(hooks) for hooks in self.hooks]
        owners = [
            (module._parameters, name) for module in self.modules for name in module._parameters
        ]
        self.owners = [owner for owner, _ in owners]
        self.parameter_names = [name for _, name in owners]
        self.parameters = [owner[name] for owner, name in owners]
        self.tensors = [p for p in self.parameters if p is not None]
        self.addresses: list[int] = []
        names: Iterable[str] = ()
        if spec is not None:
            names = (tensor_names if copies else copied_tensor_names)(spec)
        found = dict(base.named_parameters(remove_duplicate=False))
        # Their changes are counted: a plan copies from them, or computes tables of them.
        self.copied = [found[name] for name in names if name in found]
        for parameter in self.copied:
            if version_of(parameter) < 0:
                # Moved in inference mode, it would not count its changes.
                parameter.data = parameter.data.clone()
        self.copied_versions = list(map(version_of, self.copied))
        self.read_values = ReadValues(base, self.modules)

    def seal(self) -> None:
        """Records the addresses of the parameters, after the last of them was moved."""
        self.addresses = addresses(self.tensors)
        self.read_values.seal()

    def is_in_place(self) -> bool:
        """Whether the parameters' memory is where it was: what a graph reads is there."""
        return addresses(self.tensors) == self.addresses

    def is_current(self) -> bool:
        """Whether the model is unchanged since the snapshot."""
        return self.is_in_place() and self.is_same_model()

    def is_same_model(self) -> bool:
        """Whether all but the places of the parameters' memory is unchanged."""
        return (
            all(map(is_, map(dict.get, self.parents, self.names), self.modules))
            and list(map(len, self.parents)) == self.num_children
            and all(map(is_, map(type, self.modules), self.types))
            and all(map(is_, map(dict.get, self.dicts, repeat("forward")), self.own_forwards))
            and list(map(len, self.hooks)) == self.num_hooks
            and all(map(is_, map(dict.get, self.owners, self.parameter_names), self.parameters))
            and list(map(version_of, self.copied)) == self.copied_versions
            and self.read_values.are_current()
        )

    def is_training(self) -> bool:
        """Whether any inner module is in training mode (a dropout may be, on its own)."""
        return any(module["training"] for module in self.modal_dicts)

    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self.tensors)


def build_plan(base: "PreTrainedModel", families: Families, *, dtype: str = "auto") -> PassPlan:
    """Inspects the base model and, where it is supported, shares its parameters.

    The query, key and value parameters of each layer become views of one storage, and so do gate
    and value of a gated layer, so that they run as one GEMM without being held twice; a Conv1D's
    weight is laid out by columns.  Names, shapes and values stay.
    dtype: "fp8": layers multiply copies in FP8, made again once a parameter has changed.
    """
    with computing(), _BUILD_LOCK, torch.inference_mode(False), torch.no_grad():
        spec: ModelSpec | None = None
        transformer: Transformer | None = None
        reason: str | None = None
        try:
            spec = _spec_of(base, families)
        except CheckpointError as error:
            reason = str(error)
        quantization = dtype if dtype in WEIGHT_FORMATS else None
        snapshot = Snapshot(base, spec, copies=quantization is not None)
        try:
            if spec is not None:
                reason = _reason_against(base, spec, snapshot.tensors)
            if spec is not None and reason is None and quantization is not None:
                reason = _reason_against_quantization(spec, snapshot.tensors[0], quantization)
            if spec is not None and reason is None:
                transformer = _share(base, spec, quantization)
        except CheckpointError as error:
            reason = str(error)
        snapshot.seal()
        return PassPlan(transformer, reason, snapshot)


def separate_parameters(base: nn.Module) -> None:
    """Undoes build_plan: gives every fused parameter a separate storage, and every column-major one
    its row-major layout."""
    with computing(), _BUILD_LOCK, torch.inference_mode(False), torch.no_grad():
        for module in base.modules():
            unhook_state_dict(module)
        for parameter in base.parameters():
            if parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()
            elif not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()


def _reason_against_quantization(spec: ModelSpec, first: torch.Tensor, name: str) -> str | None:
    if first.dtype not in HALF_DTYPES:
        kind = str(first.dtype).removeprefix("torch.")
        return f"dtype {name} is for models in float16 or bfloat16, and this one is in {kind}"
    try:
        weight_format(name, spec).check(spec, first.device)
    except OptionError as error:
        return str(error)
    return None


def _share(base: "PreTrainedModel", spec: ModelSpec, quantization: str | None) -> Transformer:
    parameters = dict(base.named_parameters(remove_duplicate=False))
    stems = [spec.layer_names(i) for i in range(spec.num_layers)]
    for name in _column_major_names(spec, stems):
        _to_column_major(parameters[name])
        hook_state_dict(base.get_submodule(name.rpartition(".")[0]))
    for layer, group, part in product(stems, _FUSED, ("weight", "bias")):
        if not all(key in layer for key in group):
            continue
        names = [f"{layer[key]}.{part}" for key in group]
        _fuse([parameters[name] for name in names if name in parameters])
        for key in group:
            hook_state_dict(base.get_submodule(layer[key]))
    weights = parameters | _buffers_of(base, spec)
    tensors = {name: _plain(weight) for name, weight in weights.items()}
    first = tensors[spec.embeddings["word"]]
    transformer = Transformer.from_tensors(
        spec,
        tensors,
        dtype=first.dtype,
        device=first.device,
        prepack=False,
        shares=True,
        quantization=quantization,
    )
    _take_frequencies(base, transformer)
    return transformer


def _buffers_of(base: nn.Module, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The weights that the class holds as buffers."""
    named = set(tensor_names(spec))
    return {name: buffer for name, buffer in base.named_buffers() if name in named}


def _take_frequencies(base: nn.Module, transformer: Transformer) -> None:
    """Builds rotary tables from the model's frequencies, which a cast to bf16 rounds."""
    layers, rotary = transformer.spec.layer_spec, getattr(base, "rotary_emb", None)
    buffers = (
        (layers.rotary, ("inv_freq", "full_attention_inv_freq")),
        (layers.windowed_rotary, ("sliding_attention_inv_freq",)),
    )
    for spec, names in buffers:
        found = [getattr(rotary, name) for name in names if hasattr(rotary, name)]
        if spec is not None and found:
            _take_frequencies_of(spec, found[0], transformer)


def _take_frequencies_of(
    spec: RotarySpec, inv_freq: torch.Tensor, transformer: Transformer
) -> None:
    tables = transformer.layers.tables
    own = inv_freq.detach().float().cpu()
    expected = frequencies_of(spec)
    if own.shape != expected.shape:
        raise CheckpointError(f"rotary_emb's inv_freq has {len(own)} values, not {len(expected)}")
    if spec not in tables:  # no layer uses it
        return
    if spec.scaling == "dynamic" or torch.allclose(own, expected, rtol=1e-6, atol=0):
        return
    tables[spec] = rotary_tables(
        spec,
        device=tables[spec].cos.device,
        max_positions=transformer.spec.max_positions,
        frequencies=own,
    )


def _to_column_major(parameter: nn.Parameter) -> None:
    """Lays a Conv1D's weight [..., k, n] out by columns, as a linear layer's [..., n, k], without
    a copy."""
    plain = _plain(parameter)
    if not plain.mT.is_contiguous():
        _point_at(parameter, _shared_as([plain], plain.mT.contiguous()).mT)


def _fuse(parameters: list[nn.Parameter]) -> None:
    """Concatenates parameters in one storage; the old storages are released."""
    if len(parameters) < 2:
        return
    rows = [_plain(parameter) for parameter in parameters]
    fused = fuse_rows(rows)
    if fused.untyped_storage().data_ptr() == rows[0].untyped_storage().data_ptr():
        return
    fused = _shared_as(rows, fused)
    views = fused.split([parameter.shape[0] for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        _point_at(parameter, view)


def _shared_as(old: list[torch.Tensor], new: torch.Tensor) -> torch.Tensor:
    """The new tensor, in shared memory where the old ones are."""
    is_shared = not new.is_cuda and any(t.is_shared() for t in old)
    return new.share_memory_() if is_shared else new


def _point_at(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Gives the parameter the tensor's memory. A parameter made in inference mode keeps that mode,
    because torch runs no operation on a mixture."""
    with torch.inference_mode(parameter.is_inference()):
        parameter.data = _plain(tensor)


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's memory as a tensor of the mode that is on, which has no part in autograd.

    A detached parameter that was made or moved in inference mode allows no views outside of it.
    """
    plain = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    shape, strides = parameter.shape, parameter.stride()
    return plain.set_(parameter.untyped_storage(), parameter.storage_offset(), shape, strides)


def _spec_of(base: "PreTrainedModel", families: Families) -> ModelSpec:
    """The spec of the config, with as many layers as the model has (layers may be dropped)."""
    spec = build_module_spec(base.config.to_dict(), families)
    if spec.num_layer_groups:  # layers that share their weights cannot be dropped
        return spec
    num_layers = len(base.get_submodule(spec.layer["attn_out"].split(".{i}.")[0])._modules)
    if _may_cache(spec) and num_layers != spec.num_layers:
        raise CheckpointError(
            f"the model has {num_layers} layers, its config says {spec.num_layers}"
        )
    return replace(spec, num_layers=num_layers)


def _may_cache(spec: ModelSpec) -> bool:
    """Whether the model's class is causal, and has a cache with an entry for each layer."""
    return spec.is_causal or spec.is_bidirectional


def _is_column_major(spec: ModelSpec) -> bool:
    is_transposed = spec.experts is not None and spec.experts.is_transposed
    return spec.layer_spec.weight_layout == "conv1d" or is_transposed


def _column_major_names(spec: ModelSpec, stems: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """The weights that the model holds as [in, out], of Conv1D layers or of all experts."""
    linears = set(LINEARS) if spec.layer_spec.weight_layout == "conv1d" else set()
    tensors = set()
    if spec.experts is not None and spec.experts.is_transposed:
        tensors = {"experts_gate_up", "experts_down"}
    for layer in stems:
        yield from (f"{layer[key]}.weight" for key in layer.keys() & linears)
        yield from (layer[key] for key in layer.keys() & tensors)


def _reason_against(
    base: "PreTrainedModel", spec: ModelSpec, tensors: Sequence[torch.Tensor]
) -> str | None:
    from bytetx.hf.stock import difference_from_stock

    is_causal = getattr(base.config, "is_causal", None)
    attention = getattr(base.config, "_attn_implementation", None)
    reads_key = type(base).__name__ in _READ_BIDIRECTIONAL
    if spec.is_bidirectional and is_causal is None and not reads_key:
        return "transformers' own class reads is_causal alone, and keeps its causal mask here"
    if is_causal is not None and is_causal != spec.is_causal and not reads_key:
        return f"the config says is_causal={is_causal}, which bytetx does not run in this family"
    if attention not in _ATTENTIONS:
        return f"the config asks for the attention {attention!r}; set 'sdpa' to run on bytetx"
    if any(t.device.type == "meta" for t in tensors):
        return "parameters are on the meta device; load the weights"
    if any(type(t) is not nn.Parameter or not _is_dense(t, spec) for t in tensors):
        return "a parameter is no plain dense tensor (quantised or distributed)"
    sinks = _sinks(base, spec)
    kinds = {(str(t.dtype), str(t.device)) for t in tensors if id(t) not in sinks}
    if len(kinds) != 1:
        return f"parameters differ in dtype or device: {sorted(kinds)}; convert the whole model"
    changed = _changed_module(base, spec)
    return changed or difference_from_stock(
        base, is_causal=_may_cache(spec), weights=_buffers_of(base, spec)
    )


def _is_dense(t: torch.Tensor, spec: ModelSpec) -> bool:
    return t.is_contiguous() or (_is_column_major(spec) and t.dim() > 1 and t.mT.is_contiguous())


def _sinks(base: nn.Module, spec: ModelSpec) -> set[int]:
    """Ids of the parameters that are float32 in a model of any dtype."""
    parameters = dict(base.named_parameters(remove_duplicate=False))
    names = (spec.layer_names(i).get("sinks") for i in range(spec.num_layers))
    return {id(parameters[name]) for name in names if name in parameters}


def _changed_module(base: "PreTrainedModel", spec: ModelSpec) -> str | None:
    own_file = type(base).__module__
    activation = _activation_of(base.config, spec)
    for name, module in base.named_modules():
        if module is base or name.split(".")[0] in APART:
            continue
        kind = type(module)
        found = f"{name} is {kind.__module__}.{kind.__qualname__}"
        if hasattr(module, "_hf_hook") or not _runs_own_forward(module):
            return f"the forward of {name} was replaced"
        if any(map(_is_foreign_hook, module._forward_hooks.values())) or module._forward_pre_hooks:
            return f"{name} has forward hooks; remove them to run on bytetx"
        if kind is activation:
            continue
        if kind.__module__ == "transformers.activations":
            return f"{found}, another activation than the config names"
        if kind not in _PLAIN_MODULES and kind.__module__ not in (own_file, _CONV1D_FILE):
            return f"{found}; merge or undo the change to run on bytetx"
    return None


def _runs_own_forward(module: nn.Module) -> bool:
    """Whether module.forward is its class's.  transformers 5.0 collects hidden states by replacing
    forwards for a while, and leaves the class's own behind as an attribute of the instance."""
    forward = module.__dict__.get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def _is_foreign_hook(hook: object) -> bool:
    """Whether a forward hook is not one of transformers' own, which only collect outputs."""
    return getattr(hook, "__module__", "") != "transformers.utils.output_capturing"


def _activation_of(config: "PreTrainedConfig", spec: ModelSpec) -> type[nn.Module]:
    from transformers.activations import ACT2FN

    values = Values(config.to_dict(), spec.family_table)
    return type(ACT2FN[values.activation_name(values.activation_key)])


def _inner_modules(base: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, module) of every module below the base but the pooler, which runs as it is."""
    for name, module in base._modules.items():
        if module is not None and name not in APART:
            yield base, name, module
            yield from _below(module)


def _below(parent: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name, module in parent._modules.items():
        if module is not None:
            yield parent, name, module
            yield from _below(module)
