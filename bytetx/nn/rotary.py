"""Cosines and sines of rotary positions, as tables with one row per position."""

import math
from dataclasses import dataclass

import torch

from bytetx.checkpoint.rope_spec import RotarySpec
from bytetx.packed import PackedBatch


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """cos, sin: f32 [max_positions, rotary_dim / 2], already times the attention factor."""

    spec: RotarySpec
    cos: torch.Tensor
    sin: torch.Tensor

    def of(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(cos, sin, rows of them) for the batch's tokens.

        With dynamic scaling, the frequencies of a text that is longer than the model was trained
        for depend on its length: then each token has its own row, unchanged for shorter texts.
        The tokens of a prompt are rotated by its total length, also in prefill chunks, and each
        token after it by the length up to itself.
        """
        past, spec = batch.past, self.spec
        longest = batch.max_seqlen if past is None else past.max_kv_seqlen
        prompts = None if past is None else past.prompt_seqlens
        if spec.scaling != "dynamic" or (prompts is None and longest <= spec.original_positions):
            return self.cos, self.sin, batch.position_ids
        lengths = seqlens = batch.cu_seqlens.diff()
        if past is not None:
            lengths = past.kv_seqlens if prompts is None else prompts
        per_token = torch.repeat_interleave(lengths, seqlens, output_size=batch.total_tokens)
        per_token = per_token.maximum(batch.position_ids + 1)
        angles = batch.position_ids.float()[:, None] * _dynamic(spec, per_token)
        rows = torch.arange(batch.total_tokens, dtype=torch.int32, device=batch.device)
        return angles.cos(), angles.sin(), rows


def rotary_tables(
    spec: RotarySpec,
    *,
    max_positions: int,
    device: torch.device | str,
    frequencies: torch.Tensor | None = None,
) -> RotaryTables:
    """The tables of positions 0 to max_positions - 1.

    frequencies: radians a token, f32 [dim / 2] on the CPU, instead of those that spec says.
    Source: RoFormer (arXiv 2104.09864), section 3.2; in f32 as Hugging Face computes them, for
    angles in double would rotate far positions by other angles than the model was trained with.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * (frequencies_of(spec) if frequencies is None else frequencies)
    cos, sin = angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor
    return RotaryTables(spec, cos.to(device), sin.to(device))


def frequencies_of(spec: RotarySpec) -> torch.Tensor:
    """Radians a token, f32 [dim / 2]."""
    plain = 1.0 / spec.theta ** _exponents(spec)
    if spec.scaling == "linear":
        return plain / spec.factor
    if spec.scaling == "factors":
        return plain / torch.tensor(spec.factors, dtype=torch.float32)
    if spec.scaling == "ntk":
        return _ntk(spec)
    if spec.scaling == "llama3":
        return _llama3(spec, plain)
    return _yarn(spec) if spec.scaling == "yarn" else plain


def _exponents(spec: RotarySpec) -> torch.Tensor:
    return torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim


def _dynamic(spec: RotarySpec, lengths: torch.Tensor) -> torch.Tensor:
    """Frequencies of texts of n lengths (tokens), f32 [n, dim / 2]: the base grows with them."""
    original = spec.original_positions
    longest = lengths.clamp(min=original).float()
    growth = spec.factor * longest / original - (spec.factor - 1)
    theta = spec.theta * growth ** (spec.dim / max(spec.dim - 2, 1))
    return 1.0 / theta[:, None] ** _exponents(spec).to(lengths.device)


def _ntk(spec: RotarySpec) -> torch.Tensor:
    """A base that is `factor` times as large, and each frequency factor^(2 / dim) slower.

    Source: the NTK scaling of the GTE v1.5 models (Alibaba-NLP/new-impl).
    """
    plain = 1.0 / (spec.theta * spec.factor) ** _exponents(spec)
    slowdown: float = spec.factor ** (2 / spec.dim)
    return plain / slowdown


def _llama3(spec: RotarySpec, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched, short ones stay, those between are blended."""
    turns_in_context = spec.original_positions * plain / (2 * math.pi)
    low, high = spec.low_freq_factor, spec.high_freq_factor
    blend = ((turns_in_context - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / spec.factor + blend * plain


def _yarn(spec: RotarySpec) -> torch.Tensor:
    """As llama3, with a ramp over the feature's index.  Source: YaRN (arXiv 2309.00071), 3.2."""
    powers = spec.theta ** _exponents(spec)
    low, high = (_feature_of(spec, n) for n in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = 0.001 if low == high else high - low
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return ramp / (spec.factor * powers) + (1 - ramp) / powers


def _feature_of(spec: RotarySpec, num_turns: float) -> float:
    """The index of the feature that would make so many turns within the original context."""
    ratio = math.log(spec.original_positions / (num_turns * 2 * math.pi))
    return spec.dim * ratio / (2 * math.log(spec.theta))
