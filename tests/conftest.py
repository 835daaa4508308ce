"""Shared by every test: GPU markers, a reproducible hypothesis profile, no network."""

import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch is imported: threads that wait do not spin, and processes of xdist share the cores.
# With both at their defaults, most of the time goes into waiting for each other. Tests of several
# threads say how many.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if (_num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _num_workers)))
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU its kernels run in Python, on the CPU

pytest_plugins = ["cli_runs", "gpu_receipt"]

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
# Where a processor is emulated, inputs that are slowly made are no fault of the test.
settings.register_profile(
    "emulated", settings.get_profile("ci"), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("BYTETX_HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-lists",
        type=int,
        default=500,
        metavar="N",
        help="random lists of lengths that attention is tested on (10000 take a minute on an H200)",
    )
    parser.addoption(
        "--real-cache",
        default="~/.cache/bytetx/real",
        metavar="FOLDER",
        help="where `-m real` keeps downloaded packages and checkpoints of them (3.5 GB)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: one per core, 8 at most; none beside GPUs, shared by all."""
    if Path("/dev/nvidiactl").exists():
        return 0
    is_known = hasattr(os, "sched_getaffinity")
    return min(len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1, 8)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out `real` unless -m names it, and skips what needs more GPUs than there are.

    What is parametrised by nothing, such as the tilings of a module that is not built, is no test.
    torch is asked only when a test needs a GPU.
    """
    from gpu_receipt import has_no_parameters

    wants_real = "real" in re.findall(r"\w+", config.option.markexpr)
    deselected = [
        item
        for item in items
        if has_no_parameters(item)
        or (not wants_real and item.get_closest_marker("real") is not None)
    ]
    if deselected:
        left_out = set(deselected)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=deselected)
    needs = {item: needed for item in items if (needed := gpus_needed(item))}
    if not needs:
        return
    import torch

    present = 0
    if torch.cuda.is_available():
        # The GPUs of this process are told now, once: what tests hide later (below), they hide from
        # the processes that they start.
        torch.cuda.init()
        present = torch.cuda.device_count()
    for item, needed in needs.items():
        if needed > present:
            reason = f"needs {needed} CUDA GPUs, this machine has {present}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a mark what asks for no device runs on the CPU, on hosts with GPUs, too.

    Processes that such a test starts see no GPU.
    """
    needs_gpus = bool(gpus_needed(item))
    loading = sys.modules.get("bytetx.nn.loading")
    if loading is not None:
        own = _default_device.setdefault("own", loading.default_device)
        loading.default_device = own if needs_gpus else lambda: "cpu"
    if not needs_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif _VISIBLE is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = _VISIBLE


_default_device: dict[str, Callable[[], str]] = {}
_VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")  # to this process


def gpus_needed(item: pytest.Item) -> int:
    many = item.get_closest_marker("gpus")
    if many is not None:
        return many.args[0]
    return 1 if item.get_closest_marker("gpu") is not None else 0


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state; tests without torch do not pay its import."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="module", params=["native", "triton"])
def cuda_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend that serves the GPU; fixtures that load models depend on it."""
    import torch

    from bytetx.ops import native
    from bytetx.ops.triton_backend import why_no_triton

    if request.param == "native":
        yield "native"
        return
    with native.without_kernels("cuda"):
        assert why_no_triton(torch.device("cuda", 0)) is None
        yield "triton"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds none, on hosts with GPUs, too: for what is said where there is none."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
