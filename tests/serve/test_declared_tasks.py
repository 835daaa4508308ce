"""A task is one declaration: it appears in Python, awaited, and over HTTP, with its options."""

import ast
import asyncio
import inspect
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_causal, save_checkpoint
from method_stubs import STUB, stub
from serving import InProcess

import bytetx
from bytetx.encode.step import Step
from bytetx.errors import InputError, OptionError
from bytetx.nn.transformer import Transformer
from bytetx.serve.loading import load_models
from bytetx.serve.settings import ServeSettings, model_sources
from bytetx.tasks import catalog
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.context import TaskContext
from bytetx.tasks.generate import ChatOptions, GenerateOptions
from bytetx.tasks.results import Results
from bytetx.tasks.task import TASKS, TextOptions, Texts, option, task


@dataclass(frozen=True)
class Norm:
    """The length of a text's first hidden state."""

    norm: float


@dataclass(frozen=True, slots=True)
class NormTask:
    scale: int

    @property
    def key(self) -> Hashable:
        return ("first_norm", self.scale)

    @property
    def capture(self) -> None:
        return None

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        rows = transformer.forward(step.batch)[step.batch.cu_seqlens[:-1].long()]
        return (self.scale * rows.norm(dim=1),)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return np.isfinite(outputs[0])

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[Norm]:
        return [Norm(float(one)) for one in outputs[0]]


@dataclass(frozen=True, kw_only=True)
class NormOptions(TextOptions):
    scale: int = option(1, "A factor.", min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale < 1:
            raise OptionError(f"scale must be 1 or more, got {self.scale}")


@pytest.fixture
def first_norm() -> Iterator[None]:
    def first_norm(
        context: TaskContext, texts: Texts, options: NormOptions
    ) -> TaskCall[Results[Norm]]:
        """The length of each text's first hidden state."""
        return TaskCall(
            "first_norm", texts, NormTask(options.scale), context.reader(options), list_sink
        )

    task(item=Norm, has_route=True)(first_norm)
    yield
    del TASKS["first_norm"]
    for owner in (catalog.ModelTasks, catalog.AsyncModelTasks):
        delattr(owner, "first_norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("bert"))


@pytest.mark.usefixtures("first_norm")
def test_a_task_of_one_declaration(folder: Path) -> None:
    model = bytetx.load(folder, device="cpu")
    texts = ["a fox", "the quick brown fox"]
    wanted = [np.linalg.norm(states[0, 0]) for states in model.hidden_states(texts)]
    found = model.first_norm(texts)
    np.testing.assert_allclose([one.norm for one in found], wanted, rtol=1e-5)
    assert list(model.first_norm(texts, stream=True)) == found
    doubled = [Norm(2 * one.norm) for one in found]
    assert model.first_norm(texts=texts, scale=2) == doubled
    assert "scale: A factor." in model.first_norm.__doc__
    assert "scale" in inspect.signature(model.first_norm).parameters
    with pytest.raises(OptionError, match="scale must be 1 or more"):
        model.first_norm(texts, scale=0)
    with pytest.raises(TypeError, match=r"first_norm\(\) got an unexpected .* 'scal'"):
        model.first_norm(texts, scal=2)
    with pytest.raises(TypeError, match=r"first_norm\(\) takes texts"):
        model.first_norm()
    assert isinstance(model.first_norm([""], on_error="return")[0], Norm | InputError)

    async def ask() -> None:
        async with bytetx.AsyncModel(model) as shared:
            assert await shared.first_norm(texts, scale=2, priority=1) == doubled

    asyncio.run(ask())


@pytest.mark.usefixtures("first_norm")
def test_a_declared_task_has_a_route(folder: Path) -> None:
    model = bytetx.load(folder, device="cpu")
    texts = ["a fox", "the quick brown fox"]
    settings = ServeSettings(model_sources([f"only={folder}"]), device="cpu")
    server = InProcess(settings, load_models(settings))
    body = {"task": "first_norm", "texts": texts, "options": {"scale": 2}}
    answer = server.post("/tasks", body)
    assert answer.status_code == 200, answer.text
    wanted = [{"norm": one.norm} for one in model.first_norm(texts, scale=2)]
    assert answer.json() == {"results": wanted}
    for options in ({"scale": 0}, {"scal": 2}, {"scale": "2"}, {"scale": True}, {"on_error": 1}):
        assert server.post("/tasks", body | {"options": options}).status_code == 422, options
    returned = server.post("/tasks", body | {"options": {"on_error": "return"}})
    assert returned.json() == {"results": [{"norm": one.norm} for one in model.first_norm(texts)]}
    for wrong in ({"texts": "a"}, {"task": "embed"}, {"task": "nonsense"}, {"scale": 2}):
        assert server.post("/tasks", body | wrong).status_code == 422, wrong
    assert "first_norm" in server.get("/info").json()["tasks"]


def test_generate_is_a_declared_task(tmp_path: Path) -> None:
    """Its methods take the options of its dataclass; AsyncModel's those of one prompt."""
    model = bytetx.load(save_causal(tmp_path), device="cpu")
    options = {entry.name for entry in fields(GenerateOptions)}
    inputs = {"prompts", "params", "stream", "show_progress"}
    own = inspect.signature(model.generate).parameters
    assert own.keys() == options | inputs and own["params"].default is None
    for entry in fields(GenerateOptions):
        assert own[entry.name].default == entry.default
        assert f"{entry.name}: " in str(model.generate.__doc__)
    one = inspect.signature(bytetx.AsyncModel.generate).parameters
    queue = {"self", "prompt", "params", "priority", "timeout_s"}
    assert one.keys() == queue | {entry.name for entry in fields(ChatOptions)}
    with pytest.raises(TypeError, match=r"generate\(\) takes prompts, params"):
        model.generate()
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected .* 'max_tokens'"):
        model.generate(["a"], max_tokens=4)
    wrong: dict[str, object] = {
        "kv_cache_tokens": 0,
        "max_num_seqs": True,
        "num_speculative_tokens": -1,
        "chat_template_kwargs": 3,
    }
    for name, value in wrong.items():
        for call in (model.generate, partial(model.generate, stream=True)):
            with pytest.raises(OptionError, match=name):
                call(["a"], **{name: value})
        if name != "chat_template_kwargs":
            with pytest.raises(OptionError, match=name):
                model.engine(**{name: value})

    async def ask() -> None:
        async with bytetx.AsyncModel(model) as shared:
            with pytest.raises(TypeError, match=r"generate\(\) got an .* 'kv_cache_tokens'"):
                shared.generate("a", kv_cache_tokens=64)
            params = bytetx.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
            pieces = [piece async for piece in shared.generate(prompt="a fox", params=params)]
            found = tuple(token for piece in pieces for token in piece.token_ids)
            assert found == tuple(model.generate(["a fox"], params)[0].token_ids)

    asyncio.run(ask())


def test_methods_have_types() -> None:
    """methods.pyi is what tests/method_stubs.py writes."""
    written = ast.parse(STUB.read_text(encoding="utf-8"))
    made = ast.parse(stub())

    def classes(tree: ast.Module) -> list[str]:
        return [ast.dump(node) for node in tree.body if isinstance(node, ast.ClassDef)]

    assert classes(written) == classes(made)
