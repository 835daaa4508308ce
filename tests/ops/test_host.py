"""The C library's heaps: how many a server's threads share."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Eight threads allocate at the same time; glibc writes what heaps there are.
_PROGRAM = """
import ctypes, sys, threading
from bytetx.ops.host import limit_heaps

if sys.argv[1] == "limited":
    limit_heaps()
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
together = threading.Barrier(8)

def run():
    together.wait()
    libc.malloc(10_000)
    together.wait()

threads = [threading.Thread(target=run) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="heaps of glibc")
@pytest.mark.parametrize("limits", ["limited", "free"])
def test_threads_of_a_server_share_two_heaps(limits: str, tmp_path: Path) -> None:
    path = tmp_path / "heaps.xml"
    subprocess.run([sys.executable, "-c", _PROGRAM, limits, path], check=True)
    num_heaps = len(re.findall(r"<heap nr=", path.read_text()))
    assert num_heaps <= 2 if limits == "limited" else num_heaps > 2
