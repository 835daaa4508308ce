"""wrap: losses and logits that depend on pads, and the values at pads."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
import transformers
from hf_models import (
    FAMILIES,
    FAMILY_HEADS,
    largest_difference,
    one_thread,  # noqa: F401  (a fixture)
    padded_inputs,
    tiny_model,
    zeroed,
)
from tiny_decoders import DECODERS, tiny_decoder
from torch import nn

from bytetx.errors import InputError
from bytetx.hf import FallbackWarning, wrap

TOLERANCE = 1e-4  # of last hidden states and logits in fp32: DESIGN.md, "Numbers"
SEQLENS = [9, 1, 14]
NINE = ["gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3"]
MASKED_HEADS = [
    (family, head)
    for family, (stem, _) in FAMILIES.items()
    for head in ("ForMaskedLM", "ForTokenClassification", "ForPreTraining")
    if hasattr(transformers, stem + head)
]
SHIFTED_HEADS = [
    (family, head)
    for family, (stem, _) in FAMILIES.items()
    for head in ("ForCausalLM", "LMHeadModel")
    if hasattr(transformers, stem + head)
]
TOKEN_DECODERS = [
    n for n in NINE if hasattr(transformers, f"{DECODERS[n][0]}ForTokenClassification")
]


def both(stock, inputs, text=None, **options):
    """The stock model's output and the wrapped one's, which warns with `text`, or not at all."""
    wrapped = wrap(copy.deepcopy(stock), **options)
    with torch.inference_mode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        want, have = stock(**inputs), wrapped(**inputs)
    said = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert len(said) == (text is not None), said
    assert text is None or text in said[0]
    return want, have


def labels_of(inputs, *, counts_pads):
    """Two classes; at pads -100, or labels like any other."""
    labels = inputs["input_ids"] % 2
    return labels if counts_pads else labels.masked_fill(inputs["attention_mask"] == 0, -100)


def more_inputs(family, head):
    names = {"bert": "next_sentence_label", "albert": "sentence_order_label"}
    if head != "ForPreTraining" or family not in names:
        return {}
    return {names[family]: torch.tensor([0, 1, 1])}


@pytest.mark.parametrize(
    ("family", "head", "side"),
    [
        (*model, side)
        for model, side in itertools.product(MASKED_HEADS + SHIFTED_HEADS, ("right", "left"))
        # Their poolers read the first column, which has a reason of its own.
        if side == "right"
        or model not in (("bert", "ForPreTraining"), ("albert", "ForPreTraining"))
    ],
)
def test_the_loss_of_labels_at_pads_is_the_stock_models(family, head, side):
    inputs = padded_inputs(SEQLENS, side=side)
    inputs |= {"labels": labels_of(inputs, counts_pads=True)} | more_inputs(family, head)
    is_masked = (family, head) == ("electra", "ForPreTraining")  # by its own loss
    want, have = both(
        tiny_model(family, head), inputs, None if is_masked else "depends on the values at pads"
    )
    assert abs(have.loss - want.loss) < TOLERANCE


@pytest.mark.parametrize(("family", "head"), MASKED_HEADS + SHIFTED_HEADS)
def test_labels_that_do_not_count_at_pads_run_packed(family, head):
    inputs = padded_inputs(SEQLENS)
    inputs |= {"labels": labels_of(inputs, counts_pads=False)} | more_inputs(family, head)
    stock = tiny_model(family, head)
    want, have = both(stock, inputs)
    assert abs(have.loss - want.loss) < TOLERANCE
    if head in ("ForMaskedLM", "ForTokenClassification"):
        want, have = both(stock, inputs | {"labels": inputs["labels"].flatten()})
        assert abs(have.loss - want.loss) < TOLERANCE


@pytest.mark.parametrize("name", TOKEN_DECODERS)
def test_token_labels_at_pads_of_a_causal_model(name):
    stock, inputs = tiny_decoder(name, "ForTokenClassification"), padded_inputs(SEQLENS)
    for counts_pads, text in ((True, "depends on the values at pads"), (False, None)):
        labels = labels_of(inputs, counts_pads=counts_pads)
        want, have = both(stock, inputs | {"labels": labels}, text)
        assert abs(have.loss - want.loss) < TOLERANCE


def sum_of_all(logits, labels, vocab_size, **_):
    return logits.float().logsumexp(-1).sum()


@pytest.mark.parametrize("name", ["bert", "distilbert", "llama"])
def test_a_loss_of_the_users_own_may_read_pads(name):
    inputs = padded_inputs(SEQLENS)
    inputs |= {"labels": labels_of(inputs, counts_pads=False)}
    head = "LMHeadModel" if name == "bert" else "ForMaskedLM"
    stock = tiny_decoder(name) if name == "llama" else tiny_model(name, head)
    if name == "distilbert":
        stock.mlm_loss_fct = nn.CrossEntropyLoss(ignore_index=1)
        inputs["labels"] = labels_of(inputs, counts_pads=True)
    else:
        stock.loss_function = sum_of_all
    want, have = both(stock, inputs, "depends on the values at pads")
    assert abs(have.loss - want.loss) < TOLERANCE


CALLS = {
    "plain": {},
    "all layers": {"output_hidden_states": True},
    "one layer": {"output_hidden_states": [1]},  # runs the original forward, as the next one does
    "attention weights": {"output_attentions": True, "output_hidden_states": True},
    "all logits": {"logits_to_keep": 0},
    "last": {"logits_to_keep": 1},
    "columns": {"logits_to_keep": torch.tensor([13, 2])},
    "columns of each row": {"logits_to_keep": torch.tensor([[8, 13], [0, 0], [13, 1]])},
    "a mask": {"logits_to_keep": torch.arange(42).view(3, 14) % 3 > 0},
}
KINDS = [
    *((name, "ForCausalLM") for name in (*NINE, "gemma3", "falcon", "bloom", "mixtral")),
    *((name, "Model") for name in ("gpt2", "mistral", "gemma3")),
    *((name, "ForTokenClassification") for name in NINE),
    *((name, "ForQuestionAnswering") for name in ("gpt2", "llama")),
    *((name, "Model") for name in FAMILIES),
    *FAMILY_HEADS,
    *SHIFTED_HEADS,
]


def has_class(name, head):
    stem = (DECODERS.get(name) or FAMILIES.get(name))[0]
    return head in ("Model", "ForCausalLM") or hasattr(transformers, stem + head)


def assert_zeros_at_pads(have, want, *, is_token, kept):
    assert type(have) is type(want) and list(have.keys()) == list(want.keys())
    for name, theirs in want.items():
        if name in ("past_key_values", "cache"):
            for a, b in zip(have[name].layers, theirs.layers, strict=True):
                for ours, stock in ((a.keys, b.keys), (a.values, b.values)):
                    columns = is_token[:, -stock.shape[2] :]  # of a window: its last ones
                    stock = zeroed(stock.transpose(1, 2), columns).transpose(1, 2)
                    assert largest_difference(ours, stock) < TOLERANCE, name
        elif name == "hidden_states":
            assert [x is None for x in have[name]] == [x is None for x in theirs]
            pairs = [(a, b) for a, b in zip(have[name], theirs, strict=True) if b is not None]
            for ours, stock in pairs:
                assert largest_difference(ours, zeroed(stock, is_token)) < TOLERANCE, name
        elif name not in ("attentions", "cross_attentions", "pooler_output"):
            mask = kept if "logits" in name else is_token
            assert largest_difference(have[name], zeroed(theirs, mask)) < TOLERANCE, name


def kept_of(is_token, keep):
    if isinstance(keep, int):
        return is_token[:, -keep:] if keep else is_token
    if keep.dtype == torch.bool:
        return is_token[keep]
    return is_token[:, keep] if keep.dim() == 1 else is_token.gather(1, keep)


@pytest.mark.filterwarnings("ignore::bytetx.hf.FallbackWarning")
@pytest.mark.parametrize(("name", "head"), [k for k in KINDS if has_class(*k)])
def test_every_output_is_zeros_at_pads_whichever_forward_runs(name, head):
    """One rule for each output, side of the padding, and value of logits_to_keep."""
    if name in DECODERS:
        stock = tiny_decoder(name, head, **({"pad_token_id": 1} if "Class" in head else {}))
    else:
        stock = tiny_model(name, head)
    stock.set_attn_implementation("eager")  # which has attention weights
    wrapped = wrap(copy.deepcopy(stock))
    is_lm = head.endswith(("ForCausalLM", "LMHeadModel"))
    for side, (what, options) in itertools.product(("right", "left"), CALLS.items()):
        keep = options.get("logits_to_keep", 0)
        if "logits_to_keep" in options and not is_lm:
            continue
        if side == "left" and what not in ("plain", "attention weights", "last"):
            continue
        if isinstance(keep, torch.Tensor) and keep.dim() == 2 and not slices_by_row():
            continue
        inputs = padded_inputs(SEQLENS, side=side)
        is_token = inputs["attention_mask"].bool()
        if head == "ForMultipleChoice":
            inputs = {key: tensor.unsqueeze(0) for key, tensor in inputs.items()}
        with torch.inference_mode():
            want, have = stock(**inputs, **options), wrapped(**inputs, **options)
            assert_zeros_at_pads(have, want, is_token=is_token, kept=kept_of(is_token, keep))
            if what in ("plain", "attention weights"):
                as_tuple = wrapped(**inputs, **options, return_dict=False)
                assert len(as_tuple) == len(stock(**inputs, **options, return_dict=False))
                first = next(iter(have.values()))
                assert torch.equal(as_tuple[0], first)


@pytest.mark.parametrize("keep", [1, torch.tensor([13, 2])], ids=["last", "columns"])
@pytest.mark.parametrize("name", NINE + [f"{f} {h}" for f, h in SHIFTED_HEADS])
def test_logits_selected_at_pads_run_packed_or_are_the_stock_models(name, keep):
    stock = tiny_decoder(name) if name in NINE else tiny_model(*name.split())
    inputs = padded_inputs(SEQLENS) | {"logits_to_keep": keep}
    is_token = kept_of(inputs["attention_mask"].bool(), keep)
    want, have = both(stock, inputs)
    assert largest_difference(have.logits, zeroed(want.logits, is_token)) < TOLERANCE
    want, have = both(stock, inputs, pads="stock")
    # GPT-2's weights are column-major, and a GEMM may sum in another order.
    assert largest_difference(have.logits, want.logits) < TOLERANCE


@pytest.mark.filterwarnings("ignore::bytetx.hf.FallbackWarning")
@pytest.mark.parametrize("options", [{}, {"output_attentions": True}], ids=["packed", "original"])
@pytest.mark.parametrize("name", ["bert", "albert", "mpnet"])
def test_a_pooler_reads_the_first_token_whichever_forward_runs(name, options):
    stock = tiny_model(name)
    stock.set_attn_implementation("eager")
    wrapped = wrap(copy.deepcopy(stock))
    left = padded_inputs([9, 1, 14], side="left")
    with torch.inference_mode():
        have = wrapped(**left, **options)
        for row, seqlen in enumerate(SEQLENS):
            states = have.last_hidden_state[row, -seqlen:][:1]
            pool = stock.pooler(states.unsqueeze(0)) if name != "albert" else None
            if pool is None:
                pool = stock.pooler_activation(stock.pooler(states))
            assert largest_difference(have.pooler_output[row], pool[0]) < TOLERANCE


def test_training_mode_leaves_pads_as_they_are_and_inputs_are_not_written_to():
    stock, inputs = tiny_model("bert"), padded_inputs(SEQLENS)
    for dropout in stock.modules():
        if isinstance(dropout, nn.Dropout):
            dropout.p = 0.0
    wrapped = wrap(copy.deepcopy(stock)).train()
    with pytest.warns(FallbackWarning, match="training mode"):
        have = wrapped(**inputs).last_hidden_state
    assert torch.equal(have, stock(**inputs).last_hidden_state)
    llama = wrap(tiny_decoder("llama"))
    embeds = llama.get_input_embeddings()(inputs.pop("input_ids")).detach()
    given = embeds.clone()
    with pytest.warns(FallbackWarning, match="selects layers"), torch.inference_mode():
        have = llama(inputs_embeds=given, **inputs, output_hidden_states=[0])
    assert torch.equal(given, embeds)
    assert not have.hidden_states[0][1, 1:].any()


def slices_by_row():
    from transformers import modeling_utils

    return hasattr(modeling_utils, "slice_logits_to_keep")


@pytest.mark.parametrize("name", [*NINE, "roberta ForCausalLM"])
def test_logits_selected_at_tokens_run_packed(name):
    stock = tiny_decoder(name) if name in NINE else tiny_model(*name.split())
    right, left = padded_inputs(SEQLENS), padded_inputs(SEQLENS, side="left")
    calls = [left | {"logits_to_keep": 1}, right | {"logits_to_keep": torch.tensor([0])}]
    if slices_by_row():
        ends = (right["attention_mask"].sum(1) - 1).unsqueeze(1)
        calls.append(right | {"logits_to_keep": ends})
        calls.append(right | {"logits_to_keep": right["attention_mask"].bool()})
    for call in calls:
        want, have = both(stock, call)
        assert have.logits.shape == want.logits.shape
        assert largest_difference(have.logits, want.logits) < TOLERANCE


def assert_same_output(have, want):
    assert list(have.keys()) == list(want.keys())
    for name, theirs in want.items():
        ours = have[name]
        if isinstance(theirs, torch.Tensor):
            assert ours.shape == theirs.shape, name
            assert largest_difference(ours, theirs) < TOLERANCE, name
        elif isinstance(theirs, tuple):
            assert all(
                largest_difference(a, b) < TOLERANCE for a, b in zip(ours, theirs, strict=True)
            ), name


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [*FAMILIES, *NINE])
def test_every_row_of_a_base_model_with_stock_pads(name, side):
    stock = tiny_decoder(name, "Model") if name in NINE else tiny_model(name)
    for seqlens in (SEQLENS, [7, 7], [5, 0, 3]):
        inputs = padded_inputs(seqlens, side=side)
        want, have = both(stock, inputs | {"output_hidden_states": True}, pads="stock")
        assert_same_output(have, want)
        mean, ours = want.last_hidden_state.mean(1), have.last_hidden_state.mean(1)
        assert largest_difference(ours, mean) < TOLERANCE


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("family", "head"), FAMILY_HEADS)
def test_every_output_of_a_head_with_stock_pads(family, head, side):
    stock = tiny_model(family, head)
    for seqlens in (SEQLENS, [5, 0, 3]):
        inputs = padded_inputs(seqlens, side=side)
        if head == "ForMultipleChoice":
            inputs = {name: tensor.unsqueeze(0) for name, tensor in inputs.items()}
        wrapped = wrap(copy.deepcopy(stock), pads="stock")
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)  # a first column that is a pad
            for options in ({}, {"output_hidden_states": True}):
                assert_same_output(wrapped(**inputs, **options), stock(**inputs, **options))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", NINE)
def test_logits_of_a_causal_head_with_stock_pads(name, side):
    inputs = padded_inputs(SEQLENS, side=side)
    want, have = both(tiny_decoder(name), inputs, pads="stock")
    assert largest_difference(have.logits, want.logits) < TOLERANCE


def count_passes(model, monkeypatch):
    """How often the model's passes run packed, as a list that grows."""
    passes = []
    forward = type(model.base_model.forward)
    own = forward._pass
    monkeypatch.setattr(forward, "_pass", lambda *args: passes.append(1) or own(*args))
    return passes


def test_what_shows_no_pads_runs_packed_with_stock_pads(monkeypatch):
    left = padded_inputs(SEQLENS, side="left")
    calls = [
        (tiny_model("bert"), padded_inputs([6, 6])),
        (tiny_model("bert", "ForSequenceClassification"), padded_inputs(SEQLENS)),
        (tiny_decoder("llama"), left | {"logits_to_keep": 1}),
        (tiny_decoder("qwen3", "ForSequenceClassification", pad_token_id=1), left),
    ]
    for stock, inputs in calls:
        wrapped = wrap(copy.deepcopy(stock), pads="stock")
        with monkeypatch.context() as patch, torch.inference_mode():
            passes = count_passes(wrapped, patch)
            have, want = wrapped(**inputs)[0], stock(**inputs)[0]
            assert len(passes) == 1
        assert largest_difference(have, want) < TOLERANCE


def test_the_choice_of_pads_is_copied_changed_and_checked(monkeypatch):
    stock = tiny_model("bert")
    wrapped = wrap(copy.deepcopy(stock), pads="stock")
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        want = stock(**inputs)[0]
        for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
            assert largest_difference(twin(**inputs)[0], want) < TOLERANCE
        assert wrap(wrapped) is wrapped
        assert not wrapped(**inputs)[0][1, 1:].any()
    with pytest.raises(InputError, match="pads must be one of 'zeros', 'stock', got 'mean'"):
        wrap(stock, pads="mean")


def test_feature_extraction_pipeline_with_stock_pads(tmp_path):
    from checkpoints import save_checkpoint

    folder = save_checkpoint(tmp_path, head="Model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["a packed batch of some more words", "no"]
    answers = []
    for options in (None, {"pads": "stock"}):
        model = transformers.AutoModel.from_pretrained(folder).eval()
        model = model if options is None else wrap(model, **options)
        run = transformers.pipeline(
            "feature-extraction", model=model, tokenizer=tokenizer, device="cpu"
        )
        answers.append([torch.tensor(rows)[0].mean(0) for rows in run(texts, batch_size=2)])
    for want, have in zip(*answers, strict=True):
        assert largest_difference(have, want) < TOLERANCE
