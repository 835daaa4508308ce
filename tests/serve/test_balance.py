"""Which replica gets a call: estimates of tokens, and the ledger of what is under way."""

import random

import pytest

from bytetx.serve.balance import TokenLedger, estimate_tokens
from bytetx.serve.calls import Call


@pytest.mark.parametrize(
    ("task", "inputs", "options", "tokens"),
    [
        ("embed", ["a" * 400], {}, 102),
        ("embed", ["a" * 400, [7] * 30], {}, 132),
        ("embed", [[7] * 30, [7] * 2], {}, 32),
        ("rerank", ["a" * 40, ["b" * 80, "c" * 80]], {}, 12 + 22 + 22),
        ("classify", [("a" * 40, "b" * 40)], {}, 24),
        ("generate", "a" * 40, {"max_tokens": 100}, 112),
        ("generate", [7] * 12, {"max_tokens": None}, 12),
        ("generate", [{"role": "user", "content": "a" * 40}], {"max_tokens": 5}, 3 + 12 + 5),
        ("embed", [], {}, 0),
    ],
)
def test_a_call_is_about_so_many_tokens(
    task: str, inputs: object, options: dict[str, object], tokens: int
) -> None:
    assert estimate_tokens(Call("m", task, inputs, options)) == tokens


def test_the_replica_with_the_fewest_tokens_is_first() -> None:
    ledger: TokenLedger[str] = TokenLedger()
    ledger.begin("a", 1, 500)
    ledger.begin("b", 2, 20)
    ledger.begin("b", 3, 30)
    assert ledger.ranked(["a", "b", "c"]) == ["c", "b", "a"]
    # What other senders sent is in the replica's own report; of both numbers the larger counts.
    assert ledger.ranked(["a", "b", "c"], {"c": 100.0, "a": 5.0}) == ["b", "c", "a"]
    ledger.end("a", 1)
    ledger.end("a", 1)  # twice, as after an error
    ledger.end("d", 9)
    assert ledger.ranked(["b", "a"]) == ["a", "b"] and ledger.tokens("a") == 0


def test_mixed_calls_are_shared_evenly_and_end_at_nothing() -> None:
    """Calls of 10 to 5000 tokens: no replica ever has a whole long call more than another."""
    rng, ledger, running = random.Random(0), TokenLedger[int](), []
    for number in range(2000):
        tokens = rng.choice((10, 80, 5000))
        replica = ledger.ranked(range(4))[0]
        ledger.begin(replica, number, tokens)
        running.append((replica, number))
        loads = [ledger.tokens(one) for one in range(4)]
        if number < 40:
            assert max(loads) - min(loads) <= 5000
        elif rng.random() < 0.9:
            ledger.end(*running.pop(rng.randrange(len(running))))
    for replica, number in running:
        ledger.end(replica, number)
    assert [ledger.tokens(one) for one in range(4)] == [0] * 4
