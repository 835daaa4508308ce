"""A row's result depends on its own sequence alone, and on no uninitialised memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, Loaded, load, one_thread, random_ids, save, tiny_model  # noqa: F401
from tiny_decoders import DECODERS, tiny_decoder
from torch.profiler import ProfilerActivity, profile

from bytetx.ops.backend_report import backend_report
from bytetx.ops.native import tile_rows

DTYPES = [torch.float32, torch.bfloat16]
CASES = [(family, dtype) for family in ("bert", "mpnet", "electra") for dtype in DTYPES]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    family, dtype = request.param
    return load(save(tiny_model(family), tmp_path_factory.mktemp(family)), dtype)


LENGTHS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 16, 17, 33, 70]), min_size=1, max_size=7)


@settings(max_examples=50)
@given(LENGTHS, st.randoms(use_true_random=False))
def test_order_of_the_batch_changes_no_bit(loaded: Loaded, lengths: list[int], random) -> None:
    ids = random_ids(lengths)
    order = list(range(len(ids)))
    random.shuffle(order)
    straight, shuffled = loaded.rows(ids), loaded.rows([ids[i] for i in order])
    assert all(torch.equal(straight[i], rows) for i, rows in zip(order, shuffled, strict=True))


@settings(max_examples=50)
@given(LENGTHS)
def test_batch_mates_change_no_bit(loaded: Loaded, lengths: list[int]) -> None:
    """Alone (one token too), in halves, or among sequences of length 0: the same rows."""
    ids = random_ids(lengths)
    together = loaded.rows(ids)
    alone = [loaded.rows([sequence])[0] for sequence in ids]
    half = len(ids) // 2
    halves = loaded.rows(ids[:half]) + loaded.rows(ids[half:])
    spaced = loaded.rows([part for sequence in ids for part in (sequence, [])])[::2]
    for rows in (alone, halves, spaced):
        assert all(torch.equal(a, b) for a, b in zip(together, rows, strict=True))


INTERRUPTED = ("bert", "modernbert", "deberta-v2", "gptj", "llama", "olmo2", "mixtral")


@pytest.mark.parametrize(
    "family", [name for name in INTERRUPTED if name in FAMILIES or name in DECODERS]
)
def test_a_pass_between_the_linear_layers_of_another_changes_no_bit(
    family: str, tmp_path: Path
) -> None:
    """Post-norm, pre-norm, parallel and output-norm layers, and experts."""
    model = tiny_model(family) if family in FAMILIES else tiny_decoder(family)
    loaded = load(save(model, tmp_path))
    long, short = loaded.pack(random_ids([33, 20])), loaded.pack(random_ids([3, 1]))
    forward = loaded.transformer.forward
    wanted, beside = forward(long), forward(short)
    nested: list[torch.Tensor] = []
    interrupted = loaded.transformer.interrupted_by(lambda: nested.append(forward(short)))
    assert torch.equal(interrupted.forward(long), wanted)
    assert len(nested) >= 2 * len(loaded.transformer.layers.weights)
    assert all(torch.equal(states, beside) for states in nested)
    assert torch.equal(forward(long), wanted)


def test_threads_change_no_bit(loaded: Loaded) -> None:
    ids = random_ids([70, 1, 0, 33, 2, 70, 64])
    one = loaded.rows(ids)
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert all(torch.equal(a, b) for a, b in zip(one, loaded.rows(ids), strict=True))
        alone = [loaded.rows([sequence])[0] for sequence in ids]
        assert all(torch.equal(a, b) for a, b in zip(one, alone, strict=True))


def test_no_sequence_and_no_token(loaded: Loaded) -> None:
    assert loaded.rows([]) == []
    assert [rows.shape for rows in loaded.rows([[], []])] == [(0, 48), (0, 48)]


@pytest.fixture
def nan_filled_memory() -> Iterator[None]:
    """torch.empty gives NaN, which shows wherever an uninitialised value is read."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


def test_unwritten_memory_never_shows(loaded: Loaded, request: pytest.FixtureRequest) -> None:
    ids = random_ids([5, 0, 1, 64, 17])
    before = loaded.rows(ids)
    request.getfixturevalue("nan_filled_memory")
    assert all(torch.equal(a, b) for a, b in zip(before, loaded.rows(ids), strict=True))


def test_layers_handed_out_are_not_written_again(loaded: Loaded) -> None:
    batch = loaded.pack(random_ids([5, 9]))
    seen, copies = [], []

    def keep(x: torch.Tensor) -> None:
        seen.append(x)
        copies.append(x.clone())

    loaded.transformer.forward(batch, on_layer=keep)
    assert len(seen) == 3
    assert all(torch.equal(x, copy) for x, copy in zip(seen, copies, strict=True))


def peak_bytes(loaded: Loaded, lengths: list[int]) -> int:
    """The most bytes that torch's allocator had out at once during a forward pass."""
    batch = loaded.pack(random_ids(lengths))
    loaded.transformer.forward(batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loaded.transformer.forward(batch)
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(48, 48), (192, 48), (512, 48), (48, 300)])
def test_workspace_bounds_the_activations(
    sizes: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    intermediate_size, embedding_size = sizes
    model = tiny_model(
        "electra", intermediate_size=intermediate_size, embedding_size=embedding_size
    )
    assert_workspace_bounds(load(save(model, tmp_path), dtype))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gptj", "opt", "opt-post"])
def test_workspace_bounds_the_activations_of_causal_models(name: str, tmp_path: Path) -> None:
    assert_workspace_bounds(load(save(tiny_decoder(name), tmp_path)))


def assert_workspace_bounds(loaded: Loaded) -> None:
    attention = next(op for op in backend_report().ops if op.op == "varlen_attention")
    if not attention.cpu.startswith("native"):
        pytest.skip("the reference makes copies for torch's attention: " + attention.cpu)
    itemsize = loaded.transformer.embeddings.word.element_size()
    scratch = torch.get_num_threads() * 2**20
    for lengths in ([70] * 400, [1] * 20_000):
        rows = tile_rows(sum(lengths))
        bound = loaded.spec.workspace_bytes(rows, itemsize)
        measured = peak_bytes(loaded, lengths)
        assert 0.9 * bound < measured + 20 * rows < bound + scratch


@pytest.mark.parametrize("name", ["cu_seqlens", "position_ids"])
def test_rows_that_kernels_read_by_address_are_checked(name: str, loaded: Loaded) -> None:
    """A view with gaps, or other integers, would be read as something else."""
    batch = loaded.pack(random_ids([3, 2]))
    rows = getattr(batch, name)
    strided = torch.stack([rows, rows], dim=1)[:, 0]
    for wrong, message in ((strided, "must be contiguous"), (rows.long(), "must be int32")):
        with pytest.raises(ValueError, match=f"{name} {message}"):
            loaded.transformer.forward(replace(batch, **{name: wrong}))
