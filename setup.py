"""Builds the native core: bytetx._cpu always, bytetx._cuda where a GPU is that runs it.

Objects are kept in build/objects under a hash of compiler and flags, and are compiled again only
when the content of their source or of a header they include has changed. All cores compile at once.
Settings: BYTETX_CUDA (1: build _cuda on any machine, or fail; 0: leave it out), CXX (the host
compiler), NVCC, CUDA_HOME, BYTETX_CUTLASS_DIR (CUTLASS's include folder).
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OBJECTS = ROOT / "build" / "objects"
CUTLASS = "nvidia-cutlass==4.2.0.0"
OLDEST_NVCC = (12, 0)  # the first that knows C++20 and sm_90a
CAPABILITY = "9.0"  # of the GPUs that sm_90a runs on
WSL_TOOLS = "/usr/lib/wsl/lib"  # where Windows puts nvidia-smi, which need not be on PATH
GPU_FILES = ("/proc/driver/nvidia/gpus/*", "/dev/nvidia[0-9]*")  # of which a GPU has some

BUILD_FACTS, BINDINGS = "csrc/build_facts.cpp", "csrc/bindings.cpp"
BOTH_MODULES = (BINDINGS, BUILD_FACTS)  # compiled for _cpu and for _cuda

CPU_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
CUDA_FLAGS = [
    *["-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-lineinfo"],
    "--expt-relaxed-constexpr",  # CUTLASS calls constexpr host functions from kernels
    *["-Xptxas", "-warn-spills", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"],
]

_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
ISA_FLAGS = {  # processor -> file name suffix -> flags; it leaves out the files of others
    "x86_64": {
        "_amxint8": [*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
        "_avx512bf16": [*_AVX512, "-mavx512bf16"],
        "_avx512vnni": [*_AVX512, "-mavx512vnni"],
        "_avx512": _AVX512,
        "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    },
    "aarch64": {
        "_neonbf16": ["-march=armv8.2-a+bf16", "-DBYTETX_NEON", "-DBYTETX_NEON_BF16"],
        "_neoni8mm": ["-march=armv8.2-a+i8mm", "-DBYTETX_NEON", "-DBYTETX_NEON_I8MM"],
        "_neondotprod": ["-march=armv8.2-a+dotprod", "-DBYTETX_NEON", "-DBYTETX_NEON_DOTPROD"],
        "_neon": ["-march=armv8-a", "-DBYTETX_NEON"],
    },
}


class BuildError(SystemExit):
    """A failure whose text is all that the user needs: no traceback follows it."""

    def __init__(self, text: str) -> None:
        super().__init__(f"\nbytetx: {text}")


@dataclass(frozen=True, slots=True)
class Cuda:
    """nvcc, the headers it needs, and the text of its version."""

    nvcc: str
    cutlass: Path
    version: str


@dataclass(frozen=True, slots=True)
class Step:
    """One source to one object; `key` stands for all that decides the object but file contents."""

    source: str
    command: tuple[str, ...]
    key: str

    def path(self, ending: str) -> Path:
        return OBJECTS / f"{Path(self.source).stem}-{self.key}.{ending}"


# ---- what this machine has


@cache
def host_compiler() -> tuple[str, ...]:
    """The C++ compiler's command, checked to know C++20 and to have Python's headers."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((name for name in names if shutil.which(shlex.split(name)[0])), None)
    if found is None:
        raise BuildError(
            f"no C++ compiler: looked for {', '.join(names)}. Install one that knows C++20, GCC 11 "
            "or Clang 14 or later (Debian, Ubuntu: apt install g++), or name it in CXX."
        )
    command = tuple(shlex.split(found))
    probe = "#include <concepts>\nstatic_assert(std::same_as<int, int>);\n"
    with tempfile.TemporaryDirectory() as folder:  # not every compiler reads stdin
        source = Path(folder, "probe.cpp")
        source.write_text(probe)
        check = [*command, "-std=c++20", "-c", str(source), "-o", f"{folder}/probe.o"]
        checked = subprocess.run(check, capture_output=True, text=True)
    if checked.returncode:
        raise BuildError(
            f"{found} ({version_of(command)}) cannot compile C++20:\n{checked.stderr}"
            "Use GCC 11 or Clang 14 or later, and name it in CXX."
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BuildError(
            f"Python.h is not in {sysconfig.get_path('include')}. Install Python's headers "
            "(Debian, Ubuntu: apt install python3-dev)."
        )
    return command


def version_of(command: Iterable[str]) -> str:
    """The line of `--version` that tells one release from another."""
    said = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    lines = said.splitlines() or ["unknown version"]
    return next((line for line in lines if "release" in line), lines[0]).strip()


def is_cuda_asked_for() -> bool | None:
    """BYTETX_CUDA; None: where a GPU is that runs it."""
    given = os.environ.get("BYTETX_CUDA", "")
    if given not in ("", "0", "1"):
        raise BuildError(
            f"BYTETX_CUDA is {given!r}; set 1 to build the CUDA kernels, 0 to leave them out, or "
            "unset it to build them where a GPU is"
        )
    return bool(int(given)) if given else None


@cache
def why_no_gpu() -> str | None:
    """Why no kernel of _cuda would run on this machine, or None where one does or may."""
    smi = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=WSL_TOOLS)
    said = ""
    if smi:
        query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            ran = subprocess.run(query, capture_output=True, text=True, timeout=60)
            said = "" if ran.returncode else ran.stdout.replace("No devices were found", "").strip()
    capabilities = sorted(set(re.findall(r"^\d+\.\d+$", said, re.MULTILINE)))
    if capabilities and CAPABILITY not in capabilities:
        return (
            f"the GPUs here have compute capability {', '.join(capabilities)}, and the kernels are "
            f"for {CAPABILITY} (H100, H200); Triton kernels serve others"
        )
    # Drivers from before 2021 know no compute_cap, and containers may have no nvidia-smi.
    is_there = said or any(map(glob, GPU_FILES))
    return None if is_there else "no NVIDIA GPU was found on the machine that built bytetx"


def find_nvcc() -> str | None:
    """NVCC where it is set, else nvcc on PATH, else in CUDA_HOME."""
    if "NVCC" in os.environ:
        return shutil.which(os.environ["NVCC"])
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc") or (shutil.which("nvcc", path=f"{home}/bin") if home else None)


def find_cutlass() -> Path | None:
    """CUTLASS's include folder: BYTETX_CUTLASS_DIR, else the one in the package nvidia-cutlass."""
    given = os.environ.get("BYTETX_CUTLASS_DIR")
    if given:
        places = [Path(given), Path(given, "include")]
        found = next((p for p in places if (p / "cutlass" / "cutlass.h").exists()), None)
        if found is None:
            raise BuildError(f"BYTETX_CUTLASS_DIR is {given}, which has no cutlass/cutlass.h.")
        return found
    spec = importlib.util.find_spec("cutlass_library")
    folders = [] if spec is None else spec.submodule_search_locations or []
    places = [Path(folder, "source", "include") for folder in folders]
    return next((p for p in places if (p / "cutlass" / "cutlass.h").exists()), None)


def why_no_cuda_wanted() -> str | None:
    """Why _cuda is not built whatever tools there are, and what to do; None where it is."""
    asked = is_cuda_asked_for()
    if asked is False:
        return "BYTETX_CUDA=0 left it out: unset it, or set it to 1, and install again"
    no_gpu = None if asked else why_no_gpu()
    if no_gpu is None:
        return None
    return f"{no_gpu}; to build the CUDA kernels all the same, install with BYTETX_CUDA=1 set"


@cache
def find_cuda() -> Cuda | str:
    """The CUDA tools, or the reason why _cuda is not built and what to do about it."""
    unwanted = why_no_cuda_wanted()
    if unwanted is not None:
        return unwanted
    nvcc, need = find_nvcc(), ".".join(map(str, OLDEST_NVCC))
    if nvcc is None:
        given = os.environ.get("NVCC")
        where = (
            "on PATH or in CUDA_HOME/bin" if given is None else f"by the name in NVCC, {given!r}"
        )
        return f"no nvcc {where}: install CUDA {need} or later, put nvcc on PATH and install again"
    version = version_of([nvcc])
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None or (int(release[1]), int(release[2])) < OLDEST_NVCC:
        return f"{nvcc} is '{version}', and CUDA {need} or later is needed: put it first on PATH"
    cutlass = find_cutlass()
    if cutlass is None:
        return (
            f"{nvcc} is there, the CUTLASS headers are not: run `pip install --no-deps {CUTLASS}` "
            "or set BYTETX_CUTLASS_DIR to CUTLASS's include folder, then build again"
        )
    return Cuda(nvcc, cutlass, version)


# ---- what is compiled, and with which flags


def relative(paths: Iterable[Path]) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


@cache
def processor() -> str | None:
    """The key of ISA_FLAGS that the host compiler compiles for, or None for another one."""
    command = [*host_compiler(), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True).stdout
    return next((name for name in ISA_FLAGS if f"#define __{name}__ " in macros), None)


def isa_of(source: str) -> str | None:
    suffixes = (suffix for flags in ISA_FLAGS.values() for suffix in flags)
    return next((suffix for suffix in suffixes if Path(source).stem.endswith(suffix)), None)


def cpu_sources() -> list[str]:
    return [*BOTH_MODULES, *relative((ROOT / "csrc" / "cpu").glob("*.cpp"))]


def cuda_sources() -> list[str]:
    folders = [ROOT / "csrc" / name for name in ("cuda", "gemm", "comm")]
    return [*BOTH_MODULES, *relative(p for folder in folders for p in folder.glob("*.cu"))]


def instance_units() -> list[str]:
    """Sources that instantiate the kernels' launchers, one for each block of `extern template`
    lines in a header of csrc/, so that they compile at once."""
    folder = OBJECTS / "instances"
    folder.mkdir(parents=True, exist_ok=True)
    units = {}
    for header in relative((ROOT / "csrc").rglob("*.cuh")):
        text = (ROOT / header).read_text()
        for block in re.findall(r"(?:^extern template [^;]+;\n)+", text, re.MULTILINE):
            namespace = re.search(r"^namespace ([\w:]+) \{", text, re.MULTILINE)[1]
            arguments = re.findall(r"\w+", re.search(r"<([\w, ]+)>", block)[1])
            name = "_".join([Path(header).stem.removesuffix("_launch"), *arguments])
            include = f'#include "{Path(header).relative_to("csrc").as_posix()}"'
            body = re.sub("^extern ", "", block, flags=re.MULTILINE)
            units[name] = f"{include}\nnamespace {namespace} {{\n{body}}}\n"
    for name, text in units.items():
        path = folder / f"{name}.cu"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return relative(folder / f"{name}.cu" for name in units)


def cpu_steps() -> list[Step]:
    flags = {None: [], **ISA_FLAGS.get(processor(), {})}
    sources = [source for source in cpu_sources() if isa_of(source) in flags]
    isas = sorted({isa for source in sources if (isa := isa_of(source))})
    defines = ["-DBYTETX_MODULE=_cpu", *(f"-DBYTETX_HAS{isa.upper()}" for isa in isas)]
    return [host_step(source, [*defines, *flags[isa_of(source)]]) for source in sources]


def cuda_steps(cuda: Cuda) -> list[Step]:
    defines = ["-DBYTETX_MODULE=_cuda", "-DBYTETX_CUDA"]
    return [
        cuda_step(source, cuda) if source.endswith(".cu") else host_step(source, defines)
        for source in [*instance_units(), *cuda_sources()]
    ]


def host_step(source: str, flags: list[str]) -> Step:
    try:
        import pybind11
    except ImportError:
        raise BuildError(
            "pybind11, which the native core is built with, is not installed: run `pip install .`, "
            "which brings it, or `pip install pybind11`"
        ) from None
    compiler = host_compiler()
    if source == BUILD_FACTS:
        flags = [*flags, *build_facts()]
    if source == BINDINGS:
        flags = [*flags, f"-I{contract_fields().relative_to(ROOT)}"]
    flags = [*CPU_FLAGS, *flags, "-Icsrc"]
    systems = [sysconfig.get_path("include"), pybind11.get_include()]
    versions = [version_of(compiler), sys.implementation.cache_tag, pybind11.__version__]
    return make_step(source, [*compiler, *flags], systems, versions)


def cuda_step(source: str, cuda: Cuda) -> Step:
    cutlass = (cuda.cutlass / "cutlass" / "version.h").read_text()
    versions = [cuda.version, version_of(host_compiler()), cutlass]
    command = [*nvcc_command(cuda), *CUDA_FLAGS, "-Icsrc"]
    if (ROOT / source).is_relative_to(OBJECTS):
        versions.append((ROOT / source).read_text())  # dependencies are files of csrc/ alone
    return make_step(source, command, [cuda.cutlass], versions)


def nvcc_command(cuda: Cuda) -> list[str]:
    return [cuda.nvcc, *(["-ccbin", host_compiler()[0]] if os.environ.get("CXX") else [])]


def build_facts() -> list[str]:
    """The macros of BUILD_FACTS."""
    cuda = find_cuda()
    why_no_cuda = cuda if isinstance(cuda, str) else ""
    facts = {"BYTETX_SOURCE_HASH": source_hash(), "BYTETX_WHY_NO_CUDA": why_no_cuda}
    return [f"-D{name}={json.dumps(text)}" for name, text in facts.items()]  # as C writes strings


@cache
def contract_fields() -> Path:
    """A folder with contract_fields.h, made of the contract's headers and named by its content."""
    spec = importlib.util.spec_from_file_location("contract", ROOT / "csrc" / "contract.py")
    contract = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = contract  # dataclasses look their module up
    spec.loader.exec_module(contract)
    text = contract.fields_header(contract.read_structs())
    folder = OBJECTS / f"contract-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "contract_fields.h").write_text(text)
    return folder


def source_hash() -> str:
    """Return the hash that the package computes at import and compares with.

    Isolated builds leave the checkout out of sys.path.
    """
    sys.path.insert(0, str(ROOT))
    try:
        from bytetx.ops.native_modules import source_hash
    finally:
        sys.path.remove(str(ROOT))
    return source_hash(ROOT / "csrc")


def make_step(source: str, command: list[str], systems: list, versions: list[str]) -> Step:
    """System folders count by the version of what they hold: isolated builds move them about."""
    key = hashlib.sha256(json.dumps([source, command, versions]).encode()).hexdigest()[:16]
    includes = [part for folder in systems for part in ("-isystem", str(folder))]
    return Step(source, (*command, *includes), key)


# ---- compiling and linking


def content_hash(path: str) -> str:
    try:
        return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
    except FileNotFoundError:
        return "gone"


def dependencies(depfile: Path) -> list[str]:
    """Our own files in a make rule as compilers write it: continued lines, escaped spaces."""
    text = depfile.read_text().replace("\\\n", " ")
    names = re.findall(r"(?:\\ |\S)+", text.split(":", 1)[1])
    paths = (ROOT / name.replace("\\ ", " ") for name in names)
    return relative({path for path in paths if path.is_relative_to(ROOT / "csrc")})


def cached_log(step: Step) -> str | None:
    """Return what the compiler said when it made this object; None when it must be made (again)."""
    if not step.path("o").exists() or not step.path("json").exists():
        return None
    record = json.loads(step.path("json").read_text())
    is_fresh = all(content_hash(path) == seen for path, seen in record["files"].items())
    return record["log"] if is_fresh else None


def compile_step(step: Step) -> str:
    """Runs the compiler; returns its warnings. The record comes last: a killed build is safe. It
    holds what files were before, so that one edited meanwhile makes the object stale."""
    step.path("json").unlink(missing_ok=True)
    before = {path: content_hash(path) for path in relative((ROOT / "csrc").rglob("*.*"))}
    outputs = ["-MMD", "-MF", str(step.path("d")), "-c", step.source, "-o", str(step.path("o"))]
    command = [*step.command, *outputs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    log = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise BuildError(f"cannot compile {step.source}\n$ {shlex.join(command)}\n{log}")
    files = {path: before.get(path) for path in dependencies(step.path("d"))}
    step.path("json").write_text(json.dumps({"files": files, "log": log}))
    return log


def num_cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """Says how many sources of each part are done: a line a source on stdout and, as pip hides
    that, a counter on the user's terminal."""

    def __init__(self, totals: dict[str, int]) -> None:
        self.totals, self.done = totals, dict.fromkeys(totals, 0)
        self.lock = threading.Lock()

    def add(self, part: str, text: str) -> None:
        """One source of `part` is done."""
        with self.lock:
            self.done[part] += 1
            count = f"{part} {self.done[part]}/{self.totals[part]}"
            print(f"{count} {text}", flush=True)
            is_last = self.done == self.totals
            show_on_terminal("" if is_last else f" {count}")


def show_on_terminal(text: str) -> None:
    """Writes `text` behind the cursor, which stays where it is: pip turns its wheel there. Nothing
    where stdout is the terminal, or in the background, where writing may stop the build."""
    try:
        terminal = os.open("/dev/tty", os.O_WRONLY)
    except OSError:
        return
    try:
        if not sys.stdout.isatty() and os.tcgetpgrp(terminal) == os.getpgrp():
            os.write(terminal, f"\x1b7\x1b[K{text}\x1b8".encode())
    except OSError:
        pass
    finally:
        os.close(terminal)


def compile_all(parts: dict[str, list[Step]], jobs: int) -> None:
    """Brings every object up to date; warnings of objects that were kept are said again."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    progress = Progress({part: len(steps) for part, steps in parts.items()})

    def bring_up_to_date(part: str, step: Step) -> None:
        log = cached_log(step)
        how = "compiled" if log is None else "kept"
        log = compile_step(step) if log is None else log
        progress.add(part, "\n".join(filter(None, [f"{how} {step.source}", log])))

    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(bring_up_to_date, part, step)
            for part, steps in parts.items()
            for step in steps
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            show_on_terminal("")
            raise


def link(linker: list[str], steps: list[Step], output: Path) -> None:
    """Links objects into a shared library, and keeps it for as long as no object changes."""
    objects = [step.path("o") for step in steps]
    parts = [linker, [hashlib.sha256(path.read_bytes()).hexdigest() for path in objects]]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    kept = OBJECTS / f"{output.name.split('.')[0]}-{key}.so"
    if not kept.exists():
        partial = kept.with_suffix(".partial")
        command = [*linker, *map(str, objects), "-o", str(partial)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
        if done.returncode:
            log = done.stdout + done.stderr
            raise BuildError(f"cannot link {output.name}\n$ {shlex.join(command)}\n{log}")
        partial.replace(kept)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)  # a running process may have the old file mapped
    shutil.copyfile(kept, output)


# ---- setuptools commands


class BuildNative(build_ext):
    """build_ext with our own compile step; setuptools decides where the modules go."""

    def build_extensions(self) -> None:
        cuda = find_cuda()
        print(f"bytetx._cpu: {version_of(host_compiler())}")
        parts = {"CPU": cpu_steps()}
        if isinstance(cuda, Cuda):
            print(f"bytetx._cuda: {cuda.version}; BYTETX_CUDA=0 leaves it out")
            parts["CUDA"] = cuda_steps(cuda)
        elif is_cuda_asked_for():
            raise BuildError(f"BYTETX_CUDA=1 asks for CUDA kernels: {cuda}")
        else:
            print(f"bytetx._cuda: not built: {cuda}")
        compile_all(parts, int(self.parallel or 0) or num_cores())
        for extension in self.extensions:
            part = "CUDA" if extension.name == "bytetx._cuda" else "CPU"
            output = Path(self.get_ext_fullpath(extension.name))
            link(self.linker(extension.name, cuda), parts[part], output)

    @staticmethod
    def linker(name: str, cuda: Cuda | str) -> list[str]:
        """nvcc knows where its static cudart is; its symbols stay inside the module."""
        if name == "bytetx._cuda":
            hidden = ["-cudart", "static", "-Xlinker", "--exclude-libs=ALL"]
            return [*nvcc_command(cuda), "-shared", *hidden]
        is_mac = sys.platform == "darwin"
        kind = ["-bundle", "-undefined", "dynamic_lookup"] if is_mac else ["-shared"]
        return [*host_compiler(), *kind, "-pthread"]


class BuildWithModels(build_py):
    """Puts models/*.toml into the wheel as bytetx/models; editable installs read the checkout's."""

    def run(self) -> None:
        if self.editable_mode:
            return super().run()
        # What was renamed since the last build would otherwise live on in the wheel.
        shutil.rmtree(Path(self.build_lib, "bytetx"), ignore_errors=True)
        super().run()
        target = Path(self.build_lib, "bytetx", "models")
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted((ROOT / "models").glob("*.toml")):
            shutil.copyfile(path, target / path.name)


def extensions() -> list[Extension]:
    found = [Extension("bytetx._cpu", cpu_sources())]
    if isinstance(find_cuda(), Cuda):
        found.append(Extension("bytetx._cuda", cuda_sources()))
    return found


def build_requirements() -> list[str]:
    """CUTLASS where _cuda is built; egg_info is how installers ask for requirements."""
    is_asking = "egg_info" in sys.argv
    has_use = why_no_cuda_wanted() is None and find_nvcc() is not None
    return [CUTLASS] if is_asking and has_use and find_cutlass() is None else []


if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildNative, "build_py": BuildWithModels},
        setup_requires=build_requirements(),
    )
