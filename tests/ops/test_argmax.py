"""The most likely token of each row: ties, what is not finite, odd vocabularies, both devices."""

import pytest
import torch
from captured import captured

from bytetx.ops.sampling import argmax

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [(1, 1), (3, 7), (1, 50257), (5, 8191), (33, 50257), (300, 4099), (2, 151936), (0, 50)],
)
def test_the_first_of_the_largest(
    num_rows: int, vocab_size: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size).mul(4).to(dtype)  # many ties in half types
    largest = logits.amax(dim=-1, keepdim=True) if num_rows else logits
    wanted = (logits == largest).int().argmax(dim=-1).int()
    assert argmax(logits.to(device)).cpu().equal(wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_rows_have_none(dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(6, 5003).to(dtype)
    logits[0, 4999] = torch.nan
    logits[1, 17] = torch.inf
    logits[2] = -torch.inf
    logits[3, ::2] = -torch.inf
    logits[4] = 0.0
    logits[4, 1] = -0.0
    logits[4, 0] = -0.0
    logits[5] = -3.0
    tokens = argmax(logits.to(device)).tolist()
    assert tokens[:3] == [-1, -1, -1] and tokens[3] % 2 == 1 and tokens[4:] == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_remembered_by_seat(device: str) -> None:
    logits = torch.zeros(3, 100, device=device)
    logits[0, 5], logits[1, 99], logits[2, 0] = 1.0, 2.0, torch.nan
    slot_indices = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    last_tokens = torch.full((6,), 7, dtype=torch.int32, device=device)
    assert argmax(logits, slot_indices=slot_indices, last_tokens=last_tokens).tolist() == [
        5,
        99,
        -1,
    ]
    assert last_tokens.tolist() == [99, 7, 0, 7, 5, 7]
    with pytest.raises(ValueError, match="slot_indices and last_tokens must be given both"):
        argmax(logits, slot_indices=slot_indices)


@pytest.mark.gpu
def test_a_graph_holds_it() -> None:
    logits = torch.randn(9, 30000, device="cuda", dtype=torch.bfloat16)
    wanted = argmax(logits)
    graph, tokens = captured(lambda: argmax(logits))
    logits.copy_(logits.flip(1))
    graph.replay()
    assert tokens.equal(argmax(logits)) and not tokens.equal(wanted)
