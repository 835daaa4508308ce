"""wrap with CUDA graphs: on a CPU, where a graph is a plain call, and on a GPU."""

import copy
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from fake_cuda import FakeStream, fake_capture
from hf_models import (  # noqa: F401  (fixtures)
    FAMILIES,
    FAMILY_HEADS,
    MAX_POSITIONS,
    fallbacks_are_errors,
    largest_difference,
    one_thread,
    padded_inputs,
    tiny_model,
)
from tiny_decoders import tiny_decoder

from bytetx.errors import InputError
from bytetx.hf import FallbackWarning, forward, graph_pass, unwrap, wrap
from bytetx.hf.forward import Wants
from bytetx.hf.graph_pass import GraphPasses
from bytetx.ops.padded_ids import PaddedIds
from bytetx.runtime import cuda_graphs

TOLERANCE = 1e-4  # of last hidden states in fp32, which are of order 1: DESIGN.md, "Numbers"
SEQLENS = [9, 1, 23, 14]


@pytest.fixture
def graphs(monkeypatch):
    """Models on the CPU run as on a GPU; a graph is a plain call into the same outputs."""
    monkeypatch.setattr(forward, "takes_graphs", lambda transformer: True)
    monkeypatch.setattr(forward, "_is_on_host", lambda mask: False)
    monkeypatch.setattr(graph_pass, "StreamOrder", lambda device: nullcontext())
    monkeypatch.setattr(cuda_graphs.GraphCache, "_capture", fake_capture)
    monkeypatch.setattr(cuda_graphs.GraphCache, "_reserve", lambda cache, total_tokens: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    made = weakref.WeakSet()

    class Noted(GraphPasses):
        def __init__(self, transformer):
            super().__init__(transformer)
            made.add(self)

    monkeypatch.setattr(forward, "GraphPasses", Noted)
    yield
    for passes in list(made):  # graphs wait for the GPU when they go
        passes.release_memory()


@pytest.fixture
def measured(monkeypatch):
    """The sizes of the batches whose masks the host reads."""
    found, read = [], forward.read_mask

    def note(mask, num_rows, num_columns):
        if mask is not None:
            found.append((num_rows, num_columns))
        return read(mask, num_rows, num_columns)

    monkeypatch.setattr(forward, "read_mask", note)
    return found


@pytest.fixture
def runs(monkeypatch):
    """Arguments of graph passes: (shape, whether the mask was read before)."""
    found, run = [], GraphPasses.run

    def note(passes, padded, wants, *, facts, bad_ids):
        found.append((tuple(padded.input_ids.shape), facts is not None))
        return run(passes, padded, wants, facts=facts, bad_ids=bad_ids)

    monkeypatch.setattr(GraphPasses, "run", note)
    return found


def pair(family, head="Model", **config):
    stock = tiny_model(family, head, **config)
    return stock, wrap(copy.deepcopy(stock))


def passes_of(model):
    return model.base_model.__dict__["forward"].graphs[1]


def assert_equal_outputs(have, want, mask):
    is_token = mask.bool()
    assert list(have.keys()) == list(want.keys())
    ours, theirs = have.last_hidden_state, want.last_hidden_state
    assert largest_difference(ours[is_token], theirs[is_token]) < TOLERANCE
    assert not ours[~is_token].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [0, 4096])
def test_replays_equal_stock(graphs, runs, monkeypatch, family, side, most):
    """most: places that are not measured first."""
    monkeypatch.setattr(forward, "MOST_UNMEASURED", most)
    stock, wrapped = pair(family)
    batches = [padded_inputs(n, side=side) for n in (SEQLENS, [7, 23, 2, 17], [20, 1, 23, 3])]
    if getattr(stock.config, "type_vocab_size", 1) > 1:
        batches[2]["token_type_ids"] = batches[2]["attention_mask"].flip(1)
    kept = []
    with torch.inference_mode():
        for inputs in batches * 2:
            want, have = stock(**inputs), wrapped(**inputs)
            assert_equal_outputs(have, want, inputs["attention_mask"])
            if side == "right" and "pooler_output" in want:
                assert largest_difference(have.pooler_output, want.pooler_output) < TOLERANCE
            kept.append((have.last_hidden_state, have.last_hidden_state.clone()))
    depends = passes_of(wrapped).depends_on_distances
    assert runs == [((4, 23), depends or most == 0)] * 6
    assert passes_of(wrapped).num_graphs == 1
    for output, copied in kept:  # no later call writes to what an earlier one returned
        assert torch.equal(output, copied)


@pytest.mark.parametrize(("family", "head"), FAMILY_HEADS)
def test_every_head_equals_stock(graphs, runs, family, head):
    stock, wrapped = pair(family, head)
    inputs = padded_inputs(SEQLENS)
    mask = inputs["attention_mask"].bool()
    if head == "ForMultipleChoice":
        inputs = {name: tensor.view(2, 2, -1) for name, tensor in inputs.items()}
    with torch.inference_mode():
        for _ in range(3):
            want, have = stock(**inputs), wrapped(**inputs)
            for name in want:
                ours, theirs = have[name], want[name]
                if theirs.shape[:2] == mask.shape:
                    ours, theirs = ours[mask], theirs[mask]
                assert largest_difference(ours, theirs) < TOLERANCE, name
    assert len(runs) == 3
    assert passes_of(wrapped).num_graphs == 1


@pytest.mark.parametrize("family", ["bert", "roberta", "t5"])
def test_inputs_without_a_mask_and_masks_with_holes(graphs, runs, family):
    stock, wrapped = pair(family)
    inputs = padded_inputs([20, 17, 12])
    mask = inputs["attention_mask"]
    mask[0, 3:9] = 0
    mask[1, 0] = 0
    ids = inputs["input_ids"].masked_fill(mask == 0, 7)
    with torch.inference_mode():
        for _ in range(3):
            want, have = stock(**inputs), wrapped(**inputs)
            assert_equal_outputs(have, want, mask)
            want, have = stock(ids), wrapped(ids)
            assert largest_difference(have[0], want[0]) < TOLERANCE
    # Distances of a relative bias are of columns: batches with holes run without a graph.
    assert len(runs) == (3 if family == "t5" else 6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32])
def test_masks_and_ids_of_any_dtype_and_stride(graphs, runs, dtype):
    stock, wrapped = pair("bert")
    inputs = padded_inputs(SEQLENS)
    mask = inputs["attention_mask"]
    ids = inputs["input_ids"].int().T.contiguous().T
    positions = torch.arange(23).flip(0).unsqueeze(0)
    types = (torch.arange(23) % 2).expand(4, -1)
    with torch.inference_mode():
        want = stock(ids, mask, types, positions)
        have = wrapped(ids, mask.to(dtype), types, positions)
    assert_equal_outputs(have, want, mask)
    assert len(runs) == 1


def test_the_mask_is_read_only_where_it_decides(graphs, measured, runs, monkeypatch):
    monkeypatch.setattr(graph_pass, "default_token_budget", lambda spec, device: 4096)
    stock, wrapped = pair("bert", max_position_embeddings=600)
    small, wide = padded_inputs([100, 3]), padded_inputs([600, 500])
    with torch.inference_mode():
        wrapped(**small)
        assert measured == []
        assert_equal_outputs(wrapped(**wide), stock(**wide), wide["attention_mask"])
        assert measured == [(2, 600)]
        wrapped(wide["input_ids"])  # no mask: the lengths are known
        assert measured == [(2, 600)]
        wrap(wrapped, pads="stock")
        full = padded_inputs([40, 40])
        wrapped(**full)
        assert measured == [(2, 600), (2, 40)]
        assert len(runs) == 4
        assert torch.equal(wrapped(**small)[0], stock(**small)[0])  # which shows pads
        assert len(runs) == 4
        head = pair("bert", "ForSequenceClassification")[1]
        head(**padded_inputs(SEQLENS))
        assert measured[-1] == (4, 23)  # a row may start with a pad, which the head would read


def test_left_padding_under_a_head_on_the_first_token_runs_the_original(graphs, runs):
    stock, wrapped = pair("bert", "ForSequenceClassification")
    inputs = padded_inputs(SEQLENS, side="left")
    with torch.inference_mode(), pytest.warns(FallbackWarning, match="starts with padding"):
        have = wrapped(**inputs)
    assert not runs
    assert torch.equal(have.logits, stock(**inputs).logits)


def test_rows_without_tokens(graphs, runs):
    _, wrapped = pair("bert")
    inputs = padded_inputs([5, 0, 3])
    with torch.inference_mode():
        for _ in range(3):
            have = wrapped(**inputs)
            alone = wrapped(input_ids=inputs["input_ids"][:1, :5])
            assert not have.last_hidden_state[1].any()
            assert largest_difference(have[0][0], alone[0][0]) < TOLERANCE
            nothing = wrapped.pooler(torch.zeros(1, 1, 64))
            assert torch.equal(have.pooler_output[1:2], nothing)
    assert len(runs) == 6


def test_weights_that_change_in_place_are_the_graphs(graphs, runs):
    stock, wrapped = pair("bert")
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        for _ in range(3):
            wrapped(**inputs)
    passes = passes_of(wrapped)
    other = {name: tensor * 0.9 for name, tensor in stock.state_dict().items()}
    stock.load_state_dict(other)
    wrapped.load_state_dict(other)
    with torch.inference_mode():
        assert_equal_outputs(wrapped(**inputs), stock(**inputs), inputs["attention_mask"])
    assert passes_of(wrapped) is passes
    assert len(runs) == 4


def test_a_move_that_changes_nothing_keeps_the_graphs(graphs, runs):
    _, wrapped = pair("bert")
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        for _ in range(3):
            wrapped.to("cpu")(**inputs)
    passes = passes_of(wrapped)
    assert passes_of(wrapped.to("cpu").float()) is passes
    wrapped.double()
    assert wrapped.__dict__["forward"].graphs is None


def replace_a_parameter(model):
    layer = model.encoder.layer[0].output.dense
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.5)


def point_at_other_memory(model):
    layer = model.encoder.layer[0].output.dense
    layer.weight.data = layer.weight.data * 0.5


def replace_a_module(model):
    model.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.ReLU()


def convert(model):
    model.to(torch.bfloat16).float()


@pytest.mark.parametrize(
    "change", [replace_a_parameter, point_at_other_memory, replace_a_module, convert]
)
def test_no_graph_of_old_weights_answers(graphs, change):
    stock, wrapped = pair("bert")
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        for _ in range(3):
            wrapped(**inputs)
    old = passes_of(wrapped)
    for model in (stock, wrapped):
        change(model)
    falls_back = change is replace_a_module
    warns = pytest.warns(FallbackWarning) if falls_back else nullcontext()
    with torch.inference_mode():
        for _ in range(3):
            with warns:
                have = wrapped(**inputs)
            want = stock(**inputs)
            is_token = inputs["attention_mask"].bool()
            assert largest_difference(have[0][is_token], want[0][is_token]) < TOLERANCE
            warns = nullcontext()  # each reason is said once
    forward_of = wrapped.__dict__["forward"]
    assert forward_of.graphs is None or forward_of.graphs[1] is not old


def test_modes_that_need_the_original(graphs, runs):
    stock, wrapped = pair("bert")
    inputs = padded_inputs(SEQLENS)
    with pytest.warns(FallbackWarning, match="gradients are recorded"):
        wrapped(**inputs)[0].sum().backward()
    with torch.no_grad():
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.warns(FallbackWarning, match="autocast"),
        ):
            wrapped(**inputs)
        wrapped.encoder.layer[1].train()
        with pytest.warns(FallbackWarning, match="training mode"):
            wrapped(**inputs)
        wrapped.eval()
        with pytest.warns(FallbackWarning, match="output_attentions"):
            wrapped(**inputs, output_attentions=True)
        states = wrapped(**inputs, output_hidden_states=True).hidden_states
        assert len(states) == 3
        assert not runs
        wrapped(**inputs)
        assert len(runs) == 1


def test_a_trained_head_on_a_frozen_base(graphs, runs):
    _, wrapped = pair("bert")
    wrapped.requires_grad_(False)
    head = torch.nn.Linear(64, 2)
    for _ in range(4):
        head(wrapped(**padded_inputs(SEQLENS))[0]).sum().backward()
    assert head.weight.grad.any()
    assert len(runs) == 4


def test_outputs_are_what_the_caller_asks_for(graphs):
    stock, wrapped = pair("bert")
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        as_tuple = wrapped(**inputs, return_dict=False)
        want = stock(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(want) == 2
    assert largest_difference(as_tuple[1], want[1]) < TOLERANCE


def test_threads_share_the_graphs(graphs, monkeypatch):
    stock, wrapped = pair("bert")
    batches = [padded_inputs([n, 23, 24 - n]) for n in range(1, 9)]
    with torch.inference_mode():
        wants = [stock(**inputs)[0] for inputs in batches]
    inside, most, lock = [0], [0], threading.Lock()
    compute = GraphPasses._compute

    def note(*args):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        try:
            return compute(*args)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(GraphPasses, "_compute", note)

    def run(number):
        with torch.inference_mode():
            have = wrapped(**batches[number % 8])[0]
        is_token = batches[number % 8]["attention_mask"].bool()
        return largest_difference(have[is_token], wants[number % 8][is_token])

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(run, range(48))) < TOLERANCE
    assert most[0] == 1  # one after the other, for their memory is shared
    assert passes_of(wrapped).num_graphs == 1


def test_memory_is_bounded(graphs, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    _, wrapped = pair("bert")
    with torch.inference_mode():
        for width in (8, 16, 33, 40, 48) * 2:
            for _ in range(2):
                wrapped(**padded_inputs([width, width // 2, width, width]))
    passes = passes_of(wrapped)
    assert passes.num_graphs == 2
    rooms = passes._states
    assert all(states.shape[0] == room for room, states in rooms.items())
    assert sum(rooms) <= 2 * max(rooms)
    assert passes.release_memory()
    assert not passes._states and passes.num_graphs == 0


def test_a_batch_beyond_the_largest_bucket_runs_at_its_own_size(graphs, runs, monkeypatch):
    monkeypatch.setattr(graph_pass, "default_token_budget", lambda spec, device: 64)
    stock, wrapped = pair("bert")
    inputs = padded_inputs([40, 41])
    with torch.inference_mode():
        assert_equal_outputs(wrapped(**inputs), stock(**inputs), inputs["attention_mask"])
        assert not runs
        wrapped(**padded_inputs([40, 20]))  # 80 places: too many, unless they are measured
        assert not runs
        monkeypatch.setattr(forward, "MOST_UNMEASURED", 0)
        wrapped(**padded_inputs([40, 20]))
    assert len(runs) == 1


def test_no_memory_for_a_pass_frees_the_graphs(graphs, monkeypatch):
    stock, wrapped = pair("bert")
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        for _ in range(3):
            wrapped(**inputs)
        passes = passes_of(wrapped)
        assert passes.num_graphs == 1

        def fail(*args, **kwargs):
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(GraphPasses, "run", fail)
        assert_equal_outputs(wrapped(**inputs), stock(**inputs), inputs["attention_mask"])
        assert passes.num_graphs == 0
        with pytest.raises(torch.OutOfMemoryError):
            wrapped(**inputs)


def test_packed_input_embeddings_and_long_rows_run_without_a_graph(graphs, runs):
    stock, wrapped = pair("gte")
    inputs = padded_inputs([40])
    with torch.inference_mode():
        embeds = stock.get_input_embeddings()(inputs["input_ids"])
        wrapped(inputs_embeds=embeds)
        wrapped(inputs["input_ids"], cu_seqlens=torch.tensor([0, 12, 40]))
        wrapped(torch.full((1, 48), 5))
        assert len(runs) == 1
    assert not passes_of(wrapped).takes(1, 49, None)


@pytest.mark.parametrize("family", ["modernbert", "nomic_bert", "gte"])
def test_positions_of_rotary_models_are_looked_at_before_they_run(graphs, runs, family):
    """No kernel tells of positions beyond the tables: it would take the nearest rows."""
    if family not in FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    stock, wrapped = pair(family)
    inputs = padded_inputs(SEQLENS)
    for first in (3, -1, MAX_POSITIONS - 5):
        inputs["position_ids"] = torch.arange(23)[None] + first
        is_within = first == 3
        with torch.inference_mode():
            with nullcontext() if is_within else pytest.warns(FallbackWarning, match="position"):
                have = wrapped(**inputs)
            assert_equal_outputs(have, stock(**inputs), inputs["attention_mask"])
    assert not runs


def test_copies_and_unwrapped_models_have_graphs_of_their_own(graphs, runs):
    stock, wrapped = pair("bert")
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        wrapped(**inputs)
        other = copy.deepcopy(wrapped)
        other.encoder.layer[0].output.dense.weight.mul_(0.5)
        other(**inputs)
        assert passes_of(other) is not passes_of(wrapped)
        assert_equal_outputs(wrapped(**inputs), stock(**inputs), inputs["attention_mask"])
        num_runs = len(runs)
        assert torch.equal(unwrap(wrapped)(**inputs)[0], stock(**inputs)[0])
        assert len(runs) == num_runs


def test_causal_models_run_without_graphs(graphs, runs):
    wrapped = wrap(tiny_decoder("gpt2", "Model"))
    with torch.inference_mode():
        wrapped(**padded_inputs(SEQLENS), use_cache=False)
    assert not runs


def test_sentence_transformers_share_the_graphs(graphs, runs, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from checkpoints import SENTENCES, save_checkpoint
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    modules = [Transformer(str(save_checkpoint(tmp_path))), Pooling(48)]
    stock = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    wrapped = wrap(copy.deepcopy(stock))
    for _ in range(3):
        ours, theirs = (torch.from_numpy(model.encode(SENTENCES)) for model in (wrapped, stock))
        assert largest_difference(ours, theirs) < TOLERANCE
    assert len(runs) == 3


# On a GPU.


def gpu_pair(family="bert", dtype=torch.float16, **config):
    """(in fp32, stock in the dtype, wrapped) with heads that attention has kernels for."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 600} | config
    exact = tiny_model(family, **sizes).cuda()
    stock = copy.deepcopy(exact).to(dtype)
    return exact, stock, wrap(copy.deepcopy(stock))


def on_gpu(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def assert_as_exact_as_stock(have, stock, exact, inputs):
    is_token = inputs["attention_mask"].bool()
    right, theirs = exact(**inputs)[0][is_token], stock(**inputs)[0][is_token]
    noise = 4 * torch.finfo(have.dtype).eps * right.abs().max()
    limit = 2 * largest_difference(theirs, right) + noise
    assert largest_difference(have[is_token], right) <= limit
    assert not have[~is_token].any()


_OF_GPUS = ("bert", "roberta", "distilbert", "mpnet", "modernbert", "gte", "deberta-v3", "t5")
GPU_FAMILIES = [name for name in _OF_GPUS if name in FAMILIES]


@pytest.mark.gpu
@pytest.mark.parametrize("family", GPU_FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_replays_on_a_gpu(family, side):
    sizes = {"d_model": 128, "d_kv": 64, "num_heads": 2} if family == "t5" else {}
    if family == "distilbert":
        sizes = {"dim": 128, "n_heads": 2}
    if family in ("t5", "distilbert"):
        exact = tiny_model(family, **sizes).cuda()
        stock = copy.deepcopy(exact).half()
        wrapped = wrap(copy.deepcopy(stock))
    else:
        exact, stock, wrapped = gpu_pair(family)
    with torch.inference_mode():
        for seqlens in ([30], SEQLENS, [47, 1, 0, 13, 40] * 6, [48] * 30):
            inputs = on_gpu(padded_inputs(seqlens, side=side))
            outputs = [wrapped(**inputs)[0] for _ in range(4)]
            for have in outputs[2:]:  # the first ran eagerly, the others are one graph
                assert torch.equal(have, outputs[1])
            if 0 not in seqlens:  # of which the stock model makes what it likes
                for have in outputs[:2]:
                    assert_as_exact_as_stock(have, stock, exact, inputs)
    assert passes_of(wrapped).num_graphs >= 4


@pytest.mark.gpu
def test_a_small_batch_waits_for_no_gpu():
    _, _, wrapped = gpu_pair()
    inputs = on_gpu(padded_inputs([128]))
    with torch.inference_mode():
        for _ in range(4):
            wrapped(**inputs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            wrapped(**inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_streams_and_threads_share_the_graphs_on_a_gpu():
    _, _, wrapped = gpu_pair()
    batches = [on_gpu(padded_inputs([n, 100, 101 - n])) for n in (1, 20, 50, 90)]
    with torch.inference_mode():
        for _ in range(3):
            wants = [wrapped(**inputs)[0] for inputs in batches]
    torch.cuda.synchronize()

    def run(number):
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            haves = [wrapped(**batches[number])[0] for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(have, wants[number]) for have in haves)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


@pytest.mark.gpu
def test_bad_ids_of_a_replay():
    _, _, wrapped = gpu_pair()
    good = on_gpu(padded_inputs(SEQLENS))
    bad = {name: tensor.clone() for name, tensor in good.items()}
    bad["input_ids"][2, 5] = 7000
    pads = {name: tensor.clone() for name, tensor in good.items()}
    pads["input_ids"][1, 5] = 7000  # a pad: nobody looks at it
    with torch.inference_mode():
        for _ in range(4):
            want = wrapped(**good)[0]
        assert torch.equal(wrapped(**pads)[0], want)
        have = wrapped(**bad)[0]
        assert have[2, 5].isnan().all()
        torch.cuda.synchronize()
        with pytest.raises(InputError, match="input_ids with 7000"):
            wrapped(**good)
        assert torch.equal(wrapped(**good)[0], want)


@pytest.mark.gpu
def test_changes_of_the_weights_on_a_gpu():
    exact, stock, wrapped = gpu_pair()
    inputs = on_gpu(padded_inputs(SEQLENS))
    with torch.inference_mode():
        for _ in range(4):
            wrapped(**inputs)
        for model in (exact, stock, wrapped):
            model.encoder.layer[0].output.dense.weight.mul_(0.5)
        assert_as_exact_as_stock(wrapped(**inputs)[0], stock, exact, inputs)
        for model in (exact, stock, wrapped):
            layer = model.encoder.layer[1].output.dense
            layer.weight = torch.nn.Parameter(layer.weight * 2)
        for _ in range(4):
            assert_as_exact_as_stock(wrapped(**inputs)[0], stock, exact, inputs)
        wrapped, stock = wrapped.bfloat16(), stock.bfloat16()
        for _ in range(4):
            have = wrapped(**inputs)[0]
            assert have.dtype == torch.bfloat16
            assert_as_exact_as_stock(have, stock, exact, inputs)


@pytest.mark.gpu
def test_a_callers_own_graph_holds_the_kernels():
    from captured import captured

    _, _, wrapped = gpu_pair()
    ids = on_gpu(padded_inputs([40, 40]))["input_ids"]
    with torch.inference_mode():
        for _ in range(4):
            want = wrapped(ids)[0]
        graph, out = captured(lambda: wrapped(ids)[0])
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, want, rtol=2**-8, atol=2**-8)
        assert torch.equal(wrapped(ids)[0], want)


@pytest.mark.gpus(2)
def test_a_model_on_another_gpu_than_the_current_one():
    exact, stock, wrapped = gpu_pair()
    exact, stock, wrapped = (model.to("cuda:1") for model in (exact, stock, wrapped))
    inputs = {name: tensor.to("cuda:1") for name, tensor in padded_inputs(SEQLENS).items()}
    with torch.inference_mode():
        for _ in range(4):
            have = wrapped(**inputs)[0]
        assert_as_exact_as_stock(have, stock, exact, inputs)
    assert torch.cuda.current_device() == 0
    assert passes_of(wrapped).num_graphs == 1


def test_a_pass_gives_only_what_is_asked_for(graphs):
    _, wrapped = pair("bert")
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        want = wrapped(**inputs)[0]
        passes = passes_of(wrapped)
        padded = PaddedIds(inputs["input_ids"], inputs["attention_mask"])
        for _ in range(3):
            rows = passes.run(padded, Wants(False, True), facts=None, bad_ids=None)
            assert rows.padded is None
            assert largest_difference(rows.first, want[:, 0]) < TOLERANCE
    ((_, wants),) = passes._graphs._graphs
    assert wants == Wants(False, True)
