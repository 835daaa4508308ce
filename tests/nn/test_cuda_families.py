"""Every encoder family on a GPU in half precision: as close to float64 as transformers is, twice
over at most; and its vectors through Model with CUDA graphs."""

from pathlib import Path

import numpy as np
import pytest
import test_embedding_gemma2
import test_neomme
import torch
import transformers
from checkpoints import TOKENIZERS, save_checkpoint, texts
from test_t5 import tiny_t5
from tiny import FAMILIES, load, random_ids, randomize, save, tiny_model
from tiny_decoders import tiny_decoder
from torch import nn

import bytetx
from bytetx.nn.layer import ExpertFeedForward
from bytetx.nn.transformer import Transformer
from bytetx.packed import pack, split

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_backend")]

SEQLENS = [1, 2, 17, 65, 70, 33]
WIDER = {"hidden_size": 192, "intermediate_size": 256, "max_position_embeddings": 160}
T5 = {"t5-relu": {}, "t5-gated": {"feed_forward_proj": "gated-gelu"}}
# Of the sizes that the published checkpoints' heads have.
WITHOUT_BERTS_HEADS = {
    "embedding_gemma2": lambda: test_embedding_gemma2.tiny_text(
        **WIDER, head_dim=256, global_head_dim=512
    ),
    "neomme": lambda: test_neomme.tiny(**WIDER, head_dim=64),
}


def wide_model(family: str) -> nn.Module:
    """Heads of 64, as the kernels of most checkpoints have; activations of ordinary size."""
    if family in T5:
        model = tiny_t5(d_model=192, d_kv=64, d_ff=256, **T5[family])
    elif family in WITHOUT_BERTS_HEADS:
        model = WITHOUT_BERTS_HEADS[family]()
    else:
        model = tiny_model(family, **WIDER)
    randomize(model, std=0.05)
    return model


def states(model: nn.Module, ids: list[list[int]]) -> torch.Tensor:
    device = next(model.parameters()).device
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([s], device=device)).last_hidden_state[0] for s in ids]
    return torch.cat(rows).double().cpu()


@pytest.mark.parametrize("family", [*FAMILIES, *T5, *WITHOUT_BERTS_HEADS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_as_close_to_float64_as_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = wide_model(family).to(dtype)
    spec = load(save(model, tmp_path)).spec
    ours = Transformer.from_tensors(
        spec, load(tmp_path).weights.cast(dtype), dtype=dtype, device="cuda", prepack=True
    )
    ids = random_ids(SEQLENS)
    batch = pack(
        ids,
        has_token_types=spec.num_token_types > 0,
        position_offset=spec.position_offset,
        device="cuda",
    )
    found = ours.forward(batch)
    theirs = states(model.cuda(), ids)
    exact = states(model.cpu().double(), ids)
    their_error, our_error = theirs - exact, found.double().cpu() - exact
    noise = exact.abs() * torch.finfo(dtype).eps
    assert our_error.square().mean() <= 4 * their_error.square().mean() + noise.square().mean()
    assert our_error.abs().max() <= 2 * their_error.abs().max() + 2 * noise.max()
    # Batch mates change nothing.
    rows = split(found, batch)
    alone = pack(
        ids[3:4],
        has_token_types=spec.num_token_types > 0,
        position_offset=spec.position_offset,
        device="cuda",
    )
    near = max(4 * noise.max(), 2 * their_error.abs().max())  # products sum in another order
    assert torch.allclose(ours.forward(alone), rows[3], atol=float(near))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_experts_are_as_close_to_float64_as_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1}
    model = tiny_decoder(name, "Model", **sizes)
    randomize(model, std=0.05)
    model = model.to(dtype)
    spec = load(save(model, tmp_path)).spec
    ours = Transformer.from_tensors(
        spec, load(tmp_path).weights.cast(dtype), dtype=dtype, device="cuda", prepack=True
    )
    halves = [w.feed_forward for w in ours.layers.weights]
    stacks = [half.experts.first_stack for half in halves if isinstance(half, ExpertFeedForward)]
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    assert all((stack is not None) == (is_hopper and dtype == torch.bfloat16) for stack in stacks)
    ids = random_ids(SEQLENS)
    found = ours.forward(pack(ids, has_token_types=False, position_offset=0, device="cuda"))
    theirs = states(model.cuda(), ids)
    model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    exact = states(model.cpu().double(), ids)
    # Rounding chooses another expert for some rows, here and there, and then all differs.
    their_rows, our_rows = ((x - exact).abs().amax(1) for x in (theirs, found.double().cpu()))
    noise = exact.abs().max() * torch.finfo(dtype).eps
    assert our_rows.median() <= 2 * their_rows.median() + noise


@pytest.mark.parametrize("family", TOKENIZERS)
def test_vectors_of_every_family(family: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, family, **{key: WIDER[key] for key in ("hidden_size",)})
    model = transformers.AutoModel.from_pretrained(tmp_path)
    randomize(model, std=0.05)
    model.save_pretrained(tmp_path)
    given = texts(60)
    exact = bytetx.load(tmp_path, device="cpu").embed(given, truncate=True).vectors
    on_gpu = bytetx.load(tmp_path, device="cuda", dtype="float16", token_budget=256)
    for _ in range(2):  # the second run replays graphs
        found = on_gpu.embed(given, truncate=True).vectors
        cosines = (found * exact).sum(1) / np.linalg.norm(found, axis=1)
        assert np.min(cosines / np.linalg.norm(exact, axis=1)) > 0.999
