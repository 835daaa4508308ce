"""Checks of options; each error names the option, what it must be and what was given."""

import re
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import TypeGuard, TypeVar

from bytetx.errors import InputError, OptionError, shown

T = TypeVar("T")

# Short names of dtypes and the full ones.
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

KV_CACHE_DTYPES = ("auto", "fp8")
MAX_DRAFT = 32  # tokens of a draft; of longer ones the ends are wrong too often


def check_iterable(name: str, given: Iterable[T]) -> Iterable[T]:
    """Returns `given`; InputError where it is one text or not iterable."""
    if isinstance(given, str | bytes):
        one = "str" if isinstance(given, str) else "bytes"
        raise InputError(f"{name} must be an iterable of texts, got one {one}; put it in a list")
    if not isinstance(given, Iterable):
        raise InputError(f"{name} must be an iterable of texts, got {type(given).__name__}")
    return given


def check_top_k(top_k: object, *, may_be_none: bool = True) -> None:
    """OptionError unless top_k is a positive integer, or None where that means all."""
    if top_k is None and may_be_none:
        return
    check_positive("top_k", top_k)


def check_positive(name: str, given: object) -> None:
    """OptionError unless `given` is a positive integer."""
    if not _is_integer(given) or given < 1:
        raise OptionError(f"{name} must be a positive integer, got {shown(given)}")


def check_not_negative(name: str, given: object) -> None:
    if not _is_integer(given) or given < 0:
        raise OptionError(f"{name} must be an integer from 0, got {shown(given)}")


def is_share(given: object) -> TypeGuard[float]:
    """Whether it is a number from 0 to 1."""
    return isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= 1


def check_threshold(threshold: object, *, name: str = "threshold") -> None:
    """OptionError unless it is a number from 0 to 1."""
    if not is_share(threshold):
        raise OptionError(f"{name} must be a number from 0 to 1, got {shown(threshold)}")


def check_adapter_name(name: object) -> None:
    """OptionError unless it is 1 to 128 of letters, digits, '.', '_' and '-'."""
    if not isinstance(name, str) or not _ADAPTER_NAME.fullmatch(name):
        raise OptionError(
            "the name of an adapter must be 1 to 128 of the letters a-z and A-Z, digits, '.', '_' "
            f"and '-', the first one a letter or a digit, got {shown(name)}"
        )


def check_draft_size(num_speculative_tokens: object) -> None:
    """OptionError unless it is an integer from 0 to MAX_DRAFT."""
    given = num_speculative_tokens
    if not _is_integer(given) or not 0 <= given <= MAX_DRAFT:
        raise OptionError(
            f"num_speculative_tokens must be an integer from 0, which drafts none, to {MAX_DRAFT}, "
            f"got {shown(given)}"
        )


def check_kv_cache_dtype(kv_cache_dtype: object) -> None:
    """OptionError unless it is one of KV_CACHE_DTYPES."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise OptionError(
            "kv_cache_dtype must be auto, the model's dtype, or fp8, E4M3 with a scale for each "
            f"vector, got {shown(kv_cache_dtype)}"
        )


def check_token_budget(token_budget: int) -> int:
    """Returns the budget, in tokens; OptionError unless it is a positive integer."""
    check_positive("token_budget", token_budget)
    return token_budget


def check_num_seqs(max_num_seqs: int, token_budget: int) -> None:
    """OptionError unless it is an integer from 1 to token_budget."""
    check_positive("max_num_seqs", max_num_seqs)
    if max_num_seqs > token_budget:
        raise OptionError(
            f"max_num_seqs must be 1 ... token_budget ({token_budget}), got {max_num_seqs}"
        )


def check_group_timeout(given: object) -> None:
    """InputError unless `given` is a number of seconds, at least 1 (inf is one)."""
    if isinstance(given, bool) or not isinstance(given, Real) or given < 1 or given != given:
        raise InputError(f"group_timeout must be at least 1 (seconds), got {shown(given)}")


def check_integer(name: str, given: object) -> None:
    """OptionError unless `given` is an integer."""
    if not _is_integer(given):
        raise OptionError(f"{name} must be an integer, got {shown(given)}")


def check_seconds(name: str, given: object) -> None:
    """OptionError unless `given` is None or a number of seconds, 0 or more (inf is one)."""
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise OptionError(f"{name} must be a number of seconds, 0 or more, got {shown(given)}")


def check_dimensions(dimensions: object, *, size: int) -> None:
    """OptionError unless dimensions is None or an integer from 1 to size."""
    if dimensions is not None and not (_is_integer(dimensions) and 1 <= dimensions <= size):
        raise OptionError(
            f"dimensions must be an integer from 1 to {size}, got {shown(dimensions)}"
        )


def check_text(name: str, given: object) -> None:
    """OptionError unless `given` is a str that has a form in UTF-8."""
    fault = text_fault(given)
    if fault is not None:
        raise OptionError(f"{name} {fault}")


def text_fault(given: object) -> str | None:
    """The reason why `given` is no text, to follow its name in an error; None where it is one."""
    if not isinstance(given, str):
        return f"must be a str, got {type(given).__name__}"
    if given.isascii():
        return None
    try:
        given.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"holds half a surrogate pair at character {error.start}, which is no text; decode its "
            "source with errors='replace'"
        )
    return None


def check_names(name: str, given: object) -> None:
    """OptionError unless `given` is a collection of str; one str would be split into letters."""
    if (
        isinstance(given, str | bytes)
        or not isinstance(given, Collection)
        or not all(isinstance(entry, str) for entry in given)
    ):
        raise OptionError(f"{name} must be a list of str, got {shown(given)}")


def chosen_modes(pooling: object, *, known: Sequence[str]) -> tuple[str, ...]:
    """The pooling modes as a tuple; OptionError where there is none or one is unknown."""
    modes = (pooling,) if isinstance(pooling, str) else pooling
    modes = tuple(modes) if isinstance(modes, Iterable) else ()
    if not modes or not all(mode in known for mode in modes):
        raise OptionError(
            f"pooling must be one or more of {', '.join(known)}, got {shown(pooling)}"
        )
    return modes


def chosen_layers(layers: object, *, num_states: int) -> tuple[int, ...]:
    """Layers counted from 0; OptionError unless each is an integer within num_states."""
    chosen = tuple(layers) if isinstance(layers, Iterable) else ()
    if not chosen or not all(
        _is_integer(layer) and -num_states <= layer < num_states for layer in chosen
    ):
        raise OptionError(
            f"layers must be one or more integers from {-num_states} to {num_states - 1}, got "
            f"{shown(layers)}"
        )
    return tuple(layer % num_states for layer in chosen)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
