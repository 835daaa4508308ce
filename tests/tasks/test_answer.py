"""Model.answer against transformers' logits and a plain reference of its pipeline's spans."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import transformers
from checkpoints import TOKENIZERS, save_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from tiny import one_thread  # noqa: F401  (a fixture)

import bytetx
from bytetx.encode.request import Alignment
from bytetx.errors import CheckpointError, InputError, OptionError, TooLongError
from bytetx.tasks.answer import AnswerTask

CONTEXT = "Angela Merkel met Zaphod in Berlin-Mitte on 3rd March 2024. New York is big."
LONG = " ".join([CONTEXT] * 4)
QUESTIONS = ["Who met Zaphod?", "Where?", "is it big"]
FAMILIES = [
    name
    for name in TOKENIZERS
    if hasattr(transformers, f"{tiny.FAMILIES[name][0]}ForQuestionAnswering")
]


def reference(
    folder: Path,
    question: str,
    context: str,
    *,
    max_tokens: int,
    stride: int,
    top_k: int = 1,
    max_answer: int = 15,
    no_answer: bool = False,
) -> list[tuple[str, float]]:
    """The steps of transformers' former question-answering pipeline, with its tokenizer's own
    overflow, on padded chunks one by one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    chunks = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=max_tokens,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    found, null = {}, 1.0
    for i, ids in enumerate(chunks["input_ids"]):
        names = ("token_type_ids",) if "token_type_ids" in chunks else ()
        with torch.no_grad():
            out = model(
                torch.tensor([ids]), **{name: torch.tensor([chunks[name][i]]) for name in names}
            )
        start, end = out.start_logits[0].double(), out.end_logits[0].double()
        sequence = chunks.sequence_ids(i)
        for place, kind in enumerate(sequence):
            if kind != 1 and place != 0:
                start[place] = end[place] = -10000
        start, end = start.softmax(0), end.softmax(0)
        null = min(null, float(start[0] * end[0]))
        encoding = chunks.encodings[i]
        for a, kind in enumerate(sequence):
            for b in range(a, min(a + max_answer, len(sequence))):
                if kind != 1 or sequence[b] != 1:
                    continue
                low = encoding.word_to_chars(encoding.token_to_word(a), sequence_index=1)[0]
                high = encoding.word_to_chars(encoding.token_to_word(b), sequence_index=1)[1]
                score = float(start[a] * end[b])
                found[low, high] = max(found.get((low, high), 0.0), score)
    answers = [(context[low:high], score) for (low, high), score in found.items()]
    if no_answer:
        answers.append(("", null))
    return sorted(answers, key=lambda pair: -pair[1])[:top_k]


def agrees(found: list[object], wanted: list[tuple[str, float]]) -> None:
    assert [answer.score for answer in found] == pytest.approx([s for _, s in wanted], rel=1e-3)
    assert [answer.answer for answer in found] == [text for text, _ in wanted]


@pytest.mark.feature("Tasks", "`answer`: spans of extractive question answering")
@pytest.mark.parametrize("family", FAMILIES)
def test_answers(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, family, head="ForQuestionAnswering", num_labels=2)
    model = bytetx.load(folder, device="cpu")
    pairs = [(question, LONG) for question in QUESTIONS] + [("Where?", CONTEXT)]
    results = model.answer(pairs, stride=5, chunk_tokens=38)
    for (question, context), found in zip(pairs, results, strict=True):
        wanted = reference(folder, question, context, max_tokens=38, stride=5)
        agrees(found, wanted)
        assert context[found[0].start : found[0].end] == found[0].answer
    # Batch mates and order change nothing.
    for pair, found in zip(pairs, results, strict=True):
        assert list(model.answer([pair], stride=5, chunk_tokens=38)) == [found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qa")
    return save_checkpoint(path, "bert", head="ForQuestionAnswering", num_labels=2)


@pytest.fixture(scope="module")
def model(folder: Path) -> bytetx.Model:
    return bytetx.load(folder, device="cpu")


@pytest.mark.parametrize("stride", [0, 1, 12])
@pytest.mark.parametrize("max_answer", [1, 4])
def test_options(model: bytetx.Model, folder: Path, stride: int, max_answer: int) -> None:
    options = {"top_k": 1, "max_answer_tokens": max_answer, "allow_no_answer": True}
    found = model.answer([(QUESTIONS[0], LONG)], stride=stride, **options)[0]
    wanted = reference(
        folder,
        QUESTIONS[0],
        LONG,
        max_tokens=40,
        stride=stride,
        max_answer=max_answer,
        no_answer=True,
    )
    agrees(found, wanted)
    everything = model.answer([(QUESTIONS[0], LONG)], top_k=100_000, allow_no_answer=True)[0]
    assert [a.score for a in everything] == sorted((a.score for a in everything), reverse=True)
    assert sum(answer.answer == "" for answer in everything) == 1


def test_parts_of_words(model: bytetx.Model) -> None:
    pairs = [("Who?", "antidisestablishmentarianism unbelievable")]
    whole = model.answer(pairs, top_k=5)[0]
    words = {"antidisestablishmentarianism", "unbelievable", pairs[0][1]}
    assert {answer.answer for answer in whole} <= words
    parts = model.answer(pairs, top_k=50, whole_words=False)[0]
    assert {answer.answer for answer in parts} - words


def test_bad_input(model: bytetx.Model) -> None:
    long_question = " ".join(["fox"] * 60)
    given = ["no pair", [5, 6], (long_question, CONTEXT), ("Who?", ""), ("Who?", CONTEXT)]
    results = model.answer(given, on_error="return")
    for index in (0, 1):
        assert isinstance(results[index], InputError)
        assert f"texts[{index}] must be a (question, context) pair" in str(results[index])
    assert isinstance(results[2], TooLongError)
    assert "question that leaves 0 of 40 tokens" in str(results[2])
    assert results[3] == []
    assert len(results[4]) == 1
    no_answer = model.answer([("Who?", "")], allow_no_answer=True)[0]
    assert [answer.answer for answer in no_answer] == [""]
    with pytest.raises(InputError, match=r"texts\[0\] must be a \(question, context\) pair"):
        model.answer(["no pair"])
    for options in ({"top_k": 0}, {"stride": -1}, {"max_answer_tokens": 0}, {"chunk_tokens": 0}):
        with pytest.raises(OptionError, match=next(iter(options))):
            model.answer([], **options)


def test_other_heads(model: bytetx.Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no sequence classification head"):
        model.classify(["a"])
    plain = bytetx.load(save_checkpoint(tmp_path / "plain"), device="cpu")
    with pytest.raises(InputError, match="has no question answering head"):
        plain.answer([("a", "b")])
    save_checkpoint(tmp_path / "three", head="ForQuestionAnswering", num_labels=3)
    with pytest.raises(CheckpointError, match=r"qa_outputs.weight' has shape \(3, 48\)"):
        bytetx.load(tmp_path / "three", device="cpu")


@given(st.data())
def test_spans_of_any_logits(data: st.DataObject) -> None:
    """The best spans are those of the whole table of starts and ends."""
    num_tokens, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
    top_k = data.draw(st.integers(1, 6))
    value = st.floats(-5, 5, width=32)
    logits = np.array(
        data.draw(
            st.lists(st.tuples(value, value), min_size=num_tokens + 3, max_size=num_tokens + 3)
        ),
        dtype=np.float32,
    )
    sequence = [None, 0, *[1] * num_tokens, None]
    offsets = [(0, 0), (0, 1), *[(i, i + 1) for i in range(num_tokens)], (0, 0)]
    words = [None, 0, *range(num_tokens), None]
    alignment = Alignment("x" * num_tokens, offsets, words, [], sequence)
    task = AnswerTask(None, top_k, width, False, True)
    found = task.merge([task._of_chunk(logits, alignment)])
    masked = np.where(np.isin(np.arange(len(logits)), [0, *range(2, num_tokens + 2)]), 0.0, -1e4)
    p = np.exp(logits.T.astype(np.float64) + masked)
    p /= p.sum(axis=1, keepdims=True)
    wanted = sorted(
        (
            p[0, 2 + a] * p[1, 2 + b]
            for a in range(num_tokens)
            for b in range(a, min(a + width, num_tokens))
        ),
        reverse=True,
    )[:top_k]
    assert [answer.score for answer in found] == pytest.approx(wanted, rel=1e-4)
    for answer in found:
        assert answer.start < answer.end <= num_tokens and answer.end - answer.start <= width
