"""wrap: ids outside their tables raise, on a CPU at once and on a GPU at the next call."""

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from captured import captured
from hf_models import (  # noqa: F401  (fixtures)
    fallbacks_are_errors,
    largest_difference,
    one_thread,
    padded_inputs,
    tiny_model,
)
from tiny_decoders import tiny_decoder
from torch import Tensor

from bytetx.errors import InputError
from bytetx.hf import wrap
from bytetx.ops import native, reference, triton_backend

SEQLENS = [9, 1, 14]
BAD = 7000
CASES = [
    *(("bert", name) for name in ("input_ids", "position_ids", "token_type_ids")),
    *(("roberta", name) for name in ("input_ids", "position_ids")),
    *(("gpt2", name) for name in ("input_ids", "position_ids")),
    ("opt-post", "position_ids"),
    ("distilbert", "input_ids"),
    ("electra", "token_type_ids"),
    ("llama", "input_ids"),
]


def model_of(name, **config):
    is_decoder = name in ("gpt2", "llama", "opt-post")
    return tiny_decoder(name, "Model", **config) if is_decoder else tiny_model(name, **config)


def inputs_of(name, *, bad=None, value=BAD):
    """One input of each kind that the family takes; a token of the last row has a bad one."""
    inputs = padded_inputs(SEQLENS)
    inputs["position_ids"] = torch.arange(2, 16).expand(3, -1).contiguous()
    if name in ("bert", "electra"):
        inputs["token_type_ids"] = inputs["attention_mask"].clone()
    if bad is not None:
        inputs[bad][2, 5] = value
    return inputs


@pytest.mark.parametrize(("name", "bad"), CASES)
@pytest.mark.parametrize("value", [BAD, -1])
def test_ids_outside_their_tables_on_a_cpu(name, bad, value):
    """The stock model raises IndexError or RuntimeError; InputError names the input and the id."""
    stock = model_of(name)
    wrapped = wrap(copy.deepcopy(stock))
    inputs = inputs_of(name, bad=bad, value=value)
    with torch.inference_mode():
        if (name, value) != ("opt-post", -1):  # the first position is the table's third row
            with pytest.raises((IndexError, RuntimeError)):
                stock(**inputs)
        with pytest.raises(InputError, match=f"{bad} holds {value}, but the table has"):
            wrapped(**inputs)
        assert wrapped(**inputs_of(name))[0].isfinite().all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("value", [BAD, -1])
def test_generate_raises_for_a_prompt_with_a_bad_id(device, value):
    wrapped = wrap(tiny_decoder("llama")).to(device)
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    inputs["input_ids"][2, 5] = value
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    with pytest.raises(InputError, match=f"input_ids holds {value}, but the table has 60 rows"):
        wrapped.generate(**inputs, do_sample=False, max_new_tokens=2, pad_token_id=0)


def test_what_stands_at_pads_is_not_looked_at():
    inputs = inputs_of("bert")
    for name in ("input_ids", "position_ids", "token_type_ids"):
        inputs[name][inputs["attention_mask"] == 0] = -100
    with torch.inference_mode():
        assert wrap(tiny_model("bert"))(**inputs)[0].isfinite().all()


def test_positions_below_zero_of_a_rotary_model_run_the_original():
    """As attention_mask.cumsum(1) - 1 has them at pads, which nothing reads."""
    from bytetx.hf import FallbackWarning

    stock = tiny_decoder("llama", "Model")
    wrapped = wrap(copy.deepcopy(stock))
    inputs = padded_inputs(SEQLENS, side="left")
    mask = inputs["attention_mask"].bool()
    inputs["position_ids"] = inputs["attention_mask"].cumsum(1) - 1
    with torch.inference_mode():
        want, have = stock(**inputs)[0], wrapped(**inputs)[0]
        assert largest_difference(have[mask], want[mask]) < 1e-4
        inputs["position_ids"] = inputs["position_ids"] - 3
        with pytest.warns(FallbackWarning, match="position_ids below 0"):
            have = wrapped(**inputs)[0]
        assert largest_difference(have[mask], stock(**inputs)[0][mask]) < 1e-5
        assert not have[~mask].any()


@pytest.mark.parametrize("norm", [False, True])
def test_the_torch_path_notes_bad_ids(norm):
    """The operations of a GPU without kernels; here it notes them on a CPU."""
    table = torch.randn(5, 8)
    ids = {name: torch.tensor([0, 4, 3], dtype=torch.int32) for name in ("word", "place", "type")}
    options = {"position": table, "token_type": table}
    options |= {"norm_weight": torch.ones(8), "norm_bias": torch.zeros(8)} if norm else {}

    def run(bad_ids: Tensor | None) -> Tensor:
        return reference.embed(*ids.values(), word=table, **options, bad_ids=bad_ids)

    bad_ids, want = torch.zeros(3, dtype=torch.int32), run(None)
    assert torch.equal(run(bad_ids), want)
    assert bad_ids.tolist() == [0, 0, 0]
    ids["word"][1], ids["type"][2] = -(2**31), 5
    have = run(bad_ids)
    assert bad_ids.tolist() == [-(2**31), 0, 5]
    assert torch.equal(have[0], want[0]) and have[1:].isnan().all()
    ids["word"][1], ids["type"][2] = 4, 3
    assert torch.equal(run(bad_ids), want)
    assert bad_ids.tolist() == [-(2**31), 0, 5]  # until somebody reads it


def on_gpu(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def gpu_pair(name, **config):
    stock = model_of(name, **config).cuda()
    return stock, wrap(copy.deepcopy(stock))


@pytest.fixture(params=["native", "triton", "torch"])
def path(request, monkeypatch):
    """The native kernels', Triton's where there are none, or torch's where there is neither."""
    if request.param == "native":
        yield request.param
        return
    with native.without_kernels("cuda"):
        if request.param == "torch":
            monkeypatch.setattr(triton_backend, "_lookup", lambda device_type, index: "none")
        yield request.param


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "bad", "has_mask"),
    [
        (*case, has_mask)
        for case, has_mask in product(CASES, (False, True))
        # Without a mask, positions that are no sequence are the original forward's.
        if has_mask or case not in (("gpt2", "position_ids"), ("opt-post", "position_ids"))
    ],
)
@pytest.mark.parametrize("value", [BAD, -1])
def test_the_next_call_on_a_gpu_names_a_bad_id(name, bad, has_mask, value, path):
    _, wrapped = gpu_pair(name)
    good, wrong = on_gpu(inputs_of(name)), on_gpu(inputs_of(name, bad=bad, value=value))
    mask = good["attention_mask"].bool()
    if not has_mask:
        mask = torch.ones_like(mask)
        del good["attention_mask"], wrong["attention_mask"]
    with torch.inference_mode():
        want, have = wrapped(**good)[0], wrapped(**wrong)[0]
        if path == "triton":  # attention computes rows that share a tile with a NaN one by one
            assert largest_difference(have[:2], want[:2]) < 1e-4
        else:
            assert torch.equal(have[:2], want[:2])
        assert have[2, 5].isnan().all()
        if not has_mask:  # where there is one, the layout waits for the GPU
            torch.cuda.synchronize()
        with pytest.raises(InputError, match=f"earlier call .* got {bad} with {value}, where"):
            wrapped(**good)
        assert torch.equal(wrapped(**good)[0][mask], want[mask])
        torch.cuda.synchronize()
        assert torch.equal(wrapped(**good)[0][mask], want[mask])


@pytest.mark.gpu
def test_given_embeddings_are_no_ids(path):
    stock, wrapped = gpu_pair("bert")
    inputs = on_gpu(inputs_of("bert"))
    embeds = stock.get_input_embeddings()(inputs.pop("input_ids")).detach()
    with torch.inference_mode():
        for _ in range(2):
            assert wrapped(**inputs, inputs_embeds=embeds)[0].isfinite().all()
            torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_thread_hears_of_its_own_ids_alone(path):
    _, wrapped = gpu_pair("bert")
    good, wrong = on_gpu(inputs_of("bert")), on_gpu(inputs_of("bert", bad="input_ids"))
    torch.cuda.synchronize()

    def run(inputs):
        errors = 0
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                try:
                    wrapped(**inputs)
                except InputError:
                    errors += 1
            torch.cuda.current_stream().synchronize()
        return errors

    with ThreadPoolExecutor(2) as pool:
        num_good, num_wrong = pool.map(run, (good, wrong))
    # A call that raises does not run, so that every other one does: the mask waits for the GPU.
    assert (num_good, num_wrong) == (0, 25)


@pytest.mark.gpu
def test_two_models_hear_of_their_own_ids_alone(path):
    wrapped, other = gpu_pair("bert")[1], gpu_pair("roberta")[1]
    good, wrong = on_gpu(inputs_of("roberta")), on_gpu(inputs_of("bert", bad="input_ids"))
    with torch.inference_mode():
        for _ in range(3):
            wrapped(**wrong)
            other(**good)
            with pytest.raises(InputError, match="input_ids with 7000"):
                wrapped(**wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["native", "triton"], indirect=True)  # torch's waits for the GPU
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_replayed_graph_notes_bad_ids(name, path):
    # Heads and a dtype that attention has kernels for, which is what can be captured.
    sizes = {"hidden_size": 128, "num_attention_heads": 2}
    sizes = sizes if name == "bert" else {"n_embd": 128, "n_head": 2}
    stock, wrapped = (model.to(torch.bfloat16) for model in gpu_pair(name, **sizes))
    ids = on_gpu({"input_ids": inputs_of(name)["input_ids"]})["input_ids"]
    good = ids.clone()
    with torch.inference_mode():
        want = wrapped(input_ids=ids, **no_cache(name))[0].clone()
        graph, out = captured(lambda: wrapped(input_ids=ids, **no_cache(name))[0])
        graph.replay()
        # cuBLAS may cut a product otherwise while it is captured: one rounding of bf16.
        torch.testing.assert_close(out, want, rtol=2**-6, atol=2**-6)
        replayed = out.clone()
        ids[2, 5] = BAD
        graph.replay()
        torch.cuda.synchronize()
        # Rows that share a tile with a NaN are computed again one by one, and round otherwise.
        assert_right(out[:2], stock, input_ids=good[:2], **no_cache(name))
        assert out[2, 5].isnan().all()
        with pytest.raises(InputError, match=f"input_ids with {BAD}"):
            wrapped(input_ids=good, **no_cache(name))
        ids.copy_(good)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, replayed)
        assert torch.equal(wrapped(input_ids=good, **no_cache(name))[0], want)


def assert_right(found, stock, **inputs):
    """Within twice the error of the stock model in its dtype, against it in f64."""
    exact, plain = copy.deepcopy(stock).double()(**inputs)[0], stock(**inputs)[0]
    noise = 2 * torch.finfo(found.dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max() + noise


def no_cache(name):
    return {"use_cache": False} if name == "gpt2" else {}


@pytest.mark.gpu
@pytest.mark.parametrize("ids", [[5, 60_000], [-1], [5, 2**40]])
def test_ids_given_to_a_loaded_model_are_checked_on_the_host(ids, tmp_path):
    from checkpoints import save_checkpoint

    import bytetx

    model = bytetx.load(save_checkpoint(tmp_path, head="Model"), device="cuda")
    with pytest.raises(InputError, match=r"texts\[1\] holds token id"):
        model.embed([[5, 6], ids])
    assert len(model.embed([[5, 6]]).vectors) == 1
