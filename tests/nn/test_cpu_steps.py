"""Decode steps of a CPU as one native call: the bits of one operation after another."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cpu_kernels
import numpy as np
import pytest
import torch
from checkpoints import save_causal
from paged_steps import pack_past
from tiny import Loaded, load, random_ids
from tiny_decoders import DECODERS

import bytetx
from bytetx.generate import model_runner
from bytetx.nn.cpu_steps import MAX_SEQUENCES, CpuSteps
from bytetx.nn.kv_cache import KvCache, allocate_cache
from bytetx.ops.cpu_decode_step import why_no_cpu_step
from bytetx.ops.panels import PanelFinder
from bytetx.packed import PackedBatch
from bytetx.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(why_no_cpu_step() is not None, reason=f"{why_no_cpu_step()}")

dtype = cpu_kernels.dtype
poisoned_memory = cpu_kernels.poisoned_memory

# Families whose layers are not pre-norm with attention and feed-forward in turn, or have experts,
# norms of whole projections, dynamic rotation, growing queries, or weights of their own kinds.
OTHERS = {
    *("llama-dynamic", "gpt_neox", "opt-post", "gptj", "olmo2", "olmo2-biases", "falcon"),
    *("falcon-heads", "falcon-groups", "falcon-one-norm", "falcon-alibi-groups", "mixtral"),
    *("mixtral-window", "qwen3_moe", "qwen3_moe-period", "stablelm-parallel", "ministral3"),
    *("ministral3-window", "lfm2", "lfm2-biases", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
}
# Those whose activation is not a gate: with float32 oneDNN computes it, with bits of its own.
UNGATED = ("gpt2", "gpt_neox-serial", "opt", "gpt_neo", "starcoder2", "gpt_bigcode", "bloom")
UNGATED = (*UNGATED, "falcon-serial", "falcon-alibi")
PAGE = 4


def make_cache(loaded: Loaded, num_pages: int, page_size: int = PAGE) -> KvCache:
    """Pages of NaN: nothing may be read that was not written."""
    spec = loaded.spec
    cache = allocate_cache(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=loaded.transformer.embeddings.word.dtype,
    )
    for layer in cache.layers:
        layer.k_cache.fill_(torch.nan)
        layer.v_cache.fill_(torch.nan)
    return cache


class Sequences:
    """Sequences of the given lengths in a cache of their own, on pages in random order."""

    def __init__(self, loaded: Loaded, lengths: Sequence[int], *, more: int, page_size: int = PAGE):
        self.loaded, self.lengths, self.page_size = loaded, np.array(lengths), page_size
        self.ids = random_ids([n + more for n in lengths])
        rng = np.random.default_rng(len(lengths))
        counts = [-(-(n + more) // page_size) for n in lengths]
        free = rng.permutation(sum(counts) + 2).tolist()
        self.pages = [[free.pop() for _ in range(count)] for count in counts]
        self.cache = make_cache(loaded, sum(counts) + 2, page_size)
        batch = self.batch([own[:n] for own, n in zip(self.ids, lengths, strict=True)], lengths)
        loaded.transformer.forward(batch, cache=self.cache)

    def batch(self, pieces: list[list[int]], kv_seqlens: Sequence[int]) -> PackedBatch:
        """The next tokens of each sequence, up to so many in all."""
        seqlens = np.array([len(piece) for piece in pieces], np.int32)
        ends = np.array(kv_seqlens, np.int32)
        past = pack_past(self.pages, ends, seqlens, page_size=self.page_size)
        batch = self.loaded.pack(pieces)
        starts = torch.from_numpy(np.repeat(ends - seqlens, seqlens).astype(np.int32))
        return replace(batch, position_ids=batch.position_ids + starts, past=past)

    def decode(self, number: int, only: Sequence[int] | None = None) -> PackedBatch:
        """The step number of one token a sequence."""
        chosen = range(len(self.ids)) if only is None else only
        ends = [int(self.lengths[i]) + number + 1 for i in chosen]
        pages, self.pages = self.pages, [self.pages[i] for i in chosen]
        try:
            return self.batch([[self.ids[i][int(self.lengths[i]) + number]] for i in chosen], ends)
        finally:
            self.pages = pages


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


def check(loaded: Loaded, lengths: Sequence[int], *, steps: int = 3, page_size: int = PAGE) -> None:
    sequences = Sequences(loaded, lengths, more=steps, page_size=page_size)
    cache = sequences.cache
    copy = KvCache(
        tuple(
            replace(c, k_cache=c.k_cache.clone(), v_cache=c.v_cache.clone()) for c in cache.layers
        )
    )
    native_steps = CpuSteps.of(loaded.transformer, copy)
    assert native_steps is not None
    for number in range(steps):
        batch = sequences.decode(number)
        wanted = loaded.transformer.forward(batch, cache=cache)
        got = native_steps.forward(batch)
        assert wanted.isfinite().all() and torch.equal(got, wanted), (lengths, number)
        for ours, theirs in zip(copy.layers, cache.layers, strict=True):
            assert same_bits(ours.k_cache, theirs.k_cache)
            assert same_bits(ours.v_cache, theirs.v_cache)


def has_known_panels(loaded: Loaded) -> bool:
    finder = PanelFinder()
    linears = [w.dense for layer in loaded.transformer.layers.weights for w in layer.linears]
    return all(finder.find(w) is not None for w in linears)


@pytest.mark.parametrize("name", DECODERS)
def test_every_family_has_its_bits(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    loaded = load(save_causal(tmp_path, name), dtype)
    steps = CpuSteps.of(loaded.transformer, make_cache(loaded, 2))
    if name in OTHERS:
        assert steps is None
        return
    if not has_known_panels(loaded) or steps is None:
        is_ours = loaded.transformer.layers.weights[0].qkv.dense.weight.dtype == torch.int32
        is_ungated = name.startswith(UNGATED)
        assert not is_ours and (is_ungated or not has_known_panels(loaded))
        return
    check(loaded, [5, 17, 1, 8], steps=2)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = save_causal(
        tmp_path_factory.mktemp("qwen"),
        "qwen3",
        intermediate_size=96,
        max_position_embeddings=2100,
        num_hidden_layers=2,
    )
    loaded = load(folder, getattr(torch, request.param))
    if CpuSteps.of(loaded.transformer, make_cache(loaded, 2)) is None:
        pytest.skip("oneDNN's layout or order of sums is not known here")
    return loaded


def test_lengths_at_the_ends_of_pages_and_runs(qwen: Loaded) -> None:
    check(qwen, [1, 15, 16, 17, 511, 512, 513, 1023, 2000], steps=3, page_size=16)


@pytest.mark.parametrize("batch_size", [*range(1, 18), MAX_SEQUENCES])
def test_any_number_of_sequences(qwen: Loaded, batch_size: int) -> None:
    rng = np.random.default_rng(batch_size)
    check(qwen, rng.integers(1, 40, batch_size).tolist(), steps=1)


def test_neighbours_and_threads_change_no_bit(qwen: Loaded) -> None:
    threads = torch.get_num_threads()
    sequences = Sequences(qwen, [30, 3, 600, 8, 64, 1], more=1)
    steps = CpuSteps.of(qwen.transformer, sequences.cache)
    assert steps is not None
    wanted = steps.forward(sequences.decode(0))
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            for only in ([0], [2], [5, 1], [4, 3, 2, 1, 0], range(6)):
                got = steps.forward(sequences.decode(0, only))
                assert torch.equal(got, wanted[list(only)]), (num_threads, only)
    finally:
        torch.set_num_threads(threads)


def test_a_sequence_that_is_not_finite_spoils_no_other(qwen: Loaded) -> None:
    sequences = Sequences(qwen, [9, 4, 6], more=1)
    steps = CpuSteps.of(qwen.transformer, sequences.cache)
    assert steps is not None
    wanted = steps.forward(sequences.decode(0))
    page = sequences.pages[1][0]
    for layer in sequences.cache.layers:
        layer.v_cache[page, 0] = torch.inf
    got = steps.forward(sequences.decode(0))
    assert torch.equal(got[[0, 2]], wanted[[0, 2]]) and not got[1].isfinite().all()


def test_slot_minus_one_is_nowhere(qwen: Loaded) -> None:
    sequences = Sequences(qwen, [9, 4], more=1)
    steps = CpuSteps.of(qwen.transformer, sequences.cache)
    assert steps is not None
    batch = sequences.decode(0)
    assert batch.past is not None
    slots = torch.full_like(batch.past.slot_mapping, -1)
    before = [layer.k_cache.clone() for layer in sequences.cache.layers]
    steps.forward(replace(batch, past=replace(batch.past, slot_mapping=slots)))
    for layer, was in zip(sequences.cache.layers, before, strict=True):
        assert same_bits(layer.k_cache, was)


def test_numbers_outside_their_tables_are_refused(qwen: Loaded) -> None:
    sequences = Sequences(qwen, [9, 4], more=1)
    steps = CpuSteps.of(qwen.transformer, sequences.cache)
    assert steps is not None
    batch = sequences.decode(0)
    past = batch.past
    assert past is not None and batch.position_ids is not None
    wrong = torch.tensor([2, 10**6], dtype=torch.int32)
    cases = {
        "slot_mapping": replace(batch, past=replace(past, slot_mapping=wrong)),
        "position_ids": replace(batch, position_ids=wrong),
        "kv_seqlens": replace(batch, past=replace(past, kv_seqlens=wrong)),
        "page_table": replace(batch, past=replace(past, page_table=past.page_table + 10**6)),
    }
    for name, case in cases.items():
        with pytest.raises(ValueError, match=name):
            steps.forward(case)


def test_plain_weights_run_as_before(tmp_path: Path) -> None:
    loaded = load(save_causal(tmp_path), prepack=False)
    assert CpuSteps.of(loaded.transformer, make_cache(loaded, 2)) is None


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3", "gemma3", "gpt2", "smollm3"])
def test_generation_gives_the_same_tokens_and_probabilities(
    tmp_path: Path, name: str, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_causal(tmp_path, name)
    prompts = random_ids([7, 1, 30, 12])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    for chosen in ("float32", "bfloat16"):
        answers = []
        for is_native in (True, False):
            if not is_native:
                monkeypatch.setattr(model_runner.CpuSteps, "of", lambda *_: None)
            model = bytetx.load(folder, dtype=chosen, batch_invariant=batch_invariant)
            answers.append(model.generate(prompts, params))
            monkeypatch.undo()
        for ours, theirs in zip(*answers, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert str(ours.logprobs) == str(theirs.logprobs)
