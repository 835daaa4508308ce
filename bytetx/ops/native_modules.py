"""Finds the compiled modules _cpu and _cuda that belong to these sources; needs no torch.

`pip install .` compiles them into site-packages, and `python` started in the checkout imports the
sources of the checkout, which have none beside them. The installed modules are taken then, where
they were compiled from the same csrc/: another version may take other arguments.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]
_SUFFIXES = (".cpp", ".cu", ".cuh", ".h")


@dataclass(frozen=True, slots=True)
class NativeModule:
    """A compiled module, or why there is none and what to do.

    warning: what the user should know at once, as one line; "" where nothing is wrong.
    """

    module: ModuleType | str
    warning: str = ""


def source_hash(csrc: Path) -> str:
    """Hash of the names and contents of all files of csrc/ that are compiled.

    setup.py puts it into the modules, so that they say which sources they were compiled from.
    """
    digest = hashlib.sha256()
    for path in sorted(csrc.rglob("*")):
        if path.suffix in _SUFFIXES:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(csrc).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def load_native(name: str, *, package: Path = PACKAGE) -> NativeModule:
    """The module bytetx.<name>: the one beside the sources, else an installed one that fits them.

    package: the folder of the imported bytetx.
    """
    # Beside the sources, or found by the import hook of another checkout's editable install.
    spec = find_spec(f"bytetx.{name}")
    if spec is None or Path(spec.origin or "").parent != package:
        hooked = [] if spec is None else [spec]
        return load_installed(name, package=package, search_path=sys.path, found=hooked)
    try:
        module = import_module(f"bytetx.{name}")
    except ImportError as error:
        reason = f"{spec.origin} does not load ({error}): {_remedy(package)}"
        return NativeModule(reason, reason)
    expected = _expected_hash(package)
    if expected is not None and getattr(module, "source_hash", None) != expected:
        return NativeModule(module, _stale(package, package, "it may fail"))
    return NativeModule(module)


def load_installed(
    name: str, *, package: Path, search_path: Sequence[str], found: Sequence[ModuleSpec] = ()
) -> NativeModule:
    """The module from another folder named bytetx on the path, if it was compiled from the
    sources beside `package`.  found: modules to look at before."""
    missing = _missing(name, package)
    candidates = (*found, *_installed(name, package, search_path))
    expected = _expected_hash(package) if candidates else None
    if expected is None:
        return missing
    for spec in candidates:
        path = Path(spec.origin or "")
        # Asked of the file: a module of other sources is not even loaded.
        if expected.encode() in path.read_bytes():
            return _load(spec, package)
        stale = _stale(path.parent, package, "it is not used, and bytetx is slower without it")
        # Of both modules _cpu speaks: without nvcc there is no newer _cuda to be had.
        missing = NativeModule(stale, "" if name == "_cuda" else stale)
    return missing


def _load(spec: ModuleSpec, package: Path) -> NativeModule:
    assert spec.loader is not None  # a file was found
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        reason = f"{spec.origin} does not load ({error}): {_remedy(package)}"
        return NativeModule(reason, reason)
    sys.modules[spec.name] = module
    setattr(sys.modules["bytetx"], spec.name.rpartition(".")[2], module)
    return NativeModule(module)


def _installed(name: str, package: Path, search_path: Sequence[str]) -> Iterator[ModuleSpec]:
    folders = (Path(entry or ".").resolve() / "bytetx" for entry in search_path)
    for folder in dict.fromkeys(folders):
        if folder != package and (spec := PathFinder.find_spec(f"bytetx.{name}", [str(folder)])):
            yield spec


def _expected_hash(package: Path) -> str | None:
    """Hash of the sources beside the package; None for an installed package, which has none."""
    csrc = package.parent / "csrc"
    return source_hash(csrc) if (csrc / "bindings.cpp").exists() else None


def _missing(name: str, package: Path) -> NativeModule:
    """The reason and the way where no module is found. A machine without a GPU has no _cuda, and
    that is nothing to warn of."""
    if name == "_cuda":
        # The run that built _cpu knew; _cpu is loaded first.
        known = getattr(sys.modules.get("bytetx._cpu"), "why_no_cuda", "")
        return NativeModule(
            "bytetx._cuda was not built: "
            + (known or "install with BYTETX_CUDA=1 set, which says what is missing")
        )
    reason = f"{package} has no compiled core, and bytetx is slower without it: {_remedy(package)}"
    return NativeModule(reason, reason)


def _stale(folder: Path, package: Path, then: str) -> str:
    return (
        f"the compiled core in {folder} is not of the sources in {package.parent / 'csrc'}; "
        f"{then}: {_remedy(package)}"
    )


def _remedy(package: Path) -> str:
    if (package.parent / "setup.py").exists():
        # What was built without a GPU is built again without one.
        asked = "BYTETX_CUDA=1 " if any(package.glob("_cuda*.so")) else ""
        return f"run `{asked}pip install -e .` in {package.parent}"
    return "install bytetx again from its checkout"
