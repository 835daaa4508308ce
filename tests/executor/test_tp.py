"""Models that processes share, against the same checkpoints on one: every family, every head."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from checkpoints import texts as random_texts
from draft_oracle import MAX_DRAFT, Oracle, oracle  # noqa: F401  (oracle: a fixture)
from nomic_moe import save_nomic_moe
from privacy_filters import save_privacy_filter
from tiny import FAMILIES, one_thread, random_ids, save, tiny_model  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.executor.control import Workers
from bytetx.executor.leader import load_on_ranks, start_ranks
from bytetx.model import Model
from bytetx.nn.coded_cache import with_cache_dtype
from bytetx.packed import pack
from bytetx.parallel.row_scheme import RowScheme
from bytetx.parallel.tp import TpGroup
from bytetx.sampling_params import SamplingParams

# Of complete models in fp32; sums over ranks round in another order.
TOLERANCE = 1e-4
# Below 24 rows all ranks hold them, from there on they are sharded in tiles of 16, later of 32.
ROWS = RowScheme(24, ((64, 32), (0, 16)))
# One row, none, fewer than ranks, a tile and one row (with empty shares), many that are ragged.
BATCHES = [[1], [], [2, 0, 1], [24], [16, 17], [40, 1, 0, 33, 40, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Four heads, so that four ranks have one each.
WIDER = {"num_attention_heads": 4}
# Every layout of layers, and fewer key heads than ranks.
DECODERS = {
    2: [
        "llama",
        "llama-biases",
        "llama2",
        "mistral",
        "qwen2",
        "qwen3",
        "gpt2",
        "gpt_neox",
        "gpt_neox-serial",
        "opt",
        "opt-post",
        "gptj",
        "gpt_neo",
        "olmo2",
        "granite",
        "gpt_bigcode",
        "falcon",
        "falcon-serial",
        "falcon-groups",
        "bloom",
        "mixtral",
        "qwen3_moe",
        "gemma2",
        "gemma3",
    ],
    4: ["llama", "gpt2", "gpt_neox", "opt-post", "gptj", "olmo2", "falcon-groups", "mixtral"],
}

Ranks = tuple[TpGroup, Workers]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Processes that every test of this module loads its checkpoint onto."""
    workers, group = start_ranks(request.param, torch.device("cpu"), rows=ROWS)
    yield group, workers
    workers.close()


def on_ranks(folder: Path, ranks: Ranks, dtype: torch.dtype = torch.float32) -> Model:
    return Model(load_on_ranks(folder, *ranks, dtype=dtype), token_budget=200)


def alone(folder: Path, dtype: str = "float32") -> Model:
    return bytetx.load(folder, device="cpu", dtype=dtype, token_budget=200)


def states(model: Model, seqlens: list[int]) -> list[torch.Tensor]:
    """The embedding's and every layer's output."""
    spec, layers = model.spec, []
    batch = pack(
        random_ids(seqlens),
        has_token_types=spec.num_token_types > 0,
        position_offset=spec.position_offset,
    )
    last = model.transformer.forward(batch, on_layer=layers.append)
    assert last.shape == (sum(seqlens), spec.output_size)
    assert torch.equal(model.transformer.forward(batch), last)
    return [*layers, last]


def assert_same_states(shared: Model, local: Model) -> None:
    for seqlens in BATCHES:
        found, wanted = states(shared, seqlens), states(local, seqlens)
        for layer, x in enumerate(wanted):
            assert found[layer].shape == x.shape
            assert torch.allclose(found[layer], x, rtol=0, atol=TOLERANCE)


@pytest.mark.feature("Several devices", "tensor parallel encoders")
@pytest.mark.parametrize("family", FAMILIES)
def test_encoders(family: str, ranks: Ranks, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, family, head="ForMaskedLM", **WIDER)
    shared, local = on_ranks(folder, ranks), alone(folder)
    assert_same_states(shared, local)
    texts = random_texts(12, max_words=5)
    assert np.allclose(shared.embed(texts), local.embed(texts), atol=TOLERANCE)
    mask = shared.tokenizer.token(shared.tokenizer.mask_token_id)
    masked = [f"a {mask} b {text}" for text in texts[:3]]
    found, wanted = (model.fill_mask(masked, truncate=True) for model in (shared, local))
    for ours, theirs in zip(found, wanted, strict=True):
        assert [fill.token for fill in ours] == [fill.token for fill in theirs]
    rows = torch.randn(5, shared.spec.hidden_size)
    logits = [model.heads.masked_lm.forward(rows) for model in (shared, local)]
    assert logits[0].shape == (5, shared.spec.vocab_size)
    assert torch.allclose(*logits, atol=TOLERANCE)


def test_labels(ranks: Ranks, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "roberta", head="ForSequenceClassification", **WIDER)
    texts = random_texts(9, max_words=5)
    found, wanted = on_ranks(folder, ranks).classify(texts), alone(folder).classify(texts)
    for ours, theirs in zip(found, wanted, strict=True):
        assert [label.label for label in ours] == [label.label for label in theirs]
        scores = [[label.score for label in labels] for labels in (ours, theirs)]
        assert np.allclose(*scores, atol=TOLERANCE)


def test_tags(ranks: Ranks, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "bert", head="ForTokenClassification", **WIDER)
    texts = random_texts(9, max_words=5)
    found, wanted = on_ranks(folder, ranks).tag(texts), alone(folder).tag(texts)
    assert [[e.word for e in tags] for tags in found] == [[e.word for e in tags] for tags in wanted]


@pytest.mark.parametrize("ranks", [2], indirect=True)  # it has three heads
def test_experts_of_one_tensor(ranks: Ranks, tmp_path: Path) -> None:
    save_nomic_moe(tmp_path)
    assert_same_states(on_ranks(tmp_path, ranks), alone(tmp_path))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_sinks_and_biases_of_experts(ranks: Ranks, tmp_path: Path) -> None:
    save_privacy_filter(tmp_path)
    assert_same_states(on_ranks(tmp_path, ranks), alone(tmp_path))


def decoder(name: str, folder: Path) -> Path:
    config = WIDER | {"rotary_pct": 0.5} if name.startswith("gpt_neox") else {}
    return save(tiny_decoder(name, **config), folder)


@pytest.mark.feature("Several devices", "tensor parallel generation")
@pytest.mark.parametrize(
    ("ranks", "name"),
    [(size, name) for size, names in DECODERS.items() for name in names],
    indirect=["ranks"],
)
def test_decoders(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Hidden states; then greedy and sampled tokens, with prompts in pieces and thrown out."""
    folder = decoder(name, tmp_path)
    shared, local = on_ranks(folder, ranks), alone(folder)
    assert_same_states(shared, local)
    prompts = random_ids([1, 13, 37, 2, 30])
    options = {"kv_cache_tokens": 96}
    found, wanted = (m.generate(prompts, GREEDY, **options) for m in (shared, local))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    sampled = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=6, seed=5, ignore_eos=True)
    found, wanted = (m.generate(prompts, sampled) for m in (shared, local))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    if shared.heads.lm is not None:
        for ours, theirs in zip(shared.score(prompts), local.score(prompts), strict=True):
            assert abs(ours.log_likelihood - theirs.log_likelihood) < 1e-3


def test_a_cache_in_fp8(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank rounds its own heads' vectors: the tokens of one process."""
    folder, prompts = decoder("llama", tmp_path), random_ids([1, 13, 37, 2, 30])
    shared, local = (
        Model(with_cache_dtype(m.checkpoint, "fp8"), token_budget=200)
        for m in (on_ranks(folder, ranks), alone(folder))
    )
    options = {"kv_cache_tokens": 96}
    found, wanted = (m.generate(prompts, GREEDY, **options) for m in (shared, local))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_drafts(
    name: str,
    ranks: Ranks,
    tmp_path: Path,
    oracle: type[Oracle],  # noqa: F811
) -> None:
    """Steps with several rows of a decoding sequence, right and wrong ones, on all ranks."""
    folder, prompts = decoder(name, tmp_path), random_ids([1, 13, 37, 2, 30])
    shared, local = on_ranks(folder, ranks), alone(folder)
    for params in (GREEDY, SamplingParams(temperature=0.8, max_tokens=12, seed=5, ignore_eos=True)):
        wanted = local.generate(prompts, params)
        oracle.answers = [p + a.token_ids for p, a in zip(prompts, wanted, strict=True)]
        found = shared.generate(
            prompts, params, num_speculative_tokens=MAX_DRAFT, kv_cache_tokens=128
        )
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
        assert 5 < found.stats.num_accepted_tokens < found.stats.num_draft_tokens


def test_a_cache_that_is_gone_is_gone_everywhere(ranks: Ranks, tmp_path: Path) -> None:
    shared = on_ranks(decoder("llama", tmp_path), ranks)
    for tokens in (64, 128, 64):  # each call with other sizes drops the engine before it
        shared.generate(random_ids([5, 9]), GREEDY, kv_cache_tokens=tokens)
    executor = shared.checkpoint.executor
    assert len(executor._cache_ids) == 1 and executor._num_caches == 3


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_bfloat16_within_twice_the_error_of_one_process(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    if kind == "bert":
        folder = save(tiny_model("bert", **WIDER), tmp_path)
    else:
        folder = decoder("llama", tmp_path)
    exact, local = alone(folder), alone(folder, "bfloat16")
    shared = on_ranks(folder, ranks, torch.bfloat16)
    for seqlens in ([3, 2], [40, 1, 33, 40]):
        wanted = states(exact, seqlens)[-1]
        found, plain = (states(model, seqlens)[-1].float() for model in (shared, local))
        noise = torch.finfo(torch.bfloat16).eps * wanted.abs().max()
        assert (found - wanted).abs().max() <= 2 * (plain - wanted).abs().max() + noise


def test_two_threads_take_turns(ranks: Ranks, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    folder = save_checkpoint(tmp_path, "bert", **WIDER)
    shared, texts = on_ranks(folder, ranks), random_texts(30, max_words=5)
    wanted = alone(folder).embed(texts)
    with ThreadPoolExecutor(2) as pool:
        for vectors in pool.map(lambda _: shared.embed(texts), range(4)):
            assert np.allclose(vectors, wanted, atol=TOLERANCE)
