"""Records of requests, counted in arrays: as one at a time, here and from a front-end."""

import random
import re

import numpy as np

from bytetx.serve.calls import Timings
from bytetx.serve.metrics import Metrics
from bytetx.serve.records import Finished, RecordKind, group_records
from bytetx.serve.settings import ServeSettings, model_sources
from bytetx.serve.wire import decode_frame, encode_frame


def some_records(count: int) -> list[Finished]:
    numbers = random.Random(0)
    found = []
    for _ in range(count):
        timings = Timings(numbers.randint(0, 3), numbers.randint(0, 900), 1, 0.002, 0.05, 0.01)
        status = numbers.choice((200, 200, 200, 422, 499))
        found.append(
            Finished(
                route=numbers.choice(("/embed", "/rerank")),
                status=status,
                model=numbers.choice(("a", "b")),
                seconds=numbers.choice((0.05, 0.3, 70.0)),  # on a bound, and beyond the last one
                error="validation" if status == 422 else "",
                timings=None if status == 422 else timings,
                first_token_seconds=numbers.choice((None, 0.2)),
                token_seconds=numbers.choice((None, 0.01)),
                num_ignored_fields=numbers.choice((0, 2)),
            )
        )
    return found


def metrics() -> Metrics:
    return Metrics(ServeSettings(model_sources(["a"]), metrics_names=("bytetx", "te")))


def number(page: bytes, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", page.decode(), re.MULTILINE)
    return 0.0 if found is None else float(found.group(1))


def test_counts_are_those_of_the_records() -> None:
    records, own = some_records(3000), metrics()  # more than are counted at once
    for one in records:
        own.record(one)
    page = own.page()
    timed = [one for one in records if one.timings is not None]
    bucket = "bytetx_request_duration_seconds_bucket"
    for bound, text in ((0.05, "0.05"), (0.2, "0.2"), (60.0, "60.0"), (np.inf, "+Inf")):
        expected = sum(one.seconds <= bound for one in timed)
        assert number(page, f'{bucket}{{le="{text}"}}') == expected
    total = sum(one.seconds for one in timed)
    assert np.isclose(number(page, "bytetx_request_duration_seconds_sum"), total)
    assert number(page, "bytetx_request_duration_seconds_count") == len(timed)
    first = sum(one.first_token_seconds is not None for one in timed)
    assert number(page, "bytetx_time_to_first_token_seconds_count") == first
    tokens = sum(one.timings.num_tokens for one in timed if one.timings and one.model == "a")
    assert number(page, 'bytetx_input_tokens_total{model="a"}') == tokens
    failed = sum(one.error == "validation" for one in records)
    assert number(page, 'bytetx_request_failures_total{err="validation"}') == failed
    ignored = sum(one.num_ignored_fields for one in records if one.route == "/embed")
    assert number(page, 'bytetx_ignored_fields_total{route="/embed"}') == ignored


def test_records_of_a_frontend_count_as_own() -> None:
    """They come in the frames of EngineClient."""
    records, own, others = some_records(500), metrics(), metrics()
    for one in records:
        own.record(one)
    for start in range(0, 500, 100):
        groups = group_records((1.0, one) for one in records[start : start + 100])
        frame = encode_frame({"kinds": [*map(list, groups)]}, list(groups.values()))
        header, arrays = decode_frame(memoryview(frame)[4:])
        for kind, rows in zip(header["kinds"], arrays, strict=True):
            others.add(RecordKind(*kind), rows)

    def samples(page: bytes) -> dict[str, float]:
        lines = (line.rsplit(" ", 1) for line in page.decode().splitlines() if line[0] != "#")
        return {name: round(float(value), 6) for name, value in lines}

    assert samples(own.page()) == samples(others.page())
