"""Options of one kind of model where a server has several kinds."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import save_causal
from serving import InProcess
from static_models import save_model2vec
from tiny import save
from tiny_decoders import tiny_decoder

from bytetx.errors import OptionError, WeightFormatError
from bytetx.serve.loading import load_models
from bytetx.serve.settings import ServeSettings, model_sources


def serve(models: dict[str, Path], **options: object) -> InProcess:
    given = [f"{name}={folder}" for name, folder in models.items()]
    settings = ServeSettings(model_sources(given), device="cpu", **options)
    return InProcess(settings, load_models(settings))


@pytest.mark.feature("Server", "options of one kind of model beside others")
def test_an_embedder_is_served_beside_a_cache_in_fp8(checkpoints: dict[str, Path]) -> None:
    models = {name: checkpoints[name] for name in ("embedder", "writer", "classifier")}
    server = serve(models, kv_cache_dtype="fp8")
    found = {name: server.model(name).info()["kv_cache_dtype"] for name in models}
    assert found == {"embedder": "auto", "writer": "fp8", "classifier": "auto"}
    body = {"model": "writer", "prompt": "a fox", "max_tokens": 3, "ignore_eos": True}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 3
    engine = server.model("writer").engine(kv_cache_tokens=64)
    assert engine._runner.cache.has_codes
    assert server.post("/embed", {"model": "embedder", "inputs": "a fox"}).status_code == 200


def test_drafts_are_left_out_where_layers_cannot_undo_them(tmp_path: Path) -> None:
    models = {
        "plain": save_causal(tmp_path / "plain"),
        "hybrid": save(tiny_decoder("lfm2"), tmp_path / "hybrid"),
    }
    server = serve(models, num_speculative_tokens=4)
    for name in models:
        body = {"model": name, "prompt": [5, 6, 7] * 4, "max_tokens": 8, "ignore_eos": True}
        answer = server.post("/v1/completions", body).json()
        assert answer["usage"]["completion_tokens"] == 8


def test_a_default_prompt_is_of_the_models_that_have_it(checkpoints: dict[str, Path]) -> None:
    models = {name: checkpoints[name] for name in ("embedder", "sparse", "writer")}
    server = serve(models, default_prompt_name="query")
    body = {"model": "embedder", "inputs": "fox"}
    wanted = server.model("embedder").embed(["fox"], prompt_name="query").vectors
    np.testing.assert_allclose(server.post("/embed", body).json(), wanted, atol=1e-6)
    for path in ("/embed_sparse", "/tokenize"):
        assert server.post(path, {"model": "sparse", "inputs": "fox"}).status_code == 200
    assert server.post("/tokenize", {"model": "writer", "inputs": "fox"}).status_code == 200


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype fp8 is for models that generate"),
        ("num_speculative_tokens", 4, "--num-speculative-tokens is for models with attention in"),
        ("default_prompt_name", "other", "--default-prompt-name 'other' is for models with"),
    ],
)
def test_an_option_that_no_model_takes_is_refused(
    option: str, value: object, named: str, checkpoints: dict[str, Path]
) -> None:
    models = {name: checkpoints[name] for name in ("embedder", "classifier")}
    with pytest.raises(OptionError, match=f"{named}.*none of embedder, classifier is one"):
        serve(models, **{option: value})


def test_a_dtype_of_weights_is_of_the_models_that_take_it(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    static = save_model2vec(tmp_path / "static")
    models = {"static": static, "writer": checkpoints["writer"]}
    server = serve(models, dtype="int8")
    assert server.model("writer").info()["dtype"].startswith("int8")
    assert server.model("static").info()["dtype"] == "float32"
    assert "static is loaded with --dtype auto: dtype int8 is of what layers" in caplog.text
    assert server.post("/embed", {"model": "static", "inputs": "fox"}).status_code == 200
    with pytest.raises(WeightFormatError, match="a static embedding has no layers"):
        serve({"one": static, "other": static}, dtype="int8")


def test_a_cache_dtype_that_is_not_known_is_refused_before_models_load() -> None:
    with pytest.raises(OptionError, match="kv_cache_dtype must be auto.*got 'int8'"):
        ServeSettings(model_sources(["m=/nowhere"]), kv_cache_dtype="int8")
