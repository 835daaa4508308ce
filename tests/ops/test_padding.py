"""A padded batch to packed rows and back, on every backend, against Layout's plain torch."""

import numpy as np
import pytest
import torch
from pairwise import pairwise

from bytetx.hf.padding import padded_layout, position_ids_of
from bytetx.ops import padding, padding_kernel, reference
from bytetx.ops.padded_ids import IdTables, PackedIds, PaddedIds

# Backends and where they run; the native kernels are for GPUs.
PLACES = [
    pytest.param((backend, device), id=f"{backend}-{device}", marks=marks)
    for device, marks in (("cpu", ()), ("cuda", pytest.mark.gpu))
    for backend in ("reference", "triton", "native")
    if (backend, device) != ("native", "cpu")
]
MASKS = [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32, torch.float16]
POISON = -77


@pytest.fixture(params=PLACES)
def device(request, monkeypatch):
    """Where it runs, the functions of one backend in the op's place; Triton may be interpreted."""
    backend, device = request.param
    kernels = reference
    if backend == "triton":
        pytest.importorskip("triton")
        from bytetx.ops import triton_kernels as kernels
    elif backend == "native":
        kernels = padding_kernel
    monkeypatch.setattr(padding, "_backend", lambda device: kernels)
    return device


def mask_of(num_rows, num_columns, *, holes):
    rng = np.random.default_rng(num_rows * 1000 + num_columns)
    if holes:
        return torch.from_numpy(rng.random((num_rows, num_columns)) < 0.6)
    seqlens = rng.integers(0, num_columns + 1, num_rows)
    columns = np.arange(num_columns)
    is_token = columns < seqlens[:, None]
    is_token[::2] = is_token[::2, ::-1]  # every other row is padded on the left
    return torch.from_numpy(is_token)


def ids_of(num_rows, num_columns, dtype):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 9, (num_rows, num_columns), generator=generator, dtype=dtype)


def buffers(num_tokens, num_sequences, device, *, has_types=True):
    def poisoned(size):
        return torch.full((size,), POISON, dtype=torch.int32, device=device)

    types = poisoned(num_tokens) if has_types else None
    return PackedIds(poisoned(num_sequences + 1), poisoned(num_tokens), poisoned(num_tokens), types)


@pairwise(
    {"device": PLACES, "shape": [(1, 1), (5, 7), (3, 300), (300, 2)], "dtype": MASKS},
    indirect=["device"],
)
def test_counts(device, shape, dtype):
    for holes in (False, True):
        mask = mask_of(*shape, holes=holes)
        given = mask.to(device, dtype)
        if dtype.is_floating_point:
            given = -given  # -0 is zero, too
        counts = padding.count_tokens(given).cpu()
        edges = torch.nn.functional.pad(mask.int(), (1, 0)).diff(dim=1)
        want = torch.stack((mask.sum(1), (edges == 1).sum(1), mask[:, 0])).int()
        assert torch.equal(counts, want)


@pairwise(
    {
        "shape": [(1, 128), (5, 7), (3, 300)],
        "holes": [False, True, None],
        "offset": [0, 2],
        "has_seqlens": [False, True],
        "ids_dtype": [torch.int64, torch.int32],
    }
)
def test_packed_rows_are_those_of_a_layout(device, shape, holes, offset, has_seqlens, ids_dtype):
    """holes: None for no mask."""
    ids = ids_of(*shape, ids_dtype).to(device)
    mask = None if holes is None else mask_of(*shape, holes=holes).long().to(device)
    types = (ids % 2)[:1] if offset else ids % 2
    layout = padded_layout(mask, *shape, ids.device)
    total, num_texts, filler_tokens = layout.total_tokens, shape[0] + 3, 8
    num_tokens = total + 20
    packed = buffers(num_tokens, num_texts + 4, device)
    seqlens = layout.seqlens.to(device) if has_seqlens else None
    rows = padding.pack_padded(
        PaddedIds(ids, mask, types),
        packed,
        num_texts=num_texts,
        filler_tokens=filler_tokens,
        position_offset=offset,
        seqlens=seqlens,
    )
    want_positions = position_ids_of(
        layout, input_ids=ids, position_ids=None, position_offset=offset
    )
    for found, want in (
        (packed.input_ids, layout.gather(ids)),
        (packed.position_ids, want_positions),
        (packed.token_type_ids, layout.gather(types)),
    ):
        assert found[:total].tolist() == want.tolist()
        assert not found[total:].any()
    ends = layout.cu_seqlens.tolist() + [total] * 3
    assert packed.cu_seqlens.tolist() == [*ends, total + 8, total + 16, total + 20, total + 20]
    if mask is None:
        assert rows is None
    else:
        x = torch.randn(num_tokens, 40, device=device)
        unpacked = padding.unpack_padded(x, rows)
        want = torch.zeros(shape[0] * shape[1], 40, device=device)
        want[mask.flatten().bool()] = x[:total]
        assert torch.equal(unpacked, want)


def test_given_positions_and_rows_that_are_broadcast(device):
    ids = ids_of(1, 6, torch.int64).expand(3, 6).to(device)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [0] * 6, [0, 1, 1, 1, 1, 1]]).to(device)
    positions = torch.tensor([[9, 8, 7, 6, 5, 2**40]], device=device)
    packed = buffers(7, 4, device, has_types=False)
    rows = padding.pack_padded(
        PaddedIds(ids, mask, None, positions),
        packed,
        num_texts=3,
        filler_tokens=64,
        position_offset=0,
    )
    assert packed.position_ids.tolist() == [9, 8, 8, 7, 6, 5, 2**31 - 1]
    assert packed.cu_seqlens.tolist() == [0, 2, 2, 7, 7]
    assert packed.input_ids.tolist() == [*ids[0, :2].tolist(), *ids[0, 1:].tolist()]
    assert rows.view(3, 6).tolist() == [[0, 1, -1, -1, -1, -1], [-1] * 6, [-1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("bad", [-1, 7000, 2**40])
def test_bad_ids_of_tokens_are_noted_and_those_of_pads_are_not(device, bad):
    tables = IdTables(word=10, position=5, token_type=2)
    seen = max(-(2**31), min(bad, 2**31 - 1))
    for number in range(3):
        for column in (1, 3):
            tensors = [torch.zeros((2, 4), dtype=torch.int64) for _ in range(3)]
            tensors[number][1, column] = bad
            ids, positions, types = (t.to(device) for t in tensors)
            mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], device=device)
            bad_ids = torch.zeros(3, dtype=torch.int32, device=device)
            padding.pack_padded(
                PaddedIds(ids, mask, types, positions),
                buffers(8, 3, device),
                num_texts=2,
                filler_tokens=64,
                position_offset=0,
                tables=tables,
                bad_ids=bad_ids,
            )
            want = [0, 0, 0]
            want[number] = 0 if column == 3 else seen
            assert bad_ids.tolist() == want


def test_a_model_without_a_table_has_no_bad_ids_of_it(device):
    ids = torch.full((1, 3), 9999, device=device)
    bad_ids = torch.zeros(3, dtype=torch.int32, device=device)
    padding.pack_padded(
        PaddedIds(ids, None, ids, ids),
        buffers(3, 2, device),
        num_texts=1,
        filler_tokens=64,
        position_offset=0,
        tables=IdTables(word=10_000, position=0, token_type=0),
        bad_ids=bad_ids,
    )
    assert bad_ids.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 48, 384])
def test_unpacking(device, width, dtype):
    x = torch.randn(5, width).to(device, dtype)
    rows = torch.tensor([4, -1, 0, 0, -1, 2, 3, 1, -1], dtype=torch.int32, device=device)
    x[1] = torch.nan  # of another text: nothing of it reaches pads
    out = padding.unpack_padded(x, rows)
    assert torch.equal(out[[0, 2, 3, 5, 6]], x[[4, 0, 0, 2, 3]])
    assert not out[rows < 0].any()
    assert reference.unpack_padded(x[:0], rows[1:2]).tolist() == [[0.0] * width]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.zeros((2, 3, 1), dtype=torch.int64)}, "input_ids must be int32"),
        ({"input_ids": torch.zeros(2, 3)}, "input_ids must be int32 or int64"),
        ({"mask": torch.ones(2, 4)}, r"mask must be a matrix \[2, 3\]"),
        ({"position_ids": torch.zeros((3, 3), dtype=torch.int64)}, "position_ids must be"),
        ({"input_ids": torch.zeros((3, 2), dtype=torch.int64).T}, "contiguous columns"),
    ],
)
def test_what_is_refused(change, message):
    given = {"input_ids": torch.zeros((2, 3), dtype=torch.int64), "mask": torch.ones(2, 3)}
    with pytest.raises(ValueError, match=message):
        padding.pack_padded(
            PaddedIds(**given | change),
            buffers(6, 3, "cpu"),
            num_texts=2,
            filler_tokens=64,
            position_offset=0,
        )
    with pytest.raises(ValueError, match="num_texts must be at least the batch's 2 rows"):
        padding.pack_padded(
            PaddedIds(**given),
            buffers(6, 3, "cpu"),
            num_texts=1,
            filler_tokens=64,
            position_offset=0,
        )
