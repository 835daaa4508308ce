"""FlashAttention-2 as torch ships it, under the name of the package flash-attn."""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

_PACKAGE, _DISTRIBUTION = "flash_attn", "flash-attn"
_PADDING = f"{_PACKAGE}.bert_padding"
_VERSION = "2.7.4+torch"  # of the kernels in torch; no release of flash-attn is called so
# transformers asks these once and keeps the answer.
_CACHED = (
    "is_flash_attn_2_available",
    "is_flash_attn_greater_or_equal",
    "_package_distribution_mapping",
)


@contextmanager
def flash_attn_package() -> Iterator[str]:
    """Lets transformers load models with attn_implementation="flash_attention_2" inside the block.

    Yields whose kernels they get: "flash-attn" where that package is installed, else "torch": then
    `import flash_attn` gives torch's own FlashAttention-2 kernels for as long as the block lasts.
    transformers keeps the functions, so that a model loaded inside runs behind the block, too.
    """
    found = importlib.util.find_spec(_PACKAGE)
    if found is not None:
        yield "torch" if isinstance(found.loader, _ModuleLoader) else _DISTRIBUTION
        return
    finder = _Finder()
    sys.meta_path.append(finder)
    _forget_checks({_PACKAGE: [_DISTRIBUTION]})
    try:
        yield "torch"
    finally:
        sys.meta_path.remove(finder)
        for name in (_PACKAGE, _PADDING):
            sys.modules.pop(name, None)
        _forget_checks({})


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash-attn's function of this name, for those of its arguments that torch's kernel has.

    q, k, v: [batch_size, seqlen, num_heads, head_dim], f16 or bf16, on a GPU.
    """
    lengths = (None, None, q.shape[1], k.shape[1])
    return _attend(q, k, v, lengths, dropout_p, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The same for packed rows.

    q, k, v: [total_tokens, num_heads, head_dim], f16 or bf16, on a GPU.  cu_seqlens_q, _k: int32
    [batch_size + 1].
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return _attend(q, k, v, lengths, dropout_p, softmax_scale, causal, window_size)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor | None, Tensor | None, int, int],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    left, right = (None if size < 0 else size for size in window_size)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *lengths, dropout_p, causal, False),
        scale=softmax_scale,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return out


class _Finder(DistributionFinder):
    """Finds the package, which is this module under another name, and its distribution."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in (_PACKAGE, _PADDING):
            return None
        return ModuleSpec(fullname, _ModuleLoader(), is_package=fullname == _PACKAGE)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        if context is None or context.name in (None, _DISTRIBUTION, _PACKAGE):
            yield _Metadata()


class _ModuleLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _PADDING:
            # Loaded while transformers looks for these, so it is there.
            from transformers import modeling_flash_attention_utils as theirs

            vars(module).update(pad_input=theirs._pad_input, unpad_input=theirs._unpad_input)
            return
        vars(module).update(
            __version__=_VERSION,
            flash_attn_func=flash_attn_func,
            flash_attn_varlen_func=flash_attn_varlen_func,
            flash_attn_with_kvcache=None,  # which transformers takes as "not supported"
        )


class _Metadata(Distribution):
    def read_text(self, filename: str) -> str | None:
        header = f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {_VERSION}\n"
        return {"METADATA": header, "top_level.txt": f"{_PACKAGE}\n"}.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(path)


def _forget_checks(distributions: dict[str, list[str]]) -> None:
    """Makes transformers ask again whether flash-attn is installed, where it has asked already."""
    utils = sys.modules.get("transformers.utils.import_utils")
    if utils is None:
        return
    for name in _CACHED:
        clear = getattr(getattr(utils, name, None), "cache_clear", None)
        if clear is not None:
            clear()
    known = getattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", None)  # a constant before 5.2x
    if known is not None:
        known.pop(_PACKAGE, None)
        known.update(distributions)
