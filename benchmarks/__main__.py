"""`python -m benchmarks SUITE`, in a checkout's top folder."""

from benchmarks.cli import app

app(prog_name="python -m benchmarks")
