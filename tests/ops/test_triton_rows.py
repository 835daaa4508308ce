"""The Triton kernels of rows and GEMMs against plain torch in f32: on a GPU, or interpreted."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from sampled_rows import columns_of
from test_sample_tokens import is_right, random_rows
from torch import Tensor

from bytetx.ops import host, native, reference
from bytetx.ops.gated import prepare_gated
from bytetx.ops.kv_codes import quantize_kv, restore_kv
from bytetx.ops.linear import ACTIVATIONS
from bytetx.ops.pooling import POOLING_MODES
from bytetx.ops.sampling import uniform

pytest.importorskip("triton")

from bytetx.ops import maxsim, triton_backend, triton_kernels  # noqa: E402
from bytetx.ops.triton_kernels import gemm  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# numpy, which interprets them, warns of inf and NaN.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter multiplies no bf16.
GEMM_DTYPES = DTYPES if DEVICE == "cuda" else DTYPES[:2]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_close(ours: Tensor, right: Tensor, *, rounds: int = 1) -> None:
    """As good as `right` rounded to our dtype; rounds: how often, with f32 sums between."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(
        ours.float(), right.float(), rtol=rounds * eps, atol=8 * rounds * eps
    )


@pairwise(
    {
        "width": [1, 48, 384, 1000],
        "num_rows": [0, 1, 37],
        "dtype": DTYPES,
        "is_rms": [False, True],
    }
)
def test_norms(is_rms: bool, num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = normal(num_rows, width, dtype=dtype), normal(num_rows, width, dtype=dtype)
    weight = normal(width, dtype=dtype)
    bias = None if is_rms else normal(width, dtype=dtype)
    options = {"is_rms": is_rms, "eps": 1e-5}
    for rest in (None, residual):
        h = x.float() if rest is None else x.float() + rest.float()
        if is_rms:
            right = F.rms_norm(h, (width,), weight.float(), 1e-5)
        else:
            assert bias is not None
            right = F.layer_norm(h, (width,), weight.float(), bias.float(), 1e-5)
        out = torch.full_like(x, torch.nan)
        triton_kernels.norm(x, weight, bias, residual=rest, out=out, **options)
        assert_close(out, right)
    sums = torch.full_like(x, torch.nan)
    in_place = residual.clone()
    triton_kernels.norm(x, weight, bias, residual=in_place, out=in_place, sum_out=sums, **options)
    assert_close(sums, x.float() + residual.float())
    assert_close(in_place, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_embedding(has_norm: bool, dtype: torch.dtype) -> None:
    word, position, kind = (normal(n, 96, dtype=dtype) for n in (50, 40, 2))
    ids = torch.randint(0, 50, (21,), dtype=torch.int32, device=DEVICE)
    places, kinds = ids % 40, ids % 2
    options = {
        "norm_weight": normal(96, dtype=dtype) if has_norm else None,
        "norm_bias": normal(96, dtype=dtype) if has_norm else None,
        "eps": 1e-6,
    }
    for at, types, embeds in (
        (places, kinds, None),
        (places, None, normal(21, 96, dtype=dtype)),
        (None, None, None),
    ):
        tables = (word, None if at is None else position, None if types is None else kind)
        ours = triton_kernels.embed(
            (ids, at, types), tables, inputs_embeds=embeds, bad_ids=None, **options
        )
        right = reference.embed(
            ids,
            at,
            types,
            word=word.float(),
            position=None if at is None else position.float(),
            token_type=None if types is None else kind.float(),
            inputs_embeds=None if embeds is None else embeds.float(),
            **{name: v.float() if isinstance(v, Tensor) else v for name, v in options.items()},
        )
        assert_close(ours, right, rounds=2)


def test_bad_ids_are_noted_and_their_rows_are_nan() -> None:
    word, position = normal(50, 32), normal(9, 32)
    ids, places = ints(3, 50, 7, 8), ints(0, 1, 2, -4)
    noted = ints(0, 0, 0)
    options = {"norm_weight": None, "norm_bias": None, "eps": 1e-6, "inputs_embeds": None}
    tables = (word, position, None)
    ours = triton_kernels.embed((ids, places, None), tables, bad_ids=noted, **options)
    assert noted.tolist() == [50, -4, 0]
    assert ours.isnan().all(1).tolist() == [False, True, False, True]
    assert_close(ours[2], word[7] + position[2])
    nearest = triton_kernels.embed((ids, places, None), tables, bad_ids=None, **options)
    assert_close(nearest[1], word[49] + position[1])
    assert_close(nearest[3], word[8] + position[0])


@pairwise({"activation": ACTIVATIONS, "m": [0, 1, 31, 200], "dtype": GEMM_DTYPES})
def test_linear(m: int, activation: str, dtype: torch.dtype) -> None:
    x, w, bias = normal(m, 72, dtype=dtype), normal(136, 72, dtype=dtype), normal(136, dtype=dtype)
    residual = normal(m, 136, dtype=dtype)
    for b, rest in ((bias, None), (None, residual)):
        product = x.double() @ w.double().T
        right = reference.activate(product if b is None else product + b.double(), activation)
        right = right if rest is None else right + rest.double()
        ours = triton_kernels.linear(x, w, b, activation=activation, residual=rest)
        torch.testing.assert_close(ours.double(), right, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize("dtype", GEMM_DTYPES[1:])
def test_linear_by_descriptors(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda" and not gemm.has_tensor_descriptors(torch.device(DEVICE)):
        pytest.skip("this GPU loads by addresses")
    monkeypatch.setattr(gemm, "has_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(gemm, "num_multiprocessors", lambda device: 1)  # a program, several tiles
    m, n, k = 300, 136, 72  # no multiples of a tile's
    x, w, bias = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype), normal(n, dtype=dtype)
    residual = normal(m, n, dtype=dtype)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(m, k)  # not of 16-byte addresses
    for b, rest, rows, activation in (
        (bias, None, x, "gelu"),
        (None, residual, x, "silu"),
        (bias, residual, shifted, "gelu"),
    ):
        product = x.double() @ w.double().T
        right = reference.activate(product if b is None else product + b.double(), activation)
        right = right if rest is None else right + rest.double()
        ours = triton_kernels.linear(rows, w, b, activation=activation, residual=rest)
        torch.testing.assert_close(ours.double(), right, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("n", [64, 600, 20])
def test_gates(n: int, activation: str, dtype: torch.dtype) -> None:
    both = normal(9, 2 * n, dtype=dtype)
    weight = prepare_gated(normal(n, 8), normal(n, 8), prepack=False)
    gates, values = both.float().view(9, n // weight.block, 2, weight.block).unbind(2)
    right = (reference.activate(gates, activation) * values).reshape(9, n)
    ours = triton_kernels.gate_rows(both, n, block=weight.block, activation=activation)
    assert_close(ours, right, rounds=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotary_turns_views_in_place(is_interleaved: bool, dtype: torch.dtype) -> None:
    fused = normal(21, 6, 40, dtype=dtype)
    cos, sin = normal(30, 12), normal(30, 12)
    position_ids = torch.randint(0, 30, (21,), dtype=torch.int32, device=DEVICE)
    right = fused.clone()
    tables = (cos, sin, position_ids)
    reference.rotary(right[:, 2:5], *tables, is_interleaved=is_interleaved)
    triton_kernels.rotary(fused[:, 2:5], *tables, is_interleaved=is_interleaved)
    assert_close(fused, right, rounds=2)
    assert torch.equal(fused[:, :2], right[:, :2])


def test_keys_and_values_go_into_their_slots() -> None:
    fused = normal(5, 3, 2, 24)
    k, v = fused[:, 1], fused[:, 2]
    caches = [torch.full((3, 4, 2, 24), torch.nan, device=DEVICE) for _ in range(4)]
    slots = ints(11, -1, 0, 5, 6)
    triton_kernels.write_kv(k, v, *caches[:2], slots)
    reference.write_kv(k, v, *caches[2:], slots)
    for ours, right in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(ours.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_written_codes_have_the_bits_of_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    k, v = normal(2, 40, 2, head_dim).unbind()
    sizes = torch.logspace(-8, 5, 40, device=DEVICE)[:, None, None]
    k, v = ((x * sizes).to(dtype).contiguous() for x in (k, v))
    k[3], v[4, :, ::2] = 0.0, -0.0
    k[5, 0, 3], v[7, 1, 0], v[8, 0, 5] = torch.inf, torch.nan, -torch.inf
    caches = [torch.full((3, 16, 2, head_dim), 9, dtype=torch.uint8).to(DEVICE) for _ in range(4)]
    scales = [torch.full((3, 2, 16), 9, dtype=torch.uint8).to(DEVICE) for _ in range(4)]
    slots = torch.randperm(48)[:40].int().to(DEVICE)
    slots[::9] = -1
    triton_kernels.write_codes(k, v, *caches[:2], slots, *scales[:2])
    reference.write_kv(k, v, *caches[2:], slots, *scales[2:])
    for ours, right in zip(scales[:2], scales[2:], strict=True):
        assert torch.equal(ours, right)
    for ours, right, scale in zip(caches[:2], caches[2:], scales, strict=False):
        finite = (scale != 255).transpose(1, 2)  # other codes say nothing
        assert torch.equal(ours[finite], right[finite])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_pages_are_restored_in_order(head_dim: int, dtype: torch.dtype) -> None:
    k, v = normal(2, 6, 8, 2, head_dim).unbind()
    (k_codes, k_scales), (v_codes, v_scales) = quantize_kv(k), quantize_kv(v)
    k_scales, v_scales = (t.transpose(1, 2).contiguous() for t in (k_scales, v_scales))
    table, kv_seqlens = ints(4, 1, -1, 0, 3, 5, 2, 9).view(2, 4), ints(13, 24)
    table[1, 0] = -1  # before a window
    both = triton_kernels.restore_pages(
        *(k_codes, v_codes, k_scales, v_scales, table, kv_seqlens), num_columns=3, dtype=dtype
    )
    for found, codes, scales in zip(both, (k_codes, v_codes), (k_scales, v_scales), strict=True):
        wanted = restore_kv(codes, scales.transpose(1, 2)).to(dtype)
        found = found.view(2, 3, 8, 2, head_dim)
        assert torch.equal(found[0, 0], wanted[4])
        assert torch.equal(found[0, 1, :5], wanted[1, :5]) and not found[0, 1, 5:].any()
        assert torch.equal(found[1, 1], wanted[5]) and torch.equal(found[1, 2], wanted[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", POOLING_MODES)
def test_pooling(mode: str, dtype: torch.dtype) -> None:
    x, cu_seqlens = normal(60, 200, dtype=dtype), ints(0, 0, 5, 6, 40, 60)
    skipped = ints(0, 2, 1, 0, 3)
    for first_tokens in (None, skipped):
        options = {"mode": mode, "first_tokens": first_tokens}
        for normalize in (False, True):
            ours = triton_kernels.pool(x, cu_seqlens, normalize=normalize, **options)
            right = reference.pool(x, cu_seqlens, normalize=normalize, **options)
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_pooling_keeps_nan_and_reads_no_padding() -> None:
    x = normal(30, 40)
    x[7, 3], x[20:] = torch.nan, torch.nan
    for mode in ("mean", "max"):
        options = {"mode": mode, "first_tokens": None, "normalize": False}
        ours = triton_kernels.pool(x, ints(0, 5, 10, 20), **options)
        assert ours.isnan().sum() == 1 and ours[1, 3].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax(dtype: torch.dtype) -> None:
    logits = normal(6, 9000, dtype=dtype)
    logits[1, 7], logits[2], logits[4, 8999] = torch.nan, -torch.inf, torch.inf
    logits[3, 8], logits[3, 8500] = 100, 100  # the first of equals
    last = torch.full((9,), 5, dtype=torch.int32, device=DEVICE)
    ours = triton_kernels.argmax(logits, slot_indices=ints(3, 1, 2, 0, 8, 4), last_tokens=last)
    right = logits.argmax(1).int()
    right[torch.tensor([1, 2, 4])] = -1
    assert torch.equal(ours, right)
    assert last.tolist() == [8, 0, 0, int(right[0]), int(right[5]), 5, 5, 5, 0]


# Fewer features than a product's, as many, and several products.
@pytest.mark.parametrize(
    ("size", "dtype"), list(zip([20, 128, 300], [*GEMM_DTYPES, torch.float32], strict=False))
)
def test_maxsim(dtype: torch.dtype, size: int) -> None:
    """Queries within a tile and over several; documents of no vector, one, and several tiles."""
    query_lengths, lengths = [32, 5, 0, 100, 1], [3, 0, 70, 1, 64]
    q = F.normalize(normal(sum(query_lengths), size), dim=1).to(dtype)
    d = F.normalize(normal(sum(lengths), size), dim=1).to(dtype)
    cu_queries, cu_documents = (np.cumsum([0, *n]) for n in (query_lengths, lengths))
    tiles = triton_kernels.tiles_of(cu_queries, cu_documents, dtype, q.device)
    ours = triton_kernels.maxsim(q, d, tiles)
    for i, query in enumerate(q.double().split(query_lengths)):
        for j, document in enumerate(d.double().split(lengths)):
            if not len(document):
                continue  # undefined
            if not len(query):
                assert ours[i, j] == 0
            else:
                right = (query @ document.T).amax(1).sum()
                assert abs(ours[i, j] - right) < 1e-4 * max(1, len(query))


@pairwise({"num_vectors": [1, 32, 64], "size": [20, 128, 300], "dtype": GEMM_DTYPES})
def test_maxsim_of_one_query(num_vectors: int, dtype: torch.dtype, size: int) -> None:
    lengths = [3, 70, 0, 1, 64]
    q = F.normalize(normal(num_vectors, size), dim=1).to(dtype)
    d = F.normalize(normal(sum(lengths), size), dim=1).to(dtype)
    bounds = ints(0, 3, 73, 73, 74, 138)
    sums = triton_kernels.maxsim_of_one(q, d, bounds, empty_score=-7.0)
    means = triton_kernels.maxsim_of_one(q, d, bounds, empty_score=-7.0, is_mean=True)
    assert sums.shape == means.shape == (1, 5)
    assert sums[0, 2] == means[0, 2] == -7.0
    for number, document in enumerate(d.double().split(lengths)):
        if len(document):
            right = (q.double() @ document.T).amax(1).mean()
            assert abs(sums[0, number] - num_vectors * right) < 1e-4 * num_vectors
            assert abs(means[0, number] - right) < 1e-4
    d[1, 0] = torch.nan
    scores = triton_kernels.maxsim_of_one(q, d, bounds, empty_score=-7.0)
    assert scores.isnan().tolist() == [[True, False, False, False, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_documents", [0, 1, 300])
def test_tiles_without_the_native_core(
    num_documents: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.random.default_rng(0).choice([0, 1, 31, 32, 33, 64, 65, 400], num_documents)
    bounds = np.array([0, 3, 5]), np.cumsum([0, *lengths])
    ours = triton_kernels.tiles_of(*bounds, dtype, torch.device("cpu"))
    assert host.maxsim_tiles() is not None
    monkeypatch.setattr(host, "maxsim_tiles", lambda: None)
    right = triton_kernels.tiles_of(*bounds, dtype, torch.device("cpu"))
    for name, got, wanted in zip(ours._fields, ours, right, strict=True):
        assert got.dtype == torch.int32 and torch.equal(got, wanted), name


@pytest.mark.parametrize("offset", [0, 1])
def test_maxsim_of_one_query_again(offset: int) -> None:
    """A kernel compiled for aligned operands is kept, and not used for others."""
    for num_vectors, num_documents in ((32, 5), (17, 3), (32, 1)):
        q = normal(num_vectors * 20 + offset)[offset:].view(num_vectors, 20)
        d = normal(num_documents * 20 + offset)[offset:].view(num_documents, 20)
        bounds = ints(*range(num_documents + 1))
        expected = (q.double() @ d.double().T).sum(0)
        for _ in range(2):
            scores = triton_kernels.maxsim_of_one(q, d, bounds, empty_score=0.0)
            torch.testing.assert_close(scores[0].double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("query_lengths", [[5], [100], [3, 0, 9]], ids=str)
@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("product_bytes", [1, 1 << 20])
def test_scores_by_triton_are_those_without(
    query_lengths: list[int], is_mean: bool, product_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [3, 0, 70, 1, 64, 0]
    bounds = [np.cumsum([0, *n]) for n in (query_lengths, lengths)]
    q, d = normal(sum(query_lengths), 20), normal(sum(lengths), 20)
    options = {"empty_score": -1e9, "product_bytes": product_bytes, "is_mean": is_mean}
    wanted = maxsim.maxsim_scores(q, bounds[0], d, bounds[1], **options)
    called = mock.Mock(wraps=triton_kernels.maxsim_of_one)
    monkeypatch.setattr(triton_kernels, "maxsim_of_one", called)
    monkeypatch.setattr(triton_backend, "_lookup", lambda device_type, index: triton_kernels)
    native.forget_lookups()
    got = maxsim.maxsim_scores(q, bounds[0], d, bounds[1], **options)
    monkeypatch.undo()
    native.forget_lookups()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
    assert bool(called.call_count) == (query_lengths == [5])


def test_maxsim_does_not_hide_nan() -> None:
    q, d = normal(5, 32), normal(9, 32)
    d[3, 1] = torch.nan
    bounds = np.array([0, 5]), np.array([0, 3, 5, 9])
    scores = triton_kernels.maxsim(q, d, triton_kernels.tiles_of(*bounds, q.dtype, q.device))
    assert scores.isnan().tolist() == [[False, True, False]]


@pairwise(
    {
        "num_rows,vocab_size": [(4, 1), (12, 7), (9, 1500), (2, 9001)],
        "scale": [0.0, 1e-3, 2.0, 30.0],
        "dtype": DTYPES,
    }
)
def test_sampling(num_rows: int, vocab_size: int, scale: float, dtype: torch.dtype) -> None:
    """The tokens of the exact distribution, by temperature, top-k, top-p and min-p."""
    logits = (normal(num_rows, vocab_size) * scale).to(dtype)
    rows = random_rows(num_rows, vocab_size + int(scale))
    columns = columns_of(rows, DEVICE)
    filters = columns["filters"]
    limits = {"top_k": filters.top_k, "top_p": filters.top_p, "min_p": filters.min_p}
    numbers = uniform(columns["seeds"], columns["positions"])
    tokens = triton_kernels.sample(logits, columns["temperature"], **limits, numbers=numbers)
    for token, row, x in zip(tokens.tolist(), rows, logits.cpu(), strict=True):
        assert is_right(token, x, row), row


def test_bad_rows_have_no_token() -> None:
    logits = normal(5, 700)
    logits[0, 3], logits[1, 600], logits[2], logits[3, 5:] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.inf,
    )
    temperature, numbers = torch.ones(5, device=DEVICE), torch.full((5,), 0.9999, device=DEVICE)
    limits = {"top_k": None, "top_p": None, "min_p": None}
    tokens = triton_kernels.sample(logits, temperature, **limits, numbers=numbers.double())
    assert tokens[:3].tolist() == [-1, -1, -1] and 0 <= tokens[3] < 5 and tokens[4] > 600
