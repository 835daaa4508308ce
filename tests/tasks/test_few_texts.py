"""A call of a few texts runs without windows ahead, and gives what a longer call gives."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, save_checkpoint, save_tokenizer
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx import Model
from bytetx.checkpoint import word_pieces
from bytetx.encode import pipeline
from bytetx.errors import InputError, TooLongError
from bytetx.tasks import one_pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = save_checkpoint(tmp_path_factory.mktemp("bert"), "bert")
    save_tokenizer(folder, "wordpiece")
    return bytetx.load(folder, device="cpu", token_budget=120)
