"""Which compiled modules a checkout takes: its own, installed ones of the same sources, or none."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT

import bytetx
from bytetx.ops.native_modules import load_installed, source_hash

# The import hook of an editable install may hand out a core of the same sources, too.
NO_HOOK = "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in repr(f)]; "
SHOW = "from bytetx.ops import native; print(getattr(native._modules['cpu'], '__file__', None))"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which nothing was built, with one source."""
    package = tmp_path / "checkout" / "bytetx"
    package.mkdir(parents=True)
    (tmp_path / "checkout" / "csrc").mkdir()
    (tmp_path / "checkout" / "csrc" / "bindings.cpp").write_text("int answer = 1;\n")
    (tmp_path / "checkout" / "setup.py").touch()
    return package


@pytest.fixture
def no_core() -> Iterator[None]:
    """Forgets the module `_core` that a test made."""
    yield
    sys.modules.pop("bytetx._core", None)
    vars(bytetx).pop("_core", None)


def install(folder: Path, sources: str) -> str:
    """A folder as on sys.path, in which a module of these sources is installed."""
    (folder / "bytetx").mkdir(parents=True)
    (folder / "bytetx" / "_core.py").write_text(f"source_hash = {sources!r}\n")
    return str(folder)


@pytest.mark.usefixtures("no_core")
def test_an_installed_module_of_the_same_sources_is_taken(checkout: Path, tmp_path: Path) -> None:
    sources = source_hash(checkout.parent / "csrc")
    path = [
        "",
        str(checkout.parent),
        install(tmp_path / "old", "another hash"),
        install(tmp_path / "site", sources),
    ]
    found = load_installed("_core", package=checkout, search_path=path)
    assert found.module.__file__ == str(tmp_path / "site" / "bytetx" / "_core.py")
    assert found.warning == "" and sys.modules["bytetx._core"] is found.module


@pytest.mark.usefixtures("no_core")
@pytest.mark.parametrize("change", ["edit", "add", "rename"])
def test_an_installed_module_of_older_sources_is_not_loaded_in_silence(
    checkout: Path, tmp_path: Path, change: str
) -> None:
    csrc = checkout.parent / "csrc"
    path = [install(tmp_path / "site", source_hash(csrc))]
    if change == "edit":
        (csrc / "bindings.cpp").write_text("int answer = 2;\n")
    elif change == "add":
        (csrc / "more.h").write_text("")
    else:
        (csrc / "more.h").write_text("")
        path = [install(tmp_path / "newer", source_hash(csrc))]
        (csrc / "more.h").rename(csrc / "less.h")
    found = load_installed("_core", package=checkout, search_path=path)
    assert found.module == found.warning and "bytetx._core" not in sys.modules
    assert "is not of the sources" in found.warning and "\n" not in found.warning
    assert f"run `pip install -e .` in {checkout.parent}" in found.warning


def test_a_checkout_without_any_module_says_what_to_do(checkout: Path, tmp_path: Path) -> None:
    found = load_installed("_cpu", package=checkout, search_path=[str(tmp_path)])
    assert "has no compiled core" in found.warning and "pip install -e ." in found.warning
    (checkout / "_cuda.cpython-311-x86_64-linux-gnu.so").touch()  # built where no GPU may be
    found = load_installed("_cpu", package=checkout, search_path=[str(tmp_path)])
    assert "run `BYTETX_CUDA=1 pip install -e .`" in found.warning


@pytest.mark.parametrize("known", ["", "no GPU was found; set BYTETX_CUDA=1"])
def test_a_missing_cuda_module_says_what_the_build_knew(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    monkeypatch.setitem(sys.modules, "bytetx._cpu", SimpleNamespace(why_no_cuda=known))
    cuda = load_installed("_cuda", package=checkout, search_path=[str(tmp_path)])
    assert cuda.module.startswith(f"bytetx._cuda was not built: {known}")
    assert "BYTETX_CUDA=1" in cuda.module
    assert cuda.warning == ""  # as on every machine without a GPU


def test_documents_in_csrc_do_not_count_as_sources(checkout: Path) -> None:
    before = source_hash(checkout.parent / "csrc")
    (checkout.parent / "csrc" / "README.md").write_text("words")
    assert source_hash(checkout.parent / "csrc") == before


def test_python_in_the_checkout_of_a_plain_install_ran_without_the_native_core(
    tmp_path: Path,
) -> None:
    """As after `pip install .`: the compiled module is in site-packages, the checkout has none."""
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    for name in ("bytetx", "csrc", "models"):
        no_modules = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=no_modules)
    shutil.copy(ROOT / "setup.py", checkout)
    (site / "bytetx").mkdir(parents=True)
    (built,) = (ROOT / "bytetx").glob("_cpu*.so")
    shutil.copy(built, site / "bytetx")
    ran = python_in(checkout, site)
    assert (ran.stdout.strip(), ran.stderr) == (str(site / "bytetx" / built.name), "")
    with (checkout / "csrc" / "bindings.cpp").open("a") as file:
        file.write("// a newer version\n")
    ran = python_in(checkout, site)
    assert ran.stdout.strip() == "None" and ran.stderr.count("\n") == 1
    assert "run `pip install -e .` in" in ran.stderr


def python_in(checkout: Path, site: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(site)}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [sys.executable, "-c", NO_HOOK + SHOW],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
    )
