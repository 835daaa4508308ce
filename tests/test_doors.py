"""The rules of the house, read from the source: who may import whom, and how long things may be."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bytetx"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 40

# Height of every room; a room imports rooms of its own height or below. The longest prefix counts.
HEIGHTS = {
    "bytetx": 5,  # the public surface
    "bytetx.__main__": 6,
    "bytetx.cli.commands": 6,
    "bytetx.bench": 5,
    "bytetx.cli.files": 5,
    "bytetx.hf": 5,
    "bytetx.cli.report": 5,
    "bytetx.serve": 5,
    "bytetx.arguments": 4,
    "bytetx.executor.worker": 4,
    "bytetx.executor.leader": 4,
    "bytetx.generating": 4,
    "bytetx.generate.sizes": 4,
    "bytetx.info": 4,
    "bytetx.requests.inputs": 4,
    "bytetx.nn.loading": 4,
    "bytetx.model": 4,
    "bytetx.progress": 4,
    "bytetx.requests.prompts": 4,
    "bytetx.tasks.results": 4,
    "bytetx.requests.token_ids": 4,
    "bytetx.tasks.options": 4,
    "bytetx.tasks": 4,
    "bytetx.engine": 3,
    "bytetx.nn.blocks": 2,
    "bytetx.checkpoint.byte_level": 2,
    "bytetx.nn.fp8": 2,
    "bytetx.nn.heads": 2,
    "bytetx.parallel": 2,
    "bytetx.nn.rotary": 2,
    "bytetx.nn.decoder": 2,
    "bytetx.nn.decoder_weights": 2,
    "bytetx.nn.sentence_modules": 2,
    "bytetx.nn.tensors": 2,
    "bytetx.checkpoint.convert_tokenizer": 2,
    "bytetx.runtime.device_memory": 2,
    "bytetx.checkpoint.tokenizer": 2,
    "bytetx.nn.transformer": 2,
    "bytetx.checkpoint.weights": 2,
    "bytetx.ops": 1,
    "bytetx.ops.native": 0,
    "bytetx.ops.native_modules": 0,
    "bytetx.nn.kv_cache": 0,
    "bytetx.checkpoint.chat_template": 0,
    "bytetx.checkpoint.chat_process": 0,
    "bytetx.checkpoint.chat_renderer": 0,
    "bytetx.checkpoint.files": 0,
    "bytetx.checkpoint.config": 0,
    "bytetx.checkpoint.decoder_spec": 0,
    "bytetx.checkpoint.demo": 0,
    "bytetx.errors": 0,
    "bytetx.checkpoint.family": 0,
    "bytetx.packed": 0,
    "bytetx.checkpoint.rope_spec": 0,
    "bytetx.sampling_params": 0,
    "bytetx.checkpoint.side_files": 0,
    "bytetx.checkpoint.spec": 0,
    "bytetx.checkpoint.tokenizer_config": 0,
}
WITHOUT_TORCH = [
    "bytetx.runtime.buckets",
    "bytetx.generate.async_engine",
    "bytetx.generate.detokenizer",
    "bytetx.generate.engine",
    "bytetx.generate.scheduler",
    "bytetx.generate.kv_cache",
    "bytetx.encode.request",
    "bytetx.encode.scheduler",
    "bytetx.runtime.input_batch",
    "bytetx.generate.stopping",
    "bytetx.executor.channel",
    "bytetx.executor.control",
    "bytetx.executor.heartbeat",
    "bytetx.parallel.layout",
    "bytetx.parallel.plan",
    "bytetx.parallel.row_scheme",
    "bytetx.sampling_params",
    "bytetx.checkpoint.spec",
]
COMPILED = {"bytetx._cpu", "bytetx._cuda"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module name, with the line that imports it."""

    target: str
    line: int
    name: str | None = None  # the name taken from the module, for `from target import name`


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(module: str) -> Iterator[Import]:
    """Every import in a module, lazy ones too; `from package import module` names the module."""
    for node in ast.walk(tree(modules()[module])):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                is_module = deeper in modules() or deeper in COMPILED
                target = deeper if is_module else node.module
                yield Import(target, node.lineno, None if is_module else alias.name)


def height(module: str) -> int:
    """The height of the room that a module is in; a name that stands nowhere is an error."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        room = ".".join(parts[:length])
        if room in HEIGHTS:
            return HEIGHTS[room]
    assert module == "bytetx", f"{module} is in no known room: give it a height in {__file__}"
    return HEIGHTS["bytetx"]


def is_inside(target: str, package: str) -> bool:
    return target == package or target.startswith(f"{package}.")


def offences(rule: Callable[[str, Import], str | None]) -> list[str]:
    """`file:line: text` for every import on which rule(module, import) returns a text."""
    return [
        f"{modules()[module].relative_to(ROOT)}:{found.line}: {text}"
        for module in modules()
        for found in imports(module)
        if (text := rule(module, found))
    ]


def test_imports_point_down() -> None:
    def rule(module: str, found: Import) -> str | None:
        if not is_inside(found.target, "bytetx") or found.target in COMPILED:
            return None
        if found.name == "__version__" or module == "bytetx":
            return None
        is_up = height(found.target) > height(module)
        return f"{module} reaches up to {found.target}" if is_up else None

    assert offences(rule) == []


def test_only_ops_native_imports_the_compiled_modules() -> None:
    def rule(module: str, found: Import) -> str | None:
        is_offence = found.target in COMPILED and module != "bytetx.ops.native"
        return f"imports {found.target}" if is_offence else None

    assert offences(rule) == []


def test_only_ops_turn_tensors_into_pointers() -> None:
    """A storage's address may be compared anywhere: it says whether two tensors share memory."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for module, path in modules().items()
        if not is_inside(module, "bytetx.ops")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr == "data_ptr"
        if "untyped_storage" not in ast.unparse(node.value)
    ]
    assert found == []


def test_torch_distributed_stays_in_parallel() -> None:
    def rule(module: str, found: Import) -> str | None:
        full_name = f"{found.target}.{found.name}"
        is_used = is_inside(full_name, "torch.distributed")
        # Measured against torch's own collectives, by processes that torchrun started.
        is_rival = module in ("bytetx.bench.comm", "bytetx.bench.ranks", "bytetx.bench.tp_layer")
        is_offence = is_used and not is_inside(module, "bytetx.parallel") and not is_rival
        return "imports torch.distributed" if is_offence else None

    assert offences(rule) == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_planning_needs_no_torch(module: str) -> None:
    """Neither the module nor what it imports from this package imports torch."""
    seen, ahead = set(), [module] if module in modules() else []
    while ahead:
        current = ahead.pop()
        seen.add(current)
        for found in imports(current):
            heavy = found.target.split(".")[0] == "torch"
            assert not heavy, (
                f"{current}:{found.line} imports {found.target}, reached from {module}"
            )
            if found.target in modules() and found.target not in seen and found.target != "bytetx":
                ahead.append(found.target)


def test_environment_is_read_in_cli_alone() -> None:
    # What NCCL listens on has no other way in; it is set for a moment, where the user has not.
    allowed = ("bytetx.cli.commands", "bytetx.parallel.nccl")

    def rule(module: str, found: Import) -> str | None:
        is_read = found.target == "os" and found.name in ("environ", "getenv")
        return f"takes os.{found.name}" if is_read and module not in allowed else None

    attributes = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for module, path in modules().items()
        if module not in allowed
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert offences(rule) + attributes == []


def python_files() -> list[Path]:
    return [ROOT / "setup.py", *modules().values(), *sorted((ROOT / "tests").rglob("*.py"))]


def test_files_are_short() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines()) for path in python_files()
    }
    too_long = {str(path): lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert too_long == {}, f"lines, at most {MAX_FILE_LINES}"


def test_functions_are_short() -> None:
    """Counted without signature and docstring, which say more the longer they are."""
    too_long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lines
        for path in python_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := body_lines(node)) > MAX_FUNCTION_LINES
    }
    assert too_long == {}, f"lines, at most {MAX_FUNCTION_LINES}"


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_every_file_says_what_it_is() -> None:
    silent = [str(p.relative_to(ROOT)) for p in python_files() if not ast.get_docstring(tree(p))]
    assert silent == []
