"""EmbeddingGemma 2: heads of two sizes, normed values, embedded tokens read by each layer."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SENTENCES, make_gemma_tokenizer
from tiny import VOCAB_SIZE, half_errors, load, one_thread, random_ids, randomize, save  # noqa: F401  (autouse)
from torch import nn

import bytetx
from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.layer_spec import HeadSizes
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import CheckpointError, InputError, OptionError
from bytetx.nn.grid_blocks import check_grid
from bytetx.packed import split
from bytetx.parallel.grid import Grid
from bytetx.parallel.planner.shapes import shape_of

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "EmbeddingGemma2TextModel"), reason="an older transformers"
)
RADIUS = 4
SEQLENS = [1, 2, RADIUS, RADIUS + 1, RADIUS + 2, 2 * RADIUS + 2, 40, 3]
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "intermediate_size": 80,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 96,
    "sliding_window": RADIUS,
    "sliding_window_pattern": 2,
    "hidden_size_per_layer_input": 24,
    "embedding_dim": 40,
}


def tiny_text(**config: object) -> nn.Module:
    sizes = transformers.EmbeddingGemma2TextConfig(**SIZES | config)
    return spread(transformers.EmbeddingGemma2TextModel(sizes))


def spread(model: nn.Module) -> nn.Module:
    """Weights so far apart that every part shows; a scalar of its own in each layer."""
    randomize(model)
    scalars = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    for i, scalar in enumerate(scalars):
        scalar.fill_(0.5 + 0.25 * i)
    return model.eval()


def with_images(**text: object) -> nn.Module:
    """The model with a vision tower beside the text model."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    vision |= {"num_key_value_heads": 2, "intermediate_size": 16, "patch_size": 4}
    tokens = {"image_token_id": 1, "video_token_id": 3, "audio_token_id": 4}
    config = transformers.EmbeddingGemma2Config(
        text_config=SIZES | text,
        vision_config={"model_type": "gemma4_vision", **vision},
        audio_config=None,
        **tokens,
    )
    return spread(transformers.EmbeddingGemma2Model(config))


def expected(model: nn.Module, ids: list[int]) -> object:
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True)


def test_every_layer(tmp_path: Path) -> None:
    model = tiny_text()
    loaded, ids, layers = load(save(model, tmp_path)), random_ids(SEQLENS), []
    spec = loaded.spec
    assert spec.layer_spec.window_pattern == (True, False, True, False, True)[:4] + (False,)
    assert spec.layer_spec.full_heads == HeadSizes(1, 32) and spec.head_dims == {16, 32}
    batch = loaded.pack(ids)
    rows = split(loaded.transformer.forward(batch, on_layer=layers.append), batch)
    states = [split(x, batch) for x in layers]
    assert loaded.weights.unused() == [] and len(layers) == 6
    for i, sequence in enumerate(ids):
        wanted = expected(model, sequence)
        for own, theirs in zip(states[:-1], wanted.hidden_states[:-1], strict=True):
            assert (own[i] - theirs[0]).abs().max() < 1e-4
        assert (rows[i] - wanted.last_hidden_state[0]).abs().max() < 1e-4
        assert torch.equal(rows[i], loaded.rows([sequence])[0])


@pytest.mark.parametrize(
    "config",
    [
        {"attention_bias": True},
        {"sliding_window_pattern": 1},
        {"sliding_window": 1},
        {"num_key_value_heads": 1, "global_head_dim": 16},
        {"hidden_size_per_layer_input": 7, "embedding_dim": 48},
        {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 2},
    ],
)
def test_other_sizes(config: dict[str, object], tmp_path: Path) -> None:
    model = tiny_text(**config)
    loaded, ids = load(save(model, tmp_path)), random_ids(SEQLENS)
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert (rows - expected(model, sequence).last_hidden_state[0]).abs().max() < 1e-4
    assert loaded.weights.unused() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_err_no_more_than_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_text().to(dtype)
    ours, theirs = half_errors(load(save(model, tmp_path), dtype), model)
    assert ours < 1.1 * theirs


def test_the_text_model_beside_another(tmp_path: Path) -> None:
    model = with_images()
    loaded, ids = load(save(model, tmp_path)), random_ids(SEQLENS)
    assert loaded.spec.model_type == "embedding_gemma2"
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        wanted = expected(model, sequence).last_hidden_state[0]
        assert (rows - wanted).abs().max() < 1e-4
    names = loaded.weights.unused()
    assert names and all("vision" in name for name in names)


def test_what_a_config_may_leave_out(tmp_path: Path) -> None:
    """transformers' defaults, and the last layer without a window, whatever the list says."""
    spec = build_spec({"model_type": "embedding_gemma2_text"})
    config = transformers.EmbeddingGemma2TextConfig()
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    assert spec.layer_spec.window_pattern == tuple(kinds)
    assert (spec.head_dim, spec.num_kv_heads, spec.output_size) == (256, 2, 768)
    assert spec.layer_spec.full_heads == HeadSizes(1, 512)
    assert spec == build_spec(config.to_dict() | {"architectures": None})
    assert spec.layer_spec.window == config.sliding_window + 1
    config = load_config(save(tiny_text(), tmp_path))
    saved = build_spec(config)
    config["layer_types"][-1] = "sliding_attention"
    assert build_spec(config) == saved


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"0": {"head_dim": 32}}, "gives layer 0 other heads"),
        ({"1": {"head_dim": 32}}, "must give all layers without a window the same heads"),
        ({"1": {"sliding_window": 3}}, "must give layer 1 head_dim and num_key_value_heads alone"),
        ({"1": {"head_dim": "32"}}, "must give layer 1 head_dim"),
        ({"1": 5}, "must give layer 1 head_dim"),
        ({"full_attention": {"head_dim": 32}}, "must have a table for each layer"),
        ([], "per_layer_config must have a table for each layer"),
        ({i: {"num_key_value_heads": 3} for i in ("1", "3", "4")}, "is no multiple of the 3 key"),
    ],
)
def test_heads_that_are_refused(given: object, message: str, tmp_path: Path) -> None:
    config = load_config(save(tiny_text(), tmp_path)) | {"per_layer_config": given}
    with pytest.raises(CheckpointError, match=message):
        build_spec(config)


@pytest.mark.parametrize("is_whole", [False, True])
def test_wrap(is_whole: bool, recwarn: pytest.WarningsRecorder) -> None:
    stock = with_images() if is_whole else tiny_text()
    wrapped = bytetx.wrap(copy.deepcopy(stock))
    ids = random_ids(SEQLENS)
    width = max(SEQLENS)
    inputs = torch.tensor([own + [0] * (width - len(own)) for own in ids])
    mask = torch.tensor([[1] * len(own) + [0] * (width - len(own)) for own in ids])

    def assert_same() -> None:
        with torch.no_grad():
            have, want = (
                m(input_ids=inputs, attention_mask=mask, output_hidden_states=True)
                for m in (wrapped, stock)
            )
        pairs = [(have.last_hidden_state, want.last_hidden_state)]
        pairs += list(zip(have.hidden_states, want.hidden_states, strict=True))
        for own, theirs in pairs:
            assert own.shape == theirs.shape
            assert ((own - theirs) * mask[..., None]).abs().max() < 1e-4

    assert_same()
    for model in (wrapped, stock):  # a buffer that is a weight
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    assert_same()
    names = [name for name, _ in stock.named_parameters() if "language_model" in name]
    for name in names or dict(stock.named_parameters()):  # whatever is computed of it
        with torch.no_grad():
            for model in (wrapped, stock):
                model.get_parameter(name).mul_(0.9).add_(0.02)
    assert_same()
    assert not [w for w in recwarn if issubclass(w.category, bytetx.hf.FallbackWarning)]


def test_sentence_transformers_with_prompts(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    tokenizer = make_gemma_tokenizer(adds_end=True, max_tokens=96)
    base = save(tiny_text(vocab_size=len(tokenizer)), tmp_path / "base")
    tokenizer.save_pretrained(base)
    transformer = Transformer(str(base))
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    theirs = SentenceTransformer(
        modules=[transformer, Pooling(40, "mean"), Normalize()], device="cpu", prompts=prompts
    )
    theirs.save(str(tmp_path / "model"))
    ours = bytetx.load(tmp_path / "model", device="cpu")
    for name in (None, "query", "document"):
        want = theirs.encode(SENTENCES, prompt_name=name)
        have = ours.embed(SENTENCES, prompt_name=name)
        assert have.shape == want.shape == (len(SENTENCES), 40)
        assert np.abs(have - want).max() < 1e-4
    short = ours.embed(SENTENCES, prompt_name="query", dimensions=16)
    want = theirs.encode(SENTENCES, prompt_name="query", truncate_dim=16, normalize_embeddings=True)
    assert np.abs(short - want).max() < 1e-4


@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
def test_other_arithmetic(dtype: str, tmp_path: Path) -> None:
    """The layers' parts of the embedded tokens stay in the dtype of activations."""
    tokenizer = make_gemma_tokenizer(max_tokens=96)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": len(tokenizer)}
    model = tiny_text(**sizes)
    with torch.no_grad():
        for layer in model.layers:  # scores that tell a few codes apart
            layer.self_attn.q_norm.weight *= 0.1
    folder = save(model, tmp_path)
    tokenizer.save_pretrained(folder)
    options = {"pooling": "mean", "normalize": True}
    exact = np.asarray(bytetx.load(folder, device="cpu").embed(SENTENCES, **options))
    found = bytetx.load(folder, device="cpu", dtype=dtype)
    vectors = np.asarray(found.embed(SENTENCES, **options))
    assert (exact * vectors).sum(1).min() > (0.9 if dtype == "int4" else 0.98)


def test_what_nothing_divides(tmp_path: Path) -> None:
    folder = save(tiny_text(), tmp_path)
    spec = load(folder).spec
    check_grid(spec, Grid(data=2))
    for axis in "xyz":
        with pytest.raises(InputError, match="heads differ or that read the embedded tokens"):
            check_grid(spec, Grid(**{axis: 2}))
    with pytest.raises(OptionError, match="heads that differ"):
        shape_of(spec)
