"""Errors quote a caller's value in a bounded time and length."""

from collections.abc import Sequence

import pytest

from bytetx.errors import shown


@pytest.mark.parametrize(
    "value",
    [
        "z" * 10**7,
        ["z" * 1000] * 1000,
        {"k" * 10**6: "z" * 10**6},
        10**20_000,
        [[[[[[["z"] * 99] * 99] * 99] * 99]]],
        b"z" * 10**6,
        "\0" * 1000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_long_value_is_cut(value: object) -> None:
    assert 3 < len(shown(value)) <= 200 and "\n" not in shown(value)


def test_a_short_value_is_its_repr() -> None:
    values: Sequence[object] = ("a\n", 7, 99999999999999999999, None, [1, "b"], {"a": [1.5]})
    assert [shown(value) for value in values] == [repr(value) for value in values]


def test_a_value_whose_repr_fails() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "Odd" in shown(Odd())
