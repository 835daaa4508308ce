"""Fixtures of the server's tests: checkpoints, a server process, and the application in process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import save_causal, save_checkpoint, save_sentence_model
from extractors import save_extractor, save_schema_model
from serving import InProcess, Server, start_server

from bytetx.serve.loading import load_models
from bytetx.serve.settings import ServeSettings, model_sources

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random checkpoint for each kind of model, by the name it is served under."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    root = tmp_path_factory.mktemp("served")
    prompts = {"query": "the quick brown "}
    head = "ForSequenceClassification"
    paths = {
        "embedder": save_sentence_model(
            root / "embedder", [Pooling(48, "mean"), Normalize()], prompts=prompts
        ),
        "classifier": save_checkpoint(root / "classifier", head=head),
        "reranker": save_checkpoint(root / "reranker", head=head, num_labels=1),
        "tagger": save_checkpoint(root / "tagger", head="ForTokenClassification"),
        "sparse": save_checkpoint(root / "sparse", head="ForMaskedLM"),
        "extractor": save_extractor(root / "extractor"),
        "schemas": save_schema_model(root / "schemas"),
        "writer": save_causal(root / "writer", "gpt2"),
    }
    (paths["writer"] / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    labels = {"noul": ["a", "b"], "choice": list("abcde"), "score": list("abcde")}
    (paths["writer"] / "decision.json").write_text(json.dumps({"labels": labels}))
    return paths


@pytest.fixture(scope="session")
def model_options(checkpoints: dict[str, Path]) -> list[str]:
    """--model NAME=PATH of every checkpoint."""
    return [part for name, path in checkpoints.items() for part in ("--model", f"{name}={path}")]


@pytest.fixture(scope="session")
def server(model_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server process with every checkpoint and a key, for all tests."""
    log = tmp_path_factory.mktemp("server") / "log"
    with start_server([*model_options, "--api-key", "sesame"], log=log) as running:
        yield running


@pytest.fixture(scope="session")
def in_process(checkpoints: dict[str, Path]) -> InProcess:
    """The application without a server, with every checkpoint."""
    given = [f"{name}={path}" for name, path in checkpoints.items()]
    settings = ServeSettings(model_sources(given), device="cpu", metrics_names=("bytetx", "te"))
    return InProcess(settings, load_models(settings))
