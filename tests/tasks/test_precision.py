"""embed(precision=...): the integers and bits of sentence-transformers."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import SENTENCES, save_checkpoint, texts
from cli_runs import Bytetx
from sentence_transformers.util import quantize_embeddings
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.cli.files.tasks import embed_task
from bytetx.errors import InputError, OptionError
from bytetx.tasks.precision import DTYPES, Quantizer, quantize_all

QUANTISED = ("int8", "uint8", "binary", "ubinary")
INPUTS = SENTENCES[:6] + texts(30, max_words=4)
TOO_LONG = "word " * 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def model(folder: Path) -> bytetx.Model:
    return bytetx.load(folder)


@pytest.fixture(scope="module")
def floats(model: bytetx.Model) -> np.ndarray:
    return model.embed(INPUTS).vectors


def ranges_of(vectors: np.ndarray) -> np.ndarray:
    """Narrower than the vectors, so that some of them lie outside."""
    return np.stack([vectors.min(axis=0) * 0.7, vectors.max(axis=0) * 0.7])


@pytest.mark.feature("Tasks", "quantised vectors (int8, binary)")
@pytest.mark.parametrize("precision", QUANTISED)
def test_the_bits_are_those_of_sentence_transformers(
    model: bytetx.Model, floats: np.ndarray, precision: str
) -> None:
    got = model.embed(INPUTS, precision=precision).vectors
    expected = quantize_embeddings(floats, precision)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_given_ranges(model: bytetx.Model, floats: np.ndarray, precision: str) -> None:
    ranges = ranges_of(floats)
    expected = quantize_embeddings(floats, precision, ranges=ranges)
    got = model.embed(INPUTS, precision=precision, ranges=ranges).vectors
    np.testing.assert_array_equal(got, expected)
    streamed = model.embed(iter(INPUTS), precision=precision, ranges=ranges, stream=True)
    np.testing.assert_array_equal(np.stack(list(streamed)), expected)
    alone = model.embed(INPUTS[3:4], precision=precision, ranges=ranges).vectors
    np.testing.assert_array_equal(alone, expected[3:4])


@pytest.mark.parametrize("precision", ["float16", "binary", "ubinary"])
def test_a_text_alone_has_the_same_numbers(model: bytetx.Model, precision: str) -> None:
    together = model.embed(INPUTS, precision=precision).vectors
    for index in (0, 7, 20):
        alone = model.embed([INPUTS[index]], precision=precision).vectors[0]
        np.testing.assert_array_equal(alone, together[index])


def test_float16(model: bytetx.Model, floats: np.ndarray) -> None:
    np.testing.assert_array_equal(
        model.embed(INPUTS, precision="float16").vectors, floats.astype(np.float16)
    )


@pytest.mark.parametrize("dim", [1, 7, 8, 13, 384])
@pytest.mark.parametrize("precision", QUANTISED)
def test_any_number_of_dimensions(dim: int, precision: str) -> None:
    vectors = torch.randn(50, dim).numpy()
    vectors[:, 0] = 0.25  # a dimension without a range
    vectors[3] = 0.0
    if precision.endswith("int8"):
        got = quantize_all(vectors, precision, failed=[])
    else:
        got = Quantizer(precision)(torch.from_numpy(vectors)).numpy()
    np.testing.assert_array_equal(got, quantize_embeddings(vectors, precision))


def test_dimensions_are_cut_before_quantising(model: bytetx.Model) -> None:
    short = model.embed(INPUTS, dimensions=20).vectors
    got = model.embed(INPUTS, dimensions=20, precision="ubinary").vectors
    assert got.shape == (len(INPUTS), 3)
    np.testing.assert_array_equal(got, quantize_embeddings(short, "ubinary"))


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_text_that_fails_changes_no_other(
    model: bytetx.Model, floats: np.ndarray, precision: str
) -> None:
    given = [*INPUTS[:10], TOO_LONG, *INPUTS[10:]]
    got = model.embed(given, precision=precision, on_error="return")
    assert list(got.errors) == [10] and not got.vectors[10].any()
    np.testing.assert_array_equal(
        np.delete(got.vectors, 10, axis=0), quantize_embeddings(floats, precision)
    )


def test_a_generator_of_texts(model: bytetx.Model, floats: np.ndarray) -> None:
    def given() -> Iterator[str]:
        yield from INPUTS

    got = model.embed(given(), precision="int8").vectors
    np.testing.assert_array_equal(got, quantize_embeddings(floats, "int8"))


def test_no_text_gives_no_row_of_the_right_form(model: bytetx.Model) -> None:
    for precision, dtype in DTYPES.items():
        size = 6 if "binary" in precision else 48
        vectors = model.embed([], precision=precision).vectors
        assert vectors.shape == (0, size) and vectors.dtype == dtype


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"precision": "int4"}, "precision must be one of float32, float16, int8"),
        ({"precision": ["int8"]}, r"precision must be one of .*, got \['int8'\]"),
        ({"precision": "binary", "ranges": np.zeros((2, 48))}, "ranges go with precision int8"),
        ({"precision": "int8", "ranges": np.zeros((2, 47))}, r"\[2, 48\].*shape \(2, 47\)"),
        ({"precision": "int8", "ranges": np.full((2, 48), np.nan)}, "no minima and maxima"),
        ({"precision": "int8", "ranges": [[1] * 48, [0] * 48]}, "no minima and maxima"),
        ({"precision": "int8", "ranges": "wide"}, r"ranges must be f32 \[2, 48\]"),
        ({"precision": "uint8", "stream": True}, "a stream with precision uint8 needs ranges"),
    ],
)
def test_wrong_options(model: bytetx.Model, options: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        model.embed(INPUTS, **options)


def test_the_range_of_one_text_is_an_error(model: bytetx.Model) -> None:
    with pytest.raises(InputError, match="one text has none; pass ranges"):
        model.embed(["alone"], precision="int8")


@pytest.mark.parametrize("precision", ["float16", *QUANTISED])
def test_every_output_of_the_command_line(
    folder: Path, bytetx: Bytetx, tmp_path: Path, floats: np.ndarray, precision: str
) -> None:
    lines = [{"text": text} for text in INPUTS] + [{"text": TOO_LONG}]
    Path("a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.save("sample.npy", np.concatenate([floats[:20], np.full((1, 48), np.nan)]))
    options = ["--precision", precision]
    ranges = None
    if precision.endswith("int8"):
        options += ["--ranges", "sample.npy"]
        ranges = np.stack([floats[:20].min(axis=0), floats[:20].max(axis=0)])
    expected = floats.astype(np.float16)
    if precision != "float16":
        expected = quantize_embeddings(floats, precision, ranges=ranges)
    for name in ("v.npy", "v.jsonl", "v.parquet"):
        ran = bytetx("embed", "a.jsonl", "-m", folder, "-o", name, *options)
        assert ran.code == 0 and "1 error" in ran.err
    rows = np.load("v.npy")
    assert rows.dtype == expected.dtype
    np.testing.assert_array_equal(rows[:-1], expected)
    assert np.isnan(rows[-1]).all() if precision == "float16" else not rows[-1].any()
    printed = [json.loads(line) for line in Path("v.jsonl").read_text().splitlines()]
    assert "error" in printed.pop()
    got = np.array([row["embedding"] for row in printed])
    np.testing.assert_array_equal(got.astype(expected.dtype), expected)
    column = pq.read_table("v.parquet").column("embedding")
    assert column.type.value_type.to_pandas_dtype() == expected.dtype and column[-1].as_py() is None
    np.testing.assert_array_equal(np.array(column.to_pylist()[:-1], expected.dtype), expected)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--precision", "int4"), 2, "--precision must be one of float32"),
        (("--precision", "int8"), 2, "needs --ranges"),
        (("--ranges", "x.npy"), 2, "--ranges go with --precision int8 or uint8"),
        (("--precision", "int8", "--ranges", "x.npy"), 1, "--ranges x.npy cannot be read"),
        (("--precision", "int8", "--ranges", "ids.npy"), 1, "must hold a matrix of float vectors"),
        (("--precision", "int8", "--ranges", "one.npy"), 1, "has 1 vectors"),
        (("--precision", "int8", "--ranges", "narrow.npy"), 2, "ranges must be f32 [2, 48]"),
    ],
)
def test_misuse_on_the_command_line(
    folder: Path, bytetx: Bytetx, texts: Path, options: tuple, code: int, says: str
) -> None:
    np.save("ids.npy", np.zeros((3, 48), dtype=int))
    np.save("one.npy", np.zeros((1, 48)))
    np.save("narrow.npy", np.zeros((3, 47)))
    ran = bytetx("embed", texts, "-m", folder, "-o", "v.npy", *options)
    assert ran.code == code and says in " ".join(ran.err.split())


def test_a_job_with_other_ranges_is_another_job() -> None:
    jobs = [
        embed_task({"precision": "int8"}, ranges=np.array([[0.0], [end]], np.float32))
        for end in (1, 2)
    ]
    assert jobs[0].options != jobs[1].options
    assert json.dumps(jobs[0].options)
