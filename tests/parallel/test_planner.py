"""The planner: the authors' published rankings, the cost model's laws, and what users see."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from bytetx.errors import InputError, OptionError
from bytetx.parallel.grid import Grid, grids_of, parse_grid
from bytetx.parallel.planner import axonn2024, report
from bytetx.parallel.planner.cost import TransferCost
from bytetx.parallel.planner.ledger import local_sizes, pass_transfers
from bytetx.parallel.planner.machine import (
    Around,
    Machine,
    RateTable,
    load_machine,
    machine_names,
    wire_bytes,
)
from bytetx.parallel.planner.plan import plan
from bytetx.parallel.planner.shapes import SHAPES
from bytetx.parallel.planner.simulate import MIXED, simulate_year
from bytetx.parallel.planner.traffic import PROFILES

# (model, GPUs, batch): number of grids, the first ones as published, and with the second
# feed-forward product mended; rows.columns.depth.data and seconds of communication.
GOLDEN = {
    ("5B", 512, 8192): (
        216,
        {"1.1.512.1": 0.34, "1.1.256.2": 0.34, "1.1.128.4": 0.35},
        {"1.1.512.1": 0.34, "1.1.256.2": 0.34, "1.1.128.4": 0.35},
    ),
    ("20B", 32, 64): (
        36,
        {"1.1.32.1": 1.34, "1.1.16.2": 1.52, "4.1.8.1": 1.77},
        {"1.1.32.1": 1.34, "4.1.8.1": 1.49, "1.1.16.2": 1.52},
    ),
    ("20B", 64, 128): (
        64,
        {"1.1.64.1": 1.36, "1.1.32.2": 1.45, "1.1.16.4": 1.64},
        {"1.1.64.1": 1.36, "1.1.32.2": 1.45, "4.1.16.1": 1.57},
    ),
    ("40B", 64, 64): (
        49,
        {"1.1.64.1": 2.66, "1.1.32.2": 2.85, "4.1.16.1": 2.96},
        {"8.1.8.1": 2.59, "8.1.4.2": 2.64, "2.4.8.1": 2.66},
    ),
    ("40B", 4096, 8192): (
        420,
        {"1.1.4096.1": 2.70, "1.1.2048.2": 2.71},
        {"1.1.4096.1": 2.70, "1.1.2048.2": 2.71},
    ),
    ("80B", 1024, 1024): (
        230,
        {"1.1.1024.1": 5.31, "1.1.512.2": 5.33},
        {"8.1.128.1": 4.70, "8.1.64.2": 4.71, "8.1.32.4": 4.73},
    ),
}


@pytest.mark.parametrize("mends_ffn_out", [False, True])
@pytest.mark.parametrize("case", GOLDEN)
def test_the_published_rankings(case: tuple[str, int, int], mends_ffn_out: bool) -> None:
    (model, gpus, batch), (count, *rankings) = case, GOLDEN[case]
    costs = axonn2024.rank_grids(
        model,
        gpus=gpus,
        batch=batch,
        machine=load_machine("perlmutter"),
        mends_ffn_out=mends_ffn_out,
    )
    assert len(costs) == count
    wanted = rankings[mends_ffn_out]
    assert [cost.notation for cost in costs[: len(wanted)]] == list(wanted)
    for cost, seconds in zip(costs, wanted.values(), strict=False):
        assert cost.total_s == pytest.approx(seconds, abs=0.00501)  # they have two digits


def test_what_of_the_abstract_follows_from_the_model() -> None:
    found = axonn2024.headline(load_machine("perlmutter"))
    assert found.reported_share == pytest.approx(0.57, abs=0.005)
    assert found.exposed_share < found.reported_share < found.hidden_all_share
    assert 0 < found.hidden_share < 1


def test_no_published_model() -> None:
    machine = load_machine("perlmutter")
    with pytest.raises(OptionError, match="one of 5B"):
        axonn2024.rank_grids("7B", gpus=8, batch=8, machine=machine, mends_ffn_out=True)
    with pytest.raises(OptionError, match="from 64 on"):
        axonn2024.rank_grids("80B", gpus=32, batch=8, machine=machine, mends_ffn_out=True)


@pytest.mark.parametrize(
    ("num_ranks", "best", "volume"),
    [
        (4, (1, 4), 3.0),
        (8, (2, 4), 3.25),
        (16, (2, 8), 2.625),
        (64, (4, 16), 1.59),
    ],
)
def test_volumes_of_x_and_y(num_ranks: int, best: tuple[int, int], volume: float) -> None:
    """The closed form 2 (7 (x - 1) + 2 (y - 1)) / p, in units of tokens x hidden features."""
    shape = replace(SHAPES["gpt3-175b"], num_heads=128, num_kv_heads=128, head_dim=128)
    shape = replace(shape, hidden_size=16384, intermediate_size=65536, embedding_size=16384)
    unit = 1024 * shape.hidden_size * shape.num_layers

    def moved(grid: Grid) -> float:
        rows = pass_transfers(
            shape, grid, local_sizes(shape, grid), num_rows=1024, total_rows=1024, itemsize=2
        )
        sums = [t for t in rows if t.is_of_layer and "norms" not in t.what]
        return sum(
            t.count * wire_bytes(t.kind, t.payload_bytes, grid.length(t.axis)) for t in sums
        ) / (2 * unit)

    volumes = {(g.x, g.y): moved(g) for g in grids_of(num_ranks) if g.num_slots == 1}
    for (x, y), found in volumes.items():
        assert found == pytest.approx(2 * (7 * (x - 1) + 2 * (y - 1)) / num_ranks)
    assert volumes[best] == min(volumes.values()) == pytest.approx(volume, abs=0.005)


def test_special_grids_have_their_own_collectives() -> None:
    shape = SHAPES["bert-large"]

    def kinds(grid: Grid) -> dict[tuple[str, str], int]:
        rows = pass_transfers(
            shape, grid, local_sizes(shape, grid), num_rows=100, total_rows=800, itemsize=2
        )
        return {(t.axis, t.kind): t.count for t in rows if t.is_of_layer}

    assert kinds(Grid()) == kinds(Grid(data=8)) == {}
    assert kinds(Grid(z=8)) == {("z", "all_gather"): 24}
    assert kinds(Grid(y=8)) == {("y", "all_reduce"): 48}


def test_costs_follow_sizes_and_links() -> None:
    h200 = load_machine("h200-nvlink")
    slow = replace(h200, intra_gbps=50.0, all_reduce_gbps=50.0, alpha_us=100.0)

    def latency(machine: object, tokens: int, grid: str) -> float:
        found = plan("llama-70b", machine=machine, lengths=tokens, batch=8, goal="latency")
        return found.explain(grid).latency_s

    for grid in ("z8", "y8", "y4.x2"):
        assert latency(h200, 64, grid) < latency(h200, 2048, grid) < latency(slow, 2048, grid)


def test_replicas_win_for_small_models_and_gathers_for_long_batches() -> None:
    assert plan("bert-large").best.grid == Grid(data=8)
    assert "plain replicas" in plan("bert-large").advice
    long = plan("llama-70b", lengths=2048, batch=64, memory_gib=30)
    assert long.best.grid.z > 1 and long.best.exposed_s < 0.01 * long.best.latency_s
    assert plan("llama-70b", lengths=16, batch=1, goal="latency").best.grid == Grid(y=8)


def test_gathers_hide_from_the_number_of_tokens_of_the_closed_form() -> None:
    """m >= (z - 1) b F / (2 beta): 14 200 tokens of all slots for z = 8 on eight H200s."""

    def exposed_share(tokens: int) -> float:
        found = plan("llama-70b", lengths=tokens, batch=8).explain("z8")
        return found.exposed_s / found.latency_s

    assert exposed_share(2 * 1775) < 0.02 < 0.3 < exposed_share(1775 // 2)


def test_what_no_graph_replays_takes_the_host_its_time() -> None:
    machine = replace(load_machine("h200-nvlink"), host_op_us=70.0, host_collective_us=400.0)
    options = {"machine": machine, "gpus": 2, "lengths": [512] * 4}
    writer = replace(SHAPES["bert-large"], has_lm_head=True)
    chat = plan(writer, **options | {"output_tokens": 8})  # its prompts are not replayed
    host_us = {"data2": 24 * 6 * 70 + 400, "z2": 24 * (6 * 70 + 400) + 400}
    for grid, wanted in host_us.items():
        cost = chat.explain(grid).prefill
        assert cost.host_us == wanted
        assert cost.total_us == pytest.approx(wanted)
        assert cost.waiting_us == pytest.approx(wanted - cost.compute_us - cost.exposed_us)
    assert chat.explain("x2").prefill.host_us > 2 * host_us["z2"]
    decode = chat.explain("y2").decode
    assert chat.explain("y2").prefill.host_us > 0
    assert decode is not None and decode.host_us == 0  # replayed on both ranks
    large = plan(writer, **options | {"lengths": [512] * 400, "output_tokens": 8})
    assert large.explain("data2").prefill.waiting_us == 0


def test_of_a_replayed_pass_the_host_launches_the_gather_of_rows() -> None:
    machine = replace(load_machine("h200-nvlink"), host_op_us=70.0, host_collective_us=400.0)
    options = {"machine": machine, "gpus": 2, "lengths": [512] * 4}
    found = plan("bert-large", **options)
    for grid, wanted in {"data2": 400, "z2": 400, "y2": 0, "x2": 0}.items():
        assert found.explain(grid).prefill.host_us == wanted
    assert plan("bert-large", **options | {"gpus": 1}).best.prefill.host_us == 0
    short = plan("bert-large", **options | {"lengths": [1, 1]}).explain("data2")
    assert short.waiting_s == pytest.approx(short.prefill.waiting_us / 1e6)


def test_a_table_of_rates_is_linear_between_its_points() -> None:
    """In the logarithms of the sizes."""
    table = RateTable.of(
        [(128, 1024, 100.0), (512, 1024, 300.0), (128, 4096, 200), (512, 4096, 500)]
    )
    assert table.at(128, 1024) == 100 and table.at(512, 4096) == 500
    assert table.at(256, 1024) == pytest.approx(200) and table.at(128, 2048) == pytest.approx(150)
    assert table.at(256, 2048) == pytest.approx(275)
    assert table.at(1, 1) == 100 and table.at(10**6, 10**6) == 500  # the nearest points
    assert RateTable.of([(64, 7, 5.0)]).at(1000, 3) == 5
    assert not RateTable.of([])
    with pytest.raises(ValueError, match="none for"):
        RateTable.of([(1, 1, 1.0), (2, 2, 1.0)])


def test_measured_rates_take_the_place_of_one_number() -> None:
    h200 = load_machine("h200-nvlink")
    slow = RateTable.of([(1024, 1024, 10.0)])
    machine = replace(h200, gemm_table=slow)
    flop_us = 2 * 4096 * 1024 * 1024 / 10 / 1e6
    assert machine.gemm_us(4096, 1024, 1024, itemsize=2) == pytest.approx(flop_us + 2.0)
    seen = replace(h200, attention_tables={True: slow})
    options = {"length": 64.0, "head_dim": 64}
    assert seen.attention_us(1e9, **options, causal=True) == pytest.approx(100)
    assert seen.attention_us(1e9, **options, causal=False) == pytest.approx(2.5)  # its 400


def test_a_replayed_pass_has_the_rows_of_its_bucket() -> None:
    machine = load_machine("h200-nvlink")

    def compute_us(tokens: int, graph_tokens: int) -> float:
        padded = replace(machine, graph_tokens=graph_tokens)
        found = plan("bert-large", machine=padded, gpus=1, lengths=[tokens] * 20)
        return found.best.prefill.compute_us

    assert compute_us(820, 32768) > 1.02 * compute_us(820, 0)  # 16 400 rows in a bucket of 17 408
    assert compute_us(870, 32768) < 1.005 * compute_us(870, 0)  # 17 400
    assert compute_us(4100, 32768) == compute_us(4100, 0)  # beyond the longest graph


def test_copies_of_weights_begin_in_the_pass_before_and_share_the_memory() -> None:
    machine = load_machine("h200-nvlink")

    def exposed_us(shape: str, copies_gbps: float, tokens: int) -> float:
        copying = replace(machine, copies_gbps=copies_gbps)
        found = plan(shape, machine=copying, gpus=2, lengths=[tokens] * 8).explain("z2")
        (row,) = (row for row in found.prefill.transfers if row.transfer.axis == "z")
        assert row.exposed_us <= row.wait_us
        return row.exposed_us

    bert = SHAPES["bert-large"]
    shared_us = 24 * 2 * bert.layer_weights / machine.hbm_gbps / 1e3
    assert exposed_us("bert-large", 300.0, 4096) == pytest.approx(shared_us, rel=1e-6)
    assert exposed_us("bert-large", 30.0, 8) > 2 * shared_us
    odd = replace(bert, num_layers=23)  # its first layer is in the slot of the last one
    assert exposed_us(odd, 300.0, 4096) > shared_us


def test_measured_sums_of_y() -> None:
    machine = replace(load_machine("h200-nvlink"), sum_us=10.0, sum_gbps=100.0)
    found = plan("bert-large", machine=machine, gpus=2, lengths=[512] * 4).explain("y2")
    row = next(row for row in found.prefill.transfers if row.transfer.what.startswith("sums"))
    moved = 2048 * 1024 * 2  # 2 (p - 1) / p of the payload
    assert row.exposed_us == pytest.approx(48 * (10 + moved / 100e3))
    assert row.hides_behind == "its GEMMs"


def test_measured_sums_of_y_have_the_norms_in_them() -> None:
    """They read and write a rank's own rows, four times each; without measured sums as well."""
    h200 = replace(load_machine("h200-nvlink"), fused_y=0.5)

    def compute_us(machine: Machine, grid: str) -> float:
        found = plan("bert-large", machine=machine, gpus=2, lengths=[512] * 8)
        return found.explain(grid).prefill.compute_us

    norms_us = 24 * 2 * (2048 * 4 * 1024 * 2 / h200.hbm_gbps / 1e3 + h200.launch_us)
    measured = replace(h200, sum_us=10.0, sum_gbps=100.0)
    assert compute_us(h200, "y2") - compute_us(measured, "y2") == pytest.approx(norms_us)
    assert compute_us(h200, "data2") == compute_us(measured, "data2")
    apart = replace(h200, fused_y=0.0)  # every rank norms all rows
    more_us = compute_us(apart, "y2") - compute_us(h200, "y2")
    assert more_us == pytest.approx(24 * 2 * 2048 * 4 * 1024 * 2 / h200.hbm_gbps / 1e3)


def test_texts_longer_than_the_model_takes() -> None:
    short = replace(SHAPES["gpt2-xl"], max_positions=100)
    with pytest.raises(OptionError, match="takes 100 tokens, and the longest text has 101:"):
        plan(short, gpus=2, lengths=[101, 5])
    with pytest.raises(OptionError, match="has 90 and 11 of its answer"):
        plan(short, gpus=2, lengths=90, batch=4, output_tokens=11)
    assert plan(short, gpus=2, lengths=90, batch=4, output_tokens=10).grids
    cut = plan(short, gpus=2, lengths="ln128", batch=64, output_tokens=10).traffic
    assert max(cut.seqlens) == 90 and min(cut.seqlens) < 90
    with pytest.raises(OptionError, match="and 100 of its answer"):
        plan(short, gpus=2, lengths="ln128", output_tokens=100)


def test_every_rank_of_y_holds_all_logits() -> None:
    shape = SHAPES["llama-8b"]
    options = {"gpus": 2, "lengths": 8, "output_tokens": 4}

    def workspace(batch: int) -> int:
        return plan(shape, batch=batch, **options).explain("y2").memory.workspace

    of_logits = 2 * (shape.vocab_size + shape.vocab_size // 2)
    assert workspace(128) - workspace(64) > 64 * of_logits


def test_what_surrounds_a_pass() -> None:
    around = {"one": Around(100.0), "ranks": Around(200.0), "slots": Around(300.0, 0.01)}
    machine = replace(load_machine("h200-nvlink"), around=around)
    options = {"machine": machine, "lengths": [512] * 4}
    found = plan("bert-large", gpus=2, **options)
    for grid, wanted in {"y2": 200.0, "x2": 200.0, "data2": 320.48, "z2": 320.48}.items():
        cost = found.explain(grid).prefill
        assert cost.around_us == pytest.approx(wanted)
        assert cost.total_us == cost.compute_us + cost.exposed_us + cost.waiting_us
        assert cost.waiting_us >= wanted
    assert plan("bert-large", gpus=1, **options).best.prefill.around_us == 100
    chat = plan("gpt2-xl", gpus=2, output_tokens=4, **options).explain("data2")
    assert chat.decode is not None and chat.decode.around_us == 0 < chat.prefill.around_us


def test_sums_of_y_are_hidden_where_it_is_the_only_axis() -> None:
    def sums_of_y(grid: str) -> TransferCost:
        cost = plan("llama-70b", gpus=4, lengths=2048, batch=8, memory_gib=1000).explain(grid)
        return next(row for row in cost.prefill.transfers if row.transfer.what.startswith("sums"))

    alone, beside = sums_of_y("y4"), sums_of_y("z2.y2")
    assert alone.exposed_us < 0.5 * alone.wait_us
    assert beside.exposed_us == beside.wait_us and not beside.hides_behind


def test_memory_is_divided() -> None:
    found = plan("llama-70b", lengths=128, batch=8, gpus=8)
    weights = {str(g.grid): g.memory.weights for g in found.grids}
    whole = 2 * SHAPES["llama-70b"].num_parameters
    assert weights["y8"] == pytest.approx(whole / 8, rel=0.01)
    assert whole / 8 < weights["z8"] < whole / 8 * 1.3  # embeddings are not divided over z
    assert found.find(Grid(data=8)) is None
    fewest = plan("llama-70b", lengths=128, batch=8, goal="memory")
    assert fewest.best.grid.size == 2


def test_keys_and_values_in_fp8_take_half_the_memory_and_time() -> None:
    options = {"gpus": 1, "lengths": 2048, "batch": 64, "output_tokens": 256}
    plain, coded = (
        plan("llama-8b", **options, kv_cache_dtype=dtype).best for dtype in ("auto", "fp8")
    )
    assert coded.memory.kv_cache * 2 == pytest.approx(plain.memory.kv_cache, rel=0.01)
    assert coded.memory.weights == plain.memory.weights
    assert coded.decode.compute_us < plain.decode.compute_us
    with pytest.raises(OptionError, match="is of generation; give output_tokens"):
        plan("llama-8b", gpus=1, lengths=128, kv_cache_dtype="fp8")
    with pytest.raises(OptionError, match="kv_cache_dtype must be auto"):
        plan("llama-8b", **options, kv_cache_dtype="int8")


def test_a_rate_needs_instances() -> None:
    found = plan("bert-base", lengths="query", batch=64, gpus=1, rate=1e6).best
    assert (found.num_instances - 1) * found.texts_per_s < 1e6
    assert found.num_instances * found.texts_per_s >= 1e6


def test_what_cannot_be_planned() -> None:
    for options, text in (
        ({"model": "bert-huge"}, "bert-base"),
        ({"machine": "laptop"}, "h200-nvlink"),
        ({"goal": "speed"}, "latency"),
        ({"lengths": "tweets"}, "passage"),
        ({"lengths": [0, 3]}, "positive"),
        ({"dtype": "int4"}, "bfloat16"),
        ({"gpus": 0}, "gpus"),
        ({"rate": 0.0}, "rate"),
        ({"rate": math.inf}, "rate"),
        ({"rate": "5"}, "rate"),
        ({"lengths": 4.5}, "positive"),
        ({"lengths": None}, "positive"),
        ({"memory_gib": math.inf}, "memory_gib"),
        ({"memory_gib": math.nan}, "memory_gib"),
        ({"memory_gib": 0}, "memory_gib"),
        ({"output_tokens": 3}, "bert-base generates no tokens"),
    ):
        with pytest.raises(OptionError, match=text):
            plan(**{"model": "bert-base", **options})
    with pytest.raises(InputError, match="more gpus or memory"):
        plan("gpt3-175b", memory_gib=1)
    with pytest.raises(OptionError, match="does not divide the hidden size"):
        plan("gpt2-xl", gpus=7).explain("x7")
    with pytest.raises(OptionError, match="y must be one of"):
        plan("llama-8b", gpus=12).explain("y12")


def test_every_machine_and_shape_can_be_planned() -> None:
    for machine in machine_names():
        for model in ("bert-large", "axonn-5b"):
            output_tokens = 4 if SHAPES[model].has_lm_head else 0
            options = {"lengths": 256, "batch": 32, "output_tokens": output_tokens}
            found = plan(model, machine=machine, **options)
            assert found.best.latency_s > 0
            assert json.loads(json.dumps(found.as_dict()))["grids"]
            assert found.best in found.pareto
    assert all(plan(model, gpus=64, batch=64, lengths=64).grids for model in SHAPES)


def test_profiles_have_their_means() -> None:
    for profile in PROFILES.values():
        found = profile.sample(4096)
        assert min(found) >= profile.least and max(found) <= profile.most
        assert sum(found) / len(found) == pytest.approx(profile.mean, rel=0.15)


def test_texts() -> None:
    found = plan("llama-70b", lengths=2048, batch=16, output_tokens=8)
    assert report.plan_text(found, top=3).count("GiB") >= 3
    shown = report.ledger_text(found, found.explain("data2.z2.y2"))
    assert "weights of the next layer" in shown and "the layer before" in shown
    drawn = report.picture(parse_grid("data2.z2.y2"))
    assert "| 0 | 1 " in drawn and "| 6 | 7 " in drawn
    assert "96 more replicas" in report.picture(Grid(data=100))


@pytest.mark.feature("Several devices", "planner and its simulated year")
def test_a_year_on_ten_thousand_gpus_takes_seconds() -> None:
    started = time.process_time()
    year = simulate_year("llama-70b", gpus=10_000)
    assert time.process_time() - started < 10
    assert 0.97 * 10_000 < year.peak_gpus <= 10_000
    assert sum(served.texts for served in year.classes) == pytest.approx(year.texts)
    assert all(s.planned.latency_s <= s.traffic.limit_s for s in year.classes)
    assert year.same_grid_gpu_hours is None or year.same_grid_gpu_hours > 0.99 * year.gpu_hours
    assert "10,000 GPUs" in report.year_text(year)
    with pytest.raises(InputError, match="too few"):
        simulate_year("bert-base", gpus=4)
    with pytest.raises(OptionError, match="sum to 1"):
        simulate_year("llama-70b", classes=MIXED[:2])


def test_neither_the_planner_nor_its_command_imports_torch() -> None:
    code = (
        "import sys, bytetx\n"
        "bytetx.plan('llama-70b')\n"
        "from bytetx.cli.commands import main\n"
        "try: main(['plan', '-m', 'bert-base', '--json'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["advice"]
