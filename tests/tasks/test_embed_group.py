"""Calls of `embed` of one turn of the event loop: which run as one, and who gets which error."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
from checkpoints import save_checkpoint

import bytetx
from bytetx.async_model import AsyncModel
from bytetx.errors import InputError, OptionError
from bytetx.serve.calls import Call
from bytetx.serve.engine import _is_groupable
from bytetx.tasks.run import AsyncRun


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytetx.Model:
    return bytetx.load(save_checkpoint(tmp_path_factory.mktemp("bert")), device="cpu")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts that ran together."""
    seen: list[list[str]] = []
    whole = AsyncModel._joined

    def recorded(own: AsyncModel, options: dict[str, Any], texts: Sequence[str]) -> AsyncRun[Any]:
        seen.append(list(texts))
        return whole(own, options, texts)

    monkeypatch.setattr(AsyncModel, "_joined", recorded)
    return seen


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_calls_of_one_turn_with_the_same_options_run_as_one(
    model: bytetx.Model, joined: list[list[str]]
) -> None:
    calls: list[tuple[list[str], dict[str, Any]]] = [
        (["a"], {}),
        (["a fox"], {"normalize": True}),
        (["the dog"], {}),
        (["a quick fox", "brown"], {}),
        (["a"], {"truncate": True, "normalize": True}),
    ]

    async def main() -> None:
        async with AsyncModel(model) as shared:
            answers = [shared.embed_soon(texts, **options) for texts, options in calls]
            for (texts, options), found in zip(calls, await asyncio.gather(*answers), strict=True):
                wanted = model.embed(texts, **options)
                np.testing.assert_allclose(found.vectors, wanted.vectors, atol=1e-5)
                assert found.stats.num_texts == len(texts)
            later = await shared.embed_soon(["a fox"])
            np.testing.assert_allclose(later.vectors, model.embed(["a fox"]).vectors, atol=1e-5)
        assert joined == [["a", "the dog", "a quick fox", "brown"]]

    run(main())


def test_views_of_one_queue_are_not_mixed(model: bytetx.Model, joined: list[list[str]]) -> None:
    long = " ".join(["fox", "dog"] * 200)

    async def main() -> None:
        async with AsyncModel(model) as shared:
            left = shared._cutting_left()
            answers = [one.embed_soon([long], truncate=True) for one in (shared, left) * 2]
            found = [answer.vectors for answer in await asyncio.gather(*answers)]
        assert joined == [[long, long]] * 2
        np.testing.assert_array_equal(found[0], found[2])
        np.testing.assert_array_equal(found[1], found[3])
        assert np.abs(found[0] - found[1]).max() > 1e-3

    run(main())


@pytest.mark.parametrize("limits", [(40, 1 << 20), (8192, 40)])
def test_a_group_is_a_small_part_of_the_queue(
    limits: tuple[int, int], model: bytetx.Model, joined: list[list[str]]
) -> None:
    async def main() -> None:
        requests, tokens = limits
        async with AsyncModel(
            model, max_queued_requests=requests, max_queued_tokens=tokens
        ) as shared:
            answers = [shared.embed_soon(["x"]) for _ in range(25)]
            await asyncio.gather(*answers, return_exceptions=True)
        assert [len(texts) for texts in joined] == [10, 10, 5]

    run(main())


def test_an_error_of_one_call_is_its_alone_and_a_wrong_option_all_calls(
    model: bytetx.Model, joined: list[list[str]]
) -> None:
    async def main() -> None:
        async with AsyncModel(model) as shared:
            calls: list[list[Any]] = [["a"], [7], ["a dog"]]
            answers = [shared.embed_soon(texts) for texts in calls]
            found = await asyncio.gather(*answers, return_exceptions=True)
            assert [isinstance(one, InputError) for one in found] == [False, True, False]
            assert len(joined) == 1
            wrong = [shared.embed_soon(["a"], pooling="nonsense") for _ in range(3)]
            found = await asyncio.gather(*wrong, return_exceptions=True)
            assert [type(one) for one in found] == [OptionError] * 3

    run(main())


def test_who_leaves_is_not_run(model: bytetx.Model, joined: list[list[str]]) -> None:
    async def main() -> None:
        async with AsyncModel(model) as shared:
            answers = [shared.embed_soon([text]) for text in ("a", "a fox", "a dog")]
            answers[0].cancel()  # before it runs
            while not joined:
                await asyncio.sleep(0)
            answers[1].cancel()
            assert (await answers[2]).stats.num_texts == 1
            assert joined == [["a fox", "a dog"]]
            nobody = [shared.embed_soon(["a"]) for _ in range(2)]
            for answer in nobody:
                answer.cancel()
            await shared.embed(["a"])
            assert len(joined) == 1 and not shared._groups

    run(main())


def test_what_is_groupable() -> None:
    def call(*texts: Any, **options: Any) -> Call:
        return Call("model", "embed", list(texts), options)

    assert _is_groupable(call("a", "b", truncate=True, left=False))
    assert not _is_groupable(call("a", left=True))
    assert _is_groupable(call("a", task="retrieval.query"))  # it reads no weights
    assert not _is_groupable(call("a", "b", task=["retrieval.query", None]))
    assert not _is_groupable(call("a" * 5000))
    assert not _is_groupable(call(*["a"] * 33))
    assert not _is_groupable(call([1, 2, 3]))
