"""Writes bytetx/tasks/methods.pyi, the types of all tasks' methods: python tests/method_stubs.py.

Needs ruff, which formats it.
"""

import subprocess
import sys
import types
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import numpy.typing as npt

import bytetx.tasks.catalog
from bytetx.errors import InputError
from bytetx.tasks.results import Results, Stream
from bytetx.tasks.task import TaskSpec

STUB = Path(bytetx.tasks.catalog.__file__).with_name("methods.pyi")
HEAD = '''\
"""Written by tests/method_stubs.py from the declared tasks; not edited by hand."""

from typing import Any, Literal, overload

'''


class Names:
    """Types as source text, and the imports that the text needs."""

    def __init__(self) -> None:
        self.imports: set[tuple[str, str]] = set()

    def of(self, kind: Any) -> str:
        if kind == npt.ArrayLike:
            return self._imported("numpy.typing", "ArrayLike")
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            # Unions that hold ArrayLike are flat; it is named again.
            members, array = set(arguments), set(get_args(npt.ArrayLike))
            if array <= members:
                rest = [one for one in arguments if one not in array]
                return " | ".join([self.of(npt.ArrayLike), *map(self.of, rest)])
            return " | ".join(map(self.of, arguments))
        if origin is Literal:
            return f"Literal[{', '.join(map(repr, arguments))}]"
        if kind is type(None):
            return "None"
        if kind in (Any, ...):
            return "Any" if kind is Any else "..."
        if arguments:
            return f"{self.of(origin)}[{', '.join(map(self.of, arguments))}]"
        if kind.__module__ == "builtins":
            return str(kind.__name__)
        return self._imported(kind.__module__, kind.__qualname__)

    def _imported(self, module: str, name: str) -> str:
        self.imports.add((module, name))
        return name


def stub() -> str:
    """The text of methods.pyi."""
    names = Names()
    specs = bytetx.tasks.catalog.declared_tasks().values()
    model = [line for spec in specs for line in _methods(spec, names, is_async=False)]
    others = [
        line
        for spec in specs
        for line in (
            _methods(spec, names, is_async=True)
            if spec.one is None
            else _method(spec.one, names, "def", _QUEUED, spec.one.result)
        )
    ]
    modules: dict[str, list[str]] = {}
    for module, name in sorted(names.imports):
        modules.setdefault(module, []).append(name)
    imports = [f"from {module} import {', '.join(found)}" for module, found in modules.items()]
    own = ["class ModelTasks:", *model, "", "class AsyncModelTasks:", *others, ""]
    return HEAD + "\n".join([*imports, "", *own, "def attach(spec: Any) -> None: ...", ""])


_QUEUED = ["priority: int = 0", "timeout_s: float | None = None"]


def _methods(spec: TaskSpec, names: Names, *, is_async: bool) -> list[str]:
    """The overloads of one method."""
    any_error, raised, returned = (
        "Literal['raise', 'return']",
        "Literal['raise']",
        "Literal['return']",
    )
    if get_origin(spec.result) is Results and spec.item is not None:
        errors = {raised: spec.result, returned: _with_errors(Results, spec.item)}
    else:
        errors = {any_error: spec.result}
    kinds = [("False", error, result) for error, result in errors.items()]
    if spec.item is not None and not is_async:
        kinds.append(("True", raised, types.GenericAlias(Stream, spec.item)))
        kinds.append(("True", returned, _with_errors(Stream, spec.item)))
    if spec.pieces is not None and not is_async:
        kinds.append(("'pieces'", any_error, types.GenericAlias(Stream, spec.pieces)))
    lines = []
    for streams, on_error, result in kinds:
        if is_async:
            run = _QUEUED
        else:
            default = " = ..." if streams == "False" else ""
            run = [f"stream: Literal[{streams}]{default}"] if spec.item is not None else []
            run = [*run, "show_progress: bool = False"]
        if len(kinds) > 1:
            lines.append("    @overload")
        begin = "async def" if is_async else "def"
        lines += _method(spec, names, begin, run, result, on_error=on_error)
    return lines


def _with_errors(kind: type, item: Any) -> types.GenericAlias:
    return types.GenericAlias(kind, item | InputError)


def _method(
    spec: TaskSpec,
    names: Names,
    begin: str,
    run: list[str],
    result: Any,
    *,
    on_error: str = "",
) -> list[str]:
    """One method. run: its last parameters.  on_error: the type of this option."""
    parameters = ["self"]
    for name, one in list(spec.signature().parameters.items())[1:]:
        if one.kind is Parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        text = names.of(one.annotation)
        if name == "on_error":
            default = "" if on_error == "Literal['return']" else " = ..."
            parameters.append(f"on_error: {on_error}{default}")
        elif one.default is Parameter.empty:
            parameters.append(f"{name}: {text}")
        else:
            parameters.append(f"{name}: {text} = {one.default!r}")
    lines = [f"        {one}," for one in [*parameters, *run]]
    return [f"    {begin} {spec.name}(", *lines, f"    ) -> {names.of(result)}: ..."]


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    for command in (["check", "--fix-only", "--quiet"], ["format", "--quiet"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, str(STUB)], check=True)
