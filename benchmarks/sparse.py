"""The SPLADE case of suites `text` and `cpu`: embed_sparse beside embed of the same texts."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bytetx
from benchmarks import measure
from benchmarks.bert import SIZES, TOKENIZER_FILES
from benchmarks.flash_attn import flash_attn_package
from benchmarks.gpu import left_out
from benchmarks.rivals import BATCH_SIZE, quiet, tokenizer_of
from benchmarks.suite import Measurement
from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import BytetxError

# Weights of a text that are not 0: what trained SPLADE models leave of a passage is about so many.
_ACTIVE_DIMS = 200
_NUM_CHECKED = 16  # texts embedded by everyone before the clock starts
_WARM_UP = 2
# Relative distance of all weights beyond which a rival did other work; f16 rounds at 2^-11, and a
# weight is what the logit has above a bias as large as it.
_MAX_RELATIVE_ERROR = {torch.float32: 1e-3}
_MAX_HALF_ERROR = 5e-2
_LARGE_BATCH = 256
RIVALS = {
    "sparse-encoder": (BATCH_SIZE, False),
    f"sparse-encoder-{_LARGE_BATCH}": (_LARGE_BATCH, False),
    f"sparse-encoder-fa2-{_LARGE_BATCH}": (_LARGE_BATCH, True),  # without padding
}
CPU_RIVALS = ("sparse-encoder",)


def measure_sparse(
    texts: Sequence[str],
    *,
    like: Path,
    dtype: torch.dtype,
    device: str,
    rivals: Sequence[str],
    floor: Callable[[ModelSpec, list[int]], float],
    max_rounds: int = 3,
) -> Measurement:
    """Microseconds a text of embed_sparse, on the host's clock, strings in and CSR on the host out.

    like: whose tokenizer the model of random weights, BERT-base with its masked-LM head, has.
    rivals: keys of RIVALS.  floor: seconds of the model and of texts of these tokens.
    shape.embed_us is the time of `embed` of the same texts, shape.of_embed ours over it.
    """
    with random_splade(texts[:_NUM_CHECKED], like=like, dtype=dtype, device=device) as folder:
        model = bytetx.load(folder, device=device, dtype=dtype)
        assert model.tokenizer is not None
        lengths = [len(encoding.ids) for encoding in model.tokenizer.encode(texts)]
        notes: list[str] = []
        runs = _rival_runs(rivals, folder, model, texts, dtype=dtype, device=device, notes=notes)
    ours, embed = partial(model.embed_sparse, texts), partial(model.embed, texts)
    for _ in range(_WARM_UP if device == "cuda" else 1):
        embed()
        active_dims = len(ours().values) / len(texts)
    timed: dict[str, Callable[[], object]] = {"embed": embed, **runs}
    timing = measure.alternate(ours, timed, min_rounds=2, max_rounds=max_rounds, seconds=60.0)
    per_text = {name: seconds / len(texts) * 1e6 for name, seconds in timing.rivals.items()}
    return sparse_measurement(
        timing.ours / len(texts) * 1e6,
        per_text,
        floor=floor(model.spec, lengths) / len(texts) * 1e6,
        shape={
            "sequences": len(texts),
            "tokens": sum(lengths),
            "max_seqlen": max(lengths),
            "rounds": timing.rounds,
            "active_dims": round(active_dims, 1),
        },
        notes=notes,
    )


def sparse_measurement(
    ours: float,
    others: Mapping[str, float],
    *,
    floor: float,
    shape: dict[str, int | float | str],
    notes: Sequence[str],
) -> Measurement:
    """others: the rivals' microseconds a text, and "embed": ours of dense vectors, no rival."""
    rivals = dict(others)
    embed = rivals.pop("embed")
    sizes = {**shape, "embed_us": round(embed, 2), "of_embed": round(ours / embed, 3)}
    return Measurement(ours, rivals, floor, sizes, tuple(notes))


def splade_flop(spec: ModelSpec, lengths: list[int]) -> float:
    """The layers', and those of the head's two products for every token."""
    head = 2.0 * spec.hidden_size * (spec.hidden_size + spec.vocab_size)
    return measure.encoder_flop(spec, lengths) + head * sum(lengths)


@contextmanager
def random_splade(
    texts: Sequence[str], *, like: Path, dtype: torch.dtype, device: str, size: str = "base"
) -> Iterator[Path]:
    """A folder, for a while, with a BERT for masked words and the tokenizer of another checkpoint.

    The bias of its vocabulary lets about _ACTIVE_DIMS weights of each of the texts be above 0; of
    random weights half of all logits would be.
    """
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig.from_dict(SIZES[size] | {"vocab_size": load_config(like)["vocab_size"]})
    with tempfile.TemporaryDirectory(prefix="bytetx-bench-") as folder:
        with quiet(), torch.device(device):
            model: Any = BertForMaskedLM(config)
            model = model.to(dtype).eval()
        for name in TOKENIZER_FILES:
            if (like / name).exists():
                shutil.copy(like / name, folder)
        with torch.no_grad():
            model.cls.predictions.bias -= _threshold(model, Path(folder), texts)
        with quiet():
            model.save_pretrained(folder)
        del model  # its memory is for those who load the folder
        yield Path(folder)


@torch.inference_mode()
def _threshold(model: Any, folder: Path, texts: Sequence[str]) -> float:
    """The logit that _ACTIVE_DIMS words of a text exceed somewhere, on average over the texts."""
    tokenizer = tokenizer_of(folder)
    found = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, return_tensors="pt").to(model.device)
        best = model(**tokens).logits[0].float().amax(dim=0)
        kept = min(_ACTIVE_DIMS, len(best) - 1)
        found.append(float(best.topk(kept + 1).values[-1]))
    return sum(found) / len(found)


def _rival_runs(
    names: Sequence[str],
    folder: Path,
    model: "bytetx.Model",
    texts: Sequence[str],
    *,
    dtype: torch.dtype,
    device: str,
    notes: list[str],
) -> dict[str, Callable[[], object]]:
    """A run for each rival whose weights are ours; `notes` gets a line for each other one."""
    some = list(texts[:_NUM_CHECKED])
    ours = model.embed_sparse(some).to_scipy().toarray()
    limit = _MAX_RELATIVE_ERROR.get(dtype, _MAX_HALF_ERROR)
    runs: dict[str, Callable[[], object]] = {}
    for name in names:
        batch_size, unpads = RIVALS[name]
        try:
            with quiet():
                encoder = load_sparse_encoder(folder, dtype=dtype, device=device, unpads=unpads)
                encode = partial(encoder.encode, batch_size=batch_size, save_to_cpu=True)
                theirs = encode(some).to_dense().float().numpy()
        except Exception as error:  # a rival may raise anything, and costs no other number
            notes.append(left_out(name, error))
            continue
        distance = float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours))
        if distance <= limit:
            runs[name] = partial(encode, list(texts), show_progress_bar=False)
        else:
            notes.append(f"{name} left out: its relative distance to ours is {distance:.1e}")
    return runs


def load_sparse_encoder(folder: Path, *, dtype: torch.dtype, device: str, unpads: bool) -> Any:
    """sentence-transformers' SparseEncoder; unpads: with FlashAttention-2, on packed batches.

    Raises BytetxError where it pads nevertheless, for then it is another rival.
    """
    from sentence_transformers import SparseEncoder

    options = {"dtype": dtype} | ({"attn_implementation": "flash_attention_2"} if unpads else {})

    def load() -> Any:
        return SparseEncoder(
            str(folder), device=device, model_kwargs=options, trust_remote_code=False
        )

    if not unpads:
        return load()
    with flash_attn_package():
        encoder = load()
    if not getattr(encoder[0], "can_flatten_inputs", False):
        raise BytetxError("this version of sentence-transformers pads; version 6 unpads")
    return encoder
