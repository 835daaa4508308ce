#!/usr/bin/env python3
"""Stands in for the CUDA libraries that torch's wheel for 64-bit ARM is linked with, for tests.

    .ci/arm_torch.py SITE ROOT COMPILER...

PyPI has torch for ARM with CUDA alone, which would bring 5 GB that no CPU needs. Libraries of the
missing names go to SITE/torch/lib; functions of C return an error, those of C++ the address of
zeros. ROOT: the system's libraries are in it; COMPILER: a command that links for ARM.
"""

import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile

SYSTEM = ("lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu")
OPTIONS = "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb"  # torch makes one at import
VTABLE = "vtable: .quad 0, _ZTIN4c10d16ProcessGroupNCCLE, nothing, nothing, nothing, nothing"


def symbols(path: Path) -> tuple[set[str], set[str], list[str]]:
    """(what a library gives, what it must be given, the libraries that it wants)."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        table = [s for s in elf.get_section_by_name(".dynsym").iter_symbols() if s.name]
        given = {s.name for s in table if s["st_shndx"] != "SHN_UNDEF"}
        missing = {s.name for s in table} - given
        weak = {s.name for s in table if s["st_info"]["bind"] == "STB_WEAK"}
        wanted = [
            tag.needed
            for tag in elf.get_section_by_name(".dynamic").iter_tags()
            if tag.entry.d_tag == "DT_NEEDED"
        ]
    return given, missing - weak, wanted


def body(name: str) -> str:
    """A function, or the data of a class."""
    if name.startswith(("_ZTV", "_ZTS", "_ZTI")):
        size = f'.data\n.balign 16\n.type "{name}", %object\n.size "{name}", 512'
        return f'{size}\n"{name}": .quad 0, 1f\n.zero 496\n1: .asciz "{name[4:]}"\n.text'
    if name == OPTIONS:
        lines = ["adrp x1, vtable", "add x1, x1, :lo12:vtable+16", "stp x1, xzr, [x0]"]
    elif name.startswith("_Z"):
        lines = ["adrp x0, zeros", "add x0, x0, :lo12:zeros"]
    else:
        lines = ["mov x0, #100"]  # cudaErrorNoDevice
    return "\n".join([f'.type "{name}", %function', f'"{name}":', *lines, "ret"])


def main() -> None:
    site, root, compiler = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    folder = site / "torch" / "lib"
    given: set[str] = set()
    missing: set[str] = set()
    wanted: set[str] = set()
    for path in [*folder.glob("*.so*"), *site.glob("torch/_C.*.so")]:
        gives, lacks, libraries = symbols(path)
        given, missing, wanted = given | gives, missing | lacks, wanted | set(libraries)
    wanted -= {path.name for path in folder.glob("*.so*")}
    for name in sorted(wanted):
        found = [root / part / name for part in SYSTEM if (root / part / name).exists()]
        if found:
            given |= symbols(found[0])[0]
            wanted.discard(name)
    names = sorted(name for name in missing - given if not name.startswith(("Py", "_Py")))
    source = folder / "stand_in.s"
    bodies = [f'.globl "{name}"\n{body(name)}' for name in names]
    data = [".data", ".balign 16", "zeros: .zero 4096", VTABLE, ""]
    source.write_text("\n".join([".text", "nothing: ret", *bodies, *data]))
    for name in sorted(wanted):
        content = [str(source)] if name == "libtorch_cuda.so" else ["-x", "c", "/dev/null"]
        link = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run([*compiler, *content, *link], check=True)
    print(f"{len(names)} symbols of {', '.join(sorted(wanted))}")


if __name__ == "__main__":
    main()
