"""Scores of one query by the native kernel, against float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from bytetx.ops import maxsim, native

pytestmark = pytest.mark.gpu

EMPTY = -7.0


def vectors(count: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, size, device="cuda").to(dtype)


def scores_of(q: Tensor, d: Tensor, lengths: list[int], *, is_mean: bool = False) -> Tensor:
    """By the native kernel, into memory that held NaN."""
    assert maxsim._fits_kernel(q, d)
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    torch.full((1, len(lengths)), torch.nan, device="cuda")  # freed, for the result
    return maxsim.maxsim_scores(
        q,
        np.array([0, len(q)]),
        d,
        bounds,
        empty_score=EMPTY,
        product_bytes=1 << 20,
        is_mean=is_mean,
    )


def exact(q: Tensor, d: Tensor, lengths: list[int]) -> Tensor:
    """f64 [documents]."""
    rows = d[: sum(lengths)].double().split(lengths)
    found = [
        (q.double() @ row.T).amax(1).sum() if len(row) else torch.tensor(EMPTY, device="cuda")
        for row in rows
    ]
    return torch.stack([score.double() for score in found])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 96, 128])
@pytest.mark.parametrize("num_vectors", [1, 7, 8, 9, 16, 17, 32, 33, 64])
def test_scores(num_vectors: int, size: int, dtype: torch.dtype) -> None:
    lengths = [3, 70, 0, 1, 16, 17, 64, 65, 0, 500, 15]
    q, d = vectors(num_vectors, size, dtype), vectors(sum(lengths) + 40, size, dtype)
    d[sum(lengths) :] = torch.nan
    right = exact(q, d, lengths)
    found = scores_of(q, d, lengths)
    assert found.shape == (1, len(lengths)) and found.dtype == torch.float32
    torch.testing.assert_close(found[0].double(), right, rtol=2e-6, atol=2e-3)
    means = scores_of(q, d, lengths, is_mean=True)
    is_empty = torch.tensor([length == 0 for length in lengths], device="cuda")
    right = torch.where(is_empty, right, right / num_vectors)
    torch.testing.assert_close(means[0].double(), right, rtol=2e-6, atol=2e-3)


@pytest.mark.parametrize("num_documents", [0, 1, 999, 1000, 1001, 3500])
def test_numbers_of_documents(num_documents: int) -> None:
    """More than the parameters of a launch hold; a document's bits do not depend on the others."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 90, num_documents).tolist()
    q, d = vectors(32, 128, torch.float16), vectors(sum(lengths), 128, torch.float16)
    found = scores_of(q, d, lengths)
    assert found.shape == (1, num_documents)
    if num_documents == 0:
        return
    torch.testing.assert_close(found[0].double(), exact(q, d, lengths), rtol=2e-6, atol=2e-3)
    last = sum(lengths[:-1])
    alone = scores_of(q, d[last:], lengths[-1:])
    assert torch.equal(alone[0, 0], found[0, -1])


@pytest.mark.parametrize("row", [0, 2, 3, 72, 73])
def test_nan_is_not_hidden(row: int) -> None:
    lengths = [3, 70, 1]
    q, d = vectors(20, 64, torch.bfloat16), vectors(74, 64, torch.bfloat16)
    d[row, 5] = torch.nan
    owner = 0 if row < 3 else 1 if row < 73 else 2
    assert scores_of(q, d, lengths).isnan().tolist() == [[i == owner for i in range(3)]]


def test_what_it_does_not_take_goes_another_way() -> None:
    q, d = vectors(8, 128, torch.float16), vectors(30, 128, torch.float16)
    assert maxsim._fits_kernel(q, d)
    assert not maxsim._fits_kernel(q.float(), d.float())
    assert not maxsim._fits_kernel(vectors(65, 128, torch.float16), d)
    assert not maxsim._fits_kernel(vectors(8, 48, torch.float16), vectors(9, 48, torch.float16))
    assert not maxsim._fits_kernel(
        q, vectors(31 * 128, 1, torch.float16)[1:].view(-1)[: 30 * 128].view(30, 128)
    )
    assert not maxsim._fits_kernel(q[:, :64], d[:, :64])


@pytest.mark.parametrize(
    ("num_vectors", "size", "dtype"), [(0, 64, 1), (65, 64, 1), (8, 48, 1), (8, 160, 1), (8, 64, 0)]
)
def test_the_kernel_says_what_it_takes(num_vectors: int, size: int, dtype: int) -> None:
    device = torch.device("cuda", 0)
    kernel = native.require_kernel("maxsim_of_one", device)
    with pytest.raises(ValueError, match="1 to 64 vectors of 32, 64, 96 or 128"):
        kernel(
            query=None,
            documents=None,
            cu_documents=None,
            scores=None,
            num_vectors=num_vectors,
            size=size,
            num_documents=1,
            divisor=1.0,
            empty_score=0.0,
            dtype=dtype,
            launch=native.launch_args(device),
        )
