"""Small steps of a GPU on a CPU: fakes stand in for pinned memory, events and graphs."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import save_causal
from draft_oracle import MAX_DRAFT, Oracle, oracle  # noqa: F401  (oracle: a fixture)
from fake_cuda import FakeEvent, fake_capture
from generation_soak import num_free_pages, random_requests
from hypothesis import given
from hypothesis import strategies as st
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.generate.cuda_steps import CudaSteps
from bytetx.generate.model_runner import ModelRunner
from bytetx.generate.sampler import SamplerOutput, SamplingMetadata
from bytetx.model import Model
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.one_sequence import OneSequence
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch
from bytetx.runtime import cuda_graphs as graphs
from bytetx.runtime.input_batch import InputBatch
from bytetx.runtime.paged_layout import (
    MAX_MIXED_TOKENS,
    decode_layout,
    mixed_layout,
    round_rows,
)
from bytetx.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(seed=4, max_tokens=24, top_k=9, stop_token_ids=[7, 8, 9])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal(tmp_path_factory.mktemp("decode"), "qwen3")


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New engines run ahead, pad decode steps and replay them, on the CPU."""
    empty, init = torch.empty, ModelRunner.__init__

    def make(runner: ModelRunner, *arguments: object, **options: object) -> None:
        init(runner, *arguments, **options)
        runner._steps = CudaSteps(
            runner._transformer,
            runner._head,
            executor=runner._executor,
            cache=runner.cache,
            last_tokens=runner._last_tokens,
            max_samples=options["max_samples"],
            device=torch.device("cpu"),
            has_graphs=options["cuda_graphs"],
        )

    def to_host(sampled: SamplerOutput) -> SamplerOutput:
        sampled.tokens = None if sampled.tokens is None else sampled.tokens.clone()
        return sampled

    monkeypatch.setattr(SamplerOutput, "to_host", to_host)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **o: empty(*a, **o))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(graphs.GraphCache, "_capture", fake_capture)
    monkeypatch.setattr(graphs.GraphCache, "_reserve", lambda cache, total_tokens: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeEvent())
    monkeypatch.setattr(CudaSteps, "is_capturable", True)
    monkeypatch.setattr(ModelRunner, "__init__", make)
    yield
    gc.collect()  # graphs go while the fakes are there


def prompts(count: int = 11) -> list[list[int]]:
    return [prompt for prompt, _ in random_requests(count)]


def tokens_of(model: Model, params: SamplingParams, **sizes: int) -> list[list[int]]:
    return [list(answer.token_ids) for answer in model.generate(prompts(), params, **sizes)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_padded_steps_give_what_plain_ones_do(
    folder: Path, request: pytest.FixtureRequest, params: SamplingParams, cuda_graphs: bool
) -> None:
    plain = bytetx.load(folder, device="cpu")
    wanted = tokens_of(plain, params)
    request.getfixturevalue("like_a_gpu")
    model = bytetx.load(folder, device="cpu", cuda_graphs=cuda_graphs)
    for _ in range(2):
        assert tokens_of(model, params) == wanted
        assert tokens_of(model, params, max_num_seqs=5) == wanted
    small = Model(model.checkpoint, token_budget=12, cuda_graphs=cuda_graphs)
    assert tokens_of(small, params, max_num_seqs=7, kv_cache_tokens=130) == wanted
    engine = small.engines.idle[0].engine
    assert engine._scheduler.num_preempted > 0
    assert (engine.num_graphs > 0) == cuda_graphs
    assert num_free_pages(engine) == engine._scheduler.pages.num_pages


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_one_sequence_has_its_own_layers(
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    cuda_graphs: bool,
) -> None:
    """They run its decode steps, and no other steps."""
    wanted = tokens_of(bytetx.load(folder, device="cpu"), GREEDY)
    request.getfixturevalue("like_a_gpu")
    rows: list[int] = []

    class Fake:
        def __init__(self, transformer: Transformer, cache: KvCache):
            self.transformer, self.cache = transformer, cache

        def forward(self, batch: PackedBatch) -> torch.Tensor:
            assert batch.max_seqlen == 1
            rows.append(batch.total_tokens)
            return self.transformer.forward(batch, cache=self.cache)

    monkeypatch.setattr(OneSequence, "of", Fake)
    model = bytetx.load(folder, device="cpu", cuda_graphs=cuda_graphs)
    assert tokens_of(model, GREEDY) == wanted
    rows.clear()
    alone = [list(model.generate([p], GREEDY)[0].token_ids) for p in prompts()[:2]]
    assert alone == wanted[:2]
    assert set(rows) == {1}


@pytest.mark.parametrize("params", [GREEDY, replace(SAMPLED, temperature=0.3, top_k=2)])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_padded_steps_with_drafts_give_what_plain_ones_do(
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    params: SamplingParams,
    cuda_graphs: bool,
    oracle: type[Oracle],  # noqa: F811
) -> None:
    """Their steps run padded and captured, too, and steps without drafts run ahead."""
    wanted = tokens_of(bytetx.load(folder, device="cpu"), params)
    oracle.answers = [prompt + ids for prompt, ids in zip(prompts(), wanted, strict=True)]
    request.getfixturevalue("like_a_gpu")
    can_run, seen = CudaSteps.can_run, []

    def watched(steps: CudaSteps, input_batch: InputBatch, metadata: SamplingMetadata) -> bool:
        seen.append((int(input_batch.num_samples.max()), can_run(steps, input_batch, metadata)))
        return seen[-1][1]

    monkeypatch.setattr(CudaSteps, "can_run", watched)
    model = bytetx.load(folder, device="cpu", cuda_graphs=cuda_graphs)
    for sizes in ({}, {"max_num_seqs": 5}, {"max_num_seqs": 2, "kv_cache_tokens": 130}):
        for _ in range(2):
            assert tokens_of(model, params, num_speculative_tokens=MAX_DRAFT, **sizes) == wanted
        engine = model.engines.idle[0].engine
        assert engine.draft_counts[1] > 50
        assert num_free_pages(engine) == engine._scheduler.pages.num_pages
    assert all(is_run for num_samples, is_run in seen if num_samples > 1)
    assert {num_samples for num_samples, _ in seen} == {1, 2, 3, 4, 5, 6}
    if cuda_graphs:
        keys = [layout for layout, *_ in engine._runner._steps._graphs._graphs]
        assert any(layout.num_samples > layout.num_seqs for layout in keys)


def test_a_processor_sees_every_token(folder: Path, like_a_gpu: None) -> None:
    seen: list[tuple[int, ...]] = []

    def processor(token_ids: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        seen.append(token_ids)
        return logits

    model = bytetx.load(folder, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    (wanted,) = model.generate([[5, 6]], params)
    processed = SamplingParams(
        temperature=0, max_tokens=9, ignore_eos=True, logits_processors=[processor]
    )
    engine = model.engine()
    engine.add_request([5, 6, 7], params)
    engine.step()
    engine.add_request([5, 6], processed)  # while a step is in flight
    while engine.has_work:
        engine.step()
    answer = [5, 6, *wanted.token_ids]
    assert seen == [tuple(answer[: 2 + number]) for number in range(9)]


def test_nan_ends_its_request_while_the_next_step_runs(folder: Path, like_a_gpu: None) -> None:
    model = bytetx.load(folder, device="cpu")
    engine = model.engine()
    wanted = tokens_of(model, GREEDY)
    norm = model.transformer.layers.final_norm.weight
    kept = norm.clone()
    request_id = engine.add_request([5, 6, 7], GREEDY)
    engine.step()
    norm.fill_(torch.nan)
    pieces = [piece for _ in range(3) for piece in engine.step()]
    norm.copy_(kept)
    assert pieces[-1].request_id == request_id and pieces[-1].finish_reason == "error"
    while engine.has_work:
        engine.step()
    assert num_free_pages(engine) == engine._scheduler.pages.num_pages
    assert tokens_of(model, GREEDY) == wanted


def test_graphs_go_before_a_step_fails(
    folder: Path, like_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bytetx.load(folder, device="cpu")
    wanted = tokens_of(model, GREEDY)
    engine, forward = model.engines.idle[0].engine, model.transformer.forward
    assert engine.num_graphs > 0

    def short_of_memory(batch: object, **options: object) -> torch.Tensor:
        if engine.num_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(batch, **options)

    monkeypatch.setattr(model.transformer, "forward", short_of_memory)
    engine.add_request(prompts()[0], GREEDY)
    pieces = [piece for _ in range(30) for piece in engine.step()]
    assert [token for piece in pieces for token in piece.token_ids] == wanted[0]


def test_no_cycle_holds_an_engine(folder: Path, like_a_gpu: None) -> None:
    """Its cache is most of a GPU's memory, and the next engine wants it."""
    model = bytetx.load(folder, device="cpu")
    tokens_of(model, GREEDY)
    engine = model.engines.idle[0].engine
    gone = [weakref.ref(engine), weakref.ref(engine._runner.cache.layers[0].k_cache)]
    for captured in engine._runner._steps._graphs._graphs.values():
        captured.graph.compute = None  # a real one does not hold what it was captured from
    gc.collect()
    gc.disable()
    try:
        model.engines.idle.clear()
        del engine
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


@given(st.integers(1, 5000), st.integers(1, 4096))
def test_layouts_hold_their_steps(num_rows: int, num_pages: int) -> None:
    layout = decode_layout(num_rows, num_pages)
    assert num_rows <= layout.num_rows == round_rows(num_rows) <= max(1.5 * num_rows, num_rows + 32)
    assert num_pages <= layout.num_pages <= max(64, 2 * num_pages)
    block = torch.arange(layout.num_ints, dtype=torch.int32)
    views = layout.block.views(block)
    assert views["cu_seqlens"].shape == (layout.num_rows + 1,)
    assert views["page_table"].shape == (layout.num_rows, layout.num_pages)
    for name in ("kv_seqlens", "slot_indices", "positions", "slot_mapping"):
        assert views[name].shape == (layout.num_rows,)
    taken = torch.cat([view.flatten() for view in views.values()])
    assert len(taken.unique()) == len(taken)  # no two fields overlap
    assert all(int(view.flatten()[0]) % 4 == 0 for view in views.values())


@given(st.integers(1, MAX_MIXED_TOKENS), st.integers(1, 600), st.integers(1, 4096))
def test_mixed_layouts_hold_their_steps(num_tokens: int, num_sequences: int, pages: int) -> None:
    layout = mixed_layout(num_tokens, num_sequences, pages)
    assert num_tokens <= layout.num_rows <= max(1.25 * num_tokens, num_tokens + 31)
    assert num_sequences <= layout.num_seqs <= max(4 * num_sequences, num_sequences + 63)
    assert layout.num_samples == layout.num_seqs
    for num_samples in (num_sequences + 1, num_tokens):
        drafts = mixed_layout(num_tokens, num_sequences, pages, num_samples)
        assert drafts.num_samples >= max(num_samples, layout.num_seqs)
        views = drafts.block.views(torch.empty(drafts.num_ints, dtype=torch.int32))
        assert len(views["logits_rows"]) == len(views["slot_indices"]) == drafts.num_samples
    filler = layout.num_rows - num_tokens
    assert filler <= layout.num_pages * 16 and layout.num_pages >= pages
    assert len({mixed_layout(n, 8, 1) for n in range(1, MAX_MIXED_TOKENS + 1)}) <= 24


def test_small_steps_of_prompts_are_captured(folder: Path, like_a_gpu: None) -> None:
    model = bytetx.load(folder, device="cpu")
    for _ in range(3):
        tokens_of(model, GREEDY, max_num_seqs=3)
        model.engines.idle[0].engine._scheduler.pages.reset_prefix_cache()  # the same steps again
    graphs = model.engines.idle[0].engine._runner._steps._graphs._graphs
    assert {layout.is_decode for layout, *_ in graphs} == {True, False}
