"""Panels of weights that a CPU has laid out, our own or oneDNN's, for kernels that read them there.

A row keeps the bits that it has in the kernel that runs many rows: oneDNN's layout and order of
sums are found by trying, and a weight of which they are others has no panels.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from bytetx.ops import native
from bytetx.ops.linear import (
    MAX_FEW_ROWS,
    LinearWeight,
    few_rows_activations,
    has_fixed_bf16,
    prepare_linear,
)
from bytetx.ops.native_params import PanelMatrix
from bytetx.ops.panel_linear import (
    BF16_DOT,
    F32_CHAIN,
    WORDS,
    has_bf16_dot,
    our_panels,
    panel_linear,
    why_no_panels,
)

# What oneDNN has: outputs of a panel, features of a chain of sums (0: all), and those that a panel
# may have behind the weight's, exclusive.
_COLUMNS = (64, 48, 32, 16)
_CHAINS = (0, 1024, 512, 2048, 256, 4096)
_PADDING = 64
_TRIED_ROWS = 64
_MOST_TRIED = 4096  # outputs of a weight whose layout is tried on itself to run few rows
_LARGE_EXPONENT = 20  # a large product's: sums of about 1 lose what a rounding to bf16 leaves


@dataclass(frozen=True, slots=True)
class _PanelLayout:
    """Fields of PanelMatrix."""

    features: int
    columns: int
    chain: int
    format: int

    def of(self, w: LinearWeight, address: int) -> PanelMatrix:
        """Point into w's memory, which the caller keeps."""
        sizes = (self.features, self.columns, self.chain, self.format)
        return PanelMatrix(address, w.bias, None, w.n, w.k, *sizes)

    def fits(self, w: LinearWeight) -> bool:
        """Whether oneDNN has as many bytes of w as the layout has."""
        num_items = torch.ops.mkldnn._nbytes(w.weight) // w.dtype.itemsize
        outputs = -(-w.n // self.columns) * self.columns
        return bool(self.features * outputs == num_items)


@dataclass(frozen=True, slots=True)
class PanelFinder:
    """Finds the panels of weights; those of one shape are tried once."""

    _found: dict[tuple[int, int, torch.dtype, bool], _PanelLayout | None] = field(
        default_factory=dict
    )

    def find_few_rows(self, w: LinearWeight) -> None:
        """Give w what runs few rows faster than oneDNN, in its layout and with its bits, if any."""
        activations = few_rows_activations(w.dtype)
        if not activations or w.weight.dtype == torch.int32 or w.few_rows is not None:
            return
        panels = _plain_panels(w) if w.is_plain else self._find_large(w)
        if panels is None:
            return
        few = replace(w, few_rows=native.PanelProduct.of(panels, w.dtype))
        x = torch.randn(_TRIED_ROWS, w.k, generator=torch.Generator().manual_seed(1)).to(w.dtype)
        some = x[:MAX_FEW_ROWS]
        by_few, wanted = (v.matmul(some, activation=activations[-1]) for v in (few, w))
        if few.few_rows is not None and torch.equal(by_few, wanted):
            w.take_few_rows(few.few_rows)

    def find(self, w: LinearWeight) -> PanelMatrix | None:
        """The panels of a weight that is laid out for a CPU; None where it has none.

        They point into the weight's memory, which the caller keeps.
        """
        if not w.is_prepacked or w.n * w.k == 0 or why_no_panels() is not None:
            return None
        if w.bias is not None and not w.bias.is_contiguous():
            return None
        if w.weight.dtype == torch.int32:  # pack_weight's
            return our_panels(w.weight, w.bias, n=w.n, k=w.k, dtype=w.dtype)
        key = (w.n, w.k, w.dtype, w.bias is None)
        if key not in self._found:
            self._found[key] = _try_layouts(w)
        found = self._found[key]
        return None if found is None else found.of(w, torch.ops.mkldnn.data_ptr(w.weight))

    def _find_large(self, w: LinearWeight) -> PanelMatrix | None:
        """As find; a weight of many outputs, such as a head, gets the layout that a small one has.

        The caller compares results, since neither layout nor order of sums is tried on w itself.
        """
        if w.n <= _MOST_TRIED or not w.is_prepacked:
            return self.find(w)
        rng = torch.Generator().manual_seed(2)
        small = prepare_linear(
            torch.randn(_MOST_TRIED, w.k, generator=rng).to(w.dtype), prepack=True
        )
        panels = self.find(small)
        if panels is None or (w.bias is not None and not w.bias.is_contiguous()):
            return None
        layout = _PanelLayout(panels.features, panels.columns, panels.chain, panels.format)
        if not layout.fits(w):
            return None
        return layout.of(w, torch.ops.mkldnn.data_ptr(w.weight))


def _plain_panels(w: LinearWeight) -> PanelMatrix | None:
    """A plain f32 weight as panels of one output, in oneDNN's usual order of sums."""
    if w.weight.device.type != "cpu" or w.dtype != torch.float32 or w.n * w.k == 0:
        return None
    if why_no_panels() is not None:
        return None
    if any(t is not None and not t.is_contiguous() for t in (w.weight, w.bias)):
        return None
    return PanelMatrix(w.weight, w.bias, None, w.n, w.k, w.k, 1, F32_CHAIN, WORDS)


def _try_layouts(w: LinearWeight) -> _PanelLayout | None:
    """The layout with which our kernel gives what oneDNN does, bit for bit where that has bits."""
    has_bits = w.dtype == torch.float32 or has_fixed_bf16()
    x = torch.randn(_TRIED_ROWS, w.k, generator=torch.Generator().manual_seed(0)).to(w.dtype)
    if has_bits:
        x = _show_order(x, w)
    wanted = w.matmul(x)
    for layout in _layouts(w):
        got = panel_linear(x, layout.of(w, torch.ops.mkldnn.data_ptr(w.weight)))
        if torch.equal(got, wanted) if has_bits else _is_close(got, wanted):
            return layout
    return None


def _show_order(x: torch.Tensor, w: LinearWeight) -> torch.Tensor:
    """The rows x with two large products that cancel out in an output, which differs for a row.

    What is summed between them loses its last bits, so that a result shows the order of sums
    through a rounding to bf16, too.
    """
    rng = np.random.default_rng(0)
    rows, last = np.arange(len(x)), w.k - 1
    outputs, first = rng.integers(0, w.n, len(x)), rng.integers(0, w.k, len(x))
    second = np.where(rows % 2, last, rng.integers(0, w.k, len(x)))
    units = x.new_zeros(2 * len(x), w.k)
    units[np.arange(2 * len(x)), np.concatenate((first, second))] = 1
    no_bias = replace(w, bias=None)
    weights = no_bias.matmul(units).view(2, len(x), w.n)[:, rows, outputs]  # they are exact
    exponents = torch.frexp(weights[0].float() * weights[1].float()).exponent
    scale = torch.exp2((_LARGE_EXPONENT - exponents).clamp(0, 60).float()).to(x.dtype)
    x[rows, first], x[rows, second] = weights[1] * scale, -weights[0] * scale
    return x


def _layouts(w: LinearWeight) -> list[_PanelLayout]:
    """Those that fit the bytes that oneDNN has, each a read within them."""
    num_items = torch.ops.mkldnn._nbytes(w.weight) // w.dtype.itemsize
    is_half = w.dtype == torch.bfloat16
    found = []
    for columns in _COLUMNS:
        outputs = -(-w.n // columns) * columns
        features = num_items // outputs
        if features * outputs != num_items or not w.k <= features < w.k + _PADDING:
            continue
        if is_half and features % 2:
            continue
        for form in (BF16_DOT, WORDS) if is_half and has_bf16_dot() else (WORDS,):
            chains = [chain or features + features % 2 for chain in _CHAINS if chain < w.k]
            found += [_PanelLayout(features, columns, chain, form) for chain in chains]
    return found


def _is_close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results differ by their order of sums and one rounding to bf16."""
    error = (got.float() - wanted.float()).norm()
    return bool(error <= 0.01 * wanted.float().norm())
