"""The suites of several GPUs, as far as one process without a GPU runs them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import one_thread  # noqa: F401  (a fixture)
from typer.testing import CliRunner

from benchmarks import comm, tp_layer, tp_models, tune_comm, tune_layers, tune_rows
from benchmarks.cli import app
from benchmarks.gpu import Gpu
from benchmarks.ranks import Ranks, overlap_measurement
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import BytetxError
from bytetx.nn.blocks import LocalBlocks
from bytetx.nn.sharded_blocks import ShardedBlocks
from bytetx.ops import native
from bytetx.ops.comm_plan import CommPlan, Layer, Op, fused_plans
from bytetx.parallel.layout import shard_model
from bytetx.parallel.row_scheme import RowScheme
from bytetx.parallel.tp import TpGroup

HEADS = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64}
TINY = {
    "gpt3": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "llama-70b": HEADS | {"num_key_value_heads": 2, "intermediate_size": 128},
    "bert-large": HEADS | {"intermediate_size": 128},
}


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("deals", [True, False, None])
def test_layers_run_with_nothing_on_its_way(model: str, deals: bool | None) -> None:
    """deals: whether rows are dealt to two ranks; None: one process has all."""
    spec = build_spec(tp_models.MODELS[model] | TINY[model])
    if deals is None:
        blocks = LocalBlocks(spec)
    else:
        rows = RowScheme(24 if deals else 1000, ((0, 16),))
        silent = tp_layer.NoCollectives(0)
        group = TpGroup(0, 2, torch.device("cpu"), silent, None, rows)
        blocks = ShardedBlocks(spec, group, shard_model(spec, rank=0, size=2))
    share = tp_models.random_share(spec, blocks, count=2, dtype=torch.float32, device="cpu")
    share = tp_models.without_kernels(share, blocks)
    with torch.inference_mode():
        batch = tp_models.prefill_batch(share, np.array([17, 30]))
        found = tp_models.layers_run(share, batch, None)()
        assert found.shape == (32 if deals else 47, 64) and found.isfinite().all()
        if not spec.is_causal:
            return
        batch, cache = tp_models.decode_batch(share, num_seqs=40, num_keys=20)
        found = tp_models.layers_run(share, batch, cache)()
        assert found.shape == (32 if deals else 40, 64) and found.isfinite().all()


def test_the_cases_of_the_suites() -> None:
    names = [shape.name for size in (2, 4) for shape in tp_layer.shapes(size)]
    for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
        names += [f"{op} {shape.name}" for size in (2, 4) for shape in comm.shapes(op, size)]
    assert len(set(names)) == len(names)
    (packed,) = (s for s in tp_layer.shapes(4) if s.name == "tp4-gpt3-prefill-a06-2048x8")
    assert abs(packed.lengths.mean() - 0.6 * 2048) < 2


def test_what_the_times_say_of_overlap() -> None:
    times = {"ours": 11.0, "gemm": 10.0, "nccl": 4.0, "cublas-nccl": 14.0, "one-gpu": 20.0}
    found = overlap_measurement(times, shape={"m": 3})
    assert found.rivals == {"cublas-nccl": 14.0, "one-gpu": 20.0} and found.floor == 10.0
    assert found.shape["e_overlap"] == 0.75 and found.shape["ceiling"] == 1.4
    assert found.shape["of_floor"] == 0.909 and found.shape["m"] == 3


def test_the_tuner_keeps_the_plans_of_others(tmp_path: Path) -> None:
    path, layer = tmp_path / "table.json", Layer("gemm_all_reduce", 2, 64, 64)
    linear, cublas = CommPlan("linear"), CommPlan("cublas", "one_shot")
    tune_comm.write_plans(path, layer, {512: linear, 16: linear}, device="a GPU")
    tune_comm.write_plans(path, replace(layer, tp=4), {512: linear, 16: linear}, device="a GPU")
    tune_comm.write_plans(path, layer, {512: cublas}, device="a GPU")
    table = json.loads(path.read_text())
    assert [line["tp"] for line in table["lines"]] == [2, 4] and table["device"] == "a GPU"
    assert table["lines"][0]["plans"] == [
        [16, {"gemm": "linear"}],
        [512, {"gemm": "cublas", "transport": "one_shot"}],
    ]
    assert table["lines"][1]["plans"] == [[16, {"gemm": "linear"}], [512, {"gemm": "linear"}]]


def test_every_plan_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    tilings = [("64x64", 64, 64, True), ("128x128", 128, 128, True), ("128x192", 128, 192, False)]
    monkeypatch.setattr("bytetx.ops.native.gemm_all_reduce_tilings", lambda: tilings)

    def names(op: Op, n: int, k: int, m: int) -> list[str]:
        return [str(plan) for plan in tune_comm.candidates(Layer(op, 2, n, k), m)]

    few, more = names("gemm_all_reduce", 1024, 512, 16), names("gemm_all_reduce", 1024, 512, 512)
    after_gemm = ["linear/one_shot", "cublas/one_shot"]
    two_shot = ["linear/two_shot", "cublas/two_shot"]
    plain = ["linear/collective", "cublas/collective"]
    assert few == [
        f"fused_small_m/{transport}/64x64{split_k}"
        for split_k in ("", "/split_k=2", "/split_k=4", "/split_k=5")
        for transport in ("one_shot", "two_shot")
    ] + [*after_gemm, *plain]
    assert more[:3] == [
        "fused_small_m/one_shot/128x128",
        "fused/one_shot/128x192",
        "fused_small_m/two_shot/128x128",
    ]
    assert more[-6:] == [*after_gemm, *two_shot, *plain]
    fused = [
        f"fused/peer_store/{tile}{reduce}"
        for reduce in ("", "/fuse_reduce")
        for tile in ("128x192", "128x128")
    ]
    copies = ["cublas/copy_engine"]
    assert names("gemm_reduce_scatter", 1024, 512, 4096) == [*fused, *copies, *plain]
    assert names("gemm_reduce_scatter", 12288, 6144, 4096) == [*copies, *fused, *plain]
    assert names("column_gemm", 1024, 512, 4096) == plain


def test_the_lines_of_a_suite_have_every_layer_that_it_measures() -> None:
    for suite in ("ag_gemm", "gemm_rs", "gemm_ar"):
        lines = tune_comm.lines_of(suite, 2)
        assert len({line.layer for line in lines}) == len(lines) == len({x.name for x in lines})
        sizes = {(line.layer.n, line.layer.k) for line in lines if not line.layer.is_gated}
        for shape in comm.shapes(suite, 2):
            n, k = shape.n, shape.k
            assert ((n // 2, k) if suite == "ag_gemm" else (n, k // 2)) in sizes
    names = [line.name for line in tune_comm.lines_of("ag_gemm", 2)]
    assert {"llama-70b-gates", "llama-70b-ffn", "gpt2-xl-ffn1"} < set(names)


def test_patterns_choose_layers_and_rows() -> None:
    (line,) = tune_comm.lines_of("gemm_ar", 2, patterns=["gpt3-ffn1"])
    assert line.layer.op == "column_gemm" and line.activation == "gelu_tanh" and len(line.rows) == 8
    found = tune_comm.lines_of("gemm_rs", 4, patterns=["llama*-4096", "bert-large-o-512"])
    rows = {line.name: line.rows for line in found}
    assert rows == {"llama-70b-o": (4096,), "llama-70b-down": (4096,), "bert-large-o": (512,)}
    with pytest.raises(BytetxError, match="nothing to tune fits gpt5; the layers are: gpt3-o"):
        tune_comm.lines_of("gemm_rs", 2, patterns=["gpt5"])
    with pytest.raises(BytetxError, match="no model fits gpt5; they are: gpt3, "):
        next(tune_rows.tune_rows(Path("none"), None, patterns=["gpt5"]))


@pytest.mark.parametrize(
    ("first", "second", "best"),
    [
        ([10, 30, 9.5, 10.2], [9.0, 9.4, 9.5], 0),  # 9.5 and 10.2 come to the second round, too
        ([10, 30, 9.5, 10.2], [9.4, 9.35, 9.5], 0),  # alike: the preferred one
        ([10, 30, 9.5, 10.2], [9.6, 9.35, 9.36], 2),
        ([10, 30, 9.5, 10.2], [9.6, 9.5, 9.3], 3),
        ([10, 30, 9.0, 12.0], None, 2),  # alone: no second round
    ],
)
def test_two_rounds_choose_a_plan(
    first: list[float], second: list[float] | None, best: int
) -> None:
    rounds = []

    def clock(numbers: Sequence[int], samples: int) -> dict[int, float]:
        rounds.append((list(numbers), samples))
        return dict(zip(numbers, second if len(rounds) == 2 else first, strict=True))

    plans = [CommPlan("linear", split_k) for split_k in range(1, 5)]
    assert tune_comm.choose(plans, clock)[0] == plans[best]
    assert rounds[0] == ([0, 1, 2, 3], 3)
    assert rounds[1:] == ([] if second is None else [([0, 2, 3], 7)])


def test_the_tuner_writes_line_after_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a clock that says that cuBLAS is fastest, and a stop in the second line."""
    seen: list[Layer] = []

    def best(layer: Layer, m: int, ranks: Ranks, *, activation: str) -> tuple[CommPlan, float]:
        seen.append(layer)
        if len(set(seen)) > 1:
            raise KeyboardInterrupt
        return CommPlan("cublas"), 12.3456

    monkeypatch.setattr(tune_comm, "_best", best)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    group = TpGroup(0, 2, torch.device("cpu"), tp_layer.NoCollectives(0), None, RowScheme(24, ()))
    path = tmp_path / "table.json"
    lines = tune_comm.tune_comm("gemm_rs", path, Ranks(group, "a group"), patterns=["gpt3-*-512"])
    assert next(lines).startswith(
        "gemm_reduce_scatter gpt3-o: 512: cublas/collective 12.35 us (0 s, about 0 s"
    )
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    (line,) = json.loads(path.read_text())["lines"]
    assert line["k"] == 6144 and line["plans"] == [[512, {"gemm": "cublas"}]]


def test_two_tables_are_not_made_at_once() -> None:
    result = CliRunner().invoke(app, ["tp_layer", "--tune", "rows", "--tune-layers", "ways"])
    assert result.exit_code == 2
    assert "--tune and --tune-layers write tables of their own; give one of them" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "tuner"),
    [(["tp_layer", "--tune"], "tune_rows"), (["tp_layer", "--tune-layers"], "tune_layers")],
)
def test_each_option_makes_its_own_table(
    arguments: list[str], tuner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(path: Path, ranks: Ranks, *, patterns: list[str]) -> list[str]:
        return [f"{tuner} writes {path} for {patterns}"]

    monkeypatch.setattr(f"benchmarks.{tuner}.{tuner}", tune)
    monkeypatch.setattr("benchmarks.ranks.this_rank", lambda device: 0)
    monkeypatch.setattr(comm, "join", lambda: None)
    result = CliRunner().invoke(app, [*arguments, "table.json", "--case", "gpt3"])
    assert result.output == f"{tuner} writes table.json for ['gpt3']\n"


def test_the_scheme_that_loses_least(tmp_path: Path) -> None:
    times = {
        rows: {0: 10 + rows / 10, 16: 30 + rows / 20, 128: 38 + rows / 40}
        for rows in (64, 256, 512, 1024)
    }
    scheme = tune_rows.best_scheme(times)
    assert scheme == RowScheme(512, ((0, 128),))
    path = tmp_path / "schemes.json"
    old, other = ({"tp": tp, "hidden_size": 768} for tp in (2, 4))
    path.write_text(json.dumps({"cpu": [old], "cuda": [old, other]}))
    tune_rows.write_scheme(path, scheme, size=2, hidden_size=768)
    own = old | {"shard_from_tokens": 512, "tiles": [[0, 128]]}
    assert json.loads(path.read_text()) == {"cpu": [old], "cuda": [own, other]}


def test_a_case_of_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs of a case, each once, with a clock that says that ours was the fastest."""
    seen: list[str] = []

    def once(runs: dict, notes: list[str], **options: object) -> dict[str, float]:
        with torch.inference_mode():
            for run in runs.values():
                run()
        seen.extend(runs)
        return {name: {"ours": 20.0, "gemm": 18.0, "nccl": 6.0}.get(name, 30.0) for name in runs}

    on_cpu = partial(tp_models.random_share, device="cpu")
    monkeypatch.setattr(tp_layer, "random_share", on_cpu)
    monkeypatch.setattr(tp_layer, "ranks_us", once)
    monkeypatch.setattr(tp_models, "MODELS", {"tiny": tp_models.MODELS["gpt3"] | TINY["gpt3"]})
    rows = RowScheme(24, ((0, 16),))
    group = TpGroup(0, 2, torch.device("cpu"), tp_layer.NoCollectives(0), None, rows)
    for num_keys in (None, 20):
        lengths = np.array([17, 30]) if num_keys is None else np.ones(40, dtype=np.int64)
        shape = tp_layer.Shape("tiny", "tiny", lengths, num_keys)
        found = tp_layer.measure(shape, Gpu(), ranks=Ranks(group, "a group"))
        assert found.ours == 10 and found.floor == 9 and found.shape["e_overlap"] == 0.833
        assert set(found.rivals) == {"bytetx-nccl", "cublas-nccl", "one-gpu"}
    assert seen.count("cublas") == 2


def test_whole_layers_try_every_gather_plan_with_every_scatter_plan() -> None:
    plans = tune_layers.prefill_candidates("llama-70b", 16384, 2)
    assert list(plans)[:3] == [
        "fused/peer_store+fused/peer_store",
        "fused/peer_store+fused/peer_store/fuse_reduce",
        "fused/peer_store+cublas/copy_engine",
    ]
    assert len(plans) == 12
    for name, of_layers in plans.items():
        gather, scatter = name.split("+")
        assert len(of_layers) == 4  # as a rank of Llama has them, the gated one among them
        for layer, plan in of_layers.items():
            assert str(replace(plan, tile=None)) == (
                gather if layer.op == "all_gather_gemm" else scatter
            )
            assert plan.tile in (("128x192", "128x128") if plan.is_fused else (None,))
    assert any(layer.is_gated for layer in next(iter(plans.values())))


def test_decode_steps_try_every_plan_of_one_all_reduce_and_then_of_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "gemm_all_reduce_tilings", lambda: [("64x64", 64, 64, True)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    tried: list[dict[str, tune_layers.Plans]] = []

    def measure(model: str, m: int, ranks: Ranks, plans: dict) -> dict[str, float]:
        tried.append(plans)
        best = "cublas/one_shot" if len(tried) == 1 else "fused_small_m/one_shot/64x64"
        return {name: 1.0 if name == best else 2.0 for name in plans}

    monkeypatch.setattr(tune_layers, "_measure", measure)
    group, path = SimpleNamespace(rank=0, size=2), tmp_path / "table.json"
    found = tune_layers.tune_layers(path, Ranks(group, "a group"), patterns=["gpt3-64"])
    first, second = list(found)
    assert first.startswith("gpt3, 64 rows; us a layer: ") and first.endswith(
        "chosen: cublas/one_shot"
    )
    assert second.endswith("chosen: fused_small_m/one_shot/64x64")
    sums = [Layer("gemm_all_reduce", 2, 12288, k) for k in (6144, 24576)]
    assert all(set(plans) == {sums[0]} for plans in tried[0].values())
    assert {plans[sums[0]] for plans in tried[1].values()} == {CommPlan("cublas", "one_shot")}
    assert {"linear/one_shot", "cublas/one_shot", "linear/collective"} <= tried[1].keys()
    lines = {line["k"]: line["plans"] for line in json.loads(path.read_text())["lines"]}
    first_plan, second_plan = (CommPlan("cublas", "one_shot"), fused_plans(sums[0])[0])
    assert lines == {6144: [[64, first_plan.to_json()]], 24576: [[64, second_plan.to_json()]]}


@pytest.mark.parametrize("m", [16, 4096])
def test_layers_are_timed_as_prefills_and_as_decode_steps(
    m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two rounds, of which the second has those alone that come near the best."""

    class Clock:
        def __init__(self, runs: dict, notes: list[str], *, required: object):
            with torch.inference_mode():
                for run in runs.values():
                    run()

        def us(self, names: object, *, samples: int, sample_us: float) -> dict[str, float]:
            times = {"one": 10.0, "other": 10.2, "slow": 12.0} if samples == 3 else {"one": 9.0}
            return {name: times.get(name, 10.6) for name in names}

    monkeypatch.setattr(tune_layers, "RanksClock", Clock)
    monkeypatch.setattr(tune_layers, "_ROWS", (4096,))
    monkeypatch.setattr(tune_layers, "_SEQUENCE", 64)
    monkeypatch.setitem(tune_layers.DTYPES, "bf16", torch.float32)
    monkeypatch.setattr(tp_models, "MODELS", {"tiny": tp_models.MODELS["gpt3"] | TINY["gpt3"]})
    group = TpGroup(
        0, 2, torch.device("cpu"), tp_layer.NoCollectives(0), None, RowScheme(24, ((0, 16),))
    )
    plans = {Layer("gemm_all_reduce", 2, 64, 32): CommPlan("cublas")}
    found = tune_layers._measure(
        "tiny", m, Ranks(group, "a group"), {"one": plans, "other": {}, "slow": {}}
    )
    assert found == {"one": 4.5, "other": 5.3, "slow": 6.0}


def test_of_layers_that_take_alike_the_preferred_plans_are_chosen() -> None:
    assert tune_layers.choose({"fused+fused": 100.2, "copied+fused": 100.0}, 8192) == "fused+fused"
    assert tune_layers.choose({"fused+fused": 100.4, "copied+fused": 100.0}, 8192) == "copied+fused"
    assert tune_layers.choose({"64x64/1": 100.9, "linear/one_shot": 100.0}, 64) == "64x64/1"
    assert tune_layers.choose({"64x64/1": 101.1, "linear/one_shot": 100.0}, 64) == "linear/one_shot"


def test_the_tuner_of_layers_writes_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(model: str, m: int, ranks: Ranks, plans: dict[str, object]) -> dict[str, float]:
        return {
            name: 1.0 if name == "cublas/copy_engine+cublas/collective" else 2.0 for name in plans
        }

    monkeypatch.setattr(tune_layers, "_measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    group, path = SimpleNamespace(rank=0, size=2), tmp_path / "table.json"
    (text,) = tune_layers.tune_layers(path, Ranks(group, "a group"), patterns=["gpt3-8192"])
    assert text.endswith("chosen: cublas/copy_engine+cublas/collective")
    lines = json.loads(path.read_text())["lines"]
    chosen = {"all_gather_gemm": "cublas/copy_engine", "gemm_reduce_scatter": "cublas/collective"}
    for line in lines:
        assert str(CommPlan(**line["plans"][0][1])) == chosen[line["op"]]
    assert all(line["plans"][0][0] == 8192 for line in lines) and len(lines) == 4
    with pytest.raises(BytetxError, match="nothing fits gpt5; the layers are: gpt3-16, gpt3-64, "):
        next(tune_layers.tune_layers(path, Ranks(group, "a group"), patterns=["gpt5"]))
