"""wrap: files, state dicts and copies of a model with fused or column-major weights."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from hf_models import largest_difference, one_thread, padded_inputs, tiny_model  # noqa: F401
from safetensors.torch import load_file, load_model, save_file, save_model
from tiny_decoders import tiny_decoder

from bytetx.hf import FallbackWarning, unwrap, wrap

ENCODERS = ["bert", "distilbert", "mpnet", "gte", "t5"]
NAMES = [*ENCODERS, "gpt2", "llama", "qwen2", "gpt_neox", "opt"]
INPUTS = padded_inputs([9, 1, 14], side="left")


def model_of(name):
    return tiny_model(name, "ForTokenClassification") if name in ENCODERS else tiny_decoder(name)


def run(model):
    """The logits of tokens, run packed."""
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        return model(**INPUTS).logits[INPUTS["attention_mask"].bool()]


@pytest.fixture(params=NAMES)
def models(request):
    stock = model_of(request.param)
    wrapped = wrap(copy.deepcopy(stock))
    run(wrapped)
    return stock, wrapped


def untied(state, model):
    """Without the second name of the word embeddings, which save_file refuses of a stock model."""
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    again = {"lm_head.weight"} if is_tied else {"transformer.encoder.embed_tokens.weight"}
    return {name: tensor for name, tensor in state.items() if name not in again}


def test_safetensors_files_are_the_stock_models_byte_for_byte(models, tmp_path):
    for kind, model in zip(("stock", "wrapped"), models, strict=True):
        folder = tmp_path / kind
        model.save_pretrained(folder)
        save_model(model, str(folder / "model"))
        save_file(untied(model.state_dict(), model), folder / "file")
        torch.save(model.state_dict(), folder / "torch")
    for file in ("model", "file", "model.safetensors"):
        want, have = (tmp_path / kind / file for kind in ("stock", "wrapped"))
        assert have.read_bytes() == want.read_bytes(), file
    want, have = (tmp_path / kind / "torch" for kind in ("stock", "wrapped"))
    assert have.stat().st_size == want.stat().st_size
    theirs, ours = torch.load(want), torch.load(have)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.feature("Wrap", "saving of wrapped models")
def test_a_wrapped_model_loads_what_it_saved(models, tmp_path):
    stock, wrapped = models
    want = run(wrapped)
    save_model(wrapped, str(tmp_path / "model"))
    other = wrap(copy.deepcopy(stock))
    for model in (other, wrapped):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_model(model, str(tmp_path / "model"))
        assert torch.equal(run(model), want)
    wrapped.load_state_dict(stock.state_dict())
    assert torch.equal(run(wrapped), want)


def test_a_state_dict_holds_the_parameters_memory(models):
    """Averages of weights, and others, write a model through its state_dict."""
    stock, wrapped = models
    halved = {name: tensor * 0.5 for name, tensor in stock.state_dict().items()}
    for model in models:
        for name, entry in model.state_dict().items():
            entry.copy_(halved[name])
    for name, parameter in wrapped.named_parameters():
        assert torch.equal(parameter, halved[name]), name
    assert largest_difference(run(wrapped), stock_logits(stock)) < 1e-4


def stock_logits(stock):
    with torch.inference_mode():
        return stock(**INPUTS).logits[INPUTS["attention_mask"].bool()]


def test_a_state_dict_takes_no_memory_of_its_own(models):
    _, wrapped = models
    for _ in range(2):
        state = wrapped.state_dict()
        # A column-major weight is laid out by rows for the parameter itself.
        own = {t.data_ptr() for t in (*wrapped.parameters(), *wrapped.buffers())}
        assert {t.data_ptr() for t in state.values()} <= own
        assert all(t.is_contiguous() for t in state.values())
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in state.values())


def test_keep_vars_gives_the_parameters(models):
    _, wrapped = models
    state = wrapped.state_dict(keep_vars=True)
    for name, parameter in wrapped.named_parameters():
        assert state[name] is parameter


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_part_of_the_model_is_saved(name, tmp_path):
    stock = model_of(name)
    wrapped = wrap(copy.deepcopy(stock))
    part = "bert.encoder.layer.0" if name == "bert" else "transformer.h.0"
    for kind, model in (("stock", stock), ("wrapped", wrapped)):
        save_model(model.get_submodule(part), str(tmp_path / kind))
    want, have = load_file(tmp_path / "stock"), load_file(tmp_path / "wrapped")
    assert all(torch.equal(have[name], want[name]) for name in want)


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), by_torch_save]


@pytest.mark.parametrize("make", COPIES, ids=["deepcopy", "pickle", "torch.save"])
def test_copies_are_saved_like_their_model(models, make, tmp_path):
    stock, wrapped = models
    twin = make(wrapped)
    for kind, model in (("twin", twin), ("unwrapped", unwrap(make(wrapped))), ("stock", stock)):
        save_model(model, str(tmp_path / kind))
    want = (tmp_path / "stock").read_bytes()
    assert (tmp_path / "twin").read_bytes() == want
    assert (tmp_path / "unwrapped").read_bytes() == want
    assert torch.equal(run(twin), run(wrapped))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_unwrap_leaves_no_hooks(name):
    model = unwrap(wrap(model_of(name)))
    for module in model.modules():
        assert not module._state_dict_hooks and not module._state_dict_pre_hooks


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_converted_model_is_saved(name, tmp_path):
    stock = model_of(name).to(torch.bfloat16)
    wrapped = wrap(model_of(name)).to(torch.bfloat16)
    run(wrapped)
    for kind, model in (("stock", stock), ("wrapped", wrapped)):
        save_model(model, str(tmp_path / kind))
    assert (tmp_path / "wrapped").read_bytes() == (tmp_path / "stock").read_bytes()


def double_weights(models):
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            parameter.mul_(2)


def test_shared_memory_stays_shared():
    """A second process writes; the first one's next packed call reads it."""
    models = [wrap(model_of(name).share_memory()) for name in ("bert", "gpt2", "llama")]
    models += [wrap(model_of(name)).share_memory() for name in ("bert", "gpt2", "llama")]
    wants = []
    for model in models:
        run(model)
        twin = copy.deepcopy(model)
        double_weights([twin])
        wants.append(run(twin))
        assert all(p.is_shared() for p in model.parameters())
    context = torch.multiprocessing.get_context("spawn")
    worker = context.Process(target=double_weights, args=(models,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    for model, want in zip(models, wants, strict=True):
        assert torch.equal(run(model), want)
        assert all(p.is_shared() for p in model.parameters())


def test_one_thread_saves_while_another_runs(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    stock = model_of("gpt2")
    wrapped = wrap(copy.deepcopy(stock))
    want = run(wrapped)
    save_model(stock, str(tmp_path / "stock"))

    def save(i):
        save_model(wrapped, str(tmp_path / str(i)))
        return (tmp_path / str(i)).read_bytes()

    with ThreadPoolExecutor(2) as pool:
        files = pool.map(save, range(8))
        runs = pool.map(lambda _: run(wrapped), range(8))
        assert all(largest_difference(have, want) < 1e-5 for have in runs)
        assert set(files) == {(tmp_path / "stock").read_bytes()}
