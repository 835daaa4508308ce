"""The suites of GPUs: the cases and their floors, the rivals' arithmetic, plots, a tiny run."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import (
    attention,
    bert,
    causal,
    decode,
    encoder,
    generate,
    gpu,
    latency,
    linear,
    norm,
    sampling,
    text,
)
from benchmarks.cli import app
from benchmarks.gpu_rivals import cut_by_tokens
from benchmarks.lengths import Lengths, bytetransformer, dense, prefix_sums
from benchmarks.plot import draw
from benchmarks.records import Record, read_records, write_record
from benchmarks.right_runs import right_runs
from benchmarks.suite import Case, Measurement, Suite
from benchmarks.table import summary_line
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import BytetxError
from bytetx.ops import native, triton_backend
from bytetx.ops.attention import varlen_attention

pytest.importorskip("transformers")

SUITES = (
    "attention",
    "linear",
    "norm",
    "decode",
    "encoder",
    "latency",
    "text",
    "maxsim",
    "generate",
    "decide",
)
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}
RECORD = Record(
    suite="attention",
    case="mean-9",
    unit="us",
    ours=40.0,
    rivals={"flash-attention-2": 560.0},
    floor=28.0,
    device="a GPU",
    dtype="fp16",
    shape={"batch_size": 4, "total_tokens": 36, "max_seqlen": 12, "causal": 0},
    source="0" * 64,
    date="2026-01-31T12:00:00Z",
    command="python -m benchmarks attention",
    versions={"torch": "2.11.0"},
)


def test_case_names_are_unique() -> None:
    for suite in (attention, linear, norm, decode, sampling, encoder, generate):
        names = [shape.name for shape in suite.shapes()]
        assert len(set(names)) == len(names)
    assert len({shape.name for shape in latency.shapes(None)}) == 9


def test_linear_has_every_epilogue_at_many_tokens_and_each_layers_own_at_few() -> None:
    shapes = {shape.name: shape for shape in linear.shapes()}
    many = [shape for shape in shapes.values() if shape.m == 65536]
    assert len(many) == 8 * len(linear.EPILOGUES)
    few = [shape for shape in shapes.values() if shape.m == 32]
    assert len(few) == 8
    assert {s.epilogue for s in few if s.name.startswith("base-attn-out")} == {"residual"}
    assert shapes["large-ffn-in-512-gelu"].n == 4096
    assert shapes["llama-8b-ffn-in-8192-gated"].dtype == "bf16"


@pytest.mark.parametrize(
    ("epilogue", "outputs"), [("bias", 1), ("gelu", 1), ("residual", 2), ("gated", 0.5)]
)
def test_work_of_a_linear_by_hand(epilogue: str, outputs: float) -> None:
    work = linear.work_of(linear.Shape("x", 5, 8, 11, epilogue))
    assert work.flop == 2 * 5 * 8 * 11
    assert work.num_bytes == 2 * (5 * 11 + 8 * 11 + 8 + outputs * 5 * 8)


def test_work_of_an_encoder_is_its_weights_ends_and_flop() -> None:
    spec = tiny_bert().spec
    work = encoder.work_of(spec, np.array([3, 0]), torch.float16)
    weights = 2 * (4 * 64 * 64 + 2 * 64 * 128)
    assert work.num_bytes == 2 * (weights + 2 * 3 * 64)
    assert work.flop == 3 * 2 * weights + 2 * 4 * 9 * 64
    fp8 = encoder.work_of(spec, np.array([3, 0]), torch.float16, fp8_speed=2.0)
    assert work.flop - fp8.flop == 3 * 2 * (weights - 2 * 64 * 64) / 2


def test_floor_is_the_longer_of_bytes_and_flop() -> None:
    rates = gpu.Rates(copy_bytes_per_second=4e12, gemm_flops=8e14)
    assert rates.floor_us(gpu.Work(num_bytes=8e6, flop=8e8)) == 2.0
    assert rates.floor_us(gpu.Work(num_bytes=8e6, flop=8e9)) == 10.0


def test_rotated_operands_exceed_the_cache_and_stay_few() -> None:
    assert gpu.num_rotated(1 << 30) == 2
    assert gpu.num_rotated(8 << 20) * (8 << 20) > 2 * (60 << 20)
    assert gpu.num_rotated(1) == gpu.num_rotated(0) == 48


def test_lengths_are_those_of_the_recorded_cases() -> None:
    first = attention.shapes()[0]
    assert (first.name, int(first.lengths.sum())) == ("mean-9", 17930)
    assert Lengths().uniform(512, 9).tolist() == Lengths().uniform(512, 9).tolist()
    drawn = Lengths(3).lognormal(128, 0.8, 500, 4, 512)
    assert drawn.min() >= 4 and drawn.max() <= 512
    assert prefix_sums(np.array([2, 0, 5]), "cpu").tolist() == [0, 2, 2, 7]


def test_bytetransformers_lengths_are_its_scripts() -> None:
    found = bytetransformer(64).tolist()
    assert found == [50, 45, 55, 45, 31, 17, 38, 17, 37, 26, 16, 57, 56, 53, 22, 37]
    assert [int(bytetransformer(longest).sum()) for longest in (512, 1024)] == [4252, 9631]


def test_every_engine_computes_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, *, max_seqlen: int
    ) -> torch.Tensor:
        return varlen_attention(q, k, v, cu, max_seqlen=max_seqlen)

    monkeypatch.setattr(bert, "flash_attention", attend)  # the real one is a GPU's
    tiny = tiny_bert()
    inputs = bert.LayerInputs(tiny, np.array([3, 9, 1, 16]), device="cpu")
    runs = {
        "ours": lambda: tiny.transformer.layers.run(lambda: inputs.x, inputs.batch),
        "packed-torch-graph": lambda: bert.PackedTorch(tiny.model).encode(
            inputs.x, inputs.cu_seqlens, max_seqlen=inputs.max_seqlen
        ),
        "transformers": lambda: transformers_layers(tiny, inputs),
        "zeros": lambda: torch.zeros_like(inputs.x),
        "broken": lambda: {}["nothing"],
    }
    notes: list[str] = []
    assert list(right_runs(runs, inputs, notes)) == list(runs)[:3]
    assert [note.partition(":")[0] for note in notes] == ["zeros left out", "broken left out"]
    assert inputs.padded()[0].shape == (4, 16, 64)
    assert bert.LayerInputs(tiny, dense(5, 3), device="cpu").padded()[1] is None


def test_rivals_batches_keep_every_sequence() -> None:
    ids = [[1] * n for n in (3, 5, 0, 9, 2, 2)]
    batches = list(cut_by_tokens(ids, 8))
    assert [[len(row) for row in batch] for batch in batches] == [[3, 5, 0], [9], [2, 2]]
    assert list(cut_by_tokens([], 8)) == []


def test_a_rival_that_does_not_compile_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: int) -> int:
        raise RuntimeError("no compiler\nand a long trace")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    notes: list[str] = []
    assert gpu.compile_rival("compiled", fails, (1,), notes) == {}
    assert notes == ["compiled left out: RuntimeError: no compiler"]
    assert list(gpu.compile_rival("compiled", abs, (1,), notes)) == ["compiled"]


@pytest.mark.parametrize(
    ("unit", "shape", "rate"),
    [
        ("us/text", {}, "25,000 texts/s"),
        ("ms", {"flop": 4e12}, "100 TFLOP/s"),
        ("us", {"bytes": 12e7}, "3,000 GB/s"),
    ],
)
def test_rates_follow_the_unit(unit: str, shape: dict[str, float], rate: str) -> None:
    assert f" = {rate}; " in summary_line(replace(RECORD, unit=unit, shape=shape))


def test_work_of_generation_is_counted_by_hand() -> None:
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    sizes = {"num_key_value_heads": 1, "intermediate_size": 16, "num_hidden_layers": 3}
    spec = build_spec(config | sizes | {"max_position_embeddings": 32})
    requests = [causal.Request(3, 2), causal.Request(1, 4)]
    layer = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16
    flop = 2 * 3 * layer * 4 + 4 * 3 * 8 * (3 * 4 // 2 + 1)
    assert causal.prefill_work(spec, requests).flop == flop
    faster = causal.prefill_work(spec, requests, layers_speed=2.0)
    assert flop - faster.flop == 3 * layer * 4
    keys = (3 + 1) + (1 + 1) + (1 + 2) + (1 + 3)  # that each token after the first reads
    for layer_bytes in (2, 1):
        read = 2 * keys * 3 * 2 * 4 + 3 * (3 * layer * layer_bytes + 80 * 2)
        found = causal.decode_bytes(spec, requests, torch.bfloat16, layer_bytes=layer_bytes)
        assert found == read
    drawn = causal.uniform_requests(500, (100, 1024), (7, 7))
    assert {r.output_tokens for r in drawn} == {7} and drawn[0] == causal.uniform_requests(
        1, (100, 1024), (7, 7)
    )[0]
    assert 100 <= min(r.prompt_tokens for r in drawn) < max(r.prompt_tokens for r in drawn) <= 1024


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("suite", SUITES)
def test_suites_ask_for_a_gpu(suite: str) -> None:
    assert f"the {suite} suite needs a CUDA GPU" in failure([suite])


@pytest.mark.parametrize("suite", SUITES)
def test_wrong_options_say_what_to_do(suite: str) -> None:
    assert "no case fits nothing; the cases are: " in failure([suite, "--case", "nothing"], code=2)
    assert "add --record FILE" in failure([suite, "--plot"], code=2)


def test_plots_of_every_gpu_suite(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "h200.jsonl"
    write_record(path, replace(RECORD, suite="norm", case="pool-mean-768"))
    with pytest.raises(BytetxError, match="holds no record that there is a picture of"):
        draw(path)
    packed = {"transformers": 2.0, "packed-torch-graph": 1.0, "packed-torch-compiled": 0.9}
    text_shape = {"tokens": 900, "sequences": 10}
    for record in (
        RECORD,
        replace(RECORD, suite="linear", case="base-qkv-128-bias", rivals={"cublas": 41.0}),
        replace(RECORD, suite="encoder", case="base-1x32", unit="ms", rivals=packed),
        replace(RECORD, suite="text", case="minilm-ids", unit="us/text", shape=text_shape),
    ):
        write_record(path, record)
    drawn = draw(path)
    suites = ("attention", "linear", "encoder", "text")
    assert [file.name for file in drawn] == [
        f"h200-{suite}{page}.svg" for suite in suites for page in ("", "-dark")
    ]
    first = [file.read_bytes() for file in drawn]
    assert len(set(first)) == len(first)
    assert [file.read_bytes() for file in draw(path)] == first


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", [*linear.EPILOGUES, linear.GATED])
def test_linear_measures(epilogue: str) -> None:
    found = linear.measure(linear.Shape("tiny", 64, 128, 64, epilogue), gpu.Gpu())
    check(found, rivals={"cublas"})


def test_calls_of_a_norm_in_turn_have_results_of_their_own() -> None:
    rows = [(torch.full((3, 5), float(number)),) for number in range(4)]
    results = norm.in_turn(lambda x: x + 1, rows)
    assert [float(result[0, 0]) for result in results] == [1, 2, 3, 4]
    assert len({result.data_ptr() for result in results}) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("shape", norm.shapes()[::3], ids=lambda shape: shape.name)
def test_norm_measures(shape: norm.Shape) -> None:
    found = norm.measure(replace(shape, hidden_size=64, tokens=700), gpu.Gpu())
    check(found, rivals={"torch"})


@pytest.mark.gpu
def test_encoder_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bert.SIZES, "tiny", TINY)
    shape = encoder.Shape("base-1x128", "tiny", np.array([3, 40, 1]))
    found = encoder.Contest().measure(shape, gpu.Gpu())
    check(found, rivals={"transformers", "packed-torch-graph", "packed-torch-compiled"})
    assert found.notes == ()


@pytest.mark.gpu
def test_encoder_measures_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bert.SIZES, "tiny", TINY)
    shape = encoder.Shape("tiny-fp8", "tiny", np.array([3, 40, 1]), gpu.FP8)
    found = encoder.Contest().measure(shape, gpu.Gpu())
    check(found, rivals={"ours-fp16"})
    assert 0.99 < found.shape["cosine"] <= 1  # rounded


def test_fp8_cases_are_refused_by_name_where_they_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shapes, notes = encoder.shapes(), list[str]()
    with native.without_kernels("cuda"):
        kept = gpu.without_fp8(shapes, ["base-ln128"], notes)
        assert [shape for shape in shapes if shape.dtype != gpu.FP8] == kept
        assert notes == [
            "left out: base-ln128x256-fp8: dtype fp8 cannot run here: "
            "the native kernels for cuda are switched off"
        ]
        with pytest.raises(BytetxError, match="^base-ln128x256-fp8: dtype fp8 cannot run here"):
            gpu.without_fp8(shapes, ["base-ln128x256-fp8"], notes)
        assert gpu.without_fp8(shapes, ["deberta"], notes) == shapes


@pytest.mark.gpu
def test_attention_measures() -> None:
    shape = attention.Shape("tiny", np.array([3, 40, 1]), num_heads=2)
    check(attention.measure(shape, gpu.Gpu()), rivals={"flash-attention-2"})


@pytest.mark.gpu
def test_texts_and_latency_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoints import edit_json, save_checkpoint

    monkeypatch.setitem(bert.SIZES, "tiny", TINY)
    monkeypatch.setattr(text, "_NUM_TEXTS", 128)
    folder = save_checkpoint(tmp_path / "model", max_position_embeddings=4096)
    edit_json(folder / "tokenizer_config.json", model_max_length=4096)
    for inputs in ("strings", "ids"):
        text.measure(text.Shape(f"tiny-{inputs}", inputs, folder), gpu.Gpu())
    for shape in (
        latency.Shape("own-text", "own", checkpoint=folder),
        latency.Shape("tiny-layers-32", "tiny", 32),
    ):
        check(latency.measure(shape, gpu.Gpu()), rivals={"transformers"})


def tiny_bert() -> bert.Bert:
    return bert.random_bert(TINY, torch.float32, device="cpu")


def transformers_layers(tiny: bert.Bert, inputs: bert.LayerInputs) -> torch.Tensor:
    padded, mask = inputs.padded()
    return tiny.model.encoder(padded, attention_mask=mask).last_hidden_state


def check(found: Measurement, *, rivals: set[str]) -> None:
    assert rivals <= set(found.rivals), found.notes
    assert found.floor is not None and found.floor > 0
    assert all(0 < value < 1e6 for value in (found.ours, *found.rivals.values()))
    json.dumps(found.shape)


def failure(arguments: list[str], *, code: int = 1) -> str:
    """Return the one line that a bench command says which must fail."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_triton_is_measured_with_the_native_kernels_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = []

    def measured() -> Measurement:
        reasons.append(native.why_no_kernel("planned_attention", torch.device("cuda")))
        return Measurement(ours=2.0, rivals={"flash-attention-2": 3.0}, floor=1.0, shape={})

    def suite(**_: object) -> Suite:
        return Suite("attention", "a GPU", {}, [Case("mean-9", "us", "fp16", measured)])

    monkeypatch.setattr(attention, "suite", suite)
    arguments = ["attention", "--record", str(tmp_path / "records.jsonl")]
    assert "--triton measures nothing here: " in failure(["--triton", *arguments])
    says = "--triton is for the suites of one GPU ("
    assert says in failure(["--triton", "cpu", "--quick"], code=2)
    assert "not for serve" in failure(["--triton", "serve"], code=2)
    monkeypatch.setattr(triton_backend, "why_no_triton", lambda device: None)
    for options in (["--triton"], []):
        assert CliRunner().invoke(app, [*options, *arguments]).exit_code == 0
    triton, own = read_records(tmp_path / "records.jsonl")
    assert reasons[0] == "the native kernels for cuda are switched off" != reasons[1]
    assert (triton.suite, own.suite) == ("attention-triton", "attention")
    assert triton.command == "python -m benchmarks --triton attention"


@pytest.mark.usefixtures("no_gpu")
def test_tuning_says_what_it_needs(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["linear", "--tune", str(tmp_path / "table.json")])
    assert found.exit_code == 1 and "--tune needs a Hopper GPU" in found.output
    assert not (tmp_path / "table.json").exists()


def test_samples_come_in_random_orders_that_all_processes_find_alike() -> None:
    names = ["ours", "gemm", "nccl", "cublas-nccl"]
    found = list(gpu.orders(names, 40))
    assert found == list(gpu.orders(names, 40))
    assert all(sorted(order) == sorted(names) for order in found)
    before_ours = {order[order.index("ours") - 1] for order in found if order[0] != "ours"}
    assert before_ours == set(names) - {"ours"}


def test_samples_of_gemms_at_the_power_limit_are_longer() -> None:
    assert gpu.sample_us_of(2.0 * 4096 * 12288 * 12288) > 5 * gpu.SAMPLE_US
    assert gpu.sample_us_of(2.0 * 4096 * 1024 * 1024) == gpu.SAMPLE_US
