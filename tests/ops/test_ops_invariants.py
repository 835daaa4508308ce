"""Invariants of every op whatever the numbers: batch mates, empty input, errors, torch.compile."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import cpu_kernels
import pytest
import torch
from torch import Tensor

from bytetx.ops import linear as linear_ops
from bytetx.ops import native, reference
from bytetx.ops.attention import varlen_attention
from bytetx.ops.embedding import embed
from bytetx.ops.linear import ACTIVATIONS, linear, prepare_linear
from bytetx.ops.native import num_tile_rows, tile_rows
from bytetx.ops.norm import layer_norm
from bytetx.ops.pooling import POOLING_MODES, pool

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BEFORE_TORCH_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
both_dtypes = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- a row's result does not depend on its batch mates, bit for bit


@both_dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("prepack", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_linear_row_alone_equals_row_in_batch(
    dtype: torch.dtype, activation: str, prepack: bool, has_residual: bool
) -> None:
    # Before torch 2.13 oneDNN sums otherwise for few rows where the weight is plain f32.
    is_rounded = dtype == F32 and not prepack and BEFORE_TORCH_2_13
    x, other = torch.randn(2, 130, 96).to(dtype)
    w = prepare_linear(torch.randn(96, 96).to(dtype), torch.randn(96).to(dtype), prepack=prepack)
    residual = other if has_residual else None
    batch = linear(x, w, activation=activation, residual=residual)
    for rows in (slice(0, 1), slice(77, 78), slice(5, 7), slice(40, 111)):
        mates = residual[rows] if has_residual else None
        alone = linear(x[rows], w, activation=activation, residual=mates)
        if is_rounded:
            torch.testing.assert_close(alone, batch[rows])
        else:
            assert torch.equal(alone, batch[rows])


@both_dtypes
@pytest.mark.parametrize("k", [48, 64, 312])
@pytest.mark.parametrize("prepack", [True, False])
def test_what_lies_behind_the_rows_of_a_linear_layer_never_shows(
    dtype: torch.dtype, k: int, prepack: bool
) -> None:
    """NaN there. With AMX oneDNN reads past the end of bf16 rows of no whole 32 features."""
    w = prepare_linear(torch.randn(96, k).to(dtype), torch.randn(96).to(dtype), prepack=prepack)
    for m in (1, 37, 70, 130):
        storage = torch.full((tile_rows(m), k), torch.nan, dtype=dtype)
        x = storage[:m].copy_(torch.randn(m, k))
        torch.testing.assert_close(linear(x, w), linear(x.clone(), w))


@both_dtypes
@pytest.mark.parametrize("prepack", [True, False])
def test_a_linear_layer_takes_one_row_of_a_slice_of_columns(
    dtype: torch.dtype, prepack: bool
) -> None:
    """It is contiguous with a stride of its own, and as_strided raised for the last columns."""
    w = prepare_linear(torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype), prepack=prepack)
    storage = torch.full((2, 192), torch.nan, dtype=dtype)
    for rows in (storage, storage[:1], storage[1:]):
        for first in (0, 64, 128):
            x = rows[:1, first : first + 64].copy_(torch.randn(1, 64))
            torch.testing.assert_close(linear(x, w), linear(x.clone(), w))


def test_bf16_rows_that_end_within_32_features_run_without_what_lies_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the CPU of the test has no AMX, and shows nothing; others need no copy."""
    monkeypatch.setattr(linear_ops, "_has_amx", lambda: False)
    x = torch.zeros((tile_rows(70), 48), dtype=BF16)[:70]
    assert linear_ops._rows_for_onednn(x).data_ptr() == x.data_ptr()
    monkeypatch.setattr(linear_ops, "_has_amx", lambda: True)
    x = torch.full((tile_rows(70), 48), torch.nan, dtype=BF16)[:70].zero_()
    rows = linear_ops._rows_for_onednn(x)
    behind = rows.as_strided((tile_rows(70) + 1, 48), rows.stride())
    assert torch.equal(behind, torch.zeros(tile_rows(70) + 1, 48, dtype=BF16))
    for dtype, k in [(BF16, 64), (F32, 48)]:  # what lies behind these is not copied
        x = torch.zeros((tile_rows(70), k), dtype=dtype)[:70]
        assert linear_ops._rows_for_onednn(x).data_ptr() == x.data_ptr()


@both_dtypes
@pytest.mark.parametrize("k", [48, 64])
def test_a_cpu_meets_few_row_counts_and_no_uninitialised_rows(dtype: torch.dtype, k: int) -> None:
    """oneDNN keeps half a MiB for each; a ragged stream of GPT-2 grew by 0.5 GiB in 500 calls."""
    weight, bias = torch.randn(2, k).to(dtype)
    counts = set()
    for m in range(1, 1025):
        x = torch.randn(m, k).to(dtype)
        for made in (x, x.clone()[:], layer_norm(x, weight, bias, eps=1e-5)):
            rows = linear_ops._rows_for_onednn(made)
            assert torch.equal(rows[:m], made)
            assert len(rows) == tile_rows(m) and not rows[m:].any()
            counts.add(len(rows))
    assert len(counts) == num_tile_rows(1024) == 46
    assert min(counts) == 2  # for one row sums in another order


def test_rows_of_a_tile_cost_little() -> None:
    assert [tile_rows(m) for m in (0, 1, 3, 5, 9, 33, 65, 129, 1025)] == [
        0, 2, 4, 6, 12, 40, 72, 144, 1088,
    ]  # fmt: skip
    for m in range(64, 40_000, 7):
        assert m <= tile_rows(m) < m * (1.125 if m <= 1024 else 1.0625)
        assert tile_rows(tile_rows(m)) == tile_rows(m)


@both_dtypes
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "tanh"])
def test_an_activation_rounds_the_same_at_every_place(dtype: torch.dtype, activation: str) -> None:
    """torch's gelu and silu do not: scalar code runs at the end of each thread's share."""
    x = torch.randn(7000, 7).to(dtype)
    batch = reference.activate(x, activation)
    in_place = reference._activate_in_place(x.clone(), activation)
    for row, expected, placed in zip(x, batch, in_place, strict=True):
        assert torch.equal(reference.activate(row, activation), expected)
        assert torch.equal(placed, expected)
    exact = cpu_kernels.EXACT_ACTIVATIONS[activation](x.double())
    torch.testing.assert_close(batch.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@both_dtypes
@pytest.mark.parametrize("width", [384, 50])
def test_norm_and_embedding_row_alone_equals_row_in_batch(dtype: torch.dtype, width: int) -> None:
    table, weight, bias = torch.randn(211, width).to(dtype), *torch.randn(2, width).to(dtype)
    every = torch.arange(211, dtype=torch.int32)
    embedded = embed(every, None, None, word=table, norm_weight=weight, norm_bias=bias)
    normalized = layer_norm(table, weight, bias, eps=1e-12)
    assert torch.equal(embedded, normalized)
    for rows in (slice(0, 1), slice(209, 211), slice(3, 150)):
        assert torch.equal(layer_norm(table[rows], weight, bias, eps=1e-12), normalized[rows])
        alone = embed(every[rows], None, None, word=table, norm_weight=weight, norm_bias=bias)
        assert torch.equal(alone, normalized[rows])


@both_dtypes
@pytest.mark.parametrize("mode", POOLING_MODES)
def test_pooled_sequence_alone_equals_sequence_in_batch(dtype: torch.dtype, mode: str) -> None:
    x = torch.randn(900, 300).to(dtype)
    batch = pool(x, ids(0, 5, 5, 700, 701, 900), mode=mode, normalize=True)
    for i, (start, end) in enumerate([(0, 5), (5, 5), (5, 700), (700, 701), (701, 900)]):
        alone = pool(x[start:end], ids(0, end - start), mode=mode, normalize=True)
        assert torch.equal(alone[0], batch[i])


@both_dtypes
def test_attention_of_sequence_alone_equals_sequence_in_batch(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 500, 2, 32).to(dtype)
    batch = varlen_attention(q, k, v, ids(0, 3, 400, 400, 401, 500), max_seqlen=397)
    for start, end in [(0, 3), (3, 400), (400, 401), (401, 500)]:
        n = end - start
        alone = varlen_attention(q[start:end], k[start:end], v[start:end], ids(0, n), max_seqlen=n)
        assert torch.equal(alone, batch[start:end])


@both_dtypes
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(999, 384).to(dtype), *torch.randn(2, 384).to(dtype)
    cu_seqlens, before = ids(0, 7, 900, 999), torch.get_num_threads()
    heads = x.view(999, 6, 64)

    def run() -> tuple[Tensor, ...]:
        attended = varlen_attention(heads, heads, heads, cu_seqlens, max_seqlen=893)
        return layer_norm(x, weight, bias, eps=1e-5), pool(x, cu_seqlens, mode="mean"), attended

    try:
        torch.set_num_threads(1)
        expected = run()
        for num_threads in (2, 3):
            torch.set_num_threads(num_threads)
            assert all(map(torch.equal, run(), expected))
    finally:
        torch.set_num_threads(before)


# ---- edges


def test_layer_norm_in_place_on_input_or_residual() -> None:
    x, residual, (weight, bias) = *torch.randn(2, 37, 100), torch.randn(2, 100)
    expected = layer_norm(x, weight, bias, eps=1e-5, residual=residual)
    for target in ("x", "residual"):
        t = {"x": x.clone(), "residual": residual.clone()}
        got = layer_norm(t["x"], weight, bias, eps=1e-5, residual=t["residual"], out=t[target])
        assert got is t[target] and torch.equal(got, expected)


def test_layer_norm_keeps_its_digits_when_the_mean_is_large() -> None:
    x = torch.randn(8, 768) + 1e4
    got = layer_norm(x, torch.ones(768), torch.zeros(768), eps=1e-12)
    exact = torch.nn.functional.layer_norm(x.double(), (768,), eps=1e-12)
    assert (got - exact).abs().max() < 1e-3  # 1e4 has an f32 spacing of 1e-3; E[x^2] would lose all


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_no_tokens(dtype: torch.dtype) -> None:
    none, weight = torch.empty(0, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    assert layer_norm(none, weight, weight, eps=1e-5).shape == (0, 64)
    assert embed(ids(), None, None, word=torch.ones(3, 64, dtype=dtype)).shape == (0, 64)
    w = prepare_linear(torch.ones(8, 64, dtype=dtype), prepack=True)
    assert linear(none, w, residual=none[:, :8].contiguous()).shape == (0, 8)
    heads = none.view(0, 2, 32)
    for cu_seqlens in (ids(0), ids(0, 0, 0)):
        assert varlen_attention(heads, heads, heads, cu_seqlens, max_seqlen=0).shape == (0, 2, 32)
        for mode in POOLING_MODES:
            pooled = pool(none, cu_seqlens, mode=mode, normalize=True)
            assert torch.equal(pooled, torch.zeros(len(cu_seqlens) - 1, 64))


@both_dtypes
def test_max_pooling_shows_a_nan(dtype: torch.dtype) -> None:
    x = torch.randn(40, 20).to(dtype)
    x[3, 7], x[39, 0] = torch.nan, torch.nan
    got = pool(x, ids(0, 20, 40), mode="max")
    assert got.isnan().nonzero().tolist() == [[0, 7], [1, 0]]


def test_bfloat16_rounds_as_torch_does() -> None:
    values = torch.tensor([1.00390625, 1.01171875, -0.0, 3.4e38, torch.inf, torch.nan, -7.77])
    table = values.expand(2, -1).contiguous().bfloat16()
    got = embed(ids(1), ids(0), None, word=table, position=torch.zeros_like(table))
    assert torch.equal(got.isnan(), table[:1].isnan())
    assert torch.equal(got.nan_to_num(), table[:1].nan_to_num())


# ---- errors name the argument, what it needs and what it got


def attend(**changes: object) -> Tensor:
    q = torch.randn(6, 2, 8)
    given = {"q": q, "k": q, "v": q, "cu_seqlens": ids(0, 6), "max_seqlen": 6} | changes
    return varlen_attention(**given)


def normalized(**changes: object) -> Tensor:
    given = {"x": torch.ones(3, 8), "weight": torch.ones(8), "bias": torch.ones(8)} | changes
    return layer_norm(**given, eps=1e-5)


def embedded(**changes: object) -> Tensor:
    table = torch.ones(5, 8)
    given = {"input_ids": ids(0, 4), "position_ids": ids(0, 1), "token_type_ids": None}
    return embed(**(given | {"word": table, "position": table} | changes))


def pooled(**changes: object) -> Tensor:
    given = {"x": torch.ones(4, 8), "cu_seqlens": ids(0, 4), "mode": "mean"} | changes
    return pool(**given)


def projected(**changes: object) -> Tensor:
    w = prepare_linear(torch.ones(3, 8), torch.ones(3), prepack=False)
    return linear(**({"x": torch.ones(4, 8), "w": w} | changes))


ERRORS: list[tuple[Callable[..., Tensor], dict[str, object], str]] = [
    (attend, {"q": torch.ones(6, 16)}, r"q must have shape \[any, any, any\], got float32 \[6, 16"),
    (
        attend,
        {"k": torch.ones(5, 2, 8)},
        r"k must have shape \[6, any, 8\], got float32 \[5, 2, 8\]",
    ),
    (attend, {"v": torch.ones(6, 2, 8, dtype=BF16)}, "v must be float32, got bfloat16"),
    (attend, {"v": torch.ones(6, 8, 2).mT}, "v must be contiguous within a row"),
    (attend, {"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens must be int32, got int64"),
    (attend, {"cu_seqlens": ids(0, 5)}, "cu_seqlens must end at total_tokens, got 5"),
    (attend, {"cu_seqlens": ids(1, 6)}, "cu_seqlens must start at 0, got 1"),
    (attend, {"cu_seqlens": ids(0, 9, 6)}, "cu_seqlens must not decrease"),
    (attend, {"cu_seqlens": ids()}, r"cu_seqlens must have batch_size \+ 1 entries"),
    (attend, {"relative_bias": torch.ones(2, 9)}, "relative_bias must have .* max_seqlen 6, got 9"),
    (
        attend,
        {"relative_bias": torch.ones(2, 11), "bias_positions": ids(0, 1, 2, 3, 4, 6)},
        r"bias_positions must be in \[0, 6\), got 0 to 6",
    ),
    (attend, {"out": torch.ones(6, 2, 8, dtype=F16)}, "out must be float32, got float16"),
    (normalized, {"x": torch.ones(8, 3).T}, r"x must be contiguous, got strides \[1, 3\]"),
    (
        normalized,
        {"weight": torch.ones(7)},
        r"weight must have shape \[8\], got float32 \[7\] on cpu",
    ),
    (normalized, {"bias": torch.ones(8, dtype=F16)}, "bias must be float32, got float16"),
    (normalized, {"residual": torch.ones(8, 3).T}, "residual must be contiguous"),
    (normalized, {"out": torch.ones(3, 16)[:, ::2]}, "out must be contiguous"),
    (embedded, {"input_ids": ids(4, 5)}, r"input_ids\[1\] is 5, but the table has 5 rows"),
    (embedded, {"input_ids": ids(-1, 7)}, r"input_ids\[0\] is -1, but the table has 5 rows"),
    (embedded, {"position_ids": ids(0, 9)}, r"position_ids\[1\] is 9, but the table has 5 rows"),
    (embedded, {"input_ids": torch.tensor([1, 2])}, "input_ids must be int32, got int64"),
    (embedded, {"position_ids": ids(1)}, r"position_ids must have shape \[2\], got int32 \[1\]"),
    (embedded, {"position": torch.ones(5, 7)}, r"position must have shape \[any, 8\]"),
    (embedded, {"word": torch.ones(8, 5).T}, "word must be contiguous"),
    (pooled, {"mode": "median"}, "mode must be one of cls, .* got 'median'"),
    (pooled, {"cu_seqlens": ids(0, 3)}, "cu_seqlens must run from 0 to total_tokens 4, got 0 to 3"),
    (pooled, {"cu_seqlens": ids(0, 5, 4)}, "cu_seqlens must not decrease"),
    (pooled, {"first_tokens": ids(1, 2)}, r"first_tokens must have shape \[1\]"),
    (pooled, {"first_tokens": ids(-1)}, "first_tokens must not be negative"),
    (pooled, {"x": torch.ones(8, 4).T}, "x must be contiguous"),
    (projected, {"x": torch.ones(4, 7)}, r"x must have shape \[any, 8\], got float32 \[4, 7\]"),
    (projected, {"x": torch.ones(8, 4).T}, "x must be contiguous"),
    (projected, {"x": torch.ones(4, 8, dtype=BF16)}, "x must be float32, got bfloat16"),
    (projected, {"activation": "mish"}, "activation must be one of none, .* got 'mish'"),
    (projected, {"residual": torch.ones(4, 4)}, r"residual must have shape \[4, 3\]"),
]


@pytest.mark.parametrize(("op", "changes", "message"), ERRORS)
def test_error_says_what_is_wrong(
    op: Callable[..., Tensor], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        op(**changes)


def test_float16_ids_are_checked_without_kernels() -> None:
    with pytest.raises(ValueError, match=r"input_ids\[2\] is -3, but the table has 9 rows"):
        embed(ids(0, 8, -3), None, None, word=torch.ones(9, 4, dtype=F16))


def test_not_a_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="x must be a torch.Tensor, got list"):
        layer_norm([1.0], torch.ones(1), torch.ones(1), eps=1e-5)


# ---- torch.compile sees the ops


def registered_calls() -> dict[str, tuple[tuple, dict]]:
    x, weight = torch.randn(6, 16), torch.randn(16)
    heads = x.view(6, 2, 8)
    return {
        "layer_norm": ((x, weight, weight), {"eps": 1e-5, "residual": x.clone()}),
        "embed": ((ids(1, 2), ids(0, 1), None), {"word": x, "position": x.clone()}),
        "pool": ((x, ids(0, 2, 6)), {"mode": "max", "normalize": True}),
        "varlen_attention": ((heads, heads, heads, ids(0, 2, 6)), {"max_seqlen": 4}),
    }


@pytest.mark.parametrize("name", registered_calls())
def test_registered_op_passes_torchs_own_check(name: str) -> None:
    args, kwargs = registered_calls()[name]
    torch.library.opcheck(getattr(torch.ops.bytetx, name).default, args, kwargs)


def test_compiled_function_keeps_the_ops_whole() -> None:
    weight, cu_seqlens = torch.randn(16), ids(0, 2, 6)

    def block(x: Tensor) -> Tensor:
        heads = x.view(-1, 2, 8)
        attended = varlen_attention(heads, heads, heads, cu_seqlens, max_seqlen=4)
        normalized = layer_norm(attended.flatten(1), weight, weight, eps=1e-5, residual=x)
        return pool(normalized, cu_seqlens, mode="mean")

    x = torch.randn(6, 16)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), block(x))
    assert native.kernel("pool", x.device) is not None


# ---- threads


@pytest.mark.skipif(sys.platform != "linux", reason="lists the threads in /proc")
def test_kernels_work_on_torchs_own_threads() -> None:
    x, weight = torch.randn(4096, 384), torch.randn(384)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.nn.functional.gelu(x)  # torch's pool has started
        threads = set(os.listdir("/proc/self/task"))
        layer_norm(x, weight, weight, eps=1e-5)
        # Those of earlier tests may end meanwhile.
        assert set(os.listdir("/proc/self/task")) <= threads
    finally:
        torch.set_num_threads(before)


def test_kernels_start_threads_where_there_is_no_openmp() -> None:
    """A process without torch has no OpenMP runtime; the result is the same."""
    code = """
import importlib.util, sys
from collections import namedtuple
import numpy as np
spec = importlib.util.spec_from_file_location("_cpu", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
x = np.random.default_rng(0).standard_normal((4096, 384), dtype=np.float32)
one, out = np.ones(384, np.float32), [np.full_like(x, np.nan) for _ in range(2)]
Launch = namedtuple("Launch", "device stream num_threads isa")
for num_threads, y in zip((1, 3), out):
    core.layer_norm(x=x.ctypes.data, residual=None, out=y.ctypes.data, sum_out=None,
                    weight=one.ctypes.data, bias=None, out_fp8=None, out_scale=None,
                    total_tokens=4096, hidden_size=384, eps=1e-5, dtype=0,
                    launch=Launch(-1, 0, num_threads, 0))
assert "torch" not in sys.modules and (out[0] == out[1]).all() and abs(out[0].std() - 1) < 1e-3
"""
    path = importlib.util.find_spec("bytetx._cpu").origin
    subprocess.run([sys.executable, "-c", code, path], check=True)


def test_an_instruction_set_that_the_machine_lacks_is_an_error() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    launch = native.launch_args(x.device)._replace(isa=1 << 20)
    with pytest.raises(ValueError, match="isa must be a set of instructions that this machine has"):
        native.require_kernel("layer_norm", x.device)(
            x=x,
            residual=None,
            out=x,
            sum_out=None,
            weight=weight,
            bias=None,
            out_fp8=None,
            out_scale=None,
            total_tokens=2,
            hidden_size=8,
            eps=1e-5,
            dtype=0,
            launch=launch,
        )
