"""Common prefixes of texts: found, kept together in steps, computed once with the same bits."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import save_causal, save_checkpoint
from decisions import save_decider
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_thread  # noqa: F401  (autouse)
from tiny_decoders import DECODERS

import bytetx
from bytetx.encode.prefixes import MIN_PREFIX_TOKENS, prefix_order, share_prefixes
from bytetx.encode.request import Requests
from bytetx.encode.request_queue import OpenCall, RequestQueue
from bytetx.model import Model
from bytetx.nn.transformer import Transformer
from bytetx.sequence_tree import MAX_ANCESTORS


def requests_of(texts: list[list[int]]) -> Requests:
    return Requests(
        np.arange(len(texts)),
        np.array([len(text) for text in texts], dtype=np.int32),
        np.array([token for text in texts for token in text], dtype=np.int32),
        np.zeros(len(texts), dtype=bool),
    )


@st.composite
def texts_with_prefixes(draw: st.DrawFn) -> list[list[int]]:
    """Texts that grow from others, some of them equal, some of no tokens."""
    texts: list[list[int]] = [[]]
    for _ in range(draw(st.integers(0, 14))):
        start = draw(st.sampled_from(texts))
        added = draw(st.sampled_from([0, 1, 5, 31, 32, 33, 64, 100]))
        texts.append(start + [draw(st.integers(0, 3))] * added)
    return draw(st.permutations(texts))


@settings(max_examples=150, deadline=None)
@given(texts=texts_with_prefixes(), multiple=st.sampled_from([1, 64]))
def test_shared_rows_hold_every_token_of_every_text(texts: list[list[int]], multiple: int) -> None:
    requests = requests_of(texts)
    found = share_prefixes(requests, multiple=multiple)
    if found is None:
        return
    ids, tree = requests.token_ids[found.kept], found.tree
    assert (ids[found.rows] == requests.token_ids).all()
    positions = np.concatenate([np.arange(len(text)) for text in texts])
    assert (tree.positions()[found.rows] == positions).all()
    assert len(ids) < requests.total_tokens
    prefixes = np.unique(tree.parents[tree.parents >= 0])
    assert (tree.seqlens[prefixes] >= min(MIN_PREFIX_TOKENS, multiple)).all()
    assert (tree.seqlens[prefixes] % multiple == 0).all()
    # Each text ends with a row of its own.
    ends = found.rows[requests.cu_seqlens[1:][requests.seqlens > 0] - 1]
    assert len(set(ends.tolist())) == len(ends)


def test_nested_prefixes_become_nested_sequences() -> None:
    instruction, state = [1] * 40, [2] * 50
    texts = [instruction + state + [3, i] for i in range(3)] + [instruction + [4] * 3]
    found = share_prefixes(requests_of(texts))
    assert found is not None
    assert sorted(found.tree.seqlens.tolist()) == [1, 1, 1, 3, 40, 51]
    assert found.tree.num_rows == 40 + 51 + 3 + 3


def test_deeper_prefixes_than_a_tree_has_are_computed_for_each_text() -> None:
    text, texts = [], []
    for level in range(MAX_ANCESTORS + 3):
        text = [*text, *[level] * 40]
        texts += [[*text, 50], [*text, 51]]
    found = share_prefixes(requests_of(texts))
    assert found is not None  # and SequenceTree takes it
    assert (found.tree.seqlens[found.tree.parents < 0] >= 40).any()


@pytest.mark.parametrize(
    "texts", [[], [[1] * 90], [[1] * 31] * 9, [[1] * 200, [2] * 200], [[], [], [1]]]
)
def test_nothing_to_share(texts: list[list[int]]) -> None:
    assert share_prefixes(requests_of(texts)) is None


def test_neighbours_in_the_order_share_their_prefixes() -> None:
    texts = [[7] * 80, [1] * 40 + [2], [8] * 3, [1] * 40 + [3], [1] * 50, [9] * 200]
    order = prefix_order(requests_of(texts))
    assert order is not None
    assert order.texts[0] == 5 and order.texts[1] == 0 and order.texts[-1] == 2
    assert order.num_shared.sum() == 80


def test_steps_count_a_prefix_once_and_keep_its_texts_together() -> None:
    states = [[10 + i] * 60 for i in range(4)]
    texts = [state + [k] * 4 for k in range(1, 6) for state in states]
    queue, call = RequestQueue(age_limit_s=9.0, shares_prefixes=True), OpenCall("task", None)
    queue.add(call, requests_of(texts), 0.0)
    assert queue.queued_tokens == 4 * (60 + 5 * 4)
    found = []
    while queue:
        taken = queue.take(100, 0.0)
        requests = taken[0].requests()
        assert sum(some.total_tokens for some in taken) <= 100
        starts = requests.token_ids[requests.cu_seqlens[:-1]]
        assert len(set(starts.tolist())) <= 2
        found += requests.indices.tolist()
    assert sorted(found) == list(range(20)) and queue.queued_tokens == 0


def test_old_texts_whose_prefix_is_more_than_half_of_a_step_run_together() -> None:
    queue = RequestQueue(age_limit_s=1.0, shares_prefixes=True)
    for state in range(3):
        texts = [[10 + state] * 60 + [k] * 4 for k in range(8)]
        queue.add(OpenCall(state, None), requests_of(texts), 0.0)
    steps = []
    while queue:
        taken = queue.take(100, 9.0)
        assert sum(some.total_tokens for some in taken) <= 100
        steps.append(sum(some.num_texts for some in taken))
    assert steps == [8, 8, 8]


def test_what_a_step_expands_to_is_bounded() -> None:
    queue, call = RequestQueue(age_limit_s=9.0, shares_prefixes=True), OpenCall("task", None)
    queue.add(call, requests_of([[5] * 3200] * 64), 0.0)
    assert sum(some.requests().total_tokens for some in queue.take(4000, 0.0)) <= 32 * 4000


@pytest.fixture
def shared_texts() -> list[list[int]]:
    random = np.random.default_rng(3)
    ids = random.integers(3, 60, 60).tolist()
    texts = [ids[:33] + random.integers(3, 60, n).tolist() for n in (1, 2, 30, 7)]
    texts += [ids[:33] + [9] * 34 + [k] for k in range(3, 6)] + [ids, ids, ids[:40]]
    return [*texts, [4] * 34, [4] * 34, [5], [6, 7]]


def unshared(model: Model, texts: list[list[int]]) -> list[np.ndarray]:
    """Scores of texts one by one."""
    return [model.score([text])[0].token_log_likelihoods for text in texts]


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_shared_prefixes_change_no_bit(
    name: str, tmp_path: Path, shared_texts: list[list[int]]
) -> None:
    model = bytetx.load(save_causal(tmp_path, name), device="cpu", dtype="float32")
    found = model.score(shared_texts)
    # Where nothing is shared, batch mates may change roundings of a product.
    near = 0 if model.checkpoint.transformer.prefix_multiple else 1e-5
    for got, wanted in zip(found, unshared(model, shared_texts), strict=True):
        np.testing.assert_allclose(got.token_log_likelihoods, wanted, rtol=0, atol=near)


@pytest.mark.parametrize("budget", [64, 100, 4096])
def test_shared_prefixes_in_steps_of_any_size(
    budget: int, tmp_path: Path, shared_texts: list[list[int]]
) -> None:
    model = bytetx.load(save_causal(tmp_path), device="cpu", token_budget=budget)
    vectors = np.asarray(model.embed(shared_texts, pooling="mean"))
    alone = [np.asarray(model.embed([text], pooling="mean"))[0] for text in shared_texts]
    assert np.array_equal(vectors, np.stack(alone))


def test_a_pass_computes_fewer_rows(
    tmp_path: Path, shared_texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bytetx.load(save_causal(tmp_path), device="cpu")
    rows = []
    layers = model.checkpoint.transformer.layers
    run = layers.run

    def counted(embed, batch, *args, **options):  # type: ignore[no-untyped-def]
        rows.append(batch.total_tokens)
        return run(embed, batch, *args, **options)

    monkeypatch.setattr(layers, "run", counted)
    model.score(shared_texts)
    assert sum(rows) < 0.75 * sum(map(len, shared_texts))


class Reads:
    """Counts the rows of hidden states that the passes of a model give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.rows: list[int] = []
        forward = Transformer._forward_shared

        def counted(*args, **options):  # type: ignore[no-untyped-def]
            found = forward(*args, **options)
            self.rows.append(len(found))
            return found

        monkeypatch.setattr(Transformer, "_forward_shared", counted)


def test_the_hidden_states_of_last_tokens_alone_where_no_others_are_read(
    tmp_path: Path, shared_texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    model = bytetx.load(save_causal(tmp_path), device="cpu", prefix_cache_bytes=0)
    vectors = np.asarray(model.embed(shared_texts, pooling="lasttoken", normalize=True))
    assert reads.rows == [len(shared_texts)]
    alone = [model.embed([text], pooling="lasttoken", normalize=True) for text in shared_texts]
    assert np.array_equal(vectors, np.concatenate([np.asarray(one) for one in alone]))
    both = np.asarray(model.embed(shared_texts, pooling=("lasttoken", "mean")))
    assert reads.rows[1:] == [sum(map(len, shared_texts))]
    size = both.shape[1] // 2
    last = np.asarray(model.embed(shared_texts, pooling="lasttoken"))
    assert np.array_equal(both[:, :size], last)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_the_last_tokens_of_a_causal_classifier(
    num_labels: int, tmp_path: Path, shared_texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_causal(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.num_labels, config.pad_token_id = num_labels, 0
    torch.manual_seed(5)
    classifier = transformers.AutoModelForSequenceClassification.from_config(config)
    classifier.save_pretrained(tmp_path)
    reads = Reads(monkeypatch)
    model = bytetx.load(tmp_path, device="cpu", prefix_cache_bytes=0)
    found = model.classify(shared_texts)
    assert reads.rows == [len(shared_texts)]
    assert list(found) == [model.classify([text])[0] for text in shared_texts]


def test_the_rows_of_questions_and_of_answers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    model = bytetx.load(save_decider(tmp_path, "llama"), device="cpu", prefix_cache_bytes=0)
    questions = {f"q{n}": {"type": "noul", "instructions": f"{n} foxes?"} for n in range(9)}
    request = {"state": "the quick brown fox " * 30, "questions": questions}
    answers = model.decide([request])[0]
    assert reads.rows == [9]
    for name, question in questions.items():
        alone = model.decide([{**request, "questions": {name: question}}])[0]
        assert alone[name] == answers[name]


def test_rerankers_read_the_last_token_of_each_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_decider(tmp_path, "qwen3", labels=("yes", "no"))
    reads = Reads(monkeypatch)
    model = bytetx.load(folder, device="cpu", prefix_cache_bytes=0)
    documents = ["the dog", "a quick fox jumps", "lazy"]
    hits = model.rerank("who runs?", documents)
    assert reads.rows == [3]
    for hit in hits:
        assert model.rerank("who runs?", [hit.document])[0].score == hit.score


def test_bidirectional_models_share_nothing(tmp_path: Path, shared_texts: list[list[int]]) -> None:
    model = bytetx.load(save_checkpoint(tmp_path), device="cpu")
    assert model.checkpoint.transformer.prefix_multiple == 0
