"""classify, rerank, tag and fill_mask against transformers' pipelines and CrossEncoder."""

import json
import warnings
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SENTENCES, TOKENIZERS, edit_json, save_checkpoint, save_sentence_model
from sentence_transformers import CrossEncoder
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny import one_thread  # noqa: F401  (autouse)
from torch import nn

import bytetx
from bytetx.errors import CheckpointError, InputError
from bytetx.tasks.classify import sigmoid
from bytetx.tasks.results import Entity
from bytetx.tasks.tag import AGGREGATIONS

LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC", 5: "MISC"}
DOCUMENTS = [text for text in SENTENCES if text]


def labelled(labels: dict[int, str]) -> dict[str, dict]:
    return {"id2label": labels, "label2id": {label: i for i, label in labels.items()}}


@pytest.mark.feature("Tasks", "`classify`: labels and scores of the pipeline's")
@pytest.mark.parametrize("family", TOKENIZERS)
@pytest.mark.parametrize(
    "problem_type",
    ["single_label_classification", "multi_label_classification", "regression", None],
)
def test_classify_equals_the_pipeline(
    family: str, problem_type: str | None, tmp_path: Path
) -> None:
    config = labelled({0: "bad", 1: "fair", 2: "good"}) | {"problem_type": problem_type}
    folder = save_checkpoint(tmp_path, family, head="ForSequenceClassification", **config)
    pipeline = transformers.pipeline("text-classification", str(folder), top_k=None, device="cpu")
    ours = bytetx.load(folder).classify(SENTENCES, truncate=True)
    for labels, theirs in zip(ours, pipeline(SENTENCES, truncation=True), strict=True):
        assert [label.label for label in labels] == [entry["label"] for entry in theirs]
        scores = [entry["score"] for entry in theirs]
        np.testing.assert_allclose([label.score for label in labels], scores, atol=1e-5)


def test_classify_pairs_top_k_and_raw_scores(tmp_path: Path) -> None:
    config = labelled({0: "no", 1: "yes", 2: "maybe"})
    folder = save_checkpoint(tmp_path, head="ForSequenceClassification", **config)
    pairs = [(SENTENCES[0], SENTENCES[6]), (SENTENCES[4], SENTENCES[1])]
    model = bytetx.load(folder)
    raw = model.classify(pairs, raw_scores=True, truncate=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    for pair, labels in zip(pairs, raw, strict=True):
        with torch.no_grad():
            encoded = tokenizer([pair], truncation=True, return_tensors="pt")
            logits = reference(**encoded).logits[0]
        scores = {label.label: label.score for label in labels}
        np.testing.assert_allclose(
            [scores[name] for name in ("no", "yes", "maybe")], logits, atol=1e-5
        )
    best = model.classify(pairs, top_k=1, truncate=True)
    assert [labels[0].label for labels in best] == [labels[0].label for labels in raw]
    assert [len(labels) for labels in best] == [1, 1]


def test_one_label_is_a_sigmoid(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, head="ForSequenceClassification", num_labels=1)
    model = bytetx.load(folder)
    score, logit = (
        model.classify(["a"])[0][0].score,
        model.classify(["a"], raw_scores=True)[0][0].score,
    )
    assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)


def test_scores_of_huge_logits_warn_of_no_overflow() -> None:
    logits = np.array([[-500.0, -1.0, 0.0, 1.0, 500.0]], dtype=np.float32)
    with warnings.catch_warnings(action="error"):
        scores = sigmoid(logits)
    assert scores.dtype == np.float32
    expected = 1 / (1 + np.exp(-logits.astype(np.float64)))
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-38)


@pytest.mark.feature("Tasks", "`rerank` by cross-encoders")
@pytest.mark.parametrize("activation", [None, nn.Identity(), nn.Sigmoid(), nn.Tanh()])
@pytest.mark.parametrize("saved_by_cross_encoder", [False, True])
def test_rerank_equals_cross_encoder(
    activation: nn.Module | None, saved_by_cross_encoder: bool, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "a", head="ForSequenceClassification", num_labels=1)
    if activation is not None and not saved_by_cross_encoder:
        name = f"torch.nn.modules.{'linear' if type(activation) is nn.Identity else 'activation'}."
        edit_json(
            folder / "config.json",
            sentence_transformers={"activation_fn": name + type(activation).__name__},
        )
    encoder = CrossEncoder(str(folder), activation_fn=activation, device="cpu")
    if saved_by_cross_encoder:
        folder = tmp_path / "b"
        encoder.save(str(folder))
    theirs = encoder.rank(SENTENCES[0], DOCUMENTS)
    hits = bytetx.load(folder).rerank(SENTENCES[0], DOCUMENTS, truncate=True)
    assert [hit.index for hit in hits] == [entry["corpus_id"] for entry in theirs]
    scores = [entry["score"] for entry in theirs]
    np.testing.assert_allclose([hit.score for hit in hits], scores, atol=1e-5)
    assert [hit.document for hit in hits] == [DOCUMENTS[hit.index] for hit in hits]


def test_rerank_options_and_errors(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, head="ForSequenceClassification", num_labels=1)
    edit_json(
        folder / "config.json",
        sbert_ce_default_activation_function="torch.nn.modules.linear.Identity",
    )
    model = bytetx.load(folder)
    documents = [*DOCUMENTS, "half a pair \ud800"]
    hits = model.rerank("fox", iter(documents), top_k=3, on_error="return", truncate=True)
    assert len(hits) == 3 and list(hits.errors) == [len(DOCUMENTS)]
    raw = model.rerank("fox", DOCUMENTS, raw_scores=True, truncate=True)
    assert model.rerank("fox", DOCUMENTS, instruction="", truncate=True)[:3] == hits
    assert raw[:3] == hits  # this checkpoint's activation is the identity
    with pytest.raises(InputError, match=r"texts\[1\] is a pair \(str, int\); give a str"):
        model.rerank("fox", ["dog", 3])
    with pytest.raises(InputError, match="documents must be an iterable of texts, got one str"):
        model.rerank("fox", "dog")
    edit_json(folder / "config.json", sbert_ce_default_activation_function="evil.code.Run")
    with pytest.raises(CheckpointError, match="activation 'evil.code.Run' is not supported"):
        bytetx.load(folder).rerank("fox", DOCUMENTS)


@pytest.mark.feature("Tasks", "`rerank` by cross-encoders with two labels")
@pytest.mark.parametrize("family", ["bert", "roberta", "deberta-v2"])
@pytest.mark.parametrize("saved_by_cross_encoder", [False, True])
def test_two_labels_are_a_probability(
    family: str, saved_by_cross_encoder: bool, tmp_path: Path
) -> None:
    """That of the second; CrossEncoder saves the identity as the activation of its logits."""
    folder = save_checkpoint(tmp_path / "a", family, head="ForSequenceClassification", num_labels=2)
    encoder = CrossEncoder(str(folder), device="cpu")
    if saved_by_cross_encoder:
        folder = tmp_path / "b"
        encoder.save(str(folder))
    pairs = [(SENTENCES[0], document) for document in DOCUMENTS]
    logits = encoder.predict(pairs)
    chances = encoder.predict(pairs, apply_softmax=True)[:, 1]
    model = bytetx.load(folder, device="cpu")
    for raw, wanted in ((False, chances), (True, logits[:, 1] - logits[:, 0])):
        hits = model.rerank(SENTENCES[0], DOCUMENTS, raw_scores=raw, truncate=True)
        assert [hit.index for hit in hits] == np.argsort(-wanted, kind="stable").tolist()
        np.testing.assert_allclose([hit.score for hit in hits], np.sort(wanted)[::-1], atol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_labels": 3}, "this one has 3; use classify"),
        (labelled({0: "Relevant", 1: "irrelevant"}), "the first of this one is 'relevant'"),
        (
            {"num_labels": 2, "problem_type": "multi_label_classification"},
            "problem_type multi_label_classification says that neither excludes the other",
        ),
    ],
)
def test_labels_that_give_no_score_of_a_pair(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    model = bytetx.load(save_checkpoint(tmp_path, head="ForSequenceClassification", **config))
    with pytest.raises(InputError, match=message):
        model.rerank("fox", DOCUMENTS)


@pytest.mark.feature("Tasks", "`tag`: labelled tokens, words and entities")
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_tag_equals_the_pipeline(family: str, tmp_path: Path) -> None:
    config = labelled(LABELS)
    folder = save_checkpoint(tmp_path, family, head="ForTokenClassification", **config)
    model = bytetx.load(folder)
    pipeline = transformers.pipeline("token-classification", str(folder))
    num_entities = 0
    for aggregation, ignore_labels in [*product(AGGREGATIONS, [[]]), ("simple", ["O"])]:
        with warnings.catch_warnings(action="ignore"):
            options = {"aggregation_strategy": aggregation, "ignore_labels": ignore_labels}
            theirs = [pipeline(text, **options) if text else [] for text in SENTENCES]
        options = {"aggregation": aggregation, "ignore_labels": ignore_labels, "truncate": True}
        for ours, entities in zip(model.tag(SENTENCES, **options), theirs, strict=True):
            assert_same_entities(ours, entities)
            num_entities += len(entities)
    assert num_entities > 100


def assert_same_entities(ours: list[Entity], theirs: list[dict]) -> None:
    key = "entity_group" if "entity_group" in (theirs or [{}])[0] else "entity"
    assert [entity.entity for entity in ours] == [entity[key] for entity in theirs]
    for name in ("word", "start", "end"):
        assert [getattr(entity, name) for entity in ours] == [entity[name] for entity in theirs]
    scores = [entity["score"] for entity in theirs]
    np.testing.assert_allclose([entity.score for entity in ours], scores, atol=1e-5)
    if key == "entity":
        assert [entity.index for entity in ours] == [entity["index"] for entity in theirs]


def test_tag_word_ids_ignored_labels_and_token_ids(tmp_path: Path) -> None:
    config = labelled(LABELS)
    model = bytetx.load(save_checkpoint(tmp_path, head="ForTokenClassification", **config))
    text = SENTENCES[1]
    entities = model.tag([text], aggregation="none", ignore_labels=(), truncate=True)[0]
    encoding = model.tokenizer.encode([text], with_offsets=True)[0]
    assert [entity.word_id for entity in entities] == encoding.word_ids[1:-1]
    assert [(entity.start, entity.end) for entity in entities] == encoding.offsets[1:-1]
    from_ids = model.tag([encoding.ids], aggregation="none", ignore_labels=())[0]
    assert [entity.entity for entity in from_ids] == [entity.entity for entity in entities]
    assert {(entity.start, entity.end) for entity in from_ids} == {(None, None)}
    with pytest.raises(InputError, match="aggregation must be one of none, simple"):
        model.tag([text], aggregation="best")


@pytest.mark.feature("Tasks", "`fill_mask`")
@pytest.mark.parametrize("family", TOKENIZERS)
def test_fill_mask_equals_the_pipeline(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, family, head="ForMaskedLM")
    pipeline = transformers.pipeline("fill-mask", str(folder))
    mask = pipeline.tokenizer.mask_token
    inputs = [f"The {mask} brown fox, isn't it?", f"{mask} is {mask}.", f"a {mask} pad token"]
    targets = sorted(pipeline.tokenizer.get_vocab())[20:30]
    for options in ({"top_k": 3}, {"targets": targets}, {"targets": targets, "top_k": 4}):
        ours = bytetx.load(folder).fill_mask(inputs, **options)
        for text, fills in zip(inputs, ours, strict=True):
            theirs = pipeline(text, **options)
            rows = [theirs] if isinstance(theirs[0], dict) else theirs
            expected = [entry | {"mask_index": i} for i, row in enumerate(rows) for entry in row]
            assert_same_fills([asdict(fill) for fill in fills], expected)


def assert_same_fills(ours: list[dict], theirs: list[dict]) -> None:
    scores, expected = ([fill.pop("score") for fill in fills] for fills in (ours, theirs))
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert ours == theirs


def test_fill_mask_errors(tmp_path: Path) -> None:
    model = bytetx.load(save_checkpoint(tmp_path, head="ForMaskedLM"))
    with pytest.raises(InputError, match=r"texts\[1\] has no \[MASK\] to fill"):
        model.fill_mask(["a [MASK]", "a dog"])
    results = model.fill_mask(["a dog", "a [MASK]"], on_error="return")
    assert isinstance(results[0], InputError) and len(results[1]) == 5
    with pytest.raises(InputError, match="targets is empty"):
        model.fill_mask(["a [MASK]"], targets=[])
    with pytest.raises(InputError, match=r"targets\[1\] holds half a surrogate pair"):
        model.fill_mask(["a [MASK]"], targets=["a", "\ud800"])


@pytest.mark.parametrize("task", ["classify", "tag", "fill_mask"])
def test_missing_head_is_named(task: str, tmp_path: Path) -> None:
    model = bytetx.load(save_checkpoint(tmp_path))
    with pytest.raises(InputError, match=r"this checkpoint \(BertModel\) has no .* head"):
        getattr(model, task)(["a"])


def test_head_is_chosen_by_tensors_where_architectures_is_silent(tmp_path: Path) -> None:
    for head, name in (
        ("ForSequenceClassification", "sequence classification"),
        ("ForTokenClassification", "token classification"),
        ("ForMaskedLM", "masked language model"),
    ):
        folder = save_checkpoint(tmp_path / head, head=head)
        edit_json(folder / "config.json", architectures=None)
        assert bytetx.load(folder).info()["heads"] == [name]


def test_architecture_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    edit_json(folder / "config.json", architectures=["BertForTokenClassification"])
    with pytest.raises(CheckpointError, match="lacks that head's tensors"):
        bytetx.load(folder)


@pytest.mark.parametrize(
    "architecture",
    [
        "BertForMultipleChoice",
        "BertForNextSentencePrediction",
        "BertForSomethingElse",
    ],
)
def test_a_head_that_bytetx_lacks_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    wanted = bytetx.load(folder).embed(["a dog"]).vectors
    edit_json(folder / "config.json", architectures=[architecture])
    with pytest.raises(CheckpointError) as caught:
        bytetx.load(folder)
    text = str(caught.value)
    assert text.startswith(f"config.json says {architecture}, a head that bytetx does not have")
    assert "BertForTokenClassification, BertForQuestionAnswering, BertForMaskedLM" in text
    advised = json.loads("{" + text[text.index('"architectures"') :] + "}")
    edit_json(folder / "config.json", **advised)  # what the error says works
    assert (bytetx.load(folder).embed(["a dog"]).vectors == wanted).all()


def test_a_sentence_model_that_names_the_class_it_was_trained_from(tmp_path: Path) -> None:
    """As sentence-transformers/all-mpnet-base-v2 does, which has no masked-LM tensors."""
    folder = save_sentence_model(tmp_path, [Pooling(48)], family="mpnet")
    wanted = bytetx.load(folder).embed(["a dog"]).vectors
    edit_json(folder / "config.json", architectures=["MPNetForMaskedLM"])
    model = bytetx.load(folder)
    assert model.info()["heads"] == []
    assert (model.embed(["a dog"]).vectors == wanted).all()
    with pytest.raises(InputError, match="has no masked language model head"):
        model.fill_mask(["a <mask>"])


@pytest.mark.parametrize(
    ("method", "said"),
    [("gptq", "GPTQ"), ("awq", "AWQ"), ("bitsandbytes", "bitsandbytes"), ("new", "new")],
)
def test_quantised_checkpoints_are_named(method: str, said: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    edit_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(CheckpointError, match=rf"weights are quantised \({said}\).*float16"):
        bytetx.load(folder)
