"""Help for tests that stop and watch other processes."""

import re
from pathlib import Path


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)


def is_running(pid: int) -> bool:
    """A zombie that nobody waits for has ended, too."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def child_processes(pid: int) -> list[int]:
    """Process ids of those that a process's first thread started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def resident_mib(pid: int | str = "self") -> float:
    """Return the resident memory of a process, MiB; on Linux alone."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024
