"""What every test shares: GPU markers, a reproducible hypothesis profile, no network."""

import os
import random
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-lists",
        type=int,
        default=500,
        metavar="N",
        help="random lists of lengths that attention is tested on (10000 take a minute on an H200)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs more GPUs than there are; torch is asked only when a test needs one."""
    needs = {item: needed for item in items if (needed := gpus_needed(item))}
    if not needs:
        return
    import torch

    present = torch.cuda.device_count()
    for item, needed in needs.items():
        if needed > present:
            reason = f"needs {needed} CUDA GPUs, this machine has {present}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a mark what asks for no device runs on the CPU, on hosts with GPUs, too."""
    loading = sys.modules.get("bytetx.loading")
    if loading is not None:
        own = _default_device.setdefault("own", loading.default_device)
        loading.default_device = own if gpus_needed(item) else lambda: "cpu"


_default_device: dict[str, Callable[[], str]] = {}


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
