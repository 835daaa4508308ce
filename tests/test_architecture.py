"""The structure of the package, read from its imports: who imports whom, and what stays where."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import load_script

from bytetx.checkpoint.families import read_families

ROOT = Path(__file__).resolve().parent.parent
# What a file or function may have at most; far above what is usual here, for neither is ever split
# to meet a number.
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 70
MAX_ROOT_MODULES = 12
# Schedulers, cache bookkeeping, specs and plans: they and all that they import run without torch.
WITHOUT_TORCH = [
    "bytetx.checkpoint.spec",
    "bytetx.encode.request",
    "bytetx.encode.request_queue",
    "bytetx.executor.channel",
    "bytetx.executor.control",
    "bytetx.executor.heartbeat",
    "bytetx.generate.async_engine",
    "bytetx.generate.output_processor",
    "bytetx.generate.engine",
    "bytetx.generate.input_batch_builder",
    "bytetx.generate.kv_cache",
    "bytetx.generate.scheduler",
    "bytetx.generate.stopping",
    "bytetx.parallel.grid",
    "bytetx.parallel.layout",
    "bytetx.parallel.planner.axonn2024",
    "bytetx.parallel.planner.plan",
    "bytetx.parallel.planner.report",
    "bytetx.parallel.planner.simulate",
    "bytetx.parallel.row_scheme",
    "bytetx.buckets",
    "bytetx.runtime.input_batch",
    "bytetx.sampling_params",
    # What a front-end process runs.
    "bytetx.serve.app",
    "bytetx.serve.http_server",
    "bytetx.serve.remote",
    "bytetx.serve.ring_client",
    "bytetx.serve.child_process",
    "bytetx.serve.supervisor",
]
COMPILED = {"bytetx._cpu", "bytetx._cuda"}

drawing = load_script("draw_architecture")


def is_inside(target: str, package: str) -> bool:
    return target == package or target.startswith(f"{package}.")


def offences(rule: Callable[[str, object], str | None]) -> list[str]:
    """`file:line: text` for every import on which rule(module, import) returns a text."""
    return [
        f"{path.relative_to(ROOT)}:{found.line}: {text}"
        for module, path in drawing.modules().items()
        for found in drawing.imports(module)
        if (text := rule(module, found))
    ]


def test_packages_import_lower_packages_only() -> None:
    row = {package: i for i, packages in enumerate(drawing.ROWS) for package in packages}
    assert {drawing.package(module) for module in drawing.modules()} == set(row)
    assert [(a, b) for a, b in drawing.package_imports() if row[a] >= row[b]] == []


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count."""
    ahead = {
        module: {found.target for found in drawing.imports(module)} & drawing.modules().keys()
        for module in drawing.modules()
        if module != "bytetx"  # which imports what it hands out when it is asked for
    }
    while leaves := [module for module, targets in ahead.items() if not targets & ahead.keys()]:
        for leaf in leaves:
            del ahead[leaf]
    assert ahead == {}


def test_the_picture_of_the_architecture_is_of_this_source() -> None:
    text = drawing.PAGE.read_text(encoding="utf-8")
    assert drawing.page_with(drawing.mermaid()) == text, "run: python docs/draw_architecture.py"


def test_the_table_of_families_is_of_these_files() -> None:
    listing = load_script("list_families")
    text = listing.PAGE.read_text(encoding="utf-8")
    assert listing.page_with(listing.table()) == text, "run: python docs/list_families.py"
    types = read_families().model_types
    assert types and all(f"`{name}`" in listing.table() for name in types)


def test_few_modules_lie_at_the_root() -> None:
    assert len(list((ROOT / "bytetx").glob("*.py"))) <= MAX_ROOT_MODULES


def test_only_ops_native_imports_the_compiled_modules() -> None:
    def rule(module: str, found: object) -> str | None:
        is_offence = found.target in COMPILED and module != "bytetx.ops.native"
        return f"imports {found.target}" if is_offence else None

    assert offences(rule) == []


def test_only_ops_turn_tensors_into_pointers() -> None:
    """A storage's address may be compared anywhere: it says whether two tensors share memory."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for module, path in drawing.modules().items()
        if not is_inside(module, "bytetx.ops")
        for node in ast.walk(drawing.tree(path))
        if isinstance(node, ast.Attribute) and node.attr == "data_ptr"
        if "untyped_storage" not in ast.unparse(node.value)
    ]
    assert found == []


def test_torch_distributed_stays_in_parallel_and_executor() -> None:
    def rule(module: str, found: object) -> str | None:
        is_used = is_inside(f"{found.target}.{found.name}", "torch.distributed")
        may = drawing.package(module) in ("parallel", "executor")
        return "imports torch.distributed" if is_used and not may else None

    assert offences(rule) == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_planning_needs_no_torch(module: str) -> None:
    """Neither the module nor what it imports from this package imports torch."""
    assert module in drawing.modules()
    seen, ahead = set(), [module]
    while ahead:
        current = ahead.pop()
        seen.add(current)
        for found in drawing.imports(current):
            heavy = found.target.split(".")[0] == "torch"
            assert not heavy, (
                f"{current}:{found.line} imports {found.target}, reached from {module}"
            )
            is_ours = found.target in drawing.modules() and found.target != "bytetx"
            if is_ours and found.target not in seen:
                ahead.append(found.target)


def test_environment_is_read_in_cli_alone() -> None:
    def may_read(module: str) -> bool:
        # What NCCL listens on has no other way in; it is set for a moment, where the user has not.
        return drawing.package(module) == "cli" or module == "bytetx.parallel.nccl"

    def rule(module: str, found: object) -> str | None:
        is_read = found.target == "os" and found.name in ("environ", "getenv")
        return f"takes os.{found.name}" if is_read and not may_read(module) else None

    attributes = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for module, path in drawing.modules().items()
        if not may_read(module)
        for node in ast.walk(drawing.tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert offences(rule) + attributes == []


def python_files() -> list[Path]:
    own = [ROOT / "setup.py", *drawing.modules().values()]
    return own + [p for folder in ("tests", "docs") for p in sorted((ROOT / folder).rglob("*.py"))]


def test_no_file_is_huge() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines()) for path in python_files()
    }
    too_long = {str(path): lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert too_long == {}, f"lines, at most {MAX_FILE_LINES}"


def test_no_function_is_huge() -> None:
    """Counted without signature and docstring, which say more the longer they are."""
    too_long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lines
        for path in python_files()
        for node in ast.walk(drawing.tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := body_lines(node)) > MAX_FUNCTION_LINES
    }
    assert too_long == {}, f"lines, at most {MAX_FUNCTION_LINES}"


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_every_file_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if not ast.get_docstring(drawing.tree(path))
    ]
    assert silent == []


def test_one_kernel_multiplies_for_all_gemms() -> None:
    """csrc/gemm/kernel.cuh holds the body of every GEMM: roles, registers and the main loop."""
    sources = [p for name in ("gemm", "comm", "cuda") for p in (ROOT / "csrc" / name).glob("*.cu*")]
    for marks in (["give_registers<", "gemm/mainloop.cuh"], ["multiply<C>("]):
        users = {p.name for p in sources if all(mark in p.read_text() for mark in marks)}
        assert users == {"kernel.cuh"}, marks
    kernels = [p.name for p in (ROOT / "csrc" / "gemm").iterdir() if "__global__" in p.read_text()]
    assert kernels == ["kernel.cuh"]


def test_the_table_of_native_sources_names_all_of_them() -> None:
    table = (ROOT / "csrc" / "README.md").read_text()
    sources = [p for name in ("gemm", "comm", "cuda") for p in (ROOT / "csrc" / name).glob("*.cu")]
    assert len(sources) > 25
    missing = [p.name for p in sources if f"`{p.parent.name}/{p.name}`" not in table]
    assert not missing
