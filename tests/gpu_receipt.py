"""A whole run of the GPU tests leaves a line in benchmarks/gpu_tests.jsonl; a part leaves none."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_tests import RECEIPTS, ROOT, Receipt, append_receipt, head_commit
from benchmarks.records import source_sha256, utc_now

WORKER_OUTPUT = "gpu_receipt"


class GpuReceipt:
    """Counts the outcomes of tests that need GPUs and tells whether all of them were run.

    cards: names the GPUs of this process; asked only after a test ran on one.
    """

    def __init__(self, why_partial: str | None, cards: Callable[[], list[str]], root: Path) -> None:
        self.why_partial = why_partial
        self.message = ""
        self._cards = cards
        self._root = root
        self._source = source_sha256(root)
        self._expected: set[str] = set()
        self._outcomes: dict[str, str] = {}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            is_real = item.get_closest_marker("real") is not None
            if item.get_closest_marker("gpu") and not is_real and not has_no_parameters(item):
                self.why_partial = self.why_partial or f"{item.nodeid} was left out"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.why_partial = self.why_partial or f"{report.nodeid} could not be collected"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expected = {item.nodeid for item in session.items if _needs_gpu(item.keywords)}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take what a process of xdist collected; each collects all tests and runs a part."""
        found = getattr(node, "workeroutput", {}).get(WORKER_OUTPUT)
        if found is None:
            self.why_partial = self.why_partial or f"{node.gateway.id} ended early"
            return
        self._expected.update(found["expected"])
        self.why_partial = self.why_partial or found["why_partial"]

    def to_controller(self) -> dict[str, object]:
        return {"expected": sorted(self._expected), "why_partial": self.why_partial}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not _needs_gpu(report.keywords):
            return
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self._outcomes.setdefault(report.nodeid, report.outcome)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        count = Counter(self._outcomes.values())
        if not count["passed"] + count["failed"]:
            return
        why = self.why_partial
        if why is None and self._outcomes.keys() != self._expected:
            why = f"{len(self._expected) - len(self._outcomes)} of them were not reached"
        if why is None and source_sha256(self._root) != self._source:
            why = "the sources changed meanwhile"
        cards = self._cards() if why is None else []
        if why is None and not cards:
            why = "torch finds no GPU"
        if why is not None:
            self.message = f"no receipt in {RECEIPTS}: not a whole run of the GPU tests, {why}"
            return
        outcomes = {name: count[name] for name in ("passed", "skipped", "failed")}
        receipt = Receipt(
            source=self._source,
            commit=head_commit(self._root),
            card=cards[0],
            cards=len(cards),
            date=utc_now(),
            **outcomes,
        )
        append_receipt(receipt, self._root)
        self.message = f"{RECEIPTS} has a new line: {receipt}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.message:
            terminalreporter.write_line(self.message)


def pytest_configure(config: pytest.Config) -> None:
    if Path("/dev/nvidiactl").exists():  # without a GPU no test that needs one runs
        register(config)


def register(config: pytest.Config) -> None:
    """Count this session's tests; a process of xdist tells its own to the one that writes."""
    is_worker = hasattr(config, "workerinput")
    receipt = GpuReceipt(None if is_worker else _why_partial(config), _cards, ROOT)
    config.pluginmanager.register(WorkerCounts(config, receipt) if is_worker else receipt)


class WorkerCounts:
    """Tells from a process of xdist which tests it collected."""

    def __init__(self, config: pytest.Config, receipt: GpuReceipt) -> None:
        self._config = config
        self._receipt = receipt
        self.pytest_deselected = receipt.pytest_deselected
        self.pytest_collectreport = receipt.pytest_collectreport
        self.pytest_collection_finish = receipt.pytest_collection_finish

    def pytest_sessionfinish(self) -> None:
        self._config.workeroutput[WORKER_OUTPUT] = self._receipt.to_controller()


def _why_partial(config: pytest.Config) -> str | None:
    option = config.option
    whole = {(ROOT / "tests").resolve(), ROOT.resolve()}
    if not any((config.invocation_params.dir / arg).resolve() in whole for arg in config.args):
        return f"but of {' '.join(config.args)}"
    if option.ignore or option.ignore_glob:
        return "files were left out by --ignore"
    return None


def _needs_gpu(keywords) -> bool:
    return "gpu" in keywords or "gpus" in keywords


def has_no_parameters(item: pytest.Item) -> bool:
    """An empty list was given to parametrize, of which pytest makes a test that is skipped."""
    marks = item.iter_markers("skip")
    return any("got empty parameter set" in mark.kwargs.get("reason", "") for mark in marks)


def _cards() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
