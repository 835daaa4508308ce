"""Rotary positions of a checkpoint: what is rotated, how fast, and the scaling of long contexts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bytetx.checkpoint.config import Values, positive_number
from bytetx.errors import CheckpointError

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "ntk", "factors")

# A table of cosines and sines has a row a position: beyond this a config is damaged, not long.
_MAX_POSITIONS = 1 << 22


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotation of the first `dim` features of each query and key head.

    theta: base of the wavelengths.  is_interleaved: features 2i and 2i + 1 are a pair; else i and
    i + dim / 2 are.  scaling: one of SCALINGS.  factor: how much longer than original_positions
    tokens a text may be.  low_freq_factor, high_freq_factor: of llama3.  beta_fast, beta_slow,
    truncate: of yarn.  attention_factor: what cosines and sines are multiplied by.  factors: what
    each of the dim / 2 frequencies is divided by, of "factors", which GGUF files have.
    """

    dim: int
    theta: float
    is_interleaved: bool
    scaling: str
    factor: float
    original_positions: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    factors: tuple[float, ...] = ()


def read_rotary(
    values: Values, head_dim: int, *, windowed: bool = False, pattern: Sequence[bool] = ()
) -> RotarySpec | None:
    """The rotation that config.json asks for, None for a family without; CheckpointError where it
    asks for one that is not known or lacks a number.

    windowed: that of the windowed layers, None for a family that has one rotation for all.
    pattern: whether each layer is windowed, for a rope_theta that lists a base for each.
    """
    if values.architecture["positions"] != "rotary":
        return None
    if windowed and "windowed_rotary_theta" not in values.names:
        return None
    given = _Given(values, windowed=windowed, pattern=pattern)
    original = given.original_positions()
    factor = given.factor(original)
    is_llama3, is_yarn = given.scaling == "llama3", given.scaling == "yarn"
    low = given.number("low_freq_factor") if is_llama3 else 1.0
    high = given.number("high_freq_factor") if is_llama3 else 1.0
    if is_llama3 and low >= high:
        raise CheckpointError(
            f"config.json: rope low_freq_factor {low} must be below high_freq_factor {high}"
        )
    dim = given.dim(head_dim)
    return RotarySpec(
        dim=dim,
        theta=given.theta(),
        is_interleaved=values.architecture.get("rotary_layout") == "pairs",
        scaling=given.scaling,
        factor=factor,
        original_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=given.number("beta_fast", 32.0) if is_yarn else 32.0,
        beta_slow=given.number("beta_slow", 1.0) if is_yarn else 1.0,
        truncate=given.parameters.get("truncate", True) is not False,
        attention_factor=given.attention_factor(factor),
        factors=given.factors(dim),
    )


def rotary_positions(rotary: RotarySpec, max_positions: int) -> int:
    """Tokens that a text may have: what the scaling stretches config.json's number to."""
    longest = max_positions
    if rotary.scaling in ("linear", "dynamic"):
        longest = int(max_positions * rotary.factor)
    elif rotary.scaling == "yarn":
        longest = max(max_positions, int(rotary.original_positions * rotary.factor))
    if longest > _MAX_POSITIONS:
        raise CheckpointError(
            f"config.json: {longest} positions are asked for, at most {_MAX_POSITIONS} can be"
        )
    return longest


class _Given:
    """rope_parameters of config.json, or rope_scaling with rope_theta beside it (older files)."""

    def __init__(self, values: Values, *, windowed: bool, pattern: Sequence[bool]):
        self.values, self.windowed, self.pattern = values, windowed, pattern
        self.theta_name = "windowed_rotary_theta" if windowed else "rotary_theta"
        given = values.config.get("rope_scaling") or values.config.get("rope_parameters") or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"config.json: rope_parameters must be a table, got {given!r}")
        if "windowed_rotary_theta" in values.names:
            kind = "sliding_attention" if windowed else "full_attention"
            of_kind = given.get(kind)
            if isinstance(of_kind, Mapping):
                given = of_kind
            else:
                is_by_kind = any(isinstance(entry, Mapping) for entry in given.values())
                is_of_global = values.architecture.get("scaled_layers") == "global"
                given = {} if is_by_kind or (windowed and is_of_global) else given
        if any(isinstance(entry, Mapping) for entry in given.values()):
            raise CheckpointError(
                "config.json: rope_parameters differ by layer type, which is not supported"
            )
        self.parameters: Mapping[str, Any] = given
        self.scaling: str = given.get("rope_type") or given.get("type") or "default"
        if self.scaling not in SCALINGS:
            raise CheckpointError(
                f"config.json: rope_type {self.scaling!r} is not supported; known: "
                f"{', '.join(SCALINGS)}"
            )

    def number(self, key: str, default: float | None = None) -> float:
        value = self.parameters.get(key)
        return positive_number(f"rope {key}", default if value is None else value)

    def theta(self) -> float:
        given = self.parameters.get("rope_theta") is not None
        of_layers = self._theta_of_layers()
        if of_layers is not None and not given:
            theta = of_layers
        else:
            theta = self.number("rope_theta") if given else self.values.number(self.theta_name)
        if theta <= 1:
            raise CheckpointError(f"config.json: rope_theta must be above 1, got {theta}")
        return theta

    def _theta_of_layers(self) -> float | None:
        """The base of a kind of layers, where a file lists one for each."""
        thetas = self.values.config.get("rope_theta")
        if not isinstance(thetas, list):
            return None
        count = self.values.size("num_layers")
        if len(thetas) != count:
            raise CheckpointError(
                f"config.json: rope_theta must list {count} bases, got {str(thetas)[:200]}"
            )
        is_by_kind = self.pattern and "windowed_rotary_theta" in self.values.names
        kinds = self.pattern if is_by_kind else [self.windowed] * count
        found = [t for t, kind in zip(thetas, kinds, strict=True) if kind == self.windowed]
        # No layer reads the base of a kind that is not there.
        bases = {positive_number("rope_theta", theta) for theta in found or thetas}
        if len(bases) > 1:
            raise CheckpointError(
                "config.json: rope_theta lists several bases of layers that attend alike, which is "
                f"not supported: {str(thetas)[:200]}"
            )
        return next(iter(bases))

    def dim(self, head_dim: int) -> int:
        """Rotated features of a head: a number, a share of the head, or all of it."""
        if "rotary_dim" in self.values.names:
            dim = self.values.size("rotary_dim")
        else:
            dim = int(head_dim * self._fraction())
        if dim < 2 or dim % 2 or dim > head_dim:
            raise CheckpointError(
                f"config.json: {dim} rotated features of a head of {head_dim} are asked for; they "
                "must be even, at least 2 and at most the head's"
            )
        return dim

    def _fraction(self) -> float:
        key = "partial_rotary_factor"
        given = self.parameters.get(key)
        if "rotary_fraction" in self.values.names:
            return self.values.number("rotary_fraction") if given is None else self.number(key)
        other = self.values.config.get(key) if given is None else given
        if other not in (None, 1):
            raise CheckpointError(
                f"config.json: {key} is {other!r}, but this family rotates whole heads"
            )
        return 1.0

    def original_positions(self) -> int:
        """Positions that the model was first trained for; only some scalings tell them apart."""
        key = "original_max_position_embeddings"
        found = self.values.size("max_position_embeddings")
        if self.scaling in ("llama3", "yarn"):
            given = self.values.config.get(key, self.parameters.get(key))
            if given is None:
                return found
            if type(given) is not int or given < 1:
                raise CheckpointError(
                    f"config.json: {key} must be a positive integer, got {given!r}"
                )
            return given
        return found

    def factor(self, original: int) -> float:
        if self.scaling in ("default", "factors"):
            return 1.0
        if self.scaling == "yarn" and self.parameters.get("factor") is None:
            return self.values.size("max_position_embeddings") / original
        factor = self.number("factor")
        if factor < 1:
            raise CheckpointError(f"config.json: rope factor must be at least 1, got {factor}")
        return factor

    def factors(self, dim: int) -> tuple[float, ...]:
        if self.scaling != "factors":
            return ()
        given = self.parameters.get("factors")
        if not isinstance(given, list) or len(given) != dim // 2:
            raise CheckpointError(
                f"config.json: rope factors must be {dim // 2} numbers, got {str(given)[:120]}"
            )
        return tuple(positive_number("rope factors", factor) for factor in given)

    def attention_factor(self, factor: float) -> float:
        """YaRN's temperature, folded into the tables.  Source: YaRN (arXiv 2309.00071), 3.4."""
        if self.scaling != "yarn":
            return 1.0
        if self.parameters.get("attention_factor") is not None:
            return self.number("attention_factor")
        if self.parameters.get("mscale") and self.parameters.get("mscale_all_dim"):
            scale = _temperature(factor, self.number("mscale"))
            return scale / _temperature(factor, self.number("mscale_all_dim"))
        return _temperature(factor, 1.0)


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
