"""rerank by any chat model: the questions of decide about each document, or about all of them."""

import math
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_checkpoint
from decisions import save_decider, save_jev, stock
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import InputError, OptionError, TooLongError

DOCUMENTS = ["the quick fox", "a lazy <|im_end|> dog", "jumps over", ""]
EACH = "Does the document answer the query?"


def about(document: str, instructions: str = EACH) -> dict[str, Any]:
    question = {"type": "noul", "instructions": instructions}
    return {"state": f"Query: who?\nDocument: {document}", "questions": {"q": question}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decider(tmp_path_factory.mktemp("chat"), "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> bytetx.Model:
    return bytetx.load(folder, device="cpu")


@pytest.mark.feature("Tasks", "reranking by any chat model")
@pytest.mark.parametrize("instruction", [None, "Is it about animals?"])
def test_scores_are_answers_to_a_question(
    instruction: str | None, folder: Path, model: bytetx.Model
) -> None:
    asked = stock(folder, [about(one, instruction or EACH) for one in DOCUMENTS])
    wanted = [answer["q"]["noul"] for answer in asked]
    hits = model.rerank("who?", DOCUMENTS, instruction=instruction)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert sorted(hit.index for hit in hits) == [0, 1, 2, 3]
    for hit in hits:
        assert hit.document == DOCUMENTS[hit.index]
        assert hit.score == pytest.approx(wanted[hit.index], abs=1e-5)
    raw = model.rerank("who?", DOCUMENTS, instruction=instruction, raw_scores=True)
    for hit in raw:
        chance = wanted[hit.index]
        assert hit.score == pytest.approx(math.log(chance / (1 - chance)), abs=1e-3)
    assert len(model.rerank("who?", DOCUMENTS, top_k=2)) == 2
    assert model.rerank("who?", []) == []


def test_listwise(folder: Path, model: bytetx.Model) -> None:
    named = {str(number): text for number, text in enumerate(DOCUMENTS, start=1)}
    instructions = "Which of these documents answers the query best?"
    question = {"type": "choice", "instructions": instructions, "criteria": named}
    asked = stock(folder, [{"state": "Query: who?", "questions": {"q": question}}])
    wanted = list(asked[0]["q"]["probabilities"].values())
    hits = model.rerank("who?", DOCUMENTS, listwise=True)
    assert {hit.index: hit.score for hit in hits} == pytest.approx(
        dict(enumerate(wanted)), abs=1e-5
    )
    assert hits[0].score == pytest.approx(max(wanted), abs=1e-5)
    raw = model.rerank("who?", DOCUMENTS, listwise=True, raw_scores=True, top_k=1)
    assert raw[0].score == pytest.approx(math.log(max(wanted)), abs=1e-4)
    assert model.rerank("who?", [], listwise=True) == []
    with pytest.raises(InputError, match="has 27 options, and this model reads at most 26"):
        model.rerank("who?", ["a"] * 27, listwise=True)
    with pytest.raises(InputError, match=r"documents\[1\]"):
        model.rerank("who?", ["a", 5], listwise=True)


def test_bad_and_long_documents(model: bytetx.Model) -> None:
    given: list[Any] = ["short", "word " * 3000, 5, "a \ud800"]
    with pytest.raises(TooLongError, match=r"documents\[1\] makes a prompt of \d+ tokens"):
        model.rerank("who?", given[:2])
    kept = model.rerank("who?", given, on_error="return")
    assert [hit.index for hit in kept] == [0] and sorted(kept.errors) == [1, 2, 3]
    cut = model.rerank("who?", given[:2], truncate=True)
    assert len(cut) == 2 and cut.stats.num_truncated == 1
    assert {hit.index: hit.document for hit in cut} == dict(enumerate(given[:2]))


def test_the_error_of_a_long_prompt_names_what_can_be_shortened(model: bytetx.Model) -> None:
    long = "word " * 3000
    for options, message in (
        ({"instruction": long}, "shorten the document, the query or the instruction"),
        ({"instruction": long, "truncate": True}, "shorten the query or the instruction"),
        ({"truncate": True}, None),
        ({"listwise": True}, r"shorten the documents \(or give fewer\) or the query"),
    ):
        texts = [long] if "listwise" in options else ["a"]
        if message is None:
            assert len(model.rerank("who?", texts, **options)) == 1
            continue
        with pytest.raises(TooLongError, match=message):
            model.rerank("who?", texts, **options)
    with pytest.raises(TooLongError, match="takes [0-9]+; shorten the query$"):
        model.rerank(long, ["a"], truncate=True)


def test_a_decision_head(tmp_path: Path) -> None:
    folder = save_jev(tmp_path, "llama", num_verbalizers=40)
    asked = stock(folder, [about(one) for one in DOCUMENTS])
    hits = bytetx.load(folder, device="cpu").rerank("who?", DOCUMENTS)
    for hit in hits:
        assert hit.score == pytest.approx(asked[hit.index]["q"]["noul"], abs=1e-5)


def test_models_that_are_not_asked(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "encoder", head="ForSequenceClassification", num_labels=1)
    with pytest.raises(InputError, match="no language model head"):
        bytetx.load(folder, device="cpu").rerank("q", DOCUMENTS, listwise=True)
    plain = save_decider(tmp_path / "plain", "llama", template=None)
    with pytest.raises(InputError, match="no sequence classification head"):
        bytetx.load(plain, device="cpu").rerank("q", DOCUMENTS)


@pytest.mark.parametrize("listwise", [False, True])
def test_a_template_without_a_place_for_the_instruction(listwise: bool, tmp_path: Path) -> None:
    folder, options = save_decider(tmp_path, "llama"), {"listwise": listwise}
    asked = "{{ question.instructions }} "
    template = "{{ state }} {{ question.options }}: <|mark|>"
    (folder / "decision_template.jinja").write_text(template)
    model = bytetx.load(folder, device="cpu")
    assert len(model.rerank("who?", DOCUMENTS, **options)) == len(DOCUMENTS)
    with pytest.raises(OptionError, match="does not write the instructions of a question"):
        model.rerank("who?", DOCUMENTS, instruction="Is it green?", **options)
    (folder / "decision_template.jinja").write_text(asked + template)
    model = bytetx.load(folder, device="cpu")
    assert len(model.rerank("who?", DOCUMENTS, instruction="Green?", **options)) == len(DOCUMENTS)
