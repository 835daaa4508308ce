"""The native core: how it is built, what it needs, and what it says when something is missing."""

import contextlib
import importlib.util
import os
import pty
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from setuptools import Distribution, find_packages

from bytetx.ops import native
from bytetx.ops.backend_report import backend_report
from bytetx.ops.registry import OPERATIONS

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
COMPILER = ("c++", "-std=c++20", "-Wall", "-Icsrc")


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, at work on a csrc/ of its own with one source and one header."""
    spec = importlib.util.spec_from_file_location("bytetx_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bytetx_setup", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "OBJECTS", tmp_path / "build" / "objects")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "answer.h").write_text("inline int answer() { return 1; }\n")
    (tmp_path / "csrc" / "a b.cpp").write_text(
        '#include "answer.h"\nint a() { return answer(); }\n'
    )
    return module


def compile_once(build: ModuleType, capsys: pytest.CaptureFixture) -> str:
    build.compile_all({"CPU": [build.Step("csrc/a b.cpp", COMPILER, key="0")]}, jobs=2)
    return capsys.readouterr().out


def test_object_is_kept_until_a_header_changes(build: ModuleType, capsys) -> None:
    assert "CPU 1/1 compiled csrc/a b.cpp" in compile_once(build, capsys)
    assert "CPU 1/1 kept csrc/a b.cpp" in compile_once(build, capsys)
    (build.ROOT / "csrc" / "answer.h").write_text("inline int answer() { return 2; }\n")
    assert "compiled csrc/a b.cpp" in compile_once(build, capsys)


COUNT_ON_A_TERMINAL = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bytetx_setup", sys.argv[1])
build = importlib.util.module_from_spec(spec)
sys.modules["bytetx_setup"] = build  # dataclasses look for it
spec.loader.exec_module(build)
progress = build.Progress({"CPU": 1, "CUDA": 2})
for part in ("CUDA", "CPU", "CUDA"):
    progress.add(part, "compiled a source")
"""


def test_progress_reaches_the_terminal_that_pip_hides(tmp_path: Path) -> None:
    """stdout is pip's pipe; the terminal behind it shows a counter, and nothing at the end."""
    pid, terminal = pty.fork()
    if pid == 0:
        log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        command = [sys.executable, "-c", COUNT_ON_A_TERMINAL, str(ROOT / "setup.py")]
        os.execv(sys.executable, command)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the child has ended
        while chunk := os.read(terminal, 1024):
            shown += chunk
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown
    texts = re.findall(rb"\x1b7\x1b\[K(.*?)\x1b8", shown)
    assert texts == [b" CUDA 1/2", b" CPU 1/1", b""]
    assert (tmp_path / "log").read_text().splitlines() == [
        "CUDA 1/2 compiled a source",
        "CPU 1/1 compiled a source",
        "CUDA 2/2 compiled a source",
    ]


def test_header_edited_while_it_compiles_makes_the_object_stale(
    build: ModuleType, capsys, monkeypatch
) -> None:
    run = build.subprocess.run

    def run_and_edit(*args: object, **options: object) -> object:
        done = run(*args, **options)
        (build.ROOT / "csrc" / "answer.h").write_text("inline int answer() { return 2; }\n")
        return done

    with monkeypatch.context() as patched:
        patched.setattr(build.subprocess, "run", run_and_edit)
        compile_once(build, capsys)
    assert "compiled csrc/a b.cpp" in compile_once(build, capsys)
    assert "kept csrc/a b.cpp" in compile_once(build, capsys)


def test_warnings_are_said_again_for_kept_objects(build: ModuleType, capsys) -> None:
    (build.ROOT / "csrc" / "a b.cpp").write_text("static int unused() { return 1; }\n")
    assert "-Wunused-function" in compile_once(build, capsys)
    kept = compile_once(build, capsys)
    assert "kept" in kept
    assert "-Wunused-function" in kept


def test_compiler_error_is_shown_whole(build: ModuleType, capsys) -> None:
    (build.ROOT / "csrc" / "a b.cpp").write_text("int a() { return first + second; }\n")
    with pytest.raises(SystemExit) as failure:
        compile_once(build, capsys)
    assert all(word in str(failure.value) for word in ("csrc/a b.cpp", "first", "second", "$ c++"))


def test_missing_compiler_says_what_to_install(build: ModuleType, monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="no C\\+\\+ compiler: .* apt install g\\+\\+"):
        build.host_compiler()


def test_missing_pybind11_says_what_to_install(build: ModuleType, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pybind11", None)
    with pytest.raises(build.BuildError, match="pybind11.*is not installed: run `pip install .`"):
        build.cpu_steps()


@pytest.mark.parametrize(
    ("processor", "suffixes"),
    [
        ("x86_64", {"", "_avx2", "_avx512bf16"}),
        ("aarch64", {"", "_neon", "_neonbf16", "_neoni8mm", "_neondotprod"}),
        (None, {""}),
    ],
)
def test_files_of_other_processors_are_left_out(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, processor: str | None, suffixes: set[str]
) -> None:
    folder = build.ROOT / "csrc" / "cpu"
    folder.mkdir()
    for suffix in ("", *(s for flags in build.ISA_FLAGS.values() for s in flags)):
        (folder / f"x{suffix}.cpp").touch()
    monkeypatch.setattr(build, "processor", lambda: processor)
    monkeypatch.setattr(build, "host_step", lambda source, flags: (source, flags))
    flags = {Path(source).stem: flags for source, flags in build.cpu_steps()}
    assert {f"x{suffix}" for suffix in suffixes} <= flags.keys()
    assert {stem for stem in flags if stem.startswith("x_")} == {
        f"x{suffix}" for suffix in build.ISA_FLAGS.get(processor, {})
    }
    if processor == "aarch64":
        assert {"-march=armv8.2-a+i8mm", "-DBYTETX_NEON"} <= set(flags["x_neoni8mm"])
        assert "-DBYTETX_HAS_NEONDOTPROD" in flags["x"]
        assert not any("AVX" in flag for flag in flags["x"])


def test_processor_is_the_one_that_the_compiler_compiles_for(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_program(tmp_path / "cross", "#define __aarch64__ 1")
    monkeypatch.setattr(build, "host_compiler", lambda: (str(tmp_path / "cross"),))
    assert build.processor() == "aarch64"


@pytest.mark.parametrize("suffix", ["_neon", "_neoni8mm"])
@pytest.mark.parametrize(
    ("target", "processor"), [("linux-gnu.2.28", "generic"), ("macos.11.0", "apple_m1")]
)
def test_arm_kernels_compile_where_zig_is(
    build: ModuleType, tmp_path: Path, target: str, processor: str, suffix: str
) -> None:
    pytest.importorskip("ziglang")
    march, *defines = build.ISA_FLAGS["aarch64"][suffix]
    extension = march.partition("+")[2]
    flags = ["-target", f"aarch64-{target}", f"-mcpu={processor}{'+' * bool(extension)}{extension}"]
    compiler = [sys.executable, "-m", "ziglang", "c++", "-std=c++20", f"-I{CSRC}", *flags]
    source = CSRC / "cpu" / f"int8_linear{suffix}.cpp"
    command = [*compiler, *defines, "-c", str(source), "-o", str(tmp_path / "x.o")]
    subprocess.run(command, check=True)
    assert (tmp_path / "x.o").stat().st_size > 10000


@pytest.fixture
def machine(build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """setup.py on a machine with nvcc 13, without CUTLASS, nvidia-smi, a GPU or settings."""
    for name in ("BYTETX_CUDA", "BYTETX_CUTLASS_DIR", "NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "find_cutlass", lambda: None)
    monkeypatch.setattr(build, "GPU_FILES", (str(tmp_path / "gpus" / "*"),))
    monkeypatch.setattr(build, "WSL_TOOLS", str(tmp_path / "no"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    put_program(tmp_path / "bin" / "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    return build


def put_program(path: Path, said: str, status: int = 0) -> None:
    path.write_text(f"#!/bin/sh\necho '{said}'\nexit {status}\n")
    path.chmod(0o755)


def is_cuda_wanted(build: ModuleType) -> bool:
    """Whether nothing but the CUTLASS headers keeps _cuda from being built."""
    return "the CUTLASS headers are not" in build.find_cuda()


def test_cuda_was_compiled_for_an_hour_where_no_gpu_is(machine: ModuleType) -> None:
    assert "no NVIDIA GPU was found" in machine.find_cuda()
    assert "install with BYTETX_CUDA=1 set" in machine.find_cuda()


@pytest.mark.parametrize(
    ("said", "status", "is_wanted"),
    [
        ("9.0", 0, True),
        ("8.0\n9.0", 0, True),
        ("GPU 0: a name", 0, True),
        ("No devices were found", 0, False),
        ("NVIDIA-SMI has failed", 9, False),
        ("8.9", 0, False),
    ],
)
def test_nvidia_smi_says_whether_there_is_a_gpu(
    machine: ModuleType, tmp_path: Path, said: str, status: int, is_wanted: bool
) -> None:
    put_program(tmp_path / "bin" / "nvidia-smi", said, status)
    assert is_cuda_wanted(machine) == is_wanted
    assert is_wanted or "BYTETX_CUDA=1" in machine.find_cuda()


def test_a_gpu_is_found_without_nvidia_smi(machine: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert is_cuda_wanted(machine)


@pytest.mark.parametrize(("asked", "is_wanted"), [("1", True), ("0", False)])
def test_bytetx_cuda_decides_where_it_is_set(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: str, is_wanted: bool
) -> None:
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None if asked == "0" else "no GPU")
    monkeypatch.setenv("BYTETX_CUDA", asked)
    assert is_cuda_wanted(machine) == is_wanted


def test_bytetx_cuda_takes_no_other_value(machine: ModuleType, monkeypatch) -> None:
    monkeypatch.setenv("BYTETX_CUDA", "yes")
    with pytest.raises(SystemExit, match="BYTETX_CUDA is 'yes'; set 1 to build .* 0 to leave"):
        machine.find_cuda()


@pytest.mark.parametrize("missing", ["nvcc", "CUTLASS"])
def test_cuda_that_is_asked_for_and_cannot_be_built_is_an_error(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    monkeypatch.setenv("BYTETX_CUDA", "1")
    if missing == "nvcc":
        (tmp_path / "bin" / "nvcc").unlink()
    monkeypatch.setattr(machine, "cpu_steps", list)
    monkeypatch.setattr(machine, "host_compiler", lambda: ("c++",))
    monkeypatch.setattr(machine, "version_of", lambda command: "release 13.0")
    command = machine.BuildNative(Distribution({"ext_modules": []}))
    with pytest.raises(machine.BuildError, match=f"BYTETX_CUDA=1 .*{missing}.*install"):
        command.build_extensions()


def test_cpu_module_knows_why_cuda_was_not_built(machine: ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(machine, "source_hash", lambda: "0")
    facts = machine.build_facts()
    assert any(fact.startswith('-DBYTETX_WHY_NO_CUDA="no NVIDIA GPU was found') for fact in facts)


def test_cutlass_is_asked_for_only_where_cuda_is_built(machine: ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["setup.py", "egg_info"])
    assert machine.build_requirements() == []
    monkeypatch.setenv("BYTETX_CUDA", "1")
    assert machine.build_requirements() == ["nvidia-cutlass==4.2.0.0"]
    monkeypatch.setenv("NVCC", "")
    assert machine.build_requirements() == []
    assert "no nvcc by the name in NVCC, ''" in machine.find_cuda()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.88", "pip install --no-deps nvidia-cutlass"),
        ("Cuda compilation tools, release 11.8, V11.8.89", "CUDA 12.0 or later is needed"),
    ],
)
def test_cuda_that_cannot_be_used_names_the_remedy(
    machine: ModuleType, monkeypatch, tmp_path: Path, version: str, expected: str
) -> None:
    monkeypatch.setenv("BYTETX_CUDA", "1")
    put_program(tmp_path / "bin" / "nvcc", version)
    assert expected in machine.find_cuda()


def test_wrong_cutlass_folder_is_refused(build: ModuleType, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BYTETX_CUTLASS_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match="has no cutlass/cutlass.h"):
        build.find_cutlass()


def native_sources() -> list[Path]:
    return [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]


def test_native_core_is_free_of_torch_and_multicast() -> None:
    forbidden = re.compile(r"#include *[<\"](torch|ATen|c10)/|multimem\.|cuMulticastCreate")
    assert [str(path) for path in native_sources() if forbidden.search(path.read_text())] == []


def test_python_is_known_to_bindings_alone() -> None:
    python = re.compile(r"#include *[<\"](pybind11/|Python\.h)")
    knowing = [path.name for path in native_sources() if python.search(path.read_text())]
    assert knowing == ["bindings.h"]


def test_kernel_index_lists_every_cuda_source() -> None:
    index = (CSRC / "README.md").read_text()
    sources = [path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.cu")]
    assert [source for source in sources if source not in index] == []


def test_every_declared_instance_is_in_one_unit(build: ModuleType) -> None:
    """Each `extern template` line of csrc/ is compiled, beside those of its block."""
    shutil.copytree(CSRC, build.ROOT / "csrc", dirs_exist_ok=True)
    headers = "".join(path.read_text() for path in CSRC.rglob("*.cuh"))
    blocks = re.findall(r"(?:^extern template [^;]+;\n)+", headers, re.MULTILINE)
    declared = [block.replace("extern template", "template") for block in blocks]
    units = [(build.ROOT / unit).read_text() for unit in build.instance_units()]
    assert len(units) == len(declared) > 30
    assert sorted(unit.split("{\n", 1)[1] for unit in units) == sorted(f"{d}}}\n" for d in declared)


def test_units_that_did_not_change_are_kept(build: ModuleType) -> None:
    header = build.ROOT / "csrc" / "twice.cuh"
    line = "extern template int twice<1>(int x);\n"
    header.write_text(f"namespace a {{\n{line}\n{line.replace('1', '2')}}}\n")
    first, second = (build.ROOT / unit for unit in build.instance_units())
    assert (first.name, second.name) == ("twice_1.cu", "twice_2.cu")
    text = '#include "twice.cuh"\nnamespace a {\ntemplate int twice<1>(int x);\n}\n'
    assert first.read_text() == text
    before = first.stat().st_mtime_ns
    build.instance_units()
    assert first.stat().st_mtime_ns == before


def test_report_covers_every_op() -> None:
    report = backend_report()
    assert any(isa in report.cpu for isa in native.ISA_BITS)
    assert {op.op for op in report.ops} == OPERATIONS.keys()
    assert {"embed", "layer_norm", "linear", "varlen_attention", "sum_copies"} <= OPERATIONS.keys()
    assert all(op.cpu and op.cuda for op in report.ops)


def test_missing_kernel_has_a_reason() -> None:
    cpu = torch.device("cpu")
    assert native.kernel("no_such_op", cpu) is None
    assert "no_such_op" in native.why_no_kernel("no_such_op", cpu)
    assert native.launch_args(cpu) == (-1, 0, torch.get_num_threads(), 0)


def test_registered_op_passes_opcheck() -> None:
    name = "test_build_scale"

    def scale(x: torch.Tensor, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
        return x * factor

    native.register(scale, name=name, without=["out"], fake=lambda x, factor: torch.empty_like(x))
    op = getattr(torch.ops.bytetx, name).default
    torch.library.opcheck(op, (torch.ones(3), 2.0))
    assert torch.equal(op(torch.ones(3), 2.0), torch.full((3,), 2.0))


def test_wheels_hold_the_package_alone() -> None:
    """benchmarks/ and tests/ are of the repository."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    include = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = find_packages(str(ROOT), include=include)
    assert "bytetx.cli" in packages
    assert {name.partition(".")[0] for name in packages} == {"bytetx"}
