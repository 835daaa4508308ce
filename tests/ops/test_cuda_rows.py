"""Promises of the CUDA kernels of embed and pool beyond the numbers: bits, bounds and graphs."""

import pytest
import torch
from captured import captured
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.embedding import embed
from bytetx.ops.norm import layer_norm
from bytetx.ops.pooling import POOLING_MODES, pool

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def kernels() -> None:
    for op in ("embed", "pool"):
        if native.kernel(op, CUDA) is None:
            pytest.skip(native.why_no_kernel(op, CUDA))


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 50, 384, 1024, 1032, 4096, 9000, 20000])
def test_embedded_row_is_the_normalized_row_of_its_table(dtype: torch.dtype, width: int) -> None:
    table = torch.randn(211, width, device=CUDA).to(dtype)
    weight, bias = torch.randn(2, width, device=CUDA).to(dtype)
    shuffled = torch.randperm(211, device=CUDA).int()
    normalized = layer_norm(table, weight, bias, eps=1e-12)
    got = embed(shuffled, None, None, word=table, norm_weight=weight, norm_bias=bias)
    assert torch.equal(got, normalized[shuffled.long()])
    assert torch.equal(embed(shuffled, None, None, word=table), table[shuffled.long()])
    alone = embed(shuffled[7:8], None, None, word=table, norm_weight=weight, norm_bias=bias)
    assert torch.equal(alone, got[7:8])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 33])
def test_id_outside_its_table_reads_the_nearest_row(width: int) -> None:
    table = torch.randn(5, width, device=CUDA)
    wild = ids(-1, 5, -(2**31), 2**31 - 1, 3)
    got = embed(wild, wild, wild, word=table, position=table, token_type=table)
    assert torch.equal(got, table[[0, 4, 0, 4, 3]] * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 33, 128, 384, 768, 1024, 1032, 4096, 20000])
@pytest.mark.parametrize("has_norm", [False, True])
def test_ids_that_no_host_checked_are_noted(dtype: torch.dtype, width: int, has_norm: bool) -> None:
    table = torch.randn(7, width, device=CUDA).to(dtype)
    norm = torch.randn(2, width, device=CUDA).to(dtype) if has_norm else (None, None)
    options = {"word": table, "position": table, "token_type": table[:3]}
    options |= {"norm_weight": norm[0], "norm_bias": norm[1]}
    words, places = torch.randint(7, (2, 1003), dtype=torch.int32, device=CUDA)
    types = torch.randint(3, (1003,), dtype=torch.int32, device=CUDA)
    bad_ids = torch.zeros(3, dtype=torch.int32, device=CUDA)
    want = embed(words, places, types, **options)
    assert torch.equal(embed(words, places, types, **options, bad_ids=bad_ids), want)
    assert bad_ids.tolist() == [0, 0, 0]
    words[3], words[1002], places[500], types[1001] = 7, 9, -(2**31), 2**31 - 1
    is_bad = torch.zeros(1003, dtype=torch.bool, device=CUDA)
    is_bad[[3, 1002, 500, 1001]] = True
    for _ in range(2):
        got = embed(words, places, types, **options, bad_ids=bad_ids)
        assert torch.equal(got[~is_bad], want[~is_bad])
        assert got[is_bad].isnan().all()
        assert bad_ids.tolist()[1:] == [-(2**31), 2**31 - 1] and int(bad_ids[0]) in (7, 9)
        bad_ids.zero_()
    words[3] = words[1002] = places[500] = types[1001] = 0
    rows = table[words.long()]
    given = embed(words + 100, places, types, **options, inputs_embeds=rows, bad_ids=bad_ids)
    assert torch.equal(given, embed(words, places, types, **options))
    assert bad_ids.tolist() == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", POOLING_MODES)
@pytest.mark.parametrize("width", [384, 33, 1032])
@pytest.mark.parametrize("normalize", [False, True])
def test_sequence_alone_equals_sequence_among_many(
    dtype: torch.dtype, mode: str, width: int, normalize: bool
) -> None:
    """Its own length says who sums it: a warp, a CTA, or CTAs block by block."""
    seqlens = torch.randint(0, 9, (1003,))
    seqlens[[3, 499, 500, 501, 1002]] = torch.tensor([2500, 257, 256, 33, 32])
    ends = seqlens.cumsum(0).tolist()
    x = torch.randn(ends[-1], width, device=CUDA).to(dtype)
    kw = {"mode": mode, "normalize": normalize}
    many = pool(x, ids(0, *ends), **kw)
    for i in (0, 3, 499, 500, 501, 1002):
        alone = pool(x[ends[i] - seqlens[i] : ends[i]], ids(0, int(seqlens[i])), **kw)
        assert torch.equal(alone[0], many[i])
    again = pool(x, ids(0, *ends), **kw)
    assert torch.equal(many, again)


@pytest.mark.gpu
def test_mean_of_a_very_long_sequence_keeps_its_digits() -> None:
    x = torch.randn(100_003, 40, device=CUDA) + 100
    got = pool(x, ids(0, 3, 100_003), mode="mean")[1].double()
    exact = x[3:].double().mean(0)
    assert (got - exact).abs().max() <= 16 * torch.finfo(torch.float32).eps * 100


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(0, 20, 40), (0, 1000, 2000)])
def test_max_pooling_shows_a_nan(seqlens: tuple[int, ...]) -> None:
    x = torch.randn(2000, 24, device=CUDA)
    x[3, 7], x[seqlens[2] - 1, 0] = torch.nan, torch.nan
    got = pool(x, ids(*seqlens), mode="max")
    assert got.isnan().nonzero().tolist() == [[0, 7], [1, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", POOLING_MODES)
def test_lengths_that_do_not_fit_read_rows_of_x_alone(mode: str) -> None:
    x = torch.ones(10, 64, device=CUDA)
    lengths, first = ids(-5, 4, 2, 99), ids(-3, 0, 50)
    got = pool(x, lengths, mode=mode, first_tokens=first, normalize=True)
    expected = torch.zeros(3, 64, device=CUDA)
    expected[0] = 1 / 8
    assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", POOLING_MODES)
@pytest.mark.parametrize("max_seqlen", [None, 1300])
def test_padding_rows_are_never_read(dtype: torch.dtype, mode: str, max_seqlen: int | None) -> None:
    """A bucket: rows past the last sequence and sequences past the batch, which are empty."""
    seqlens = [9, 1300, 0, 200, 33, 1]
    ends = torch.tensor(seqlens).cumsum(0).tolist()
    x = torch.randn(ends[-1], 384, device=CUDA).to(dtype)
    padded = torch.cat((x, torch.full((700, 384), torch.nan, device=CUDA, dtype=dtype)))
    kw = {"mode": mode, "normalize": True, "max_seqlen": max_seqlen}
    got = pool(padded, ids(0, *ends, *[ends[-1]] * 10), **kw)
    assert torch.equal(got[:6], pool(x, ids(0, *ends), **kw))
    assert torch.equal(got[6:], torch.zeros(10, 384, device=CUDA))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", POOLING_MODES)
def test_a_bound_of_the_lengths_changes_no_bit(mode: str) -> None:
    x = torch.randn(2100, 768, device=CUDA, dtype=torch.float16)
    short, long = ids(0, 32, 65, 321), ids(0, 257, 2100)
    for cu_seqlens, bound in ((short, 256), (long, 1843)):
        known = pool(x, cu_seqlens, mode=mode, max_seqlen=bound)
        assert torch.equal(known, pool(x, cu_seqlens, mode=mode))


@pytest.mark.gpu
def test_no_tokens_and_no_sequences() -> None:
    x = torch.empty(0, 64, device=CUDA)
    assert embed(ids(), None, None, word=torch.ones(3, 64, device=CUDA)).shape == (0, 64)
    assert pool(x, ids(0), mode="mean").shape == (0, 64)
    assert torch.equal(pool(x, ids(0, 0, 0), mode="max"), torch.zeros(2, 64, device=CUDA))


@pytest.mark.gpu
def test_both_run_in_a_cuda_graph_with_lengths_of_the_replay() -> None:
    table = torch.randn(100, 768, device=CUDA, dtype=torch.float16)
    words = torch.randint(100, (1000,), dtype=torch.int32, device=CUDA)
    cu_seqlens = ids(0, 500, 1000)

    def run() -> Tensor:
        return pool(embed(words, None, None, word=table), cu_seqlens, mode="mean", normalize=True)

    run()
    graph, out = captured(run)
    words.copy_(words.flip(0))
    cu_seqlens.copy_(ids(0, 30, 999))
    graph.replay()
    assert torch.equal(out, run())
