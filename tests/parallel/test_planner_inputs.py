"""Inputs of the planner: machine files, folders and options, and what it says of them."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint, save_sentence_model
from sentence_transformers.sentence_transformer.modules import Pooling
from static_models import save_model2vec
from typer.testing import CliRunner

from bytetx.cli.calibrate import calibrate_to_file
from bytetx.cli.commands import all_commands
from bytetx.errors import InputError, OptionError
from bytetx.executor.load import load_ranks
from bytetx.parallel.grid import Grid
from bytetx.parallel.planner.machine import load_machine
from bytetx.parallel.planner.plan import plan
from bytetx.parallel.planner.shapes import shape_of

H100 = files("bytetx.parallel.planner").joinpath("machines", "h100-nvlink.toml").read_text()


def changed(folder: Path, name: str, value: str) -> Path:
    """The file of an H100 with another value of `name`."""
    lines = [
        f"{name} = {value}" if line.startswith(f"{name} =") else line for line in H100.split("\n")
    ]
    assert "\n".join(lines) != H100
    file = folder / "machine.toml"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("name", ["gemm_tflops", "hbm_gbps", "num_sms", "gpus_per_node", "gbps"])
def test_a_rate_that_no_machine_has_was_a_traceback_or_nonsense(
    tmp_path: Path, name: str, value: str
) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        load_machine(changed(tmp_path, name, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sum_gbps", "inf"),
        ("launch_us", "-1.0"),
        ("sum_us", "nan"),
        ("gemm_table", "[[128, 1024, 0.0]]"),
        ("gemm_table", "[[0, 1024, 100.0]]"),
        ("gemm_table", "[[128, 1024]]"),
        ("gemm_table", "7"),
        ("small_bytes", '"many"'),
    ],
)
def test_other_damaged_values(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        load_machine(changed(tmp_path, name, value))


@pytest.mark.parametrize("text", [b"host = 5", b"\xff\xfe", b"gpu = [", b""])
def test_files_that_are_no_machine(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "machine.toml"
    file.write_bytes(text)
    with pytest.raises(OptionError, match="cannot be read"):
        load_machine(file)


def test_a_file_that_cannot_be_written_is_said_before_it_is_measured(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        calibrate_to_file(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        calibrate_to_file(tmp_path / "none" / "here.toml")


def test_folders_that_load_takes_could_not_be_planned(tmp_path: Path) -> None:
    """Folders of sentence-transformers, whose transformer may have its own, and of adapters."""
    base = save_checkpoint(tmp_path / "plain")
    nested = save_sentence_model(tmp_path / "sentences", [Pooling(48, "mean")])
    own = nested / "0_Transformer"
    own.mkdir()
    for file in nested.iterdir():
        if file.is_file() and file.name != "modules.json":
            file.rename(own / file.name)
    modules = json.loads((nested / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (nested / "modules.json").write_text(json.dumps(modules))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(base), "peft_type": "LORA"})
    )
    wanted = shape_of(base)
    for folder in (nested, adapter):
        found = shape_of(folder)
        assert found.name == folder.name
        assert (found.hidden_size, found.layer_weights) == (48, wanted.layer_weights)


def test_a_static_embedding_has_no_layers_to_plan(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="model is a static embedding, which has no layers"):
        shape_of(save_model2vec(tmp_path / "model"))
    for name in (
        "modules.json",
        "config_sentence_transformers.json",
    ):  # as model2vec alone reads it
        (tmp_path / "model" / name).unlink(missing_ok=True)
    for config in (None, {"model_type": "model2vec"}, {}):
        if config is not None:
            (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        with pytest.raises(OptionError, match="model is a static embedding, which has no layers"):
            shape_of(tmp_path / "model")


def test_advice_names_the_reason_for_which_replicas_are_refused() -> None:
    assert "8 slots for 4 texts" in plan("bert-large", gpus=8, batch=4).advice
    assert "do not fit the memory" in plan("llama-70b", gpus=8, memory_gib=60).advice
    with pytest.raises(InputError, match=r"the smallest one needs 0\.\d GiB a GPU of 0\.1"):
        plan("bert-large", gpus=3, memory_gib=0.1)


def test_replicas_that_need_as_many_gpus_were_called_worse() -> None:
    found = plan("bert-large", goal="memory", rate=1e5)
    single = found.find(Grid())
    assert single is not None and single.num_gpus == found.best.num_gpus
    assert "worse" not in found.advice


def test_the_prefill_gives_the_first_token() -> None:
    one = plan("llama-8b", gpus=1, lengths=128, batch=8, output_tokens=1).best
    assert one.latency_s == pytest.approx(one.prefill.total_us / 1e6)
    three = plan("llama-8b", gpus=1, lengths=128, batch=8, output_tokens=3).best
    assert three.decode is not None
    decoded = three.latency_s - three.prefill.total_us / 1e6
    assert decoded == pytest.approx(2 * three.decode.total_us / 1e6)


@pytest.mark.parametrize("options", [["--explain", "z2"], ["--year"]])
def test_json_was_ignored(options: Sequence[str]) -> None:
    gpus = ["--gpus", "200"] if options == ["--year"] else ["--gpus", "2"]
    shown = CliRunner().invoke(
        all_commands(), ["plan", "-m", "bert-large", "--json", *gpus, *options]
    )
    assert shown.exit_code == 0
    found = json.loads(shown.stdout)
    assert found["classes"] if options == ["--year"] else found["prefill"]["transfers"]


def test_auto_and_tp_exclude_each_other(tmp_path: Path) -> None:
    options = {"device": "cpu", "dtype": torch.float32, "token_budget": None, "group_timeout": 9}
    with pytest.raises(OptionError, match="grid auto chooses from all GPUs, and tp is 2"):
        load_ranks(save_checkpoint(tmp_path), 2, grid="auto", **options)
