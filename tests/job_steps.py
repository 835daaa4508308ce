"""Real `bytetx` processes that stop or die at a chosen step, each a call into the operating system.

As a script it forks them from itself, so that hundreds take seconds: `job_steps.py SCENARIO TASK
SUFFIX FOLDER [EVERY]` ends with 0 where no order of steps loses a row. Only the model is made up.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np

from bytetx.cli.commands import main
from bytetx.cli.files import command, job
from bytetx.cli.files.writer import StagedOutput
from bytetx.encode.request import RunStats
from bytetx.errors import InputError

ROWS = ["fine", "broken", "a fox", "", "bad", "the last but one", "the last"]
BUSY = "is being written by another bytetx"


class FakeModel:
    """Its vectors and answers are made of the text's letters; "bad" cannot be run."""

    checkpoint = SimpleNamespace(generation="defaults")

    def embed(self, texts: Sequence[str], **options: object) -> Any:
        if options.get("stream"):
            return FakeStream(texts, lambda text: np.full(3, 1 + len(text), np.float32))
        return SimpleNamespace(vectors=np.zeros((0, 3), np.float32))

    def generate(self, prompts: Sequence[str], **options: object) -> Any:
        return FakeStream(prompts, self._answer)

    def generation_sizes(self, **sizes: object) -> str:
        return "sizes"

    def _answer(self, text: str) -> Any:
        ids = tuple(range(len(text)))
        return SimpleNamespace(
            text=text.upper(), finish_reason="stop", num_prompt_tokens=len(text), token_ids=ids
        )


@dataclass
class FakeStream:
    """Results one by one, each a window of its own, so that each may be committed."""

    texts: Sequence[str]
    answer: Callable[[str], Any]
    num_texts: int = 0

    @property
    def stats(self) -> RunStats:
        return RunStats(num_texts=self.num_texts)

    def __iter__(self) -> Iterator[Any]:
        for text in self.texts:
            self.num_texts += 1
            yield InputError("a bad text") if text == "bad" else self.answer(text)


class Steps:
    """Counts the calls into the operating system that bytetx.cli.files makes, and acts on one."""

    def __init__(self, at: int, sign: int):
        self._at, self._sign, self._count = at, sign, 0

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or not _is_system_call(called) or not _is_of_files(frame):
            return
        if self._count == self._at:
            self._count += 1
            os.kill(os.getpid(), self._sign)
            return
        self._count += 1


def _is_system_call(called: Any) -> bool:
    module = getattr(called, "__module__", None)
    is_open = module in ("_io", "io") and called.__name__ == "open"
    if getattr(called, "__name__", "") == "_exit":
        return False
    return module in ("posix", "fcntl") and called.__name__ != "fspath" or is_open


def _is_of_files(frame: FrameType | None) -> bool:
    for _ in range(4):  # pathlib and os.path call for the files' modules
        if frame is None:
            return False
        if "/bytetx/cli/files/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _count_from(begin: tuple[Any, str], steps: Steps) -> None:
    """Counts while a function runs: its module or class, and its name."""
    owner, name = begin
    own = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> None:
        sys.setprofile(steps)
        try:
            own(*arguments, **options)
        finally:
            sys.setprofile(None)

    setattr(owner, name, counted)


def _main_and_exit(arguments: list[str]) -> None:
    """As the installed command ends, without the second that tearing down its modules takes."""
    code: object = 1
    try:
        main(arguments)
    except SystemExit as exited:
        code = exited.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.setprofile(None)
        sys.stderr.flush()
        os._exit(int(code))


class Process:
    """`bytetx ARGUMENTS`, which gets a signal at its step number `at` in the function `begin`."""

    def __init__(
        self,
        *arguments: object,
        at: int = -1,
        sign: int = signal.SIGSTOP,
        begin: tuple[Any, str] = (command, "_run"),
    ):
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_end)
            os.dup2(write_end, 1)
            os.dup2(write_end, 2)
            if at >= 0:
                _count_from(begin, Steps(at, sign))
            _main_and_exit([str(argument) for argument in arguments])
        os.close(write_end)
        self._output = os.fdopen(read_end, encoding="utf-8")

    def wait(self) -> int | None:
        """The exit code, negative for a signal that ended it; None where it stopped."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        return None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)

    def go_on(self) -> int | None:
        os.kill(self.pid, signal.SIGCONT)
        return self.wait()

    @property
    def said(self) -> str:
        with self._output:
            return self._output.read()


@dataclass
class Jobs:
    """The jobs of one scenario, all on one output, and what it must hold in the end."""

    task: str
    suffix: str
    folder: Path
    every: int = 1  # steps from one that is tried to the next

    @property
    def out(self) -> Path:
        return self.folder / f"out{self.suffix}"

    def start(self, *more: str, **when: Any) -> Process:
        return Process(*self._arguments(self.out), *more, **when)

    def _arguments(self, out: Path) -> list[str]:
        own = ["--temperature", "0"] if self.task == "generate" else []
        given = [self.task, self.folder / "in.jsonl", "-m", self.folder, "-o", out, *own]
        return [str(argument) for argument in given]

    def run(self, *more: str) -> str:
        process = self.start(*more)
        assert process.wait() == 0, process.said
        return process.said

    def prepare(self) -> None:
        rows = [json.dumps({"text": text}) if text != "broken" else "{" for text in ROWS]
        (self.folder / "in.jsonl").write_text("\n".join(rows))
        (self.folder / "config.json").write_text("{}")
        whole = self.folder / f"whole{self.suffix}"
        with suppress(SystemExit):  # here, so that all is imported once and not in every process
            main(self._arguments(whole))
        self.expected = {path.name[5:]: path.read_bytes() for path in self.folder.glob("whole*")}
        for path in self.folder.glob("whole*"):
            path.unlink()

    def check(self, when: str) -> None:
        """The output is complete, and no other file is next to it."""
        found = {path.name[3:]: path.read_bytes() for path in self.folder.glob("out*")}
        assert found.keys() == self.expected.keys(), f"{when}: {sorted(found)}"
        assert found == self.expected, f"{when}: other bytes"

    def clear(self) -> None:
        for path in self.folder.glob("out*"):
            path.unlink()

    def leave_unfinished(self, at: int = 60) -> None:
        process = self.start("--resume", at=at, sign=signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.said
        assert (self.folder / f"out{self.suffix}.progress.json").exists()

    def leave_old(self) -> None:
        """A finished output of another job, whose list of errors is another one, too."""
        self.out.write_bytes(b"old" * 1000)
        if self.suffix == ".npy":
            Path(f"{self.out}.errors.jsonl").write_bytes(b"old")


def check_second(jobs: Jobs, second: Process, code: int | None, when: str) -> None:
    """A second job either found the output complete, or was refused in one line."""
    said = second.said
    assert code in (0, 1), f"{when}: {code} {said}"
    if code == 1:
        assert BUSY in said and said.count("\n") == 1, f"{when}: {said}"


def one_stops(jobs: Jobs, prepare: Callable[[], object], *options: str) -> int:
    """The first job stops at each of its steps in turn, while the second one runs to its end."""
    step = 0
    while True:
        jobs.clear()
        prepare()
        first = jobs.start(*options, at=step)
        if first.wait() is not None:
            return step
        second = jobs.start(*options)
        check_second(jobs, second, second.wait(), f"step {step}")
        code = first.go_on()
        said = first.said
        assert code == 0 or BUSY in said, f"step {step}: {code} {said}"
        jobs.check(f"step {step}")
        step += jobs.every


def both_stop(jobs: Jobs, prepare: Callable[[], object], *options: str) -> int:
    """Both stop: the first goes on to its end while the second stands between two steps."""
    num_steps = one_stops(jobs, prepare, *options)
    for own in range(0, 24, jobs.every):  # up to behind the lock
        for step in range(0, num_steps, 3 * jobs.every):
            when = f"steps {step} and {own}"
            jobs.clear()
            prepare()
            first = jobs.start(*options, at=step + own % 3)
            code = first.wait()
            second = jobs.start(*options, at=own)
            other = second.wait()
            if code is None:
                code = first.go_on()
            assert code == 0 or BUSY in first.said, when
            if other is None:
                other = second.go_on()
            check_second(jobs, second, other, when)
            assert 0 in (code, other), when
            jobs.check(when)
    return num_steps


def two_resume(jobs: Jobs) -> int:
    return both_stop(jobs, lambda: None, "--resume")


def two_resume_what_a_third_left(jobs: Jobs) -> int:
    return one_stops(jobs, jobs.leave_unfinished, "--resume")


def two_overwrite(jobs: Jobs) -> int:
    return one_stops(jobs, jobs.leave_old, "--overwrite")


def killed(jobs: Jobs, **when: Any) -> int:
    """A kill at each step; what a run without options then says; and one that resumes."""
    step = 0
    while True:
        jobs.clear()
        first = jobs.start(at=step, sign=signal.SIGKILL, **when)
        if first.wait() == 0:
            return step
        plain = jobs.start()
        code, said = plain.wait(), plain.said
        assert code == 0 or "is unfinished" in said or "exists" in said, f"step {step}: {said}"
        jobs.run("--resume")
        jobs.check(f"step {step}")
        step += jobs.every


def killed_in_finish(jobs: Jobs) -> int:
    return killed(jobs, begin=(StagedOutput, "finish"))


def killed_while_it_replaces(jobs: Jobs, **when: Any) -> int:
    """A kill at each step of a job that overwrites: the old output or the new one is there."""
    step = 0
    while True:
        jobs.clear()
        jobs.leave_old()
        old = jobs.out.read_bytes()
        first = jobs.start("--overwrite", at=step, sign=signal.SIGKILL, **when)
        if first.wait() == 0:
            return step
        assert jobs.out.read_bytes() in (old, jobs.expected[jobs.suffix]), f"step {step}"
        said = jobs.run("--resume")
        if jobs.out.read_bytes() == old:  # killed before it had left anything to go on with
            assert "there is nothing to resume" in said, f"step {step}: {said}"
            jobs.run("--overwrite")
        jobs.check(f"step {step}")
        step += jobs.every


def killed_in_finish_while_it_replaces(jobs: Jobs) -> int:
    return killed_while_it_replaces(jobs, begin=(StagedOutput, "finish"))


SCENARIOS = (
    two_resume,
    two_resume_what_a_third_left,
    two_overwrite,
    killed,
    killed_in_finish,
    killed_while_it_replaces,
    killed_in_finish_while_it_replaces,
)


def run_scenario(name: str, task: str, suffix: str, folder: str, every: str = "1") -> None:
    job.COMMIT_ROWS = 4
    command._load = lambda options, folder, task: FakeModel()
    jobs = Jobs(task, suffix, Path(folder), int(every))
    jobs.prepare()
    run = {scenario.__name__: scenario for scenario in SCENARIOS}[name]
    print(f"{run(jobs)} steps")


if __name__ == "__main__":
    run_scenario(*sys.argv[1:])
