"""Random requests for the generation engine, which come, stop and are given up."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from bytetx.generate.engine import GenerationEngine
from bytetx.sampling_params import SamplingParams

VOCAB_SIZE = 90  # ids that every tokenizer of these tests has


def num_free_pages(engine: GenerationEngine) -> int:
    return engine._scheduler.pages.num_available


def random_requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that often share their first pages, greedy and sampled, with stops of each kind."""
    rng = np.random.default_rng(5)
    shared = rng.integers(5, VOCAB_SIZE, (3, 40)).tolist()
    requests = []
    for number in range(count):
        start = shared[rng.integers(3)][: rng.integers(0, 40)]
        prompt = start + rng.integers(5, VOCAB_SIZE, rng.integers(1, 12)).tolist()
        params = SamplingParams(
            seed=number,
            temperature=float(rng.choice([0, 0.8, 1.5])),
            max_tokens=int(rng.integers(1, 45)),
            top_k=int(rng.choice([0, 20])),
            top_p=float(rng.choice([1, 0.9])),
            stop=("th", "e ") if number % 3 == 0 else (),
            stop_token_ids=rng.integers(5, VOCAB_SIZE, 3).tolist() if number % 3 == 1 else (),
            frequency_penalty=float(rng.choice([0, 0.5])),
        )
        requests.append((prompt, params))
    return requests


@dataclass
class Soaked:
    """Outcomes of requests, by their indices: why each ended, its tokens, who was given up."""

    reasons: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    given_up: set[int] = field(default_factory=set)


def soak(engine: GenerationEngine, requests: list[tuple[list[int], SamplingParams]]) -> Soaked:
    """Requests that come a few at a time and are given up at random; every page is free after."""
    num_free, rng = num_free_pages(engine), np.random.default_rng(6)
    waiting, place_of, found = list(enumerate(requests)), {}, Soaked()
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), int(rng.integers(0, 4)))):
            place, (prompt, params) = waiting.pop()
            place_of[engine.add_request(prompt, params, priority=int(rng.integers(2)))] = place
        for piece in engine.step():
            found.tokens[place_of[piece.request_id]] += piece.token_ids
            if piece.finish_reason is not None:
                found.reasons[place_of[piece.request_id]] = piece.finish_reason
        if place_of and rng.random() < 0.1:
            request_id = int(rng.choice(list(place_of)))
            engine.abort(request_id)
            found.given_up.add(place_of[request_id])
    assert num_free_pages(engine) == num_free
    assert found.reasons.keys() == set(range(len(requests)))
    assert set(found.reasons.values()) == {"stop", "length", "abort"}
    assert engine._scheduler.num_preempted and engine._scheduler.num_cached_tokens
    return found
