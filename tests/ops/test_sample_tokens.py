"""Choices from logits, -1 for bad rows: the kernel and the reference against float64."""

import numpy as np
import pytest
import torch
from captured import captured
from sampled_rows import Row, columns_of, distribution, splitmix
from scipy.stats import chisquare

from bytetx.ops.sample_tokens import sample_tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TEMPERATURES, TOP_KS = [0.0, 0.1, 0.7, 1.0, 3.0], [0, 1, 3, 40, 1200, 9999, 100_000]
TOP_PS, MIN_PS = [0.0, 0.1, 0.6, 0.95, 0.999, 1.0], [0.0, 0.0, 0.05, 0.5, 1.0]
ROUNDING = 3e-6  # of a row's sum: f32 weights, and exp2 in place of exp


def choose(logits: torch.Tensor, rows: list[Row], device: str) -> list[int]:
    return sample_tokens(logits.to(device), **columns_of(rows, device)).tolist()


def random_rows(num_rows: int, state: int) -> list[Row]:
    rng = np.random.default_rng(state)
    columns = (rng.choice(v, num_rows) for v in (TEMPERATURES, TOP_KS, TOP_PS, MIN_PS))
    return [
        Row(float(t), int(k), float(p), float(m), int(rng.integers(1 << 40)), i)
        for i, (t, k, p, m) in enumerate(zip(*columns, strict=True))
    ]


def is_right(token: int, logits: torch.Tensor, row: Row) -> bool:
    """Whether the exact distribution gives this token, or one across an edge within rounding."""
    if row.temperature == 0:
        return token == int((logits == logits.max()).int().argmax())
    number = splitmix(row.seed % 2**64, row.position)
    nudges = (0.0,) if row.top_p in (0.0, 1.0) else (0.0, -ROUNDING, ROUNDING)
    for nudge in nudges:  # a nucleus may end a token sooner or later
        near = Row(row.temperature, row.top_k, row.top_p + nudge, row.min_p)
        cumulative = distribution(logits, near).cumsum()
        before = cumulative[token - 1] if token > 0 else 0.0
        if before < cumulative[token] and (
            before - ROUNDING <= number <= cumulative[token] + ROUNDING
        ):
            return True
    return False


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(9, 1), (30, 7), (30, 1500), (4, 50257)])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 2.0, 30.0])
def test_choices_are_the_definition_s(
    num_rows: int, vocab_size: int, scale: float, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * scale).to(dtype)
    rows = random_rows(num_rows, vocab_size + int(scale))
    for token, row, x in zip(choose(logits, rows, device), rows, logits, strict=True):
        assert is_right(token, x, row), row


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_s_choice_is_its_own_whatever_the_batch(dtype: torch.dtype) -> None:
    """Also where more rows mean fewer CTAs a row, and sums that are split otherwise."""
    logits = torch.randn(300, 8001).mul(2).to(dtype)
    logits[7, 5:] = -torch.inf
    rows = random_rows(300, 1)
    together = choose(logits, rows, "cuda")
    for some in (1, 2, 13, 60):
        assert choose(logits[:some], rows[:some], "cuda") == together[:some]
    assert choose(logits.flip(0), rows[::-1], "cuda") == together[::-1]
    assert all(is_right(t, x, row) for t, x, row in zip(together, logits, rows, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_rows_have_none(dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(7, 5003).to(dtype)
    rows = [Row(top_p=0.9), Row(), Row(top_k=3), Row(top_k=5000), Row(0.0), Row(0.0), Row()]
    alone = choose(logits[[3, 4, 6]], [rows[3], rows[4], rows[6]], device)
    logits[0, 4999], logits[1, 17], logits[2], logits[5, 0] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.nan,
    )
    tokens = choose(logits, rows, device)
    assert [tokens[i] for i in (0, 1, 2, 5)] == [-1] * 4
    assert [tokens[i] for i in (3, 4, 6)] == alone


@pytest.mark.parametrize("device", DEVICES)
def test_ties_at_a_limit_are_kept_whole(device: str) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]).expand(600, -1).contiguous()
    for limit in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}):
        rows = [Row(**limit, position=place) for place in range(600)]
        assert set(choose(logits, rows, device)) == {1, 2, 3, 4}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [0, 7, 2])
def test_top_p_is_a_share_of_what_min_p_keeps(top_k: int, device: str) -> None:
    probabilities = torch.tensor([0.4, 0.2, 0.15, 0.05, 0.05, 0.05, 0.05, 0.05])
    logits = probabilities.log().expand(300, -1).contiguous()
    for top_p, kept in ((0.52, 1), (0.54, 2), (0.79, 2), (0.81, 3)):  # of 0.75: 0.533, 0.8
        kept = (1 if top_p < 2 / 3 else 2) if top_k == 2 else kept  # of 0.6: 0.667
        rows = [Row(top_k=top_k, top_p=top_p, min_p=0.3, position=i) for i in range(300)]
        assert set(choose(logits, rows, device)) == set(range(kept))


@pytest.mark.parametrize("device", DEVICES)
def test_more_ties_than_the_list_holds(device: str) -> None:
    """20 000 equal tokens under 5000 that are likelier: single values are counted instead."""
    logits = torch.zeros(4, 40_000)
    logits[:, ::2], logits[:, ::8] = 1.0, 2.0
    rows = [Row(top_k=5001), Row(top_p=0.9), Row(top_k=4000), Row(top_k=5001, top_p=0.6)]
    rows = [Row(r.temperature, r.top_k, r.top_p, position=i) for i, r in enumerate(rows)]
    for token, row, x in zip(choose(logits, rows, device), rows, logits, strict=True):
        assert is_right(token, x, row), row


@pytest.mark.parametrize("device", DEVICES)
def test_narrow_limits_take_the_argmax(device: str) -> None:
    logits = torch.randn(50, 3001)
    for limit in ({"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.0}, {"min_p": 1.0}):
        rows = [Row(**limit, position=place) for place in range(50)]
        assert choose(logits, rows, device) == logits.argmax(1).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_one_token_and_extreme_logits(device: str) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf], [3e38, -3e38, 3e38 * 0.9]])
    assert choose(logits, [Row(temperature=5), Row(temperature=1e-8)], device) == [1, 0]
    assert choose(torch.zeros(0, 9), [], device) == []


@pytest.mark.gpu
@pytest.mark.parametrize("row", [Row(1.3), Row(top_k=12), Row(top_p=0.7), Row(min_p=0.1)], ids=repr)
def test_draws_follow_the_exact_softmax(row: Row) -> None:
    generator = torch.Generator().manual_seed(3)
    logits, num_draws = torch.randn(40, generator=generator) * 2, 20_000
    rows = [Row(**{**vars(row), "position": place}) for place in range(num_draws)]
    tokens = choose(logits.expand(num_draws, -1).contiguous(), rows, "cuda")
    drawn = np.bincount(tokens, minlength=40)
    expected = distribution(logits, row) * num_draws
    assert not drawn[expected == 0].any()
    frequent = expected >= 5  # chi-square's own condition; the rest is one class
    classes = np.append(drawn[frequent], drawn[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum())
    assert chisquare(classes[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3


@pytest.mark.gpu
def test_a_graph_holds_it() -> None:
    logits = torch.randn(9, 30000, device="cuda", dtype=torch.bfloat16)
    columns = columns_of([Row(top_k=50, top_p=0.9, seed=i) for i in range(9)], "cuda")
    wanted = sample_tokens(logits, **columns)
    graph, tokens = captured(lambda: sample_tokens(logits, **columns))
    logits.copy_(logits.flip(1))
    graph.replay()
    assert tokens.equal(sample_tokens(logits, **columns)) and not tokens.equal(wanted)


@pytest.mark.gpu
def test_a_vocabulary_beyond_the_kernel_s_runs_in_torch() -> None:
    logits = torch.zeros(1, (1 << 19) + 1)
    logits[0, -1] = 9.0
    assert choose(logits, [Row(top_k=1)], "cuda") == [1 << 19]


@pytest.mark.gpu
def test_parameters_of_another_kind_are_refused() -> None:
    columns = columns_of([Row()], "cuda") | {"seeds": torch.zeros(1, device="cuda")}
    with pytest.raises(ValueError, match="seeds must be int64"):
        sample_tokens(torch.zeros(1, 9, device="cuda"), **columns)
    with pytest.raises(ValueError, match="logits must be contiguous"):
        sample_tokens(torch.zeros(9, 2).t(), **columns_of([Row(), Row()]))
