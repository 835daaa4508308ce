"""Every module of sentence-transformers against its own encode()."""

import json
from itertools import combinations
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from checkpoints import (
    SENTENCES,
    cosine_distance,
    edit_json,
    save_checkpoint,
    save_sentence_model,
    texts,
)
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import (
    LayerNorm,
    Pooling,
    WeightedLayerPooling,
)
from tiny import one_thread  # noqa: F401  (autouse)
from torch import nn

import bytetx
from bytetx.checkpoint.pickled import read_pickled
from bytetx.errors import CheckpointError, InputError
from bytetx.nn.sentence_modules import ACTIVATIONS
from bytetx.ops.pooling import POOLING_MODES

HIDDEN = 48
INPUTS = SENTENCES + texts(20, max_words=12)


def assert_same_embeddings(folder: Path, **options: object) -> None:
    """Within 1e-5 cosine distance of encode() over ordinary and cut texts, and of equal length."""
    theirs = SentenceTransformer(str(folder), device="cpu").encode(INPUTS, **options)
    ours = bytetx.load(folder).embed(INPUTS, truncate=True, **options).vectors
    assert ours.shape == theirs.shape
    assert cosine_distance(ours, theirs) < 1e-5
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_pooling_mode(mode: str, tmp_path: Path) -> None:
    assert_same_embeddings(save_sentence_model(tmp_path, [Pooling(HIDDEN, mode)]))


@pytest.mark.parametrize("modes", list(combinations(POOLING_MODES, 2))[::4])
def test_joined_pooling_modes(modes: tuple[str, ...], tmp_path: Path) -> None:
    assert_same_embeddings(save_sentence_model(tmp_path, [Pooling(HIDDEN, modes), Normalize()]))


def test_old_pooling_flags(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN, "mean")])
    path = folder / "1_Pooling" / "config.json"
    flags = {"pooling_mode_cls_token": True, "pooling_mode_weightedmean_tokens": True}
    path.write_text(json.dumps({"word_embedding_dimension": HIDDEN} | flags))
    assert_same_embeddings(folder)


@pytest.mark.parametrize(
    "activation", [nn.Identity, nn.Tanh, nn.GELU, nn.ReLU, nn.Sigmoid, nn.SiLU]
)
def test_dense_activation(activation: type[nn.Module], tmp_path: Path) -> None:
    dense = Dense(HIDDEN, 20, activation_function=activation())
    assert_same_embeddings(save_sentence_model(tmp_path, [Pooling(HIDDEN), dense, Normalize()]))


@pytest.mark.parametrize("out_features", [HIDDEN, 24])
def test_dense_without_bias_with_residual(out_features: int, tmp_path: Path) -> None:
    dense = Dense(HIDDEN, out_features, bias=False, use_residual=True)
    assert_same_embeddings(save_sentence_model(tmp_path, [Pooling(HIDDEN, "cls"), dense]))


@pytest.mark.feature("Checkpoints", "sentence-transformers' modules saved as pytorch_model.bin")
def test_a_dense_layer_in_pytorch_model_bin(tmp_path: Path) -> None:
    modules = [Pooling(HIDDEN), Dense(HIDDEN, 20), LayerNorm(20), Normalize()]
    folder = save_sentence_model(tmp_path, modules)
    wanted = bytetx.load(folder, device="cpu").embed(["a text", "another"])
    for name in ("2_Dense", "3_LayerNorm"):
        safe = folder / name / "model.safetensors"
        torch.save(load_file(safe), folder / name / "pytorch_model.bin")
        safe.unlink()
    assert_same_embeddings(folder)
    found = bytetx.load(folder, device="cpu").embed(["a text", "another"])
    assert np.array_equal(found.vectors, wanted.vectors)
    (folder / "2_Dense" / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor pytorch_model.bin"):
        bytetx.load(folder, device="cpu")


def test_a_file_of_plain_tensors_may_be_of_any_size_that_it_has(tmp_path: Path) -> None:
    """Its records are not compressed, and its tensors have memory of their own."""
    path, packed = tmp_path / "pytorch_model.bin", tmp_path / "packed.bin"
    with path.open("wb") as file:
        torch.save({"weight": torch.zeros(300, 1000)}, file)
    assert read_pickled(path)["weight"].shape == (300, 1000)
    with ZipFile(path) as plain, ZipFile(packed, "w", ZIP_DEFLATED) as file:
        for record in plain.infolist():
            file.writestr(record.filename, plain.read(record))
    with pytest.raises(CheckpointError, match="records of 1,2.*more than its own bytes"):
        read_pickled(packed)
    for tensors in (
        {"weight": torch.zeros(1).expand(1 << 40)},
        dict.fromkeys(map(str, range(9)), torch.zeros(1000)),
        {"weight": torch.eye(9).to_sparse()},
    ):
        torch.save(tensors, path)
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin (holds|cannot be read)"):
            read_pickled(path)
    torch.save({"weight": torch.zeros(9)}, path, _use_new_zipfile_serialization=False)
    assert read_pickled(path)["weight"].tolist() == [0] * 9


def save_layer_mean(folder: Path, *, family: str = "bert", first: int = 1, **config: bool) -> Path:
    module = WeightedLayerPooling(HIDDEN, num_hidden_layers=2, layer_start=first)
    path = save_sentence_model(folder, [module, Pooling(HIDDEN)], family=family)
    save_file({"layer_weights": torch.arange(1.0, 4 - first)}, path / "1_WeightedLayerPooling" /
              "model.safetensors")  # fmt: skip
    edit_json(path / "config.json", **({"output_hidden_states": True} | config))
    return path


@pytest.mark.feature("Checkpoints", "sentence-transformers' WeightedLayerPooling")
@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_mean_over_layers(family: str, first: int, tmp_path: Path) -> None:
    folder = save_layer_mean(tmp_path, family=family, first=first)
    assert_same_embeddings(folder)
    model, ids = bytetx.load(folder, device="cpu"), [[7, 8, 9], [5], [9] * 20]
    together = model.embed(ids).vectors
    for one, vector in zip(ids, together, strict=True):
        np.testing.assert_allclose(model.embed([one]).vectors[0], vector, atol=1e-6)
    half = bytetx.load(folder, device="cpu", dtype="bfloat16").embed(ids).vectors
    assert cosine_distance(half, together) < 1e-3


def test_a_mean_over_layers_that_the_transformer_does_not_give(tmp_path: Path) -> None:
    """sentence-transformers leaves the module out then."""
    folder = save_layer_mean(tmp_path, output_hidden_states=False)
    assert_same_embeddings(folder)


def test_a_mean_over_layers_that_does_not_fit(tmp_path: Path) -> None:
    folder = save_layer_mean(tmp_path)
    module = folder / "1_WeightedLayerPooling"
    with pytest.raises(InputError, match="does not run with tp"):
        bytetx.load(folder, tp=2)
    save_file({"layer_weights": torch.tensor([1.0, -1.0])}, module / "model.safetensors")
    with pytest.raises(CheckpointError, match="must be finite, their sum not 0"):
        bytetx.load(folder, device="cpu")
    edit_json(module / "config.json", layer_start=4)
    with pytest.raises(CheckpointError, match="layer_start 4 must fit the model's 2 layers"):
        bytetx.load(folder, device="cpu")


def test_layer_norm_module(tmp_path: Path) -> None:
    modules = [Pooling(HIDDEN, "max"), LayerNorm(HIDDEN), Normalize()]
    assert_same_embeddings(save_sentence_model(tmp_path, modules))


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_prompt_left_out_of_pooling(mode: str, tmp_path: Path) -> None:
    pooling = Pooling(HIDDEN, mode, include_prompt=False)
    prompts = {"query": "the query: ", "document": ""}
    folder = save_sentence_model(tmp_path, [pooling, Normalize()], prompts=prompts)
    assert_same_embeddings(folder, prompt_name="query")
    assert_same_embeddings(folder, prompt="any dog: ")
    assert_same_embeddings(folder)


def test_default_prompt(tmp_path: Path) -> None:
    options = {"prompts": {"query": "quick fox: "}, "default_prompt_name": "query"}
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN)], **options)
    assert_same_embeddings(folder)
    with pytest.raises(
        InputError, match="prompt_name 'passage' is not in this checkpoint; .*query"
    ):
        bytetx.load(folder).embed(["a"], prompt_name="passage")


def test_max_seq_length_and_its_truncation(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN)], max_seq_length=9)
    assert bytetx.load(folder).max_tokens == 9
    assert_same_embeddings(folder)


def test_lower_case_of_the_transformer_module(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN)], family="roberta")
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert_same_embeddings(folder)


def test_dimensions_are_normalised_anew(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN), Normalize()])
    theirs = SentenceTransformer(str(folder), device="cpu", truncate_dim=16).encode(
        INPUTS, normalize_embeddings=True
    )
    ours = bytetx.load(folder).embed(INPUTS, dimensions=16, truncate=True)
    np.testing.assert_allclose(ours.vectors, theirs, atol=1e-5)
    with pytest.raises(InputError, match="dimensions must be an integer from 1 to 48, got 49"):
        bytetx.load(folder).embed(["a"], dimensions=49)


def test_normalize_and_pooling_can_be_overridden(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN, "cls"), Normalize()])
    model = bytetx.load(folder)
    states = model.hidden_states(["the quick fox"])[0][0]
    plain = model.embed(["the quick fox"], pooling="mean", normalize=False)[0]
    np.testing.assert_allclose(plain, states.mean(axis=0), atol=1e-5)
    joined = model.embed(["the quick fox"], pooling=("cls", "max"))[0]
    assert joined.shape == (2 * HIDDEN,)
    np.testing.assert_allclose(np.linalg.norm(joined), 1.0, rtol=1e-5)
    with pytest.raises(InputError, match="pooling must be one or more of cls"):
        model.embed(["a"], pooling="median")


def test_plain_transformer_is_mean_pooled_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = bytetx.load(save_checkpoint(tmp_path))
    with caplog.at_level("INFO", logger="bytetx"):
        vector = model.embed(["the quick fox"])[0]
    assert "mean is used" in caplog.text
    states = model.hidden_states(["the quick fox"])[0][0]
    np.testing.assert_allclose(vector, states.mean(axis=0), atol=1e-5)


def test_unknown_module_is_refused(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN)])
    entries = json.loads((folder / "modules.json").read_text())
    entries.append(
        {"idx": 2, "name": "2", "path": "2_X", "type": "sentence_transformers.models.CNN"}
    )
    (folder / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=r"module 'sentence_transformers.models.CNN' is not"):
        bytetx.load(folder)


def test_activation_of_foreign_code_is_refused(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN), Dense(HIDDEN, 8)])
    edit_json(folder / "2_Dense" / "config.json", activation_function="os.system")
    with pytest.raises(CheckpointError, match="activation 'os.system' is not supported"):
        bytetx.load(folder)


def test_dense_of_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN), Dense(HIDDEN, 8)])
    edit_json(folder / "2_Dense" / "config.json", out_features=9)
    with pytest.raises(CheckpointError, match=r"linear.bias of shape \(9,\), got shape \(8,\)"):
        bytetx.load(folder)


def test_dense_that_does_not_fit_the_pooling_is_named(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN), Dense(HIDDEN, 8)])
    with pytest.raises(InputError, match="Dense takes 48 numbers, pooling gives 96"):
        bytetx.load(folder).embed(["a"], pooling=("cls", "mean"))


def test_folder_of_its_own_for_the_transformer(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(HIDDEN, "cls")])
    inner = folder / "0_Transformer"
    inner.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.name not in (
            "modules.json",
            "config_sentence_transformers.json",
        ):
            path.rename(inner / path.name)
    entries = json.loads((folder / "modules.json").read_text())
    entries[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(entries))
    assert_same_embeddings(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_do_not_depend_on_a_rows_place(name: str, dtype: torch.dtype) -> None:
    activation, values = ACTIVATIONS[name], torch.randn(61, 33).mul(4).to(dtype)
    together = activation(values.clone())
    assert together.dtype == dtype
    for count in (1, 2, 7):
        for first in range(0, len(values) - count, 5):
            rows = activation(values[first : first + count].clone())
            assert torch.equal(rows, together[first : first + count])
    exact = getattr(nn, name)()(values.double())
    stock = getattr(nn, name)()(values).double()
    noise = 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (together.double() - exact).abs().max() <= 2 * (stock - exact).abs().max() + noise
