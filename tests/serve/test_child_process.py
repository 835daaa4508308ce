"""Processes that a server starts: what becomes of those that do not start, or do not end."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from other_processes import is_running

from bytetx.serve import child_process
from bytetx.serve.child_process import ChildProcess, run_until_told
from bytetx.serve.settings import ServeSettings, model_sources

SETTINGS = replace(ServeSettings(model_sources(["m=/m"])), shutdown_timeout_s=0.0)
WAIT_S = 60.0


def child(kind: str, **options: bool) -> ChildProcess:
    return ChildProcess(
        SETTINGS,
        ["stubborn_child", kind],
        kind,
        environment=[f"PYTHONPATH={Path(__file__).parent}"],
        **options,
    )


def test_a_process_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_process, "KILL_AFTER_S", 0.1)

    async def main() -> int:
        ready = asyncio.Event()
        stubborn = child("stubborn")
        stubborn.start(lambda _: ready.set())
        await ready.wait()
        assert stubborn._process is not None
        await stubborn.stop()
        return stubborn._process.pid

    with caplog.at_level(logging.WARNING, "bytetx.serve"):
        pid = asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert not is_running(pid)
    assert "stubborn did not end within 0.1 s and is killed" in caplog.text


def test_a_process_that_never_gets_ready_is_a_failure() -> None:
    async def main() -> tuple[ChildProcess, int] | None:
        failing, other = child("failing"), child("stubborn")
        failing.start(lambda _: None)
        found = await run_until_told([other, failing], asyncio.Event())
        await failing.stop()
        return found

    failed = asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert failed is not None and (failed[0].title, failed[1]) == ("failing", 3)


def test_one_that_may_fail_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_process, "_FIRST_WAIT_S", 0.0)

    async def main() -> None:
        failing = child("failing", may_fail=True)
        failing.start(lambda _: None)
        while caplog.text.count("ended with 3; it is started again") < 2:
            await asyncio.sleep(0.01)
        await failing.stop()

    with caplog.at_level(logging.WARNING, "bytetx.serve"):
        asyncio.run(asyncio.wait_for(main(), WAIT_S))
