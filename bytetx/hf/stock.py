"""Compares what a stock forward reads besides parameters with the model's config."""

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bytetx.hf.pooler import APART
from bytetx.ops.check import version_of

# What the forward of a plain module reads of its attributes; all other classes may read any.
_READ_ATTRIBUTES = {
    nn.Linear: (),
    nn.LayerNorm: ("normalized_shape", "eps"),
    nn.Embedding: ("max_norm", "norm_type"),
    nn.ModuleList: (),
    nn.Dropout: (),
    nn.Identity: (),
    Conv1D: ("nf",),
}
# Attributes that no forward in eval mode reads, or that bytetx compares elsewhere.
_UNREAD = {
    "activation_dropout",
    "attention_dropout",
    "config",
    "dropout",
    "forward",
    "gradient_checkpointing",
    "layerdrop",
    "training",
    "vocab_size",  # differs where embeddings were resized
}
# Of keys that the original forward reads at every call, or that say where a model came from.
_UNREAD_CONFIG = {
    "_commit_hash",
    "_name_or_path",
    "_output_attentions",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "transformers_version",
    "use_cache",
}
# Instance attributes of a wrapped or compiled module that no stock forward reads.
_OWN = {"forward", "_apply", "_compiled_call_impl"}
_FACTORIES = {torch.arange, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros}
_PACKAGES = ("torch.", "transformers.")


class _DynamicRotary(Protocol):
    """A rotary embedding of transformers whose frequencies change with the length."""

    max_seq_len_cached: int
    original_max_seq_len: int
    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor


class ReadValues:
    """The attributes and buffers that the modules' forwards read; compared on every call.

    What changes by itself, the frequencies of dynamic rotary scaling, is not among them.
    """

    def __init__(self, base: PreTrainedModel, modules: Sequence[nn.Module]):
        """modules: those below `base` whose forwards do not run as they are."""
        self.config = base.config
        self.config_values = copy.deepcopy(base.config.__dict__)
        modules = [base, *modules]
        read = [(m.__dict__, name) for m in modules for name in (*_names(m), "config")]
        read = [(owner, name) for owner, name in read if name in owner]
        self.owners = [owner for owner, _ in read]
        self.names = [name for _, name in read]
        self.values = [_copied(owner[name]) for owner, name in read]
        # An attribute that comes later may stand in front of a method.
        self.dicts = [m.__dict__ for m in modules[1:] if type(m) not in _READ_ATTRIBUTES]
        self.base_dict = base.__dict__
        self.num_attributes: list[int] = []
        buffers = [(m._buffers, name, t) for m in modules for name, t in _read_buffers(m)]
        self.buffer_owners = [owner for owner, _, _ in buffers]
        self.buffer_names = [name for _, name, _ in buffers]
        self.buffers = [buffer for _, _, buffer in buffers]
        self.versions: list[int] = []
        self.growing = [(m, m.inv_freq, version_of(m.inv_freq)) for m in modules if _grows(m)]
        self.kinds = list({type(m) for m in modules})
        self.forwards = [kind.forward for kind in self.kinds]

    def seal(self) -> None:
        """Records the values that the plan itself may have changed."""
        self.num_attributes = self._count_attributes()
        self.versions = list(map(version_of, self.buffers))

    def are_current(self) -> bool:
        get = dict.get
        return (
            list(map(get, self.owners, self.names)) == self.values
            and self._count_attributes() == self.num_attributes
            and all(map(is_, map(get, self.buffer_owners, self.buffer_names), self.buffers))
            and list(map(version_of, self.buffers)) == self.versions
            and all(starts_as(*growing) for growing in self.growing)
            and [kind.forward for kind in self.kinds] == self.forwards
            and self._is_same_config()
        )

    def _count_attributes(self) -> list[int]:
        own = sum(name in self.base_dict for name in _OWN)  # wrap sets some after the plan
        return [*map(len, self.dicts), len(self.base_dict) - own]

    def _is_same_config(self) -> bool:
        now, then = self.config.__dict__, self.config_values
        if now == then:
            return True
        changed = {key for key in now.keys() | then.keys() if now.get(key) != then.get(key)}
        if changed - _UNREAD_CONFIG:
            return False
        self.config_values = copy.deepcopy(now)  # the next calls compare equal at once
        return True


def difference_from_stock(
    base: PreTrainedModel, *, is_causal: bool, weights: Container[str] = ()
) -> str | None:
    """Name what the forward of a module below `base` reads that is not as the config says, or None.

    Parameters are not compared, nor buffers of these names, nor the modules that stay apart.
    """
    try:
        stock = build_stock(base)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        return f"no model can be built of its config: {error}"
    have = dict(base.named_modules())
    for name, twin in stock.named_modules():
        if name.split(".")[0] in APART or name not in have:  # layers may be dropped
            continue
        found = _difference(have[name], twin, base=base, is_causal=is_causal)
        found = found or _different_buffer(have[name], twin, name, weights)
        if found is not None:
            return f"{name or type(base).__name__}{found}; undo the change to run on bytetx"
    return None


def build_stock(base: PreTrainedModel) -> nn.Module:
    """A model of base's class and config: real buffers on the CPU, parameters without memory."""
    config = copy.deepcopy(base.config)
    # Whether another implementation can run here was asked when the model was loaded.
    config._attn_implementation = "eager"
    with torch.device("meta"), _RealBuffers():
        return type(base)(config)


class _RealBuffers(TorchFunctionMode):
    """Under the meta device: factories of constants, which buffers are made of, use the CPU, and
    parameters are not initialised, which takes most of the time."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None:
            return func(*args, **kwargs | {"device": "cpu"})
        name = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") and not name.endswith("__")
        if is_in_place and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs)


def _difference(
    module: nn.Module, twin: nn.Module, *, base: PreTrainedModel, is_causal: bool
) -> str | None:
    if type(module) is not type(twin):
        return f" is {_name_of(module)}, the config says {_name_of(twin)}"
    forward_file = getattr(type(module).forward, "__module__", "")
    if not forward_file.startswith(_PACKAGES):
        return f"'s class has a forward of {forward_file}"
    if type(module) is nn.ModuleList and isinstance(twin, nn.ModuleList):
        has_more = len(module) > len(twin)
        return f" has {len(module)} layers, the config says {len(twin)}" if has_more else None
    missing = {name for name, child in twin._modules.items() if child is not None}
    missing -= {name for name, child in module._modules.items() if child is not None}
    if missing := missing - set(APART):
        return f" has no module {min(missing)}"
    hiding = module.__dict__.keys() - twin.__dict__.keys() - _OWN
    hidden = [name for name in hiding if hasattr(type(module), name)]
    if hidden:
        return f"'s {min(hidden)} was replaced"
    own_config = module.__dict__.get("config")
    if own_config is not None and _read_config(own_config) != _read_config(base.config):
        return "'s config is another one than the model's"
    for name in _names(twin):
        if name == "layer_idx" and not is_causal:  # for the cache; layers may be dropped
            continue
        have, want = module.__dict__.get(name), twin.__dict__[name]
        if type(have) is not type(want) or not _is_same(have, want):
            return f"'s {name} is {have!r:.60}, the config says {want!r:.60}"
    if _grows(module) and not starts_as(module, module.original_inv_freq):
        return "'s inv_freq was replaced"
    return None


def _different_buffer(
    module: nn.Module, twin: nn.Module, prefix: str, weights: Container[str]
) -> str | None:
    """weights: names of buffers, under the base model, that may hold anything."""
    for name, expected in _read_buffers(twin):
        if name.endswith("inv_freq") and not _grows(twin):  # the plan uses the buffer's values
            continue
        buffer = module._buffers.get(name)
        if buffer is not None and f"{prefix}.{name}" in weights:
            continue
        if buffer is None or buffer.shape != expected.shape or not _is_equal(buffer, expected):
            return f"'s {name} has other values than the config says"
    return None


def _is_same(have: object, want: object) -> bool:
    """Equality; of partial functions, which are equal to themselves alone, that of their parts."""
    if isinstance(have, partial) and isinstance(want, partial):
        return (have.func, have.args, have.keywords) == (want.func, want.args, want.keywords)
    return have == want


def _names(module: nn.Module) -> Iterator[str]:
    """The attributes that the module's forward may read, but for its config and parameters."""
    kind = type(module)
    if kind in _READ_ATTRIBUTES:
        yield from _READ_ATTRIBUTES[kind]
        return
    is_model = isinstance(module, PreTrainedModel)  # whose other attributes are for files and such
    unread = _UNREAD | {"max_seq_len_cached"} if _grows(module) else _UNREAD
    for name, value in module.__dict__.items():
        if name.startswith("_") or name in unread or isinstance(value, torch.Tensor):
            continue
        if not is_model or isinstance(value, bool | int | float):
            yield name


def _read_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that the module's forward may read."""
    grows = _grows(module)
    for name, buffer in module._buffers.items():
        is_unread = name == "inv_freq" if grows else name.endswith("original_inv_freq")
        if buffer is not None and not is_unread:
            yield name, buffer


def _grows(module: nn.Module) -> TypeGuard[_DynamicRotary]:
    """Whether it is a rotary embedding whose own forward changes its frequencies by the length."""
    return module.__dict__.get("rope_type") == "dynamic"


def _copied(value: object) -> object:
    """The value, or a copy of one that may be changed in place."""
    return copy.deepcopy(value) if isinstance(value, dict | list | set) else value


def _is_equal(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether a buffer, which may have been cast since, has these values."""
    have = have.detach().cpu()
    if torch.equal(have, want.to(have.dtype)):
        return True
    # Of two GPUs' or processors' powers the last bits may differ.
    is_float = have.dtype in (torch.float32, torch.float64)
    return is_float and torch.allclose(have, want.to(have.dtype), rtol=1e-6, atol=0)


def _read_config(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.__dict__.items() if key not in _UNREAD_CONFIG}


def starts_as(rotary: _DynamicRotary, inv_freq: torch.Tensor, version: int | None = None) -> bool:
    """Whether dynamic rotary scaling uses these frequencies as long as texts are short.

    Its forward replaces them once a text is long, and puts them back for the next short one.
    """
    has_grown = rotary.max_seq_len_cached > rotary.original_max_seq_len
    now = rotary.inv_freq
    if has_grown or now is rotary.original_inv_freq:
        return True
    if version is None:
        return torch.equal(now, inv_freq)
    return now is inv_freq and version_of(now) == version


def _name_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
