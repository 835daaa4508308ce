"""The native core: how it is built, what it needs, and what it says when something is missing."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bytetx.ops import native
from bytetx.ops.backend_report import OPS, backend_report

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
    build.compile_all([build.Step("csrc/a b.cpp", COMPILER, key="0")], jobs=2)
    return capsys.readouterr().out


def test_object_is_kept_until_a_header_changes(build: ModuleType, capsys) -> None:
    assert "compiled csrc/a b.cpp" in compile_once(build, capsys)
    assert "kept csrc/a b.cpp" in compile_once(build, capsys)
    (build.ROOT / "csrc" / "answer.h").write_text("inline int answer() { return 2; }\n")
    assert "compiled csrc/a b.cpp" in compile_once(build, capsys)


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


def test_cutlass_is_asked_for_only_where_nvcc_is(build: ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(build, "find_cutlass", lambda: None)
    monkeypatch.setattr(sys, "argv", ["setup.py", "egg_info"])
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.build_requirements() == []
    assert build.find_cuda() == "no nvcc on PATH or in CUDA_HOME/bin"
    monkeypatch.setattr(build, "find_nvcc", lambda: "/opt/cuda/bin/nvcc")
    assert build.build_requirements() == ["nvidia-cutlass==4.2.0.0"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.88", "pip install --no-deps nvidia-cutlass"),
        ("Cuda compilation tools, release 11.8, V11.8.89", "CUDA 12.0 or later is needed"),
    ],
)
def test_cuda_that_cannot_be_used_names_the_remedy(
    build: ModuleType, monkeypatch, version: str, expected: str
) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: "/opt/cuda/bin/nvcc")
    monkeypatch.setattr(build, "version_of", lambda command: version)
    monkeypatch.setattr(build, "find_cutlass", lambda: None)
    assert expected in build.find_cuda()


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


def test_report_covers_every_op() -> None:
    report = backend_report()
    assert any(isa in report.cpu for isa in ("avx512_bf16", "avx512", "avx2", "portable"))
    assert tuple(op.op for op in report.ops) == OPS
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
