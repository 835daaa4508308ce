"""A model is freed with its last name, even after calls that failed: no error's frames hold it."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SENTENCES, save_causal, save_checkpoint

import bytetx

LONG = "the " * 5000
BAD_IDS = torch.tensor([[10**6, 1]])
MANY = list(SENTENCES) * 100  # several windows, which threads read
Act = Callable[[Any], object]


def stream_generated(model: Any) -> None:
    for _ in model.generate([LONG], stream=True):
        pass


async def stream_async(model: Any) -> None:
    async for _ in model.generate(LONG):
        pass


def overflow(model: Any) -> None:
    with torch.no_grad():
        model.transformer.embeddings.word.fill_(torch.nan)
    model.embed(["fox"])


# By the checkpoint: calls that fail.
SYNC: dict[str, list[tuple[str, Act]]] = {
    "encoder": [
        ("too long", lambda model: model.embed([LONG])),
        ("no text", lambda model: model.embed([3])),
        ("bad ids", lambda model: model.embed([[1, 10**6], [1.5], [10**7]])),
        ("a later window", lambda model: model.embed([*MANY, 3])),
        ("chunks", lambda model: model.embed([3, LONG], overflow="chunk", stride=4)),
        ("stream", lambda model: list(model.embed([LONG], stream=True))),
        ("classify", lambda model: model.classify([LONG])),
        ("rerank", lambda model: model.rerank("q", ["a", LONG])),
        ("not finite", overflow),
    ],
    "causal": [
        ("generate", lambda model: model.generate([LONG])),
        ("no prompt", lambda model: model.generate([3])),
        ("stream of tokens", stream_generated),
        ("encode_prompts", lambda model: model.encode_prompts([LONG])),
    ],
}
ASYNC: dict[str, list[tuple[str, Act]]] = {
    "encoder": [
        ("too long", lambda model: model.embed([LONG])),
        ("a later window", lambda model: model.embed([*MANY, 3])),
    ],
    "causal": [("stream of tokens", stream_async)],
}


def rows(calls: dict[str, list[tuple[str, Act]]]) -> list[Any]:
    return [pytest.param(kind, act, id=name) for kind in calls for name, act in calls[kind]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("freed")
    head = "ForSequenceClassification"
    return {
        "encoder": save_checkpoint(root / "encoder", head=head, num_labels=1),
        "causal": save_causal(root / "causal", "gpt2"),
    }


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def assert_freed(model: list[Any]) -> None:
    """model: the only name of it."""
    alive = weakref.ref(model.pop())
    assert alive() is None


@pytest.mark.parametrize(("kind", "act"), rows(SYNC))
def test_a_failed_call_leaves_no_cycle(folders: dict[str, Path], kind: str, act: Act) -> None:
    model = [bytetx.load(folders[kind], device="cpu", token_budget=256)]
    with pytest.raises(bytetx.InputError) as caught:
        act(model[0])
    del caught  # its traceback has this frame's callees
    assert_freed(model)


@pytest.mark.parametrize(("kind", "act"), rows(ASYNC))
def test_a_failed_call_of_many_leaves_no_cycle(
    folders: dict[str, Path], kind: str, act: Act
) -> None:
    model = [bytetx.load(folders[kind], device="cpu", token_budget=256)]

    async def fail() -> None:
        async with bytetx.AsyncModel(model[0]) as shared:
            try:
                await act(shared)  # type: ignore[misc]
            except bytetx.InputError:
                return
            raise AssertionError("the call did not fail")

    asyncio.run(fail())
    assert_freed(model)


@pytest.mark.parametrize(
    ("kind", "method"), [("encoder", "forward"), ("causal", "forward"), ("causal", "generate")]
)
def test_an_unwrapped_model_is_freed(folders: dict[str, Path], kind: str, method: str) -> None:
    """Until then the module and what stands in for its forward hold each other."""
    import transformers

    name = "AutoModelForCausalLM" if kind == "causal" else "AutoModelForSequenceClassification"
    model = [bytetx.wrap(getattr(transformers, name).from_pretrained(folders[kind]).eval())]
    with torch.no_grad(), pytest.raises(bytetx.InputError) as caught:
        if method == "generate":
            model[0].generate(BAD_IDS, max_new_tokens=2)
        else:
            model[0](BAD_IDS)
    del caught
    bytetx.unwrap(model[0])
    assert_freed(model)
