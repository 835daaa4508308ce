"""One record of a suite."""

from benchmarks.records import Record

RECORD = Record(
    suite="cpu",
    case="minilm-fp32-arrival",
    unit="us/token",
    ours=50.0,
    rivals={"transformers": 200.0, "sentence-transformers": 125.0},
    floor=40.0,
    device="a processor",
    dtype="fp32",
    shape={"sequences": 256, "tokens": 23040},
    source="0" * 64,
    date="2026-01-31T12:00:00Z",
    command="python -m benchmarks cpu",
    versions={"torch": "2.13.0"},
)
