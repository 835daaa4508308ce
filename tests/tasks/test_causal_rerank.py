"""rerank and classify of causal models: yes or no as Qwen3-Reranker's model card computes it, and
heads on the last token."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import SENTENCES, save_causal
from tiny import one_thread  # noqa: F401  (a fixture)

import bytetx
from bytetx.errors import InputError, OptionError, TooLongError
from bytetx.nn.heads import LmHead

DOCUMENTS = [text for text in SENTENCES if text]
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"


def save_reranker(folder: Path) -> Path:
    """A random Qwen3 with the tokens yes and no, and room for the prompt."""
    save_causal(folder, "qwen3", max_position_embeddings=1024)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.model_max_length = 700
    tokenizer.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.2)
    model.save_pretrained(folder)
    return folder


def expected(folder: Path, query: str, document: str, instruction: str) -> float:
    """The steps of the model card."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    parts = (tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, body, AFTER))
    ids = [token for part in parts for token in part]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    pair = torch.stack([logits[tokenizer.convert_tokens_to_ids(word)] for word in ("no", "yes")])
    return float(torch.log_softmax(pair, dim=0)[1].exp())


@pytest.mark.parametrize("instruction", [None, "Find what packs tokens"])
def test_yes_or_no(instruction: str | None, tmp_path: Path) -> None:
    folder = save_reranker(tmp_path)
    model = bytetx.load(folder, device="cpu")
    hits = model.rerank("who met Zaphod?", DOCUMENTS, instruction=instruction)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    for hit in hits:
        assert hit.document == DOCUMENTS[hit.index]
        wanted = expected(folder, "who met Zaphod?", hit.document, instruction or DEFAULT)
        assert hit.score == pytest.approx(wanted, abs=1e-4)
    raw = model.rerank("who met Zaphod?", DOCUMENTS, instruction=instruction, raw_scores=True)
    chances = torch.sigmoid(torch.tensor([hit.score for hit in raw])).tolist()
    assert chances == pytest.approx([hit.score for hit in hits], abs=1e-5)
    assert len(model.rerank("q", DOCUMENTS, top_k=2)) == 2


def test_the_vocabulary_is_not_multiplied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rows of the two answers, whichever of all labels they are."""
    folder = save_reranker(tmp_path)
    wanted = {
        hit.index: hit.score for hit in bytetx.load(folder, device="cpu").rerank("q", DOCUMENTS)
    }

    def refuse(head: LmHead, rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the whole vocabulary")

    monkeypatch.setattr(LmHead, "forward", refuse)
    (folder / "decision.json").write_text(json.dumps({"labels": {"noul": ["no", "the"]}}))
    model = bytetx.load(folder, device="cpu")
    head = model.context.heads.lm
    assert head is not None and head.labels is not None
    yes, no = (model.tokenizer.backend.token_to_id(word) for word in ("yes", "no"))
    assert head.labels.token_ids[:2] != (yes, no)
    hits = model.rerank("q", DOCUMENTS)
    assert {hit.index: hit.score for hit in hits} == pytest.approx(wanted, abs=1e-6)


def test_long_documents(tmp_path: Path) -> None:
    model = bytetx.load(save_reranker(tmp_path), device="cpu")
    given = ["short", "word " * 1000, "other"]
    with pytest.raises(TooLongError, match=r"documents\[1\] makes a prompt of \d+ tokens"):
        model.rerank("q", given)
    kept = model.rerank("q", given, on_error="return")
    assert {hit.index for hit in kept} == {0, 2}
    assert isinstance(kept.errors[1], TooLongError)
    cut = model.rerank("q", given, truncate=True)
    assert len(cut) == 3 and cut.stats.num_truncated == 1
    with pytest.raises(InputError, match=r"documents\[0\]"):
        model.rerank("q", [5])


def test_bad_documents_of_a_causal_reranker_fail_alone(tmp_path: Path) -> None:
    model = bytetx.load(save_reranker(tmp_path), device="cpu")
    given = ["a", "\ud800", None]
    got = model.rerank("q", given, on_error="return")
    assert [(hit.index, hit.score) for hit in got] == [(0, model.rerank("q", ["a"])[0].score)]
    assert {index: type(error) for index, error in got.errors.items()} == dict.fromkeys(
        (1, 2), InputError
    )
    half = "holds half a surrogate pair at character 0"
    assert str(got.errors[1]).startswith(f"documents[1] {half}")
    assert str(got.errors[2]) == "documents[2] must be a str, got NoneType"
    with pytest.raises(InputError, match=rf"documents\[1\] {half}"):
        model.rerank("q", given)
    with pytest.raises(OptionError, match=f"query {half}"):
        model.rerank("\ud800", ["a"], on_error="return")
    with pytest.raises(OptionError, match=f"instruction {half}"):
        model.rerank("q", ["a"], instruction="\ud800", on_error="return")
    with pytest.raises(UnicodeEncodeError):
        model.tokenizer.encode_plain("\ud800")


def test_other_models(tmp_path: Path) -> None:
    model = bytetx.load(save_causal(tmp_path / "plain"), device="cpu")
    with pytest.raises(InputError, match='no tokens "yes" and "no"'):
        model.rerank("q", DOCUMENTS)
    labels = {"num_labels": 1, "pad_token_id": 1}
    folder = save_causal(tmp_path / "one", head="ForSequenceClassification", **labels)
    with pytest.raises(OptionError, match="instruction is for causal rerankers"):
        bytetx.load(folder, device="cpu").rerank("q", DOCUMENTS, instruction="x")


@pytest.mark.feature("Tasks", "`classify` and `rerank` by causal models")
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox"])
def test_classify_and_rerank_by_the_last_token(name: str, tmp_path: Path) -> None:
    for num_labels in (1, 3):
        folder = save_causal(
            tmp_path / str(num_labels),
            name,
            "ForSequenceClassification",
            num_labels=num_labels,
            pad_token_id=1,
        )
        # Qwen2's own class would build another post-processor than the file's.
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        model = bytetx.load(folder, device="cpu")
        given = [("a query", text) for text in DOCUMENTS] if num_labels == 1 else DOCUMENTS
        with torch.no_grad():
            wanted = [
                theirs(
                    **tokenizer(*((text,) if isinstance(text, str) else text), return_tensors="pt")
                )
                .logits[0]
                .tolist()
                for text in given
            ]
        if num_labels == 1:
            hits = model.rerank("a query", DOCUMENTS, raw_scores=True)
            for hit in hits:
                assert hit.score == pytest.approx(wanted[hit.index][0], abs=1e-4)
            continue
        for labels, logits in zip(model.classify(given, raw_scores=True), wanted, strict=True):
            found = {label.label: label.score for label in labels}
            assert [found[f"LABEL_{i}"] for i in range(3)] == pytest.approx(logits, abs=1e-4)
