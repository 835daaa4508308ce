"""FlashAttention-3 as an optional rival: its arguments' order, pages, windows, and its absence."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import attention, decode, flash_attn3, gpu
from benchmarks.cli import app, command_of
from benchmarks.flash_attn3 import FlashAttention3
from benchmarks.lengths import prefix_sums
from bytetx.ops.attention import varlen_attention
from bytetx.ops.paged import paged_attention

# The declarations in the library of vllm 0.24.0, which torch checks every call against.
FWD = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, "
    "int window_size_left, int window_size_right, bool has_softcap, int num_splits, "
    "bool? pack_gqa, int sm_margin) -> Tensor"
)
METADATA_SIZE = 7


def names_of(schema: str) -> list[str]:
    arguments = schema.partition("(")[2].rpartition(")")[0].split(",")
    return [argument.split()[-1] for argument in arguments]


def forward_by_definition(*values: object) -> list[torch.Tensor]:
    """The library's fwd by its arguments' names: a sequence after the other, in plain torch."""
    names = names_of(FWD)
    assert len(values) == len(names)
    given = dict(zip(names, values, strict=True))
    q, k, v = (given[name] for name in "qkv")
    rows = given["cu_seqlens_q"].diff().tolist()
    if given["page_table"] is None:
        keys = given["cu_seqlens_k"].diff().tolist()
        pairs = list(zip(k.split(keys), v.split(keys), strict=True))
    else:
        assert given["scheduler_metadata"].shape == (METADATA_SIZE,)
        keys = given["seqused_k"].tolist()
        pages = [table.long() for table in given["page_table"]]
        pairs = [
            (k[page].flatten(0, 1)[:n], v[page].flatten(0, 1)[:n])
            for page, n in zip(pages, keys, strict=True)
        ]
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (max(rows), max(keys))
    used = {"is_rotary_interleaved", "scheduler_metadata", "page_table", "seqused_k", "s_aux"}
    unused = set(names[3:]) - used - {name for name in names if "seqlen" in name}
    options = {"softmax_scale", "is_causal", "window_size_left", "window_size_right"}
    for name in unused - options:
        assert given[name] in (None, 0, 0.0, 1)
    outs = []
    for own, (own_k, own_v) in zip(q.split(rows), pairs, strict=True):
        distance = torch.arange(len(own_k)) - torch.arange(len(own))[:, None]
        distance = distance - (len(own_k) - len(own))
        seen = torch.ones_like(distance, dtype=torch.bool)
        if given["window_size_left"] >= 0:
            seen &= distance >= -given["window_size_left"]
        if given["window_size_right"] >= 0:
            seen &= distance <= given["window_size_right"]
        if given["is_causal"]:
            seen &= distance <= 0
        heads = (x.transpose(0, 1) for x in (own, own_k, own_v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=seen, scale=given["softmax_scale"], enable_gqa=True
        )
        outs.append(out.transpose(0, 1))
    return [torch.cat(outs), q, q, q]


def metadata_by_definition(*values: object) -> torch.Tensor:
    given = dict(zip(names_of(METADATA), values, strict=True))
    assert given["batch_size"] == len(given["seqused_k"]) == len(given["cu_seqlens_q"]) - 1
    assert given["max_seqlen_k"] == int(given["seqused_k"].max())
    assert given["headdim"] == given["headdim_v"] and given["is_causal"]
    assert (given["window_size_left"], given["window_size_right"]) == (-1, -1)
    assert given["num_heads"] % given["num_heads_k"] == 0
    assert isinstance(given["qkv_dtype"], torch.dtype) and given["page_size"] in (16, 256)
    return torch.zeros(METADATA_SIZE, dtype=torch.int32)


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FlashAttention3:
    """The rival, over a library that computes what its declarations say."""
    file = tmp_path / "fa3.so"
    file.touch()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    operators = SimpleNamespace(
        fwd=forward_by_definition, get_scheduler_metadata=metadata_by_definition
    )
    monkeypatch.setattr(flash_attn3, "_NAMESPACE", "fa3_of_a_test")
    monkeypatch.setattr(torch.ops, "fa3_of_a_test", operators, raising=False)
    return FlashAttention3(file)


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 5), (True, 5)])
def test_packed_rows_are_attended_as_ours(fa3: FlashAttention3, causal: bool, window: int) -> None:
    torch.manual_seed(0)
    lengths = np.array([3, 17, 1])
    q, k, v = torch.randn(3, int(lengths.sum()), 2, 8)
    cu_seqlens = prefix_sums(lengths, "cpu")
    options = {"max_seqlen": 17, "causal": causal, "window": window}
    wanted = varlen_attention(q, k, v, cu_seqlens, **options)
    torch.testing.assert_close(fa3.varlen(q, k, v, cu_seqlens, **options), wanted)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> decode.Step:
    """One prompt piece and two decode rows over keys of more than a page, in two layers."""
    monkeypatch.setitem(decode.MODELS, "tiny", decode.Heads(4, 2, 16, 2))
    monkeypatch.setattr(decode, "num_rotated", lambda bytes_per_call: 3)
    torch.manual_seed(0)
    shape = decode.Shape("tiny", "tiny", np.array([5, 1, 1]), np.array([20, 300, 1]))
    return decode.Step(shape, device="cpu")


@pytest.mark.parametrize("page_size", [16, 256])
def test_pages_of_both_sizes_are_attended_as_ours(
    fa3: FlashAttention3, step: decode.Step, page_size: int
) -> None:
    assert step.num_calls == 4 and len(step.paged(page_size)) == 3
    k, v = step.paged(page_size)[0]  # the fourth call's: three caches in turn
    wanted = paged_attention(
        step.q.float(),
        k.float(),
        v.float(),
        cu_seqlens=step.cu_seqlens,
        kv_seqlens=step.kv_seqlens,
        max_seqlen=5,
        max_kv_seqlen=300,
        page_table=step.page_tables[page_size],
    )
    for out in (step.ours(page_size), step.flash3(fa3, page_size)):
        error = float((out.float() - wanted).norm() / wanted.norm())
        assert error < 2**-7  # bf16 rounds at 2^-9, and the weights before it


def test_runs_of_pages_that_are_not_ours_are_left_out(
    fa3: FlashAttention3, step: decode.Step
) -> None:
    notes: list[str] = []
    names = [f"flash-attention-3-page-{size}" for size in (16, 256)]
    assert list(decode._flash3_runs(step, fa3, notes)) == names and notes == []
    step.page_tables[256] = step.page_tables[256].flip(0)
    paged = fa3.paged

    def wrong(*operands: torch.Tensor, page_table: torch.Tensor, **options: object) -> torch.Tensor:
        return paged(*operands, page_table=page_table.flip(0), **options)

    fa3.paged = wrong
    assert decode._flash3_runs(step, fa3, notes) == {}
    assert [note.partition(":")[0] for note in notes] == [f"{name} left out" for name in names]


def test_work_of_a_window_is_the_pairs_that_it_keeps() -> None:
    for causal in (False, True):
        for window in (1, 3, 9, 50):
            shape = attention.Shape("x", np.array([1, 7, 30, 0]), causal=causal, window=window)
            pairs = 0
            for n in shape.lengths.tolist():
                distance = np.arange(n)[None] - np.arange(n)[:, None]
                pairs += int((np.abs(distance) < window)[distance <= (0 if causal else n)].sum())
            work = attention._work(shape)
            assert work.flop == 4 * pairs * 12 * 64
            assert work.num_bytes == 4 * 38 * 12 * 64 * 2
    whole = attention._work(attention.Shape("x", np.array([4, 2])))
    assert whole.flop == 4 * 20 * 12 * 64


def test_windowed_cases_are_modernberts() -> None:
    windowed = {shape.name: shape for shape in attention.shapes() if shape.window}
    assert list(windowed) == ["window-128-one-8192", "window-128-long", "window-128-ln128"]
    assert {shape.window for shape in windowed.values()} == {65}
    assert [int(shape.lengths.sum()) for shape in windowed.values()][:2] == [8192, 14892]
    whole = next(shape for shape in attention.shapes() if shape.name == "ln128")
    assert (windowed["window-128-ln128"].lengths == whole.lengths).all()
    from bytetx.checkpoint.spec import build_spec

    spec = build_spec({"model_type": "modernbert", "local_attention": 128})
    assert spec.layer_spec.window_of(1) == 65 and math.isclose(spec.head_dim, 64)


@pytest.mark.parametrize("suite", ["attention", "decode"])
def test_a_library_that_is_none_is_one_line(suite: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, [suite, "--fa3", str(tmp_path / "none.so")])
    assert found.exit_code == 2 and "--fa3 needs a library's file" in found.output
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    found = CliRunner().invoke(app, [suite, "--fa3", str(broken)])
    assert found.exit_code == 1 and "gives no FlashAttention-3 under torch" in found.output
    assert "Traceback" not in found.output and "vllm==0.24.0" in found.output


@pytest.mark.parametrize("suite", ["attention", "decode"])
def test_the_option_is_in_the_recorded_command(suite: str) -> None:
    given: list[dict[str, Path | None]] = [{}, {"fa3": Path("my folder/fa3.so")}]
    commands = [command_of(suite, ["ln128"], options) for options in given]
    assert commands == [
        f"python -m benchmarks {suite} --case ln128",
        f"python -m benchmarks {suite} --fa3 'my folder/fa3.so' --case ln128",
    ]


@pytest.mark.gpu
def test_windows_measure_and_a_missing_library_is_noted() -> None:
    shape = attention.Shape("tiny", np.array([3, 400, 1]), num_heads=2, window=65)
    found = attention.measure(shape, gpu.Gpu())
    assert set(found.rivals) == {"flash-attention-2"}
    assert found.notes == (flash_attn3.NOT_GIVEN,)
    assert found.shape["window"] == 65
