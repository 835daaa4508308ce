"""Families in TOML files: a broken one breaks itself alone; a folder of the caller's adds some."""

import logging
import pickle
import tomllib
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from checkpoints import edit_json, save_causal, save_checkpoint
from cli_runs import Bytetx, bytetx  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BertConfig, BertModel
from typer.testing import CliRunner

from bytetx import SamplingParams, load, plan, unwrap, wrap
from bytetx.checkpoint import families, family
from bytetx.checkpoint.families import Families, Family, read_families
from bytetx.checkpoint.spec import build_spec
from bytetx.cli.commands import all_commands
from bytetx.errors import CheckpointError, OptionError
from bytetx.hf import FallbackWarning
from bytetx.parallel.planner.simulate import MIXED, simulate_year
from bytetx.serve.loading import load_models
from bytetx.serve.settings import ServeSettings, model_sources

MODELS = Path(family.__file__).parents[2] / "models"
BERT = (MODELS / "bert.toml").read_text()
OWN = BERT.replace('model_types = ["bert"]', 'model_types = ["own"]')
ATTENTION = "base_model.model.transformer.h.0.attn.c_attn"
TEXTS = ["the quick brown fox", "a dog"]

# A file's content, and what its error says.
UNREADABLE = {
    "unparsable": (b"model_types = [", "cannot be read as TOML"),
    "not UTF-8": ('model_types = ["own"] # \xe9'.encode("latin-1"), "cannot be read as TOML"),
    "empty": (b"", "missing key"),
    "of another kind": (b"[project]\nname = 'own'\n", "unknown key project"),
    "without types": (OWN.replace('model_types = ["own"]', "").encode(), "missing key model_types"),
    "a number": (OWN.replace('["own"]', "3").encode(), "model_types must be a list of names"),
    "deep": (b"a = " + b"[" * 100_000, "cannot be read as TOML"),
}
CLAIMING = {
    "unknown key": (f"{OWN}\n[strange]\na = 1\n", "unknown key strange"),
    "missing key": (OWN.replace("attn_out =", "# attn_out ="), "missing key attn_out"),
    "wrong value": (OWN.replace('norm = "layer_norm"', 'norm = "batch"'), "norm is 'batch'"),
    "wrong type": (OWN.replace('norm_eps = "layer_norm_eps"', "norm_eps = []"), "norm_eps"),
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """An empty folder of families."""
    (tmp_path / "families").mkdir()
    return tmp_path / "families"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint of a model_type that bytetx does not have."""
    folder = save_checkpoint(tmp_path_factory.mktemp("renamed"))
    edit_json(folder / "config.json", model_type="own")
    return folder


def vectors(folder: Path, **options: Any) -> np.ndarray:
    with load(folder, device="cpu", **options) as model:
        return np.asarray(model.embed(TEXTS).vectors)


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_breaks_unknown_model_types_alone(
    name: str, own: Path, bert: Path, renamed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, message = UNREADABLE[name]
    (own / "bad.toml").write_bytes(content)
    with caplog.at_level(logging.WARNING, "bytetx"):
        assert vectors(bert, families=own).shape[0] == len(TEXTS)
    warnings = [record.message for record in caplog.records if "bad.toml" in record.message]
    assert len(warnings) == 1 and message in warnings[0]
    with pytest.raises(CheckpointError, match=message) as caught:
        load(renamed, device="cpu", families=own)
    assert str(own / "bad.toml") in str(caught.value) and "'own'" in str(caught.value)


@pytest.mark.parametrize("name", CLAIMING)
def test_a_broken_file_breaks_the_model_types_that_it_claims(
    name: str, own: Path, bert: Path
) -> None:
    content, message = CLAIMING[name]
    (own / "bad.toml").write_text(content)
    (own / "good.toml").write_text(OWN.replace('["own"]', '["good"]'))
    known = read_families(own)
    with pytest.raises(CheckpointError, match=message) as caught:
        build_spec({"model_type": "own"}, known)
    assert str(own / "bad.toml") in str(caught.value)
    assert build_spec({"model_type": "good"}, known).family == "good"
    assert build_spec({"model_type": "bert"}, known).family == "bert"
    assert "own" not in known.model_types and {"good", "bert"} <= set(known.model_types)
    # A file that claims a model_type of bytetx's own was meant to serve it.
    (own / "bad.toml").write_text(content.replace('["own"]', '["bert"]'))
    with pytest.raises(CheckpointError, match=message):
        load(bert, device="cpu", families=own)


def test_a_broken_file_of_bytetx_itself(
    own: Path, bert: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for path in MODELS.glob("*.toml"):
        (own / path.name).write_bytes(path.read_bytes())
    (own / "gpt2.toml").write_text((own / "gpt2.toml").read_text() + "\n[strange]\n")
    (own / "mpnet.toml").write_bytes(b"\xff")
    monkeypatch.setattr(families, "models_folder", lambda: own)
    monkeypatch.setattr(family, "models_folder", lambda: own)
    families._built_in.cache_clear()
    try:
        assert vectors(bert).shape[0] == vectors(bert).shape[0] == len(TEXTS)
        assert sum("models/gpt2.toml" in record.message for record in caplog.records) == 1
        with pytest.raises(CheckpointError, match=r"models/gpt2\.toml: unknown key strange"):
            build_spec({"model_type": "gpt2"})
        with pytest.raises(CheckpointError, match=r"no family serves; models/mpnet\.toml cannot"):
            build_spec({"model_type": "mpnet"})
    finally:
        families._built_in.cache_clear()


def test_a_model_type_in_two_files_is_an_error_of_that_model_type(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (own / "one.toml").write_text(OWN.replace('["own"]', '["own", "first"]'))
    (own / "two.toml").write_text(OWN.replace('["own"]', '["second", "own"]'))
    known = read_families(own)
    for model_type in ("first", "second", "bert"):
        assert build_spec({"model_type": model_type}, known).model_type == model_type
    message = rf"model_type own is in {own / 'one.toml'}, {own / 'two.toml'}; only one"
    with pytest.raises(CheckpointError, match=message):
        build_spec({"model_type": "own"}, known)
    assert sum("model_type own is in" in record.message for record in caplog.records) == 1


def test_a_folder_s_family_wins_over_bytetx_s(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert 'norm_eps = "layer_norm_eps"' in BERT
    (own / "mine.toml").write_text(BERT.replace('norm_eps = "layer_norm_eps"', "norm_eps = 0.5"))
    marked = OWN.replace('["own"]', '["gpt2"]\nmarker = ["own_key"]')
    (own / "marked.toml").write_text(marked)
    with caplog.at_level(logging.INFO, "bytetx"):
        known = read_families(own)
    assert f"{own / 'mine.toml'} is used for model_type bert" in caplog.messages
    spec = build_spec({"model_type": "bert"}, known)
    assert (spec.family, spec.norm_eps) == ("mine", 0.5)
    # Jina's BERT has a marker; the folder's family has none and serves every bert.
    assert build_spec({"model_type": "bert"}).norm_eps < 0.5
    assert build_spec({"model_type": "gpt2", "own_key": 1}, known).family == "marked"
    assert build_spec({"model_type": "gpt2"}, known).family == "gpt2"


def test_the_planner_takes_a_new_family(own: Path, bert: Path, renamed: Path) -> None:
    (own / "mine.toml").write_text(OWN)
    wanted = plan(bert, gpus=2).shape
    assert plan(renamed, gpus=2, families=own).shape == replace(wanted, name=renamed.name)
    classes = [replace(MIXED[0], share=1.0)]
    year = simulate_year(renamed, families=own, gpus=16, classes=classes)
    assert year.texts == simulate_year(bert, gpus=16, classes=classes).texts
    args = ["plan", "--model", str(renamed), "--gpus", "2"]
    assert CliRunner().invoke(all_commands(), [*args, "--families", str(own)]).exit_code == 0
    with pytest.raises(CheckpointError, match="has model_type 'own'; bytetx knows: albert"):
        plan(renamed, gpus=2)
    for model in (renamed, "bert-base"):
        with pytest.raises(OptionError, match="families must be a folder"):
            plan(model, gpus=2, families=own / "nowhere")


@pytest.mark.feature("Checkpoints", "families of the caller's own")
def test_a_new_family_runs_wherever_a_checkpoint_does(
    own: Path, bert: Path, renamed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "mine.toml").write_text(OWN)
    wanted = vectors(bert)
    with pytest.raises(CheckpointError, match="has model_type 'own'; bytetx knows: albert"):
        load(renamed, device="cpu")
    np.testing.assert_array_equal(vectors(renamed, families=str(own)), wanted)
    np.testing.assert_allclose(vectors(renamed, families=own, tp=2), wanted, atol=1e-5)
    monkeypatch.chdir(own.parent)
    model = load(renamed, device="cpu", families="families")
    data = pickle.dumps(model)
    monkeypatch.chdir(bert)
    again = pickle.loads(data)
    np.testing.assert_array_equal(again.embed(TEXTS).vectors, wanted)
    named = model_sources([f"one={renamed}"])
    (served,) = load_models(ServeSettings(named, device="cpu", families=str(own)))
    np.testing.assert_array_equal(served.model.model.embed(TEXTS).vectors, wanted)


def test_adapters_and_generation_of_a_new_family(own: Path, tmp_path: Path) -> None:
    folder = save_causal(tmp_path / "base", "gpt2")
    greedy = SamplingParams(temperature=0, max_tokens=8)
    wanted = load(folder, device="cpu").generate(TEXTS, greedy)
    # Before the base model has the other name, which only bytetx knows.
    base = AutoModelForCausalLM.from_pretrained(folder)
    adapter = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"]))
    torch.nn.init.ones_(adapter.get_parameter(f"{ATTENTION}.lora_B.default.weight"))
    adapter.save_pretrained(tmp_path / "adapter")
    merged = load(tmp_path / "adapter", device="cpu").score(TEXTS)[0].log_likelihood
    text = (MODELS / "gpt2.toml").read_text().replace('["gpt2"]', '["own"]')
    assert '["own"]' in text
    (own / "mine.toml").write_text(text)
    edit_json(folder / "config.json", model_type="own")
    got = load(folder, device="cpu", families=own).generate(TEXTS, greedy)
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
    assert (
        load(tmp_path / "adapter", device="cpu", families=own).score(TEXTS)[0].log_likelihood
        == merged
    )


def test_the_command_line(bytetx: Bytetx, own: Path, bert: Path, renamed: Path) -> None:  # noqa: F811
    (own / "mine.toml").write_text(OWN)
    texts = own.parent / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    wanted = bytetx("embed", texts, "-m", bert).rows
    ran = bytetx("embed", texts, "-m", renamed, "--families", own)
    assert ran.code == 0 and ran.rows == wanted
    assert bytetx("info", "-m", renamed, "--families", own).code == 0
    refused = bytetx("embed", texts, "-m", renamed)
    assert refused.code != 0 and "has model_type 'own'" in " ".join(refused.err.split())
    missing = bytetx("embed", texts, "-m", renamed, "--families", own / "none")
    assert missing.code == 2 and "is no folder" in " ".join(missing.err.split())


class OwnConfig(BertConfig):
    model_type = "own"


def test_a_wrapped_model_of_an_own_family(own: Path) -> None:
    """In place of no family, and of bytetx's own; copies keep it."""
    (own / "own.toml").write_text(OWN)
    (own / "other.toml").write_text(BERT.replace('activation = "hidden_act"', 'activation = "x"'))
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 99}
    model = BertModel(OwnConfig(**sizes, num_attention_heads=4)).eval()
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        want = model(ids).last_hidden_state
        with pytest.warns(FallbackWarning, match="model_type 'own'"):
            wrap(model)(ids)
        unwrap(model)
        wrap(model, families=own)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            for one in (model, deepcopy(model), pickle.loads(pickle.dumps(model))):
                have = one(ids).last_hidden_state
                torch.testing.assert_close(have, want, rtol=0, atol=1e-5)
        stock = BertModel(BertConfig(**sizes, num_attention_heads=4)).eval()
        with pytest.warns(FallbackWarning, match="other.toml"):
            wrap(stock, families=own)(ids)


def test_what_is_no_folder_of_families(own: Path, bert: Path) -> None:
    for wrong in (own, own / "none", bert / "config.json", "", 3, b"families", ["a"]):
        with pytest.raises(OptionError, match="families must be a folder of TOML files"):
            load(bert, device="cpu", families=wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="families must be a folder of TOML files"):
            wrap(torch.nn.Linear(1, 1), families=wrong)  # type: ignore[arg-type]


def places(table: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value of a table."""
    items = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in items:
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


FILES = {path.name: tomllib.loads(path.read_text()) for path in sorted(MODELS.glob("*.toml"))}
PLACES = [(name, at) for name, table in FILES.items() for at in places(table)]


@settings(max_examples=300)
@given(st.sampled_from(PLACES), st.sampled_from([3, -1, 1.5, True, "x", "", [], {}, [3], {"a": 1}]))
def test_a_wrong_value_is_a_checkpoint_error(place: tuple[str, Any], value: Any) -> None:
    name, at = place
    inner = table = deepcopy(FILES[name])
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    try:
        table = family.checked_family(MODELS / name, table)
        types, marker = table["model_types"], table.get("marker", [])
        one = Family("own", "own.toml", tuple(types), tuple(marker), table)
        config = {"model_type": types[0], **dict.fromkeys(marker, True)}
        build_spec(config, Families(None, ((one,),)))
    except CheckpointError:
        pass
