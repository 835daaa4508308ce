"""Linear layers with weights of 8 or 4 bits in groups of features, which stay so in a CPU's memory.

Rows are rounded to 8 bits as a product reads them, each group of each row on its own, so that
nothing is calibrated and a row's result depends on no other row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bytetx.ops.check import is_operand, require_contiguous, require_tensor
from bytetx.ops.linear import ACTIVATIONS, LinearWeight, taken
from bytetx.ops.native_params import PanelMatrix
from bytetx.ops.panel_linear import INT4, INT8, panel_linear
from bytetx.ops.weight import QuantizedWeight

# Of csrc/cpu/panels.h: features that share a scale, and outputs of a strip.
GROUP, _COLUMNS = 32, 16
_STEP = 4  # features of an output that lie side by side
_DTYPES = (torch.float32, torch.bfloat16)
_FORMATS = {8: INT8, 4: INT4}
_OFFSET = 128.0  # added to codes of 8 bits, which are stored without a sign
# Rounded f16 scales are normal numbers in groups 2^22 times smaller than their output's largest.
_LARGEST_EXPONENT = 10
_LEAST_EXPONENT = -100
_CHUNK = 1 << 20  # weights that are rounded at a time, so that temporaries stay in a cache
_SHRINKS = {8: (1.0, 0.985), 4: (1.0, 0.95, 0.9, 0.85)}

# (codes, scale, least): [n, groups, GROUP] of whole numbers and [n, groups, 1], f32.
_Groups = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class GroupedWeight(QuantizedWeight):
    """A layer's weight [n, k] of about factor[:, None] * (scale * codes + least) by groups.

    strips: uint8 [ceil(n / 16), ceil(k / 32), bytes of a group of 16 outputs]: the codes, the f16
    scales and, with 4 bits, the f16 leasts, as csrc/cpu/group_kernel.h says.
    factor: f32 [n], powers of two.  bias: [n] of dtype, or None.  bits: of a code, 8 or 4.
    dtype: of rows and results, f32 or bf16.  Other members: as of bytetx.ops.weight.Weight.
    """

    strips: Tensor
    factor: Tensor
    bias: Tensor | None
    n: int
    k: int
    bits: int
    dtype: torch.dtype
    sum_bias: Tensor | None = None

    @property
    def panels(self) -> PanelMatrix:
        """The native call's view of it, into memory that the caller keeps."""
        features = self.strips.shape[1] * GROUP
        layout = (features, _COLUMNS, features, _FORMATS[self.bits])
        return PanelMatrix(self.strips, self.bias, self.factor, self.n, self.k, *layout)

    @property
    def restored(self) -> Tensor:
        """The matrix that it stands for, f32 [n, k]."""
        return _values(*self._groups(), self.factor)[:, : self.k].contiguous()

    def rows(self, indices: Tensor) -> Tensor:
        """Those rows of the matrix, a new [len(indices), k] of dtype, as an embedding reads them.

        Raises ValueError for an index outside of it.
        """
        index = indices.long()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.n:
            wrong = index[(index < 0) | (index >= self.n)][0]
            raise ValueError(f"input_ids must be in [0, {self.n}), got {int(wrong)}")
        strip, column = index // _COLUMNS, index % _COLUMNS
        codes, numbers = self._parts()
        steps = codes[strip, :, :, column]  # [m, groups, steps or pairs of them, 4]
        if self.bits == 4:
            steps = torch.stack((steps & 15, steps >> 4), 3)
        scale, least = _as_floats(numbers[strip, :, :, column], self.bits)
        groups = steps.reshape(len(index), self.strips.shape[1], GROUP).float()
        found = _values(groups, scale, least, self.factor[index])[:, : self.k]
        return found.to(self.dtype).contiguous()

    def shard(
        self, *, outputs: range | None = None, inputs: range | None = None
    ) -> "GroupedWeight":
        """Raises ValueError for inputs that are not whole groups."""
        parts = tuple(taken(t, outputs) for t in self._groups())
        factor, bias = taken(self.factor, outputs), taken(self.bias, outputs)
        sum_bias, k = taken(self.sum_bias, outputs), self.k
        if inputs is not None:
            if inputs.start % GROUP or (inputs.stop % GROUP and inputs.stop != k):
                raise ValueError(
                    f"inputs must be whole groups of {GROUP} features, got {inputs.start} to "
                    f"{inputs.stop}; load the model in bfloat16, or divide it in other parts"
                )
            groups = range(inputs.start // GROUP, -(-inputs.stop // GROUP))
            parts, k = tuple(taken(t, groups, dim=1) for t in parts), len(inputs)
            bias, sum_bias = None, sum_bias if bias is None else bias
        strips = _in_strips(parts, self.bits)
        return GroupedWeight(
            strips, factor, bias, len(factor), k, self.bits, self.dtype, sum_bias=sum_bias
        )

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        if not is_operand(x, (*x.shape[:1], self.k), self.dtype, -1):
            require_tensor("x", x, shape=(None, self.k), dtypes=(self.dtype,))
            require_contiguous("x", x)
        d = panel_linear(x, self.panels, activation=ACTIVATIONS.index(activation))
        return d if residual is None else d.add_(residual)

    def _parts(self) -> tuple[Tensor, Tensor]:
        """(codes [strips, groups, steps, 16, 4], f16 [strips, groups, 1 or 2, 16]), views."""
        num_strips, groups, _ = self.strips.shape
        num_bytes = _COLUMNS * GROUP * self.bits // 8
        codes = self.strips[..., :num_bytes].unflatten(2, (-1, _COLUMNS, _STEP))
        numbers = self.strips[..., num_bytes:].view(torch.float16)
        return codes, numbers.reshape(num_strips, groups, -1, _COLUMNS)

    def _groups(self) -> _Groups:
        codes, numbers = self._parts()
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), 3).flatten(2, 3)
        num_strips, groups = codes.shape[:2]
        rows = codes.permute(0, 3, 1, 2, 4).reshape(-1, groups, GROUP)[: self.n].float()
        scale, least = _as_floats(numbers.permute(0, 3, 1, 2).flatten(0, 1)[: self.n], self.bits)
        return rows, scale, least


def prepare_grouped_linear(plain: LinearWeight, *, bits: int) -> GroupedWeight:
    """A plain weight, f32 or bf16 on the CPU, rounded to 8 or 4 bits in groups of 32 features.

    A group's scale, and with 4 bits its least value, are those of a few with the least square
    error. Groups that were saved in Q4_0, Q4_1 or Q8_0 keep their values.
    Raises ValueError for another weight.
    """
    if plain.is_prepacked:
        raise ValueError("plain must be a plain weight, got one in another layout")
    require_tensor("weight", plain.weight, shape=(None, None), dtypes=_DTYPES)
    n, k = plain.n, plain.k
    largest = plain.weight.abs().amax(1).float() if k else torch.zeros(n)
    exponent = torch.frexp(largest).exponent.clamp(min=_LEAST_EXPONENT) - _LARGEST_EXPONENT
    factor = torch.where(largest > 0, torch.ldexp(torch.ones(n), exponent), torch.ones(n))
    step = max(_CHUNK // max(k, 1) // _COLUMNS * _COLUMNS, _COLUMNS)
    strips = []
    for weight, scale in zip(plain.weight.split(step), factor.split(step), strict=True):
        rows = weight.float() / scale[:, None]
        more = rows[:, -1:].expand(-1, -k % GROUP)
        strips.append(_in_strips(_round(torch.cat((rows, more), 1), bits), bits))
    bias, sum_bias = plain.bias, plain.sum_bias
    return GroupedWeight(
        torch.cat(strips), factor, bias, n, k, bits, plain.dtype, sum_bias=sum_bias
    )


def _round(rows: Tensor, bits: int) -> _Groups:
    """rows: f32 [n, whole groups]."""
    w = rows.unflatten(1, (-1, GROUP))
    candidates = _candidates8(w) if bits == 8 else _candidates4(w)
    top = 255.0 if bits == 8 else 15.0
    best: _Groups | None = None
    least_error = torch.full_like(w[..., :1], torch.inf)

    def attempt(scale: Tensor, least: Tensor) -> None:
        nonlocal best, least_error
        scale = scale.half().float()
        least = -_OFFSET * scale if bits == 8 else least.half().float()
        codes = ((w - least) / torch.where(scale == 0, 1.0, scale)).round_().clamp_(0, top)
        error = (codes * scale + least - w).square_().sum(2, keepdim=True)
        if best is None:
            best, least_error = (codes, scale, least), error
            return
        is_better = error < least_error
        found = zip((codes, scale, least), best, strict=True)
        codes, scale, least = (torch.where(is_better, new, old) for new, old in found)
        best, least_error = (codes, scale, least), torch.where(is_better, error, least_error)

    for scale, least in candidates:
        attempt(scale, least)
    assert best is not None
    if bits == 4:  # the line through the best codes
        codes, _, _ = best
        mean, middle = codes.mean(2, keepdim=True), w.mean(2, keepdim=True)
        spread = (codes - mean).square().sum(2, keepdim=True)
        slope = ((codes - mean) * w).sum(2, keepdim=True) / spread.clamp(min=1e-9)
        attempt(slope, middle - slope * mean)
    return best


def _candidates8(w: Tensor) -> list[tuple[Tensor, Tensor]]:
    scale = w.abs().amax(2, keepdim=True) / 127.0
    return [(scale * shrink, scale) for shrink in _SHRINKS[8]]


def _candidates4(w: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Ranges between least and largest value, and that of Q4_0: code 0 is the largest in size."""
    low, high = w.amin(2, keepdim=True), w.amax(2, keepdim=True)
    extreme = torch.where(high > -low, high, low)
    found = [((high - low) * shrink / 15.0, low * shrink) for shrink in _SHRINKS[4]]
    return [*found, (extreme / -8.0, extreme)]


def _values(codes: Tensor, scale: Tensor, least: Tensor, factor: Tensor) -> Tensor:
    return (codes * scale + least).flatten(1) * factor[:, None]


def _as_floats(numbers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """numbers: f16 [..., 1 or 2] -> (scale, least), f32 [..., 1]."""
    scale = numbers[..., :1].float()
    return scale, -_OFFSET * scale if bits == 8 else numbers[..., 1:].float()


def _in_strips(groups: tuple[Tensor, ...], bits: int) -> Tensor:
    codes, scale, least = groups
    n, num_groups, _ = codes.shape
    more = -n % _COLUMNS
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, 0, 0, 0, 0, more))
    codes = codes.view(-1, _COLUMNS, num_groups, GROUP // _STEP, _STEP).permute(0, 2, 3, 1, 4)
    if bits == 4:
        codes = codes[:, :, ::2] | (codes[:, :, 1::2] << 4)
    numbers = torch.cat((scale, least)[: 1 if bits == 8 else 2], 2).half()
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, 0, 0, more))
    numbers = numbers.view(-1, _COLUMNS, num_groups, numbers.shape[2]).permute(0, 2, 3, 1)
    both = (codes.flatten(2), numbers.flatten(2).contiguous().view(torch.uint8))
    return torch.cat(both, 2).contiguous()
