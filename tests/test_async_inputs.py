"""AsyncModel and iterables of the caller's that block or raise while they are read."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from checkpoints import save_checkpoint
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.async_model import AsyncModel
from bytetx.model import Model

WAIT_S = 60.0  # until a test that hangs fails


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, WAIT_S))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """It classifies with one label, so it embeds and reranks as well."""
    folder = tmp_path_factory.mktemp("model")
    saved = save_checkpoint(folder, head="ForSequenceClassification", num_labels=1)
    return bytetx.load(saved, device="cpu", token_budget=64)


@pytest.mark.parametrize("task", ["embed", "rerank", "classify"])
def test_input_that_blocks_holds_up_its_own_call_alone(model: Model, task: str) -> None:
    """Even more of them than asyncio has threads; a call that is cancelled waits for nothing."""
    may_go, is_asked = threading.Event(), threading.Semaphore(0)

    def blocking() -> Iterator[str]:
        yield "the quick brown fox"
        is_asked.release()
        may_go.wait(WAIT_S)
        yield "jumps"

    async def main(shared: AsyncModel) -> None:
        def start() -> asyncio.Task[Any]:
            if task == "rerank":
                return asyncio.create_task(shared.rerank("a", blocking()))
            return asyncio.create_task(getattr(shared, task)(blocking()))

        blocked = [start() for _ in range(40)]
        for _ in blocked:
            await asyncio.to_thread(is_asked.acquire)
            await shared.embed(["a"])
        blocked[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocked[0]
        may_go.set()
        assert all(len(one) == 2 for one in await asyncio.gather(*blocked[1:]))

    async def whole() -> None:
        async with AsyncModel(model) as shared:
            await main(shared)

    run(whole())


def test_an_error_of_the_input_is_the_callers(model: Model) -> None:
    def failing() -> Iterator[str]:
        yield "a"
        raise KeyError("of the caller")

    async def main() -> None:
        async with AsyncModel(model) as shared:
            with pytest.raises(KeyError, match="of the caller"):
                await shared.embed(failing())
            assert len(await shared.embed(iter([]))) == 0

    run(main())
