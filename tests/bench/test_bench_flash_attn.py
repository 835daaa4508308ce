"""FlashAttention-2 as torch ships it in place of flash-attn: same vectors, and nothing stays."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint

from benchmarks import flash_attn, gpu_rivals
from benchmarks.flash_attn import flash_attn_package
from benchmarks.measure import cosine_distance
from benchmarks.rivals import SentenceTransformersRival
from bytetx.errors import BytetxError

transformers = pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")
if importlib.util.find_spec("flash_attn") is not None:
    pytest.skip("flash-attn itself is installed", allow_module_level=True)

TEXTS = ["a", "the quick brown fox", "over the lazy dog and back", "fox", "dog dog"]


def attend_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[torch.Tensor | None, torch.Tensor | None, int, int],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """The kernel's definition, a sequence after the other."""
    assert (dropout_p, causal, window_size) == (0.0, False, (-1, -1))
    cu_seqlens = lengths[0]
    if cu_seqlens is None:  # [batch_size, seqlen, num_heads, head_dim]
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, scale=softmax_scale)
        return out.transpose(1, 2)
    assert cu_seqlens.dtype == torch.int32 and lengths[2] == int(cu_seqlens.diff().max())
    out = torch.full_like(q, torch.nan)
    for first, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        own = (x[first:end].transpose(0, 1) for x in (q, k, v))
        part = torch.nn.functional.scaled_dot_product_attention(*own, scale=softmax_scale)
        out[first:end] = part.transpose(0, 1)
    return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ends of each packed batch that the kernel got, on a machine that transformers takes for one
    with a GPU."""
    found: list[int] = []

    def attend(q: torch.Tensor, *others: object) -> torch.Tensor:
        found.append(len(q))
        return attend_on_cpu(q, *others)

    from transformers import modeling_flash_attention_utils as utils
    from transformers.utils import import_utils

    monkeypatch.setattr(flash_attn, "_attend", attend)
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    matrix = dict(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2])
    matrix["supported_devices"] = ((lambda: True, "cuda"),)
    monkeypatch.setitem(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX, 2, matrix)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    return found


def is_available() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return is_flash_attn_2_available()


def test_the_package_is_there_inside_the_block_alone(calls: list[int]) -> None:
    assert not is_available()
    for _ in range(2):
        with flash_attn_package() as origin:
            assert origin == "torch" and is_available()
            import flash_attn as package

            assert package.flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
            assert importlib.metadata.version("flash-attn") == package.__version__
            with flash_attn_package() as inner:  # as two suites of one process may
                assert inner == "torch"
            assert is_available()
        assert not is_available() and "flash_attn" not in sys.modules
        with pytest.raises(ImportError):
            importlib.import_module("flash_attn")
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash-attn")


def embedder(folder: Path, **options: object) -> Callable[[list[str]], np.ndarray]:
    return SentenceTransformersRival(folder, torch.float32, **options).embed


def test_unpadded_vectors_are_the_padded_ones(tmp_path: Path, calls: list[int]) -> None:
    folder = save_checkpoint(tmp_path / "model")
    options = {"name": "fa2", "device": "cpu"}
    small = gpu_rivals.load_unpadded(folder, torch.float32, batch_size=2, **options)
    large = gpu_rivals.load_unpadded(folder, torch.float32, batch_size=1024, **options)
    padded = embedder(folder)(TEXTS)
    assert cosine_distance(small.embed(TEXTS), padded) < 1e-6
    num_layers = 2
    assert len(calls) == 3 * num_layers
    calls.clear()
    assert cosine_distance(large.embed(TEXTS), padded) < 1e-6
    assert len(calls) == num_layers and len(set(calls)) == 1  # all tokens, and no pad token
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert calls[0] == sum(len(ids) for ids in tokenizer(TEXTS)["input_ids"])


def test_a_padded_batch_is_unpadded_around_the_kernel(tmp_path: Path, calls: list[int]) -> None:
    """transformers alone, whose padded batches the kernel gets packed, too."""
    folder = save_checkpoint(tmp_path / "model")
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        TEXTS, padding=True, return_tensors="pt"
    )
    plain = transformers.AutoModel.from_pretrained(folder).eval()
    with flash_attn_package():
        model = transformers.AutoModel.from_pretrained(
            folder, attn_implementation="flash_attention_2"
        ).eval()
    keep = tokens["attention_mask"].bool()
    with torch.inference_mode():
        wanted, got = plain(**tokens).last_hidden_state, model(**tokens).last_hidden_state
        torch.testing.assert_close(got[keep], wanted[keep], atol=1e-5, rtol=1e-5)
        assert calls[0] == int(keep.sum())
        dense = {name: row[:1, :3] for name, row in tokens.items()}
        wanted, got = plain(**dense).last_hidden_state, model(**dense).last_hidden_state
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_a_rival_that_pads_nevertheless_is_refused(
    tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SentenceTransformersRival, "unpads", False)
    folder = save_checkpoint(tmp_path / "model")
    with pytest.raises(BytetxError, match="pads; version 6 unpads"):
        gpu_rivals.load_unpadded(folder, torch.float32, name="x", batch_size=2, device="cpu")


@pytest.mark.gpu
def test_unpadded_vectors_are_the_padded_ones_on_a_gpu(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    options = {"name": "fa2", "batch_size": 1024}
    unpadded = gpu_rivals.load_unpadded(folder, torch.float16, **options)
    padded = SentenceTransformersRival(folder, torch.float16, device="cuda")
    assert cosine_distance(unpadded.embed(TEXTS), padded.embed(TEXTS)) < 1e-3
