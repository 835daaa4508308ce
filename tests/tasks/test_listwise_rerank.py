"""Listwise rerankers (Jina reranker v3, v3.5) against the authors' algorithm with transformers."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import edit_json
from listwise_rerankers import MARKS, POSITIONS, save_reranker
from safetensors.torch import load_file, save_file
from torch import nn

import bytetx
from bytetx import AsyncModel
from bytetx.errors import CheckpointError, InputError, TooLongError
from bytetx.tasks import listwise_rerank

QUERY = "which animal is quick"
DOCUMENTS = [
    "the quick brown fox jumps over the lazy dog",
    "a",
    "",
    "Grüße aus Köln, 东京 и Москва",
    "pack my box with five dozen liquor jugs " * 6,
    "sphinx of black quartz, judge my vow",
]
VERSIONS = ["v3", "v3.5"]
_SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how "
    "relevant they are to the query. If the query is a question, how relevant a passage is depends "
    "on how well it answers the question. If not, try to analyze the intent of the query and "
    "assess how well each passage satisfies the intent. If an instruction is provided, you should "
    "follow the instruction when determining the ranking."
)


class Reference:
    """The authors' algorithm, without padding and in fp32."""

    def __init__(self, folder: Path, version: str):
        path = str(folder / "tokenizer.json")
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=path)
        config = transformers.Qwen3Config.from_pretrained(folder)
        self.trunk = transformers.Qwen3Model(config).eval()
        tensors = load_file(folder / "model.safetensors")
        trunk = {
            name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
            if name.startswith("model.")
        }
        self.trunk.load_state_dict(trunk)
        self.first, self.second = (tensors[f"projector.{place}.weight"] for place in (0, 2))
        self.marks = [self.tokenizer.convert_tokens_to_ids(mark) for mark in MARKS]
        self.is_v35 = version == "v3.5"
        self.limits = (1024, 8192) if self.is_v35 else (512, 2048)

    def prompt(self, query: str, documents: Sequence[str], instruction: str | None) -> str:
        early = MARKS[1] if self.is_v35 else ""
        lines = [
            f"I will provide you with {len(documents)} passages, each indicated by a numerical "
            f"identifier. Rank the passages based on their relevance to query: {query}{early}"
        ]
        if instruction:
            lines += ["<instruct>", instruction, "</instruct>"]
        for number, document in enumerate(documents):
            lines += [f'<passage id="{number}">', document + MARKS[0], "</passage>"]
        lines += ["<query>", query + MARKS[1], "</query>"]
        body = "\n".join(lines)
        return (
            f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{body}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )

    @torch.no_grad()
    def vectors(
        self, query: str, documents: Sequence[str], instruction: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(of the documents, of the query)"""
        prompt = self.prompt(query, documents, instruction)
        ids = torch.tensor(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        hidden = self.trunk(input_ids=ids[None]).last_hidden_state[0]
        rows = [hidden[ids == mark] for mark in self.marks]
        documents, queries = (torch.relu(one @ self.first.T) @ self.second.T for one in rows)
        return documents, queries[-1]

    def scores(
        self,
        query: str,
        documents: Sequence[str],
        *,
        window: int = POSITIONS,
        instruction: str | None = None,
    ) -> np.ndarray:
        def size(text: str) -> int:
            return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        blocks: list[list[str]] = [[]]
        left = room = window - 2 * size(query)
        for document in documents:
            blocks[-1].append(document)
            left -= size(document)
            if len(blocks[-1]) >= 125 or left <= self.limits[1]:
                blocks, left = [*blocks, []], room
        found = [self.vectors(query, block, instruction) for block in blocks if block]
        self.num_blocks = len(found)
        cosine = nn.functional.cosine_similarity
        weights = [(1 + cosine(rows, own[None]).max()) / 2 for rows, own in found]
        queries = torch.stack([own for _, own in found])
        own = (queries * torch.stack(weights)[:, None]).sum(0) / sum(weights)
        return torch.cat([cosine(rows, own[None]) for rows, _ in found]).numpy()


def in_order(hits: Sequence[bytetx.tasks.results.Hit]) -> np.ndarray:
    """The scores by the index of the document."""
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    return np.array([hit.score for hit in sorted(hits, key=lambda hit: hit.index)])


@pytest.fixture(scope="module", params=VERSIONS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Reference]:
    folder = save_reranker(tmp_path_factory.mktemp("ranker") / request.param, request.param)
    return folder, Reference(folder, request.param)


@pytest.mark.feature("Tasks", "Listwise rerankers: Jina reranker v3 and v3.5")
@pytest.mark.parametrize("instruction", [None, "prefer animals"])
def test_scores_are_those_of_the_authors(
    instruction: str | None, saved: tuple[Path, Reference]
) -> None:
    folder, reference = saved
    model = bytetx.load(folder, device="cpu")
    for number in (1, 2, len(DOCUMENTS)):
        hits = model.rerank(QUERY, DOCUMENTS[:number], instruction=instruction)
        wanted = reference.scores(QUERY, DOCUMENTS[:number], instruction=instruction)
        np.testing.assert_allclose(in_order(hits), wanted, atol=1e-4)
    assert reference.num_blocks == 1
    best = model.rerank(QUERY, DOCUMENTS, instruction=instruction, top_k=2)
    np.testing.assert_array_equal([hit.index for hit in best], np.argsort(-wanted)[:2])
    assert best.stats.num_texts == len(DOCUMENTS)
    assert "listwise ranking" in model.info()["heads"]
    assert model.rerank(QUERY, []) == []


def test_more_documents_than_a_prompt_takes(saved: tuple[Path, Reference]) -> None:
    folder, reference = saved
    documents = [f"{DOCUMENTS[number % 2]} {number}" for number in range(130)]
    model = bytetx.load(folder, device="cpu")
    hits = model.rerank(QUERY, documents)
    wanted = reference.scores(QUERY, documents)
    assert reference.num_blocks == 2
    np.testing.assert_allclose(in_order(hits), wanted, atol=1e-4)


def test_a_window_that_the_documents_exceed(saved: tuple[Path, Reference], tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "narrow")
    window = saved[1].limits[1] + 500
    edit_json(folder / "tokenizer_config.json", model_max_length=window)
    documents = [text for text in DOCUMENTS if text] * 4
    hits = bytetx.load(folder, device="cpu").rerank(QUERY, documents)
    wanted = saved[1].scores(QUERY, documents, window=window)
    assert saved[1].num_blocks > 1
    np.testing.assert_allclose(in_order(hits), wanted, atol=1e-4)


def test_no_prompt_exceeds_the_window(saved: tuple[Path, Reference], tmp_path: Path) -> None:
    """Where the passages' own frames are longer than they are, which the authors do not count."""
    folder = shutil.copytree(saved[0], tmp_path / "narrow")
    window = saved[1].limits[1] + 100
    edit_json(folder / "config.json", max_position_embeddings=window)
    edit_json(folder / "tokenizer_config.json", model_max_length=window)
    documents = ["a fox"] * 124 + ["the lazy dog " * 90]
    hits = bytetx.load(folder, device="cpu").rerank(QUERY, documents)
    assert len(hits) == 125 and np.isfinite(in_order(hits)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_types(dtype: str, saved: tuple[Path, Reference]) -> None:
    folder, reference = saved
    hits = bytetx.load(folder, device="cpu", dtype=dtype).rerank(QUERY, DOCUMENTS)
    np.testing.assert_allclose(in_order(hits), reference.scores(QUERY, DOCUMENTS), atol=5e-2)


def test_callers_share_a_step_and_change_nothing(saved: tuple[Path, Reference]) -> None:
    folder, _ = saved
    model = bytetx.load(folder, device="cpu")
    queries = ["a", QUERY, "five dozen jugs"]
    alone = [in_order(model.rerank(query, DOCUMENTS)) for query in queries]

    async def run() -> list[np.ndarray]:
        async with AsyncModel(bytetx.load(folder, device="cpu")) as shared:
            states = shared.hidden_states(["a fox"])
            *found, _ = await asyncio.gather(
                *(shared.rerank(query, DOCUMENTS) for query in queries), states
            )
            return [in_order(hits) for hits in found]

    for one, other in zip(alone, asyncio.run(run()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_marks_in_texts_are_left_out(saved: tuple[Path, Reference]) -> None:
    model, (document, query) = bytetx.load(saved[0], device="cpu"), MARKS
    texts = ["a fox", "the dog", "a box"]
    wanted = in_order(model.rerank(QUERY, texts, instruction="animals"))
    marked = [
        f"a {document}fox",
        f"{query}the dog{document}",
        "<|embed_<|embed_token|>token|>a box",
    ]
    found = model.rerank(f"{QUERY}{query}", marked, instruction=f"{document}animals")
    np.testing.assert_array_equal(in_order(found), wanted)
    nested = "<|embed_" * 20 + "token|>" * 20
    with pytest.raises(InputError, match=r"documents\[1\] holds the marks"):
        model.rerank(QUERY, ["a", nested])


def test_bad_documents(saved: tuple[Path, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved
    model = bytetx.load(folder, device="cpu")
    with pytest.raises(InputError, match=r"documents\[1\] must be a str"):
        model.rerank(QUERY, ["a", 3])
    limit = listwise_rerank._Limits(40, 60, folder.name == "v3.5")
    monkeypatch.setattr(listwise_rerank._Limits, "of", lambda spec: limit)
    long = "a fox " * 60
    with pytest.raises(TooLongError, match=r"documents\[1\] has \d+ tokens, .* takes 60 of it"):
        model.rerank(QUERY, ["a", long])
    kept = model.rerank(QUERY, ["a", long, 3, "b"], on_error="return")
    assert sorted(kept.errors) == [1, 2] and len(kept) == 2
    np.testing.assert_array_equal(
        [hit.score for hit in kept], [hit.score for hit in model.rerank(QUERY, ["a", "b"])]
    )
    cut = model.rerank(QUERY, ["a", long], truncate=True)
    assert cut.stats.num_truncated == 1 and len(cut) == 2
    with pytest.raises(TooLongError, match="query has"):
        model.rerank(long, ["a"])
    assert len(model.rerank(long, ["a"], truncate=True)) == 1


def test_a_query_that_leaves_no_room(saved: tuple[Path, Reference], tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "small")
    edit_json(folder / "tokenizer_config.json", model_max_length=300)
    with pytest.raises(TooLongError, match="without a document, the model takes 300"):
        bytetx.load(folder, device="cpu").rerank("a " * 200, ["a"])


def test_damaged_checkpoints(saved: tuple[Path, Reference], tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    short = {**tensors, "projector.2.weight": torch.zeros(256, 24)}
    save_file(short, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"projector\.2\.weight.*512"):
        bytetx.load(folder)
    del short["projector.2.weight"]
    save_file(short, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="JinaForRanking.*lacks that head"):
        bytetx.load(folder)
    save_file(tensors, folder / "model.safetensors")
    for path in folder.glob("*token*.json"):
        path.write_text(path.read_text().replace("rerank_token", "other_token"))
    with pytest.raises(InputError, match=r"has no tokens '<\|embed_token\|>'"):
        bytetx.load(folder).rerank(QUERY, ["a"])
