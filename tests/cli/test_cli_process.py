"""cli as a process: killed and interrupted at random moments, fed by pipes, quick to start."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import save_checkpoint
from cli_runs import command, environment
from paths import ROOT

NUM_TEXTS = 1500


# The command as installed, but for commits after every window, and a pause behind each: these jobs
# would end within half a second, perhaps before the test has seen their first rows. Ctrl-C counts
# also where the tests run in the background of a shell, whose children ignore it.
COMMITS_OFTEN = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import bytetx.cli.files.job
from bytetx.cli.files.writer import StagedOutput
bytetx.cli.files.job.COMMIT_SECONDS = 0
append = StagedOutput.append
def append_and_pause(*arguments):
    append(*arguments)
    time.sleep(0.05)
StagedOutput.append = append_and_pause
from bytetx.cli.commands import main
main()
"""


def command_that_commits_often(*arguments: object) -> list[str]:
    return [sys.executable, "-c", COMMITS_OFTEN, *map(str, arguments)]


def run(*arguments: object, text: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), env=environment(), input=text, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("encoder"))


# Modules of this package that one process needs for no embedding; others follow from them.
OTHER_WORK = {
    *("bytetx.generate.scheduler", "bytetx.generate.build", "bytetx.ops.comm_gemm"),
    *("bytetx.parallel.planner", "bytetx.parallel.tp", "bytetx.nn.weight_gather"),
    *("bytetx.tasks.classify", "bytetx.tasks.embed_sparse", "bytetx.tasks.generate"),
    *("bytetx.tasks.search", "bytetx.async_model", "bytetx.hf"),
}


def test_help_is_quick_because_it_loads_no_torch() -> None:
    code = (
        "import sys; from bytetx.cli.commands import main\n"
        "try: main(['embed', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, cwd=ROOT)


def test_an_import_and_a_small_embed_load_no_more_than_they_need(encoder: Path) -> None:
    """torch itself brings torch.distributed, torch.fx and asyncio; what is named here it does not
    bring, and each takes a tenth of a second or more."""
    code = (
        "import sys, bytetx\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        f"model = bytetx.load({str(encoder)!r})\n"
        "assert model.embed(['one', 'two']).shape[0] == 2\n"
        "heavy = {'transformers', 'sentence_transformers', 'huggingface_hub', 'rich', 'jinja2',\n"
        "         'torch._dynamo', 'torch._inductor', 'sympy', 'networkx', 'triton', 'scipy',\n"
        "         'pandas', 'pyarrow', 'numpy.testing', 'fastapi', 'httpx', 'httpx2'}\n"
        f"found = (heavy | {OTHER_WORK}) & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, cwd=ROOT)


def test_a_job_imports_neither_other_commands_nor_other_tasks(
    encoder: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("one\n")
    arguments = ["embed", "-m", str(encoder), str(tmp_path / "one.txt")]
    code = (
        "import sys; from bytetx.cli.commands import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as end: assert end.code == 0\n"
        "found = {'bytetx.cli.bench', 'bytetx.cli.plan', 'bytetx.serve', 'rich.table'}\n"
        f"found = (found | {OTHER_WORK}) & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run(
        [sys.executable, "-c", code], env=environment(), check=True, cwd=ROOT, capture_output=True
    )


def test_pipes_in_and_out(encoder: Path) -> None:
    ran = run("embed", "-m", encoder, text="one\ntwo\n")
    assert ran.returncode == 0
    assert [json.loads(line)["index"] for line in ran.stdout.splitlines()] == [0, 1]
    assert ran.stderr.startswith("embed: 2 texts") and ran.stderr.count("\n") == 1
    ran = run("embed", "-m", encoder, "--input-format", "jsonl", "-", text='{"text": "x"}\n{\n')
    assert "error" in json.loads(ran.stdout.splitlines()[1])


def write_inputs(path: Path) -> None:
    draw = random.Random(5)
    with path.open("w") as file:
        for number in range(NUM_TEXTS):
            words = " ".join(draw.choices(["packed", "tokens", "a", "fox"], k=draw.randrange(9)))
            file.write("broken\n" if number % 97 == 5 else json.dumps({"text": words}) + "\n")


@pytest.mark.feature("Command line", "jobs resume to the same bytes")
def test_a_killed_job_resumes_to_the_same_bytes(encoder: Path, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in.jsonl")
    job = ("embed", tmp_path / "in.jsonl", "-m", encoder, "--token-budget", 32)
    whole, out = tmp_path / "whole.npy", tmp_path / "v.npy"
    assert run(*job, "-o", whole).returncode == 0
    progress_path = Path(f"{out}.progress.json")
    process = subprocess.Popen(
        command_that_commits_often(*job, "-o", out, "--resume"), env=environment()
    )
    wait_for_rows(progress_path, process)
    process.kill()
    process.wait()
    assert not out.exists() and progress_path.exists()
    ran = run(*job, "-o", out, "--resume")
    assert ran.returncode == 0 and f"{NUM_TEXTS:,} texts" in ran.stderr, ran.stderr
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("v.npy*")) == ["v.npy", "v.npy.errors.jsonl"]


def wait_for_rows(path: Path, process: subprocess.Popen) -> None:
    """Until the job has committed some rows, or has ended."""
    while process.poll() is None:
        if path.exists() and json.loads(path.read_text())["counts"]["num_texts"] > 0:
            return
        time.sleep(0.005)


def test_ctrl_c_ends_with_130_and_one_line(encoder: Path, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in.jsonl")
    job = ("embed", tmp_path / "in.jsonl", "-m", encoder, "--token-budget", 32)
    out = tmp_path / "v.npy"
    process = subprocess.Popen(
        command_that_commits_often(*job, "-o", out),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_rows(Path(f"{out}.progress.json"), process)
    process.send_signal(signal.SIGINT)
    errors = process.communicate()[1]
    assert process.returncode == 130, errors
    assert errors.startswith("interrupted: ") and errors.count("\n") == 1, errors


def test_a_file_size_limit_is_a_clear_error_and_resumes(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a fox\n" * 400)
    out = tmp_path / "v.npy"
    job = command("embed", tmp_path / "in.txt", "-m", encoder, "--token-budget", 64, "-o", out)
    limited = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (40000, r.RLIM_INFINITY))\n"
    limited += f"import os; os.execv({sys.executable!r}, {job!r})"
    ran = subprocess.run(
        [sys.executable, "-c", limited], env=environment(), capture_output=True, text=True
    )
    assert ran.returncode == 1 and "File too large" in ran.stderr and "--resume" in ran.stderr
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert run(*job[3:], "--resume").returncode == 0
    assert np.load(out).shape[0] == 400
