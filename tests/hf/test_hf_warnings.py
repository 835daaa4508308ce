"""wrap: calls, outputs and copies of wrapped models make transformers log and warn nothing."""

import copy
import logging
import pickle
import warnings

import pytest
import torch
from hf_models import FAMILIES, FAMILY_HEADS, one_thread, padded_inputs, tiny_model  # noqa: F401
from tiny_decoders import DECODERS, tiny_decoder
from transformers.utils import logging as their_logging

from bytetx.hf import wrap

SEQLENS = [9, 1, 14]
DECODER_NAMES = [*("gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "llama", "mistral", "qwen2")]
DECODER_NAMES += [*("qwen3", "gemma3", "falcon", "bloom", "mixtral", "gpt_bigcode")]


@pytest.fixture
def records(monkeypatch):
    """Messages that transformers logs from now on, of a kind that it says once too."""
    logger, found = their_logging.get_logger("transformers"), []
    handler = logging.Handler()
    handler.emit = found.append
    logging.Logger.warning_once.cache_clear()
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def read_every_way(output):
    """Reads an output as a dictionary, a tuple, by attributes, and after copies."""
    for twin in (output, copy.copy(output), copy.deepcopy(output)):
        assert [twin[name] is not None for name in twin] == [True] * len(twin)
        assert len(twin[:]) == len(twin.to_tuple()) == len(dict(twin))
        assert all(getattr(twin, name) is not None for name in twin)
    again = pickle.loads(pickle.dumps(output))
    assert torch.equal(again[0], output[0])
    flat, spec = torch.utils._pytree.tree_flatten(output)
    assert type(torch.utils._pytree.tree_unflatten(flat, spec)) is type(output)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, "Model") for name in FAMILIES),
        *((f, h) for f, h in FAMILY_HEADS if h != "ForMultipleChoice"),
        *((name, head) for name in DECODER_NAMES for head in ("Model", "ForCausalLM")),
    ],
)
def test_transformers_warns_of_nothing(name, head, records):
    model = wrap((tiny_decoder if name in DECODERS else tiny_model)(name, head))
    inputs = padded_inputs(SEQLENS, side="left" if name in DECODERS else "right")
    records.clear()  # of making the model
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error")
        for options in ({}, {"output_hidden_states": True}):
            read_every_way(model(**inputs, **options))
        assert isinstance(model(**inputs, return_dict=False), tuple)
        pickle.loads(pickle.dumps(model))(**inputs)
        if head == "ForCausalLM":
            model.generate(**inputs, do_sample=False, max_new_tokens=2, pad_token_id=0)
    assert [record.getMessage() for record in records] == []
