"""Prefixes that texts of several steps have in common: kept, taken, bounded, the same bits."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from checkpoints import save_causal, save_checkpoint
from tiny import one_thread  # noqa: F401  (autouse)
from tiny_decoders import DECODERS

import bytetx
from bytetx.encode.prefix_cache import PrefixCache
from bytetx.errors import OptionError
from bytetx.model import Model


def texts_of(seed: int = 3) -> list[list[int]]:
    """Texts with prefixes in common, and others; of 1 token to 90."""
    random = np.random.default_rng(seed)
    ids = random.integers(3, 60, 80).tolist()
    texts = [ids[:33] + random.integers(3, 60, n).tolist() for n in (1, 2, 30, 7)]
    texts += [ids[:33] + [9] * 34 + [k] for k in range(3, 6)] + [ids, ids, ids[:32], ids[:33]]
    return [*texts, ids[:40], [4] * 34, [4] * 34, [5], [6, 7], [*ids, 8], ids[:50] + [1] * 40]


def load(folder: Path, name: str = "qwen3", **options: object) -> Model:
    return bytetx.load(save_causal(folder, name), device="cpu", **options)


def cache_of(model: Model) -> PrefixCache:
    cache = model._runner.prefix_cache
    assert cache is not None
    return cache


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens of each forward pass."""
    from bytetx.nn.layers import Layers

    tokens: list[int] = []
    run = Layers.run

    def counted(layers, embed, batch, *args, **options):  # type: ignore[no-untyped-def]
        tokens.append(batch.total_tokens)
        return run(layers, embed, batch, *args, **options)

    monkeypatch.setattr(Layers, "run", counted)
    yield tokens


@pytest.mark.feature("Arithmetic", "cache of shared prefixes")
@pytest.mark.parametrize("name", sorted(DECODERS))
def test_cached_prefixes_change_no_bit(name: str, tmp_path: Path) -> None:
    texts = texts_of()
    save_causal(tmp_path, name)
    plain = bytetx.load(tmp_path, device="cpu", dtype="float32", prefix_cache_bytes=0)
    wanted = [plain.score([text])[0].token_log_likelihoods for text in texts]
    model = bytetx.load(tmp_path, device="cpu", dtype="float32")
    shares = plain.checkpoint.transformer.prefix_multiple > 0
    for some in (texts, texts[::-1], texts[:3], *([text] for text in texts)):
        for text, found in zip(some, model.score(some), strict=True):
            # Where nothing is shared, batch mates may change roundings of a product.
            near = 0 if shares else 1e-5
            right = wanted[texts.index(text)]
            np.testing.assert_allclose(found.token_log_likelihoods, right, rtol=0, atol=near)
    if shares:
        assert cache_of(model).saved_tokens > 0


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"batch_invariant": True}])
def test_bits_of_vectors(options: dict[str, object], tmp_path: Path) -> None:
    texts = texts_of()
    model = load(tmp_path, **options)
    plain = bytetx.load(tmp_path, device="cpu", prefix_cache_bytes=0, **options)
    wanted = np.concatenate([np.asarray(plain.embed([text], pooling="mean")) for text in texts])
    for _ in range(3):
        assert np.array_equal(np.asarray(model.embed(texts, pooling="mean")), wanted)
    for text, vector in zip(texts, wanted, strict=True):
        assert np.array_equal(np.asarray(model.embed([text], pooling="mean"))[0], vector)
    assert cache_of(model).saved_tokens > 0


def test_a_lone_text_continues_what_two_before_it_had(tmp_path: Path, computed: list[int]) -> None:
    model, start = load(tmp_path), [7, *range(3, 60)]
    for last in range(5):
        model.score([[*start, last, last]])
    assert computed == [60, 60, 2, 2, 2]
    assert cache_of(model).saved_tokens == 3 * 58
    model.score([[*start[:40], 1]])  # the first tokens of what is kept
    assert computed[-1] == 1
    model.score([start])  # all of it but the last token
    model.score([start[:33]])
    model.score([start[:32]])
    assert computed[-3:] == [1, 1, 32]


def test_a_longer_common_prefix_takes_the_place_of_a_shorter_one(
    tmp_path: Path, computed: list[int]
) -> None:
    model = load(tmp_path)
    instruction, state = [*range(3, 43)], [*range(43, 3, -1)]
    model.score([[*instruction, 50], [*instruction, 51]])
    model.score([[*instruction, 52], [*instruction, 53]])
    assert len(cache_of(model)) == 1
    for last in range(3):
        model.score([[*instruction, *state, last]])
    assert len(cache_of(model)) == 1 and computed[-3:] == [41, 41, 1]
    model.score([[*instruction, *[9] * 33, 1], [*instruction, *[9] * 33, 2]])
    assert computed[-1] == 35  # the common prefix beneath the kept one is computed once


def test_texts_that_share_nothing_keep_nothing(tmp_path: Path, computed: list[int]) -> None:
    model, random = load(tmp_path), np.random.default_rng(0)
    for _ in range(5):
        model.score(random.integers(3, 60, (4, 40)).tolist())
    assert len(cache_of(model)) == 0 and computed == [160] * 5


@pytest.mark.parametrize("tokens", [31, 32, 50, 100])
def test_the_limit_is_never_exceeded(tokens: int, tmp_path: Path) -> None:
    texts = [[first, *range(3, 60), 1] for first in range(1, 8)] * 3
    plain = load(tmp_path, prefix_cache_bytes=0)
    spec = plain.spec
    per_token = 4 * (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim + spec.output_size)
    model = bytetx.load(tmp_path, device="cpu", prefix_cache_bytes=tokens * per_token)
    cache = cache_of(model)
    for text in texts:
        found, wanted = (one.score([text])[0].token_log_likelihoods for one in (model, plain))
        assert np.array_equal(found, wanted)
        assert cache.num_bytes <= cache.max_bytes
        assert len(cache) == cache.num_bytes // (min(tokens, 58) * per_token)
    assert len(cache) == min(tokens // 32, 1)


def test_the_least_recently_used_leaves_first(tmp_path: Path, computed: list[int]) -> None:
    model = load(tmp_path, prefix_cache_bytes=0)
    spec = model.spec
    per_token = 4 * (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim + spec.output_size)
    model = bytetx.load(tmp_path, device="cpu", prefix_cache_bytes=2 * 50 * per_token)
    first, second, third = ([start] * 51 for start in (7, 8, 9))
    for text in (first, first, second, second, first, third, third):
        model.score([text])
    computed.clear()
    for text in (first, third, second):
        model.score([text])
    assert computed == [1, 1, 51]


def test_steps_that_fail_or_are_not_finite_keep_nothing(tmp_path: Path) -> None:
    model, start = load(tmp_path), [*range(3, 60)]
    table = model.checkpoint.transformer.embeddings.word
    row = table[start[5]].clone()
    with torch.inference_mode():
        table[start[5]] = torch.nan
    for last in range(3):
        with pytest.raises(bytetx.NotFiniteError):
            model.score([[*start, last]])
    assert len(cache_of(model)) == 0
    with torch.inference_mode():
        table[start[5]] = row
    wanted = load(tmp_path, prefix_cache_bytes=0).score([[*start, 1]])[0].token_log_likelihoods
    for _ in range(3):
        found = model.score([[*start, 1]])[0].token_log_likelihoods
        assert np.array_equal(found, wanted)
    assert len(cache_of(model)) == 1


def test_a_pass_out_of_memory_empties_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, start = load(tmp_path), [*range(3, 60)]
    wanted = [model.score([[*start, last]])[0].token_log_likelihoods for last in (1, 2)]
    transformer, fails = model.checkpoint.transformer, [True]
    forward = transformer.forward

    def failing(*args, **options):  # type: ignore[no-untyped-def]
        if fails:
            fails.pop()
            raise torch.OutOfMemoryError("no room")
        return forward(*args, **options)

    assert len(cache_of(model)) == 1
    monkeypatch.setattr(transformer, "forward", failing)
    found = model.score([[*start, 1]])[0].token_log_likelihoods
    assert np.array_equal(found, wanted[0])
    assert len(cache_of(model)) == cache_of(model).num_bytes == 0


def test_threads_share_a_cache(tmp_path: Path) -> None:
    texts = texts_of()
    plain = load(tmp_path, prefix_cache_bytes=0)
    wanted = [plain.score([text])[0].token_log_likelihoods for text in texts]
    spec = plain.spec
    per_token = 4 * (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim + spec.output_size)
    model = bytetx.load(tmp_path, device="cpu", prefix_cache_bytes=90 * per_token)
    wrong: list[int] = []

    def run(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(texts)).tolist() * 3
        for index in order:
            found = model.score([texts[index]])[0].token_log_likelihoods
            if not np.array_equal(found, wanted[index]):
                wrong.append(index)

    threads = [Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cache_of(model).saved_tokens > 0
    assert cache_of(model).num_bytes <= cache_of(model).max_bytes


def test_async_calls_of_several_tasks_and_streams(tmp_path: Path) -> None:
    texts = texts_of()
    model = load(tmp_path, token_budget=200)
    plain = bytetx.load(tmp_path, device="cpu", prefix_cache_bytes=0)
    vectors, scores = np.asarray(plain.embed(texts)), plain.score(texts)

    async def calls() -> None:
        async with bytetx.AsyncModel(model) as queue:
            for _ in range(3):
                found, scored = await asyncio.gather(queue.embed(texts), queue.score(texts))
                assert np.array_equal(np.asarray(found), vectors)
                for one, wanted in zip(scored, scores, strict=True):
                    assert one.log_likelihood == wanted.log_likelihood
            stats = queue.stats()
            assert stats.prefix_saved_tokens > 0 < stats.prefix_cache_bytes

    asyncio.run(calls())
    streamed = np.stack([np.asarray(one) for one in model.embed(iter(texts), stream=True)])
    assert np.array_equal(streamed, vectors)


def test_the_option(tmp_path: Path) -> None:
    assert load(tmp_path / "a").info()["prefix_cache_bytes"] >= 1 << 20
    off = bytetx.load(tmp_path / "a", device="cpu", prefix_cache_bytes=0)
    assert off.info()["prefix_cache_bytes"] == 0 and off._runner.prefix_cache is None
    some = bytetx.load(tmp_path / "a", device="cpu", prefix_cache_bytes=12345)
    again, arguments = some.__reduce__()[:2]
    assert again(*arguments).info()["prefix_cache_bytes"] == 12345
    with pytest.raises(OptionError, match="prefix_cache_bytes must be an integer from 0, got -1"):
        bytetx.load(tmp_path / "a", device="cpu", prefix_cache_bytes=-1)
    encoder = bytetx.load(save_checkpoint(tmp_path / "b"), device="cpu")
    assert encoder.info()["prefix_cache_bytes"] == 0
