"""Linear layers on Hopper: every tiling, epilogue and dtype against float64."""

import math
from functools import partial

import pytest
import torch
from captured import assert_replays_give_the_same_bits

from bytetx.ops import native, reference
from bytetx.ops.linear import (
    ACTIVATIONS,
    LinearWeight,
    fuses_residual,
    linear,
    prepare_linear,
    run_kernel,
)
from bytetx.ops.linear_plan import LinearPlan, tilings

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
HALVES = [torch.float16, torch.bfloat16]
# (name, split_k) of every way to cut a product, known before a GPU is looked for.
CUTS = [
    (name, split_k)
    for name, _, _, is_small_m in native.linear_tilings()
    for split_k in ((1, 2, 3, 8) if is_small_m else (1,))
]
ROWS = [1, 24, 63, 64, 65, 100, 128, 191, 300, 1000]


@pytest.fixture(autouse=True)
def has_kernel() -> None:
    reason = native.why_no_kernel("linear", CUDA)
    if reason is not None:
        pytest.skip(reason)


def random_layer(
    m: int, n: int, k: int, dtype: torch.dtype, *, seed: int = 0
) -> tuple[torch.Tensor, LinearWeight, torch.Tensor]:
    """x, the layer, a residual."""
    torch.manual_seed(seed)
    x = torch.randn(m, k, device=CUDA, dtype=dtype)
    weight = torch.randn(n, k, device=CUDA, dtype=dtype) / k**0.5
    bias = torch.randn(n, device=CUDA, dtype=dtype)
    residual = torch.randn(m, n, device=CUDA, dtype=dtype)
    return x, prepare_linear(weight, bias, prepack=False), residual


def assert_right(
    ours: torch.Tensor,
    x: torch.Tensor,
    w: LinearWeight,
    activation: str,
    residual: torch.Tensor | None,
) -> None:
    def plain(to: torch.dtype) -> torch.Tensor:
        bias = None if w.bias is None else w.bias.to(to)
        rest = None if residual is None else residual.to(to)
        return reference.linear(
            x.to(to), w.weight.to(to), bias, activation=activation, residual=rest
        )

    exact = plain(torch.float64)
    error, of_torch = ((d.double() - exact).abs().max().item() for d in (ours, plain(x.dtype)))
    assert error <= 2 * of_torch + 1e-6, (error, of_torch)


def poison_free_memory() -> None:
    """Fill the memory that the allocator hands out next with NaN."""
    torch.full((1 << 22,), float("nan"), device=CUDA)


def index_of(name: str) -> int:
    return next(tiling.index for tiling in tilings() if tiling.name == name)


@pytest.mark.parametrize(("name", "split_k"), CUTS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", ROWS)
def test_every_tiling(name: str, split_k: int, dtype: torch.dtype, m: int) -> None:
    plan = LinearPlan(index_of(name), split_k)
    for n, k in ((32, 8), (224, 72), (384, 1024), (1152, 520)):
        x, w, residual = random_layer(m, n, k, dtype)
        for activation, rest in (("none", None), ("none", residual), ("gelu", None)):
            poison_free_memory()
            ours = run_kernel(x, w, plan=plan, activation=activation, residual=rest)
            assert_right(ours, x, w, activation, rest)


@pytest.mark.parametrize("size", ["64x64", "128x64", "128x128"])
@pytest.mark.parametrize("m", [1, 65, 200, 520])
def test_pairs_give_the_bits_of_single_tiles(size: str, m: int) -> None:
    """Pairs share what they read, not what they sum; one launch behind the other."""
    pair, single = (LinearPlan(index_of(f"small-m-{size}{end}")) for end in ("-pair", ""))
    x, w, residual = random_layer(m, 736, 1096, torch.float16)
    for activation, rest in (("none", residual), ("gelu", None)):
        poison_free_memory()
        run = partial(run_kernel, x, w, activation=activation, residual=rest)
        ours = [run(plan=pair) for _ in range(20)]
        assert all(torch.equal(d, run(plan=single)) for d in ours)


@pytest.mark.parametrize(
    "name", [name for name, _, _, is_few in native.linear_tilings() if not is_few]
)
@pytest.mark.parametrize("dtype", HALVES)
def test_many_tiles_a_cta(name: str, dtype: torch.dtype) -> None:
    """Each CTA's rings and its place for residuals go round several times."""
    plan = LinearPlan(index_of(name))
    x, w, residual = random_layer(20001, 768, 200, dtype)
    for activation, rest in (("none", residual), ("gelu", None)):
        poison_free_memory()
        ours = run_kernel(x, w, plan=plan, activation=activation, residual=rest)
        assert_right(ours, x, w, activation, rest)
        again = run_kernel(x, w, plan=plan, activation=activation, residual=rest)
        assert torch.equal(again, ours)


@pytest.mark.parametrize(
    "name", [name for name, _, _, is_few in native.linear_tilings() if not is_few]
)
@pytest.mark.parametrize("m", [300, 2200, 5000])
def test_rows_in_bands_where_weights_are_large(name: str, m: int) -> None:
    """Along n, in two bands and in three whose last one is lower; tiles that m and n cut."""
    plan = LinearPlan(index_of(name))
    x, w, residual = random_layer(m, 4128, 3080, torch.bfloat16)
    for activation, rest in (("none", None), ("none", residual), ("gelu", None)):
        poison_free_memory()
        ours = run_kernel(x, w, plan=plan, activation=activation, residual=rest)
        assert_right(ours, x, w, activation, rest)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [1, 77, 5000])
@pytest.mark.parametrize("has_residual", [False, True])
def test_every_epilogue(dtype: torch.dtype, activation: str, m: int, has_residual: bool) -> None:
    x, w, residual = random_layer(m, 768, 384, dtype)
    rest = residual if has_residual else None
    poison_free_memory()
    assert_right(linear(x, w, activation=activation, residual=rest), x, w, activation, rest)


@pytest.mark.parametrize("dtype", HALVES)
def test_large_and_small_inputs_of_every_activation(dtype: torch.dtype) -> None:
    values = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e4, -1e4])])
    x = torch.zeros(len(values), 32, dtype=dtype)
    x[:, 0] = values
    w = prepare_linear(torch.eye(32, dtype=dtype, device=CUDA), prepack=False)
    for activation in ACTIVATIONS:
        ours = linear(x.to(CUDA), w, activation=activation)
        exact = reference.activate(x.double(), activation)
        of_torch = reference.activate(x, activation).double()
        error = (ours.cpu().double() - exact).abs()
        spacing = exact.abs().clamp(min=2.0**-14) * torch.finfo(dtype).eps
        allowed = torch.maximum(2 * (of_torch - exact).abs(), spacing)
        assert (error <= allowed).all(), activation


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "relu"])
def test_what_is_not_finite_stays_in_its_row(value: float, activation: str) -> None:
    for m in (100, 2000):
        x, w, _ = random_layer(m, 768, 384, torch.float16)
        clean = linear(x, w, activation=activation)
        x[7, 5] = value
        dirty = linear(x, w, activation=activation)
        others = torch.arange(m, device=CUDA) != 7
        assert torch.equal(dirty[others], clean[others])
        expected = reference.linear(x, w.weight, w.bias, activation=activation, residual=None)[7]
        # torch's GELU of -inf is NaN, of its limit 0.
        grows = expected.isinf()
        assert torch.equal(dirty[7][grows], expected[grows])
        assert math.isfinite(value) or not dirty[7].isfinite().all()
        assert not math.isnan(value) or dirty[7].isnan().all()


def test_batch_mates_change_no_bit_where_the_plan_is_the_same() -> None:
    x, w, _ = random_layer(4000, 768, 768, torch.float16)
    for rows in (3000, 3500, 4000):
        assert torch.equal(
            linear(x[:rows], w, activation="gelu")[:3000], linear(x, w, activation="gelu")[:3000]
        )


def test_the_same_call_gives_the_same_bits() -> None:
    for m in (40, 3000):
        x, w, residual = random_layer(m, 768, 3072, torch.bfloat16)
        first = linear(x, w, residual=residual)
        for _ in range(20):
            assert torch.equal(linear(x, w, residual=residual), first)


def test_a_captured_graph_gives_the_same_bits() -> None:
    x, w, residual = random_layer(200, 768, 768, torch.float16)
    back = prepare_linear(w.weight.T.contiguous(), prepack=False)

    def run() -> torch.Tensor:
        return linear(linear(x, w, activation="gelu"), back, residual=residual)

    assert_replays_give_the_same_bits(run)


@pytest.mark.parametrize("name", ["small-m-64x96", "small-m-64x32"])
def test_tilings_that_cannot_gate_say_which_can(name: str) -> None:
    x, w, _ = random_layer(50, 192, 64, torch.float16)
    with pytest.raises(ValueError, match="only tilings of a multiple of 64 columns gate"):
        run_kernel(x, w, plan=LinearPlan(index_of(name)), activation="gelu", is_gated=True)


def test_shapes_that_no_kernel_takes_run_all_the_same() -> None:
    for n, k in ((33, 64), (2, 768), (64, 36)):
        x, w, residual = random_layer(50, n, k, torch.float16)
        assert not w.has_kernel
        assert not fuses_residual(50, w)
        assert_right(linear(x, w, residual=residual), x, w, "none", residual)
    x, w, _ = random_layer(50, 64, 64, torch.float32)
    assert_right(linear(x, w), x, w, "none", None)


def test_no_rows() -> None:
    x, w, residual = random_layer(0, 768, 768, torch.float16)
    assert linear(x, w, residual=residual).shape == (0, 768)


def test_operands_that_start_off_16_bytes_run_all_the_same() -> None:
    x, w, _ = random_layer(50, 64, 64, torch.float16)
    moved = torch.empty(50 * 64 + 1, device=CUDA, dtype=torch.float16)[1:].view(50, 64)
    moved.copy_(x)
    assert_right(linear(moved, w), x, w, "none", None)
