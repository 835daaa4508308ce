"""A context that begins beside imports: of the rank's GPU, and no error without a driver."""

import ctypes
import subprocess
import sys

import pytest

from bytetx.executor import early_context


class Driver:
    """Stands in for libcuda, whose calls return 0 for success."""

    def __init__(self, *, status: int = 0):
        self.status = status
        self.calls: list[tuple] = []

    def cuInit(self, flags: int) -> int:  # noqa: N802 (the driver's names)
        self.calls.append(("cuInit", flags))
        return self.status

    def cuDeviceGet(self, device: object, index: int) -> int:  # noqa: N802
        device._obj.value = 40 + index
        self.calls.append(("cuDeviceGet", index))
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, device: ctypes.c_int) -> int:  # noqa: N802
        self.calls.append(("cuDevicePrimaryCtxRetain", device.value))
        return 0


def test_the_primary_context_of_the_gpu_is_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    early_context.begin_context(3).join()
    calls = [("cuInit", 0), ("cuDeviceGet", 3), ("cuDevicePrimaryCtxRetain", 43)]
    assert driver.calls == calls


def test_a_driver_that_refuses_or_is_absent_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(status=100)  # CUDA_ERROR_NO_DEVICE
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    early_context.begin_context(0).join()
    assert driver.calls == [("cuInit", 0)]
    monkeypatch.undo()
    monkeypatch.setattr(early_context, "_DRIVER", "no-such-library.so")
    early_context.begin_context(0).join()


def test_it_does_not_wait_for_torch() -> None:
    code = "import sys; import bytetx.executor.early_context; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
