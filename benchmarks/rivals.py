"""Rivals in the same process: padded batches of 32, the way of each library."""

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.measure import cosine_distance
from bytetx import __version__
from bytetx.cli.passages import english_passages
from bytetx.nn.sentence_modules import load_sentence_spec

BATCH_SIZE = 32  # sentence-transformers' default
_CALIBRATION_TEXTS = 128  # of the rival in int8

Inputs = Sequence[str] | Sequence[Sequence[int]]
# (input_ids, attention_mask), both int64 [batch_size, max_seqlen] -> the last hidden states.
Forward = Callable[[Tensor, Tensor], Tensor]


class Rival(Protocol):
    """One library with the checkpoint loaded: inputs to unit vectors f32 [n, hidden_size].

    Only those with sorts_itself False take token ids.
    """

    name: str
    sorts_itself: bool  # by length, before it pads

    def embed(self, inputs: Inputs) -> np.ndarray: ...


Loader = Callable[[Path, torch.dtype], Rival]


class PaddedRival:
    """Tokenise, pad, forward, mean-pool, normalise: equal batches in the order given."""

    sorts_itself = False

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        forward: Forward,
        *,
        device: str = "cpu",
        batch_size: int = BATCH_SIZE,
    ):
        self.name, self._tokenizer, self._forward = name, tokenizer, forward
        self._device, self._batch_size = device, batch_size

    def embed(self, inputs: Inputs) -> np.ndarray:
        starts = range(0, len(inputs), self._batch_size)
        batches = (inputs[start : start + self._batch_size] for start in starts)
        return np.concatenate([self._embed_batch(batch) for batch in batches])

    @torch.inference_mode()
    def _embed_batch(self, batch: Inputs) -> np.ndarray:
        if isinstance(batch[0], str):
            tokens = self._tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            input_ids, mask = tokens["input_ids"], tokens["attention_mask"]
        else:
            input_ids, mask = padded(cast(Sequence[Sequence[int]], batch))
        input_ids, mask = input_ids.to(self._device), mask.to(self._device)
        hidden_states = self._forward(input_ids, mask)  # [batch_size, max_seqlen, hidden_size]
        pooled = mean_pooled(hidden_states, mask)
        return torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()


class SentenceTransformersRival:
    """sentence-transformers' own encode, which sorts by length and pads batches."""

    sorts_itself = True

    def __init__(
        self,
        checkpoint: Path,
        dtype: torch.dtype,
        *,
        name: str = "sentence-transformers",
        device: str = "cpu",
        batch_size: int = BATCH_SIZE,
        attention: str | None = None,
    ):
        """attention: transformers' attn_implementation, None for its default."""
        from sentence_transformers import SentenceTransformer

        self.name, self._batch_size = name, batch_size
        # Older versions import the classes that a local modules.json names, whatever they are told.
        load_sentence_spec(checkpoint)
        options = {"dtype": dtype} | ({"attn_implementation": attention} if attention else {})
        self._model = SentenceTransformer(
            str(checkpoint), device=device, model_kwargs=options, trust_remote_code=False
        )

    @property
    def unpads(self) -> bool:
        """Return whether it runs batches without padding, which it decides by itself."""
        return bool(getattr(self._model[0], "can_flatten_inputs", False))

    def embed(self, inputs: Inputs) -> np.ndarray:
        with warnings.catch_warnings(action="ignore"):
            return self._model.encode(
                inputs,
                batch_size=self._batch_size,
                normalize_embeddings=True,
                show_progress_bar=False,
            )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rivals that could be loaded, and a line for each that could not."""

    rivals: tuple[Rival, ...]
    notes: tuple[str, ...]


def load_rivals(
    names: Sequence[str],
    checkpoint: Path,
    dtype: torch.dtype,
    *,
    loaders: Mapping[str, tuple[tuple[str, ...], Loader]] | None = None,
) -> Loaded:
    """The named rivals that are installed, with the checkpoint in `dtype`.

    names: keys of `loaders`, which are those for a CPU unless they are given. A rival that is
    installed but fails to load is left out and named in the notes, so that it costs no other
    number.
    """
    found, notes = [], []
    for name in names:
        needs, load = (_LOADERS if loaders is None else loaders)[name]
        missing = [module for module in needs if importlib.util.find_spec(module) is None]
        if missing:
            notes.append(f"{name} left out: {', '.join(missing)} not installed")
        elif name == "onnxruntime" and dtype != torch.float32:
            notes.append("onnxruntime left out of bf16: it has no bf16 kernels for CPUs")
        else:
            try:
                with quiet():
                    found.append(load(checkpoint, dtype))
            except Exception as error:  # a converter may raise anything; the line says what
                notes.append(f"{name} left out: {type(error).__name__}: {error}")
    return Loaded(tuple(found), tuple(notes))


def right_rivals(
    rivals: Iterable[Rival], some: Inputs, ours: np.ndarray, *, limit: float, notes: list[str]
) -> list[Rival]:
    """The rivals whose vectors of `some` are ours; `notes` gets a line for each other one.

    limit: of the cosine distance, beyond which a rival did other work.
    """
    kept = []
    for rival in rivals:
        distance = cosine_distance(ours, rival.embed(some))
        if distance > limit:
            notes.append(f"{rival.name} left out: cosine distance to ours is {distance:.1e}")
        else:
            kept.append(rival)
    return kept


def versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of bytetx, torch and the named packages, those that are installed."""
    found = {"bytetx": __version__}
    for name in ("torch", *names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class _LastHiddenState(torch.nn.Module):
    """A transformers model with one output, so that no rival pays for the pooler."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return cast(Tensor, out.last_hidden_state)


def tokenizer_of(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    # None, the default, would ask on stdin whether to run the checkpoint's code.
    return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)


def encoder_of(checkpoint: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModel

    options = {"dtype": dtype, "trust_remote_code": False}
    return _LastHiddenState(AutoModel.from_pretrained(checkpoint, **options)).eval()


def _transformers_rival(checkpoint: Path, dtype: torch.dtype) -> Rival:
    """AutoModel with its default attention."""
    return PaddedRival("transformers", tokenizer_of(checkpoint), encoder_of(checkpoint, dtype))


def _openvino_rival(checkpoint: Path, dtype: torch.dtype) -> Rival:
    """AutoModel converted with openvino.convert_model; bf16 by the precision hint."""
    import openvino

    example = dict(zip(("input_ids", "attention_mask"), _example(), strict=True))
    exported = openvino.convert_model(encoder_of(checkpoint, torch.float32), example_input=example)
    precision = "bf16" if dtype == torch.bfloat16 else "f32"
    return PaddedRival("openvino", tokenizer_of(checkpoint), _openvino_forward(exported, precision))


def _openvino_forward(model: Any, precision: str) -> Callable[[Tensor, Tensor], Tensor]:
    """precision: of what the model does not say itself."""
    import openvino

    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",  # every thread on the one batch in flight
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = openvino.Core().compile_model(model, "CPU", options)

    def forward(input_ids: Tensor, mask: Tensor) -> Tensor:
        outputs = compiled({"input_ids": input_ids.numpy(), "attention_mask": mask.numpy()})
        return torch.from_numpy(outputs[0])

    return forward


def _openvino_nncf_rival(checkpoint: Path, dtype: torch.dtype) -> Rival:
    """OpenVINO's model in int8: post-training quantisation by NNCF, as it recommends for
    transformers, calibrated on real passages."""
    import nncf
    import openvino

    tokenizer = tokenizer_of(checkpoint)
    example = dict(zip(("input_ids", "attention_mask"), _example(), strict=True))
    exported = openvino.convert_model(encoder_of(checkpoint, torch.float32), example_input=example)
    passages = english_passages(_CALIBRATION_TEXTS, seed=1)
    batches = [dict(tokenizer(passage, return_tensors="np")) for passage in passages]
    kept = [{name: batch[name] for name in example} for batch in batches]
    quantized = nncf.quantize(
        exported, nncf.Dataset(kept), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(kept)
    )
    return PaddedRival("openvino-nncf", tokenizer, _openvino_forward(quantized, "bf16"))


def _onnxruntime_rival(checkpoint: Path, dtype: torch.dtype) -> Rival:
    """AutoModel through torch.onnx.export, with every graph optimisation of ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory(prefix="bytetx-bench-") as folder:
        path = str(Path(folder) / "model.onnx")
        _export_onnx(encoder_of(checkpoint, dtype), path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def forward(input_ids: Tensor, mask: Tensor) -> Tensor:
        feed = {"input_ids": input_ids.numpy(), "attention_mask": mask.numpy()}
        return torch.from_numpy(session.run(None, feed)[0])

    return PaddedRival("onnxruntime", tokenizer_of(checkpoint), forward)


def _export_onnx(model: torch.nn.Module, path: str) -> None:
    axes = {0: torch.export.Dim("batch_size"), 1: torch.export.Dim("max_seqlen")}
    program = torch.onnx.export(
        model,
        _example(),
        dynamo=True,
        verbose=False,
        dynamic_shapes={"input_ids": axes, "attention_mask": axes},
        input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state"],
    )
    assert program is not None  # with dynamo=True
    program.save(path)


# Each rival: the modules it needs, and how it is loaded.
_LOADERS: dict[str, tuple[tuple[str, ...], Loader]] = {
    "transformers": (("transformers",), _transformers_rival),
    "openvino": (("openvino", "transformers"), _openvino_rival),
    "openvino-nncf": (("openvino", "nncf", "transformers"), _openvino_nncf_rival),
    "onnxruntime": (("onnxruntime", "onnxscript", "transformers"), _onnxruntime_rival),
    "sentence-transformers": (("sentence_transformers",), SentenceTransformersRival),
}


def _example() -> tuple[Tensor, Tensor]:
    """Small inputs for tracing, with pad tokens so that the mask stays in the graph."""
    return padded([[1, 2, 3, 4, 5], [6, 7, 8]])


def padded(token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask, int64 [batch_size, max_seqlen], padded with id 0."""
    rows = [torch.tensor(ids) for ids in token_ids]
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return pad_sequence(rows, batch_first=True), mask


def mean_pooled(hidden_states: Tensor, mask: Tensor) -> Tensor:
    """f32 [batch_size, hidden_size]: the mean of each text's tokens."""
    keep = mask.unsqueeze(-1).to(hidden_states.dtype)
    return (hidden_states * keep).sum(1).float() / mask.sum(1, keepdim=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what the libraries print while they load and convert."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
        transformers_logging.enable_progress_bar()
        transformers_logging.set_verbosity(verbosity)
