"""The static case of suite `cpu`: a table of token vectors from strings, against model2vec."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

import bytetx
from benchmarks import measure
from benchmarks.gpu import left_out
from benchmarks.rivals import quiet
from benchmarks.suite import Measurement, measured

_SIZE = 256
_NUM_CHECKED = 64  # texts embedded by everyone before the clock starts
_MAX_DIFFERENCE = 1e-5
_BATCH_SIZE = 1024  # model2vec's own
RIVALS = ("model2vec", "sentence-transformers")


def measure_static(
    texts: Sequence[str], *, like: Path, min_rounds: int, max_rounds: int, seconds: float
) -> Measurement:
    """Microseconds a text of embed, on the host's clock, strings in and vectors out.

    like: whose tokenizer the table of random vectors has.  There is no floor: the tokenizer takes
    most of the time.
    """
    texts, notes = list(texts), list[str]()
    with random_table(like) as folder:
        model = bytetx.load(folder, device="cpu")
        runs = _rival_runs(folder, model, texts, notes)
    stats = model.embed(texts).stats
    timing = measure.alternate(
        partial(model.embed, texts),
        runs,
        min_rounds=min_rounds,
        max_rounds=max_rounds,
        seconds=seconds,
    )
    shape: dict[str, int | float | str] = {
        "sequences": len(texts),
        "tokens": stats.num_tokens,
        "size": _SIZE,
        "rounds": timing.rounds,
    }
    return measured(timing.found, None, shape, notes, per=len(texts) / 1e6)


@contextmanager
def random_table(like: Path) -> Iterator[Path]:
    """A Model2Vec folder, for a while, of random vectors for another checkpoint's tokenizer."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(like / "tokenizer.json"))
    shape = (tokenizer.get_vocab_size(), _SIZE)
    table = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    with tempfile.TemporaryDirectory(prefix="bytetx-bench-") as name:
        folder = Path(name)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.save(str(folder / "tokenizer.json"))
        save_file({"embeddings": table}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "model2vec", "normalize": true}')
        yield folder


def _rival_runs(
    folder: Path, model: "bytetx.Model", texts: list[str], notes: list[str]
) -> dict[str, Callable[[], object]]:
    """A run for each rival whose vectors are ours; `notes` gets a line for each other one."""
    some = texts[:_NUM_CHECKED]
    ours = model.embed(some).vectors
    runs: dict[str, Callable[[], object]] = {}
    for name in RIVALS:
        try:
            with quiet():
                encode = _load(name, folder)
                difference = float(np.abs(encode(some) - ours).max())
        except Exception as error:  # a rival may raise anything, and costs no other number
            notes.append(left_out(name, error))
            continue
        if difference <= _MAX_DIFFERENCE:
            runs[name] = partial(encode, texts)
        else:
            notes.append(f"{name} left out: its vectors differ from ours by {difference:.1e}")
    return runs


def _load(name: str, folder: Path) -> Callable[[Sequence[str]], np.ndarray]:
    """Makes a rival of the table and the tokenizer; one that reads a folder may run code there."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    table = load_file(folder / "model.safetensors")["embeddings"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if name == "model2vec":
        from model2vec import StaticModel

        static = StaticModel(table, tokenizer, normalize=True)
        return lambda texts: static.encode([*texts], batch_size=_BATCH_SIZE)
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

    modules: list[nn.Module] = [StaticEmbedding(tokenizer, embedding_weights=table), Normalize()]
    encoder = SentenceTransformer(modules=modules, device="cpu", trust_remote_code=False)

    def encode(texts: Sequence[str]) -> np.ndarray:
        vectors: np.ndarray = encoder.encode(
            list(texts), batch_size=_BATCH_SIZE, show_progress_bar=False
        )
        return vectors

    return encode
