"""Sampling: every row against the definition in float64, whatever its batch mates are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampled_rows import Row, columns_of, distribution, splitmix
from scipy.stats import chisquare

from bytetx.ops.sampling import (
    Biases,
    Filters,
    Penalties,
    _draw,
    _lowest_kept,
    adjust_logits,
    greedy,
    is_bad_row,
    sample,
    top_logprobs,
    uniform,
)


def sample_rows(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    return sample(logits, **columns_of(rows)).tolist()


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_random_numbers_are_counted(seed: int, position: int) -> None:
    drawn = uniform(torch.tensor([seed]), torch.tensor([position]))
    assert drawn.tolist() == [splitmix(seed % 2**64, position)]


def test_random_numbers_are_uniform_along_positions_and_along_seeds() -> None:
    numbers = torch.arange(1 << 16)
    for seeds, positions in ((numbers, numbers * 0), (numbers * 0 + 5, numbers)):
        counts = torch.histc(uniform(seeds, positions).float(), bins=256, min=0, max=1)
        assert chisquare(counts.numpy()).pvalue > 1e-3
    pairs = uniform(numbers * 0, numbers).reshape(-1, 2)
    assert abs(np.corrcoef(pairs.numpy().T)[0, 1]) < 0.02  # 4 sigma of 32 768 pairs


ROWS = [
    Row(),
    Row(temperature=0.3),
    Row(temperature=2.5),
    Row(top_k=5),
    Row(top_p=0.7),
    Row(min_p=0.2),
    Row(top_k=12, top_p=0.5, temperature=1.3),
    Row(top_k=20, top_p=0.9, min_p=0.05),
    Row(top_k=1),
    Row(top_k=10**6, top_p=0.999),
    Row(top_p=0.0),
    Row(temperature=0),
    Row(min_p=1.0),
]


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_draws_follow_the_exact_softmax(row: Row) -> None:
    logits = torch.randn(40) * 2
    num_draws = 20_000
    rows = [Row(**{**vars(row), "position": place}) for place in range(num_draws)]
    drawn = np.bincount(sample_rows(logits.expand(num_draws, -1), rows), minlength=40)
    expected = distribution(logits, row) * num_draws
    assert not drawn[expected == 0].any()
    if (expected > 0).sum() == 1:
        return
    frequent = expected >= 5  # chi-square's own condition; the rest is one class
    classes = np.append(drawn[frequent], drawn[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum())
    assert chisquare(classes[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3


row_strategy = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 1200, 9999]),
    top_p=st.sampled_from([0.0, 0.1, 0.6, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 10_000),
)


@given(st.lists(row_strategy, min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_draw_is_the_row_s_own_whatever_the_batch(rows: list[Row], state: int) -> None:
    generator = torch.Generator().manual_seed(state)
    logits = torch.randn(len(rows), 1500, generator=generator) * 1.5
    together = sample_rows(logits, rows)
    assert together == [sample_rows(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together[::-1] == sample_rows(logits.flip(0), rows[::-1])
    for token, row, x in zip(together, rows, logits, strict=True):
        assert token == drawn_by_definition(x, row)


def drawn_by_definition(x: torch.Tensor, row: Row) -> int:
    if row.temperature == 0:
        return int(x.argmax())
    cumulative = distribution(x, row).cumsum()
    target = splitmix(row.seed % 2**64, row.position) * cumulative[-1]
    return int(np.searchsorted(cumulative, target, side="right"))


@pytest.mark.parametrize("number", [0.0, 2.0**-52, 0.5, 1 - 2.0**-52])
def test_no_number_draws_a_token_that_is_out(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even at the ends, where blocks of tokens without weight lie and rounding decides."""
    drawn = torch.full((400,), number, dtype=torch.float64)
    monkeypatch.setattr("bytetx.ops.sampling.uniform", lambda seeds, positions: drawn)
    logits = torch.randn(400, 1300) * 4
    kept = torch.rand(400, 1300) < torch.logspace(-2.5, -0.1, 400).unsqueeze(1)
    logits[~kept] = -torch.inf
    logits[:, 700] = 0
    tokens = torch.tensor(sample_rows(logits, [Row(temperature=0.8)] * 400))
    assert torch.isfinite(logits[torch.arange(400), tokens]).all()


def test_a_block_boundary_is_no_way_to_a_token_without_weight() -> None:
    """Weights of very different size: sums round, and a share may seem to lie outside its block."""
    weights = torch.zeros(3000, 3, 4)
    weights[:, :, 1:3] = torch.rand(3000, 3, 2) * 10.0 ** torch.randint(-20, 1, (3000, 3, 1))
    sums = weights.sum(-1).double()
    edges = sums.cumsum(-1)
    for boundary in (0, 1):
        share = edges[:, boundary] / edges[:, -1]
        for number in (share, share - 2.0**-53, share + 2.0**-53):
            token = _draw(weights, number.clamp(0, 1 - 2.0**-52)).unsqueeze(1)
            assert (weights.flatten(1).gather(1, token) > 0).all()


@pytest.mark.parametrize("top_k", [0, 7])
def test_top_p_is_a_share_of_what_min_p_keeps(top_k: int) -> None:
    """As in vLLM: the tokens that min_p takes out are no part of the nucleus' whole."""
    probabilities = torch.tensor([0.4, 0.2, 0.15, 0.05, 0.05, 0.05, 0.05, 0.05])
    for top_p, kept in ((0.52, 1), (0.54, 2), (0.79, 2), (0.81, 3)):  # of 0.75: 0.533, 0.8
        rows = [Row(top_k=top_k, top_p=top_p, min_p=0.3, position=i) for i in range(300)]
        drawn = sample_rows(probabilities.log().expand(300, -1), rows)
        assert set(drawn) == set(range(kept))


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 30.0])
def test_a_nucleus_is_the_one_that_sorting_finds(scale: float) -> None:
    """Also where rows forbid most tokens, ties fill a step, or all logits are beyond the steps."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(9, 3001, generator=generator) * scale
    x[2, 7:] = -torch.inf
    x[3] = x[3].round()
    x[4, 1:] -= 200
    top_p = torch.tensor([0.0, 0.5, 0.9, 0.7, 0.9, 0.999, 0.95, 0.05, 0.3])
    x -= x.amax(1, keepdim=True)
    ordered = x.sort(descending=True).values
    weights = ordered.exp().double()
    kept = weights.cumsum(1) - weights < top_p.double().unsqueeze(1) * weights.sum(1, keepdim=True)
    wanted = ordered.gather(1, kept.sum(1, keepdim=True).clamp(min=1) - 1)
    assert torch.equal(_lowest_kept(x, Filters(top_p=top_p, has_open_nucleus=True)), wanted)


def test_a_flat_nucleus_is_found_whole() -> None:
    logits = torch.stack([torch.linspace(0, 1e-3, 5000), torch.linspace(0, 50, 5000)])
    rows = [Row(top_p=0.9, position=place) for place in range(4000)]
    flat = sample_rows(logits[:1].expand(4000, -1), rows)
    assert min(flat) in range(499, 520)  # the least likely tenth is out, and no more
    assert sample_rows(logits, rows[:2])[0] == flat[0]


def test_ties_at_a_limit_are_kept_whole() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0]).expand(600, -1)
    for limit in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}):
        rows = [Row(**limit, position=place) for place in range(600)]
        assert set(sample_rows(logits, rows)) == {1, 2, 3, 4}


def test_one_token_and_extreme_logits() -> None:
    assert sample_rows(torch.zeros(1, 1), [Row()]) == [0]
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf], [3e38, -3e38, 3e38 * 0.9]])
    assert sample_rows(logits, [Row(temperature=5), Row(temperature=1e-8)]) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bad_rows_are_told_and_the_others_go_on(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 50).to(dtype)
    alone = sample_rows(logits[[1, 3]], [Row(), Row(top_p=0.5)])
    logits[0, 7], logits[2, 0], logits[4] = torch.nan, torch.inf, -torch.inf
    assert is_bad_row(logits).tolist() == [True, False, True, False, True]
    together = sample_rows(logits, [Row(), Row(), Row(), Row(top_p=0.5), Row()])
    assert together[1::2] == alone and all(0 <= token < 50 for token in together)


def test_a_nucleus_of_nothing_but_nan_is_no_failure() -> None:
    assert 0 <= sample_rows(torch.full((1, 9), torch.nan), [Row(top_p=0.5)])[0] < 9


def test_greedy_takes_the_argmax() -> None:
    logits = torch.randn(7, 100)
    assert greedy(logits).tolist() == logits.argmax(1).tolist()


def test_penalties_and_biases_against_the_definition() -> None:
    n, vocab_size = 4, 30
    logits = torch.randn(n, vocab_size)
    counts = torch.randint(0, 3, (n, vocab_size), dtype=torch.int32)
    in_prompt = torch.rand(n, vocab_size) < 0.3
    repetition = torch.tensor([1.0, 1.5, 0.5, 2.0])
    presence, frequency = torch.tensor([0.0, 0.5, -1.0, 2.0]), torch.tensor([0.0, 0.2, 1.0, -0.5])
    rows, tokens = torch.tensor([0, 0, 3, 3]), torch.tensor([1, 1, 2, 5])
    values = torch.tensor([1.0, 2.0, -torch.inf, 4.0])
    before = logits.clone()
    got = adjust_logits(
        logits,
        penalties=Penalties(counts, in_prompt, repetition, presence, frequency),
        biases=Biases(rows, tokens, values),
    )
    assert torch.equal(logits, before)
    for i in range(n):
        for t in range(vocab_size):
            x, count = float(logits[i, t]), int(counts[i, t])
            x += sum(v for r, w, v in zip(rows, tokens, values, strict=True) if (r, w) == (i, t))
            if count or in_prompt[i, t]:
                x = x / float(repetition[i]) if x > 0 else x * float(repetition[i])
            x -= count * float(frequency[i]) + (count > 0) * float(presence[i])
            assert float(got[i, t]) == pytest.approx(float(x), abs=1e-5)


def test_nothing_to_change_keeps_every_bit() -> None:
    logits = torch.randn(2, 9)
    zeros, ones = torch.zeros(2), torch.ones(2)
    none = Penalties(torch.ones(2, 9, dtype=torch.int32), torch.ones(2, 9) > 0, ones, zeros, zeros)
    assert torch.equal(adjust_logits(logits, penalties=none), logits)


@pytest.mark.parametrize("k", [0, 3, 200])
def test_logprobs_of_the_chosen_and_of_the_argmax(k: int) -> None:
    logits = torch.randn(6, 50)
    chosen = torch.randint(50, (6,), dtype=torch.int32)
    got = top_logprobs(logits, chosen, k=k)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        got.chosen.double(), exact[range(6), chosen.long()], atol=1e-5, rtol=0
    )
    order = exact.argsort(descending=True)
    assert torch.equal(got.token_ids.long(), order[:, :k])
    torch.testing.assert_close(
        got.values.double(), exact.gather(1, order[:, :k]), atol=1e-5, rtol=0
    )
    places = [order[i].tolist().index(int(token)) + 1 for i, token in enumerate(chosen)]
    assert got.ranks.tolist() == places


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits must have shape \[any, any\]"):
        sample_rows(torch.zeros(5), [Row()])
