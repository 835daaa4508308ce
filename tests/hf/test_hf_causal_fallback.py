"""wrap for causal families: which calls are the original forward's, and that it says why once."""

import copy
import pickle
import re
import warnings

import pytest
import torch
import transformers
from hf_models import (  # noqa: F401  (a fixture)
    largest_difference,
    one_thread,
    padded_inputs,
    zeroed,
)
from tiny_decoders import tiny_decoder
from torch import nn

from bytetx.hf import FallbackWarning, unwrap, wrap

SEQLENS = [9, 1, 23, 14]
LEFT = padded_inputs(SEQLENS, side="left")
RIGHT = padded_inputs(SEQLENS)
HOLES = {"input_ids": LEFT["input_ids"], "attention_mask": LEFT["attention_mask"].clone()}
HOLES["attention_mask"][2, 4:9] = 0
LABELS = LEFT["input_ids"]


def call_both(stock, wrapped, inputs, text):
    """The two outputs of a call that only the original forward answers."""
    with pytest.warns(FallbackWarning, match=text) as said:
        have = wrapped(**inputs)
    assert len([w for w in said if w.category is FallbackWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        again = wrapped(**inputs)  # said once
    want = stock(**inputs)
    first = next(name for name in ("logits", "last_hidden_state") if name in want)
    for output in (have, again):
        # GPT-2's weights are column-major, and a GEMM may sum in another order.
        mask = inputs.get("attention_mask")
        theirs = zeroed(want[first], mask) if isinstance(mask, torch.Tensor) else want[first]
        assert largest_difference(output[first], theirs) < 1e-5
    return want, have


@pytest.mark.parametrize(
    ("name", "inputs", "text"),
    [
        ("llama", LEFT | {"labels": LABELS}, "the values at pads"),
        ("gpt2", LEFT | {"token_type_ids": LEFT["attention_mask"]}, "token_type_ids add"),
        ("mistral", HOLES, "a mask with holes under a sliding window"),
        ("gpt_neo", HOLES, "a mask with holes under a sliding window"),
        (
            "qwen3",
            {"input_ids": LABELS, "position_ids": torch.arange(23).remainder(9).expand(4, -1)},
            "position_ids start again",
        ),
        ("llama", {"input_ids": torch.ones(1, 100).long()}, "100 positions are more than the 96"),
        ("llama-dynamic", {"input_ids": torch.ones(1, 97).long()}, "97 positions are more than"),
        ("llama", LEFT | {"position_ids": torch.arange(80, 103)[None]}, "103 positions are more"),
        ("qwen2", LEFT | {"output_hidden_states": [0, 2]}, "selects layers"),
        (
            "gemma3",
            {
                "input_ids": LABELS,
                "attention_mask": {"full_attention": None, "sliding_attention": None},
            },
            "a mask for each kind of layer",
        ),
    ],
)
def test_calls_that_the_original_answers(name, inputs, text):
    stock = tiny_decoder(name)
    wrapped = wrap(copy.deepcopy(stock))
    with torch.inference_mode():
        try:
            stock(**inputs)
        except Exception as error:  # of this version of transformers: wrap raises the same
            with (
                pytest.warns(FallbackWarning, match=text),
                pytest.raises(type(error), match=re.escape(str(error))),
            ):
                wrapped(**inputs)
        else:
            call_both(stock, wrapped, inputs, text)


def test_attention_weights_and_other_caches():
    stock = tiny_decoder("llama", attn_implementation="eager")
    wrapped = wrap(copy.deepcopy(stock))
    with torch.inference_mode():
        want, have = call_both(
            stock, wrapped, LEFT | {"output_attentions": True}, "never holds attention weights"
        )
        assert torch.equal(have.attentions[1], want.attentions[1])
        cache = transformers.StaticCache(config=stock.config, max_cache_len=40)
        with pytest.warns(FallbackWarning, match="are no DynamicCache"):
            logits = wrapped(**LEFT, past_key_values=cache).logits
    mask = LEFT["attention_mask"].bool()
    assert largest_difference(logits[mask], want.logits[mask]) < 1e-4


def test_scores_of_experts():
    stock = tiny_decoder("qwen3_moe")
    wrapped = wrap(copy.deepcopy(stock))
    with torch.inference_mode():
        want, have = call_both(
            stock, wrapped, LEFT | {"output_router_logits": True}, "does not keep the scores of"
        )
        assert torch.equal(have.router_logits[0], want.router_logits[0])
        stock.config.output_router_logits = wrapped.config.output_router_logits = True
        wrapped = wrap(copy.deepcopy(stock))
        want, have = call_both(stock, wrapped, RIGHT, "does not keep the scores of")
        assert torch.equal(have.aux_loss, want.aux_loss)


def test_gradients_and_training():
    stock = tiny_decoder("gpt2", embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    wrapped = wrap(copy.deepcopy(stock))
    labels = LABELS.masked_fill(LEFT["attention_mask"] == 0, -100)
    with pytest.warns(FallbackWarning, match="gradients are recorded"):
        wrapped(**LEFT, labels=labels).loss.backward()
    stock(**LEFT, labels=labels).loss.backward()
    for ours, theirs in zip(wrapped.parameters(), stock.parameters(), strict=True):
        assert largest_difference(ours.grad, theirs.grad) < 1e-4
    wrapped.train()
    with pytest.warns(FallbackWarning, match="training mode"), torch.no_grad():
        wrapped(**LEFT)


def test_a_trained_head_on_a_frozen_model():
    model = tiny_decoder("llama")
    model.model.requires_grad_(False)
    wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        model(**LEFT).logits.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def scale_norm(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1


def replace_activation(model):
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def drop_layer(model):
    del model.model.layers[1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (scale_norm, "variance_epsilon is 0.1, the config says 1e-05"),
        (replace_activation, "ReLU"),
        (drop_layer, "has 2 layers, its config says 3"),
    ],
)
def test_changed_models(change, text):
    model = tiny_decoder("llama")
    change(model)
    wrapped = wrap(copy.deepcopy(model))
    with torch.inference_mode(), pytest.warns(FallbackWarning, match=text):
        wrapped(**LEFT, use_cache=False)


def test_copies_pickles_and_a_head_with_a_hook():
    wrapped = wrap(tiny_decoder("gpt_neox"))
    with torch.inference_mode():
        want = wrapped(**LEFT).logits
        for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
            assert twin.forward.module is twin and twin.generate.module is twin
            assert torch.equal(twin(**LEFT).logits, want)
        wrapped.lm_head.register_forward_hook(lambda module, args, output: output + 1)
        assert largest_difference(wrapped(**LEFT).logits, want + 1) > 0  # pads are zeros still
        mask = LEFT["attention_mask"].bool()
        assert largest_difference(wrapped(**LEFT).logits[mask], want[mask] + 1) < 1e-4
        assert "generate" not in unwrap(wrapped).__dict__


def test_a_half_model_moves_with_its_layout():
    """GPT-2's weights are column-major; .to and load_state_dict still give right values."""
    stock = tiny_decoder("gpt2")
    wrapped = wrap(copy.deepcopy(stock))
    with torch.inference_mode():
        want = stock.double().float()(**LEFT).logits
        have = wrapped.double().float()(**LEFT).logits
        mask = LEFT["attention_mask"].bool()
        assert largest_difference(have[mask], want[mask]) < 1e-4
    other = tiny_decoder("gpt2").state_dict()
    wrapped.load_state_dict({name: tensor * 0.5 for name, tensor in other.items()})
    stock.load_state_dict({name: tensor * 0.5 for name, tensor in other.items()})
    with torch.inference_mode():
        assert largest_difference(wrapped(**LEFT).logits[mask], stock(**LEFT).logits[mask]) < 1e-4


def test_text_generation_pipeline(tmp_path):
    from checkpoints import save_causal

    folder = save_causal(tmp_path, "gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    texts, options = ["a packed batch", "no"], {"do_sample": False, "max_new_tokens": 6}

    def answers(model):
        run = transformers.pipeline(
            "text-generation", model=model, tokenizer=tokenizer, device="cpu"
        )
        return [run(text, **options)[0]["generated_text"] for text in texts]

    want = answers(stock)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert answers(wrap(stock)) == want
