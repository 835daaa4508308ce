"""wrap: input that is packed already, by transformers' names and by our own."""

import copy

import pytest
import torch
from hf_models import (  # noqa: F401  (fixtures)
    FAMILIES,
    FAMILY_HEADS,
    largest_difference,
    one_thread,
    padded_inputs,
    tiny_model,
)  # noqa: F401

from bytetx.errors import InputError
from bytetx.hf import wrap

TOLERANCE = 1e-4  # as in test_hf.py
SEQLENS = [9, 1, 23, 14]
CU_SEQLENS = torch.tensor([0, 9, 10, 33, 47], dtype=torch.int32)


def packed_and_padded():
    """input_ids [total_tokens], and the same sequences padded on the right."""
    padded = padded_inputs(SEQLENS)
    return padded["input_ids"][padded["attention_mask"].bool()], padded


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_hidden_states_and_pooler(family):
    stock = tiny_model(family)
    wrapped = wrap(copy.deepcopy(stock))
    input_ids, padded = packed_and_padded()
    mask = padded["attention_mask"].bool()
    with torch.inference_mode():
        want = stock(**padded)
        have = wrapped(input_ids.unsqueeze(0), cu_seqlens=CU_SEQLENS, output_hidden_states=True)
        flat = wrapped(input_ids=input_ids, cu_seqlens=CU_SEQLENS.long())
        as_transformers = wrapped(
            input_ids=input_ids.unsqueeze(0),
            cu_seq_lens_q=CU_SEQLENS,
            cu_seq_lens_k=CU_SEQLENS,
            max_length_q=23,
            max_length_k=23,
        )
    assert have.last_hidden_state.shape == (1, 47, 64)
    assert [layer.shape for layer in have.hidden_states] == [(1, 47, 64)] * 3
    assert largest_difference(have.last_hidden_state[0], want.last_hidden_state[mask]) < TOLERANCE
    assert torch.equal(flat.last_hidden_state, have.last_hidden_state)
    assert torch.equal(as_transformers.last_hidden_state, have.last_hidden_state)
    if "pooler_output" in want:
        assert largest_difference(have.pooler_output, want.pooler_output) < TOLERANCE


@pytest.mark.parametrize(
    "family", [family for family, head in FAMILY_HEADS if head == "ForSequenceClassification"]
)
def test_packed_sequence_classification_gives_one_row_a_sequence(family):
    stock = tiny_model(family, "ForSequenceClassification")
    wrapped = wrap(copy.deepcopy(stock))
    input_ids, padded = packed_and_padded()
    with torch.inference_mode():
        want = stock(**padded).logits
        have = wrapped(input_ids, cu_seqlens=CU_SEQLENS).logits
    assert have.shape == (4, 3)
    assert largest_difference(have, want) < TOLERANCE


@pytest.mark.parametrize("family", ["bert", "mpnet", "distilbert"])
@pytest.mark.parametrize("head", ["ForTokenClassification", "ForMaskedLM"])
def test_packed_heads_on_every_token(family, head):
    stock = tiny_model(family, head)
    wrapped = wrap(copy.deepcopy(stock))
    input_ids, padded = packed_and_padded()
    with torch.inference_mode():
        want = stock(**padded).logits[padded["attention_mask"].bool()]
        have = wrapped(input_ids=input_ids.unsqueeze(0), cu_seq_lens_q=CU_SEQLENS).logits[0]
    assert largest_difference(have, want) < TOLERANCE


def test_packed_embeddings_positions_and_an_empty_sequence():
    stock = tiny_model("roberta", "ForSequenceClassification")
    wrapped = wrap(copy.deepcopy(stock))
    input_ids, padded = packed_and_padded()
    with_empty = torch.tensor([0, 9, 10, 10, 33, 47])
    positions = torch.cat([torch.arange(2, 2 + n) for n in SEQLENS])
    with torch.inference_mode():
        want = stock(**padded).logits
        embeds = stock.get_input_embeddings()(input_ids)
        calls = [
            {"input_ids": input_ids},
            {"inputs_embeds": embeds},
            {"input_ids": input_ids, "position_ids": positions},
            {"input_ids": input_ids[None], "token_type_ids": torch.zeros(47, dtype=torch.long)},
        ]
        for call in calls:
            have = wrapped(**call, cu_seqlens=with_empty).logits
            assert have.shape == (5, 3)
            assert largest_difference(have[[0, 1, 3, 4]], want) < TOLERANCE


@pytest.mark.parametrize(
    ("cu_seqlens", "text"),
    [
        ([0, 9, 46], "rise from 0 to the number of tokens, 47"),
        ([1, 47], "rise from 0"),
        ([0, 30, 20, 47], "rise from 0"),
        ([0.0, 47.0], "integers"),
        ([47], "integers"),
    ],
)
def test_wrong_cu_seqlens(cu_seqlens, text):
    input_ids, _ = packed_and_padded()
    with torch.inference_mode(), pytest.raises(InputError, match=text):
        wrap(tiny_model("bert"))(input_ids, cu_seqlens=torch.tensor(cu_seqlens))


def test_packed_calls_that_make_no_sense():
    input_ids, padded = packed_and_padded()
    model = wrap(tiny_model("bert"))
    with torch.inference_mode():
        with pytest.raises(InputError, match="one row"):
            model(padded["input_ids"], cu_seqlens=CU_SEQLENS)
        with pytest.raises(InputError, match="attention_mask must be None"):
            model(input_ids, torch.ones(1, 47), cu_seqlens=CU_SEQLENS)
        with pytest.raises(InputError, match="must be equal"):
            model(input_ids, cu_seq_lens_q=CU_SEQLENS, cu_seq_lens_k=CU_SEQLENS + 1)
        with pytest.raises(InputError, match="must be an integer tensor"):
            model(input_ids, cu_seqlens=[0, 47])
        with pytest.raises(InputError, match="multiple choice"):
            wrap(tiny_model("bert", "ForMultipleChoice"))(input_ids, cu_seqlens=CU_SEQLENS)
    with pytest.raises(InputError, match=r"runs on bytetx alone.*inference_mode"):
        model(input_ids, cu_seqlens=CU_SEQLENS)
