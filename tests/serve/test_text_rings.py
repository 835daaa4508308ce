"""Texts in shared memory between front-ends and the engine: vectors, cancels, faults, both ends."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from path_lengths import path_length
from serving import InProcess

from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.ops import host
from bytetx.serve.calls import Call, Outcome
from bytetx.serve.engine import LocalBackend
from bytetx.serve.engine_process import EngineCalls
from bytetx.serve.errors import ServeError
from bytetx.serve.loading import close_models, load_models
from bytetx.serve.metrics import Metrics
from bytetx.serve.remote import EngineClient, rings_path
from bytetx.serve.ring_memory import FACTS, RingMemory, RingSizes, new_memory
from bytetx.serve.settings import ServeSettings, model_sources
from bytetx.serve.text_rings import _COLUMN_TYPES, NUM_SLOTS

SIZES = RingSizes(num_slots=4, max_tokens=8, width=3)
TEXTS = ["the fox", "a", "the quick brown fox jumps over the lazy dog", "dog", "a fox a dog"]
OPTIONS: dict[str, Any] = {"normalize": True, "truncate": True}


def embed(texts: list[str], **options: Any) -> Call:
    return Call("embedder", "embed", texts, {**OPTIONS, **options})


@contextlib.asynccontextmanager
async def connected(
    app: InProcess, folder: Path, *, num_clients: int = 1
) -> AsyncIterator[tuple[EngineCalls, list[EngineClient]]]:
    """The engine's process and front-ends, all in this one."""
    path = str(folder / "engine")
    Path(rings_path(path)).unlink(missing_ok=True)
    calls = EngineCalls(cast(LocalBackend, app.site.backend), Metrics(app.settings))
    calls.listen_for_rings(rings_path(path))
    server = await asyncio.get_running_loop().create_unix_server(calls.protocol, path)
    clients = [EngineClient(path) for _ in range(num_clients)]
    tasks = [asyncio.create_task(client.keep_connected()) for client in clients]
    try:
        for client in clients:
            await client.wait_until_connected()
        yield calls, clients
    finally:
        for task in tasks:
            task.cancel()
        for client in clients:
            client._rings.close()
        calls.close()
        server.close()


async def learnt(client: EngineClient, call: Call) -> Outcome:
    """The call's outcome by a frame; later ones like it go by a ring."""
    outcome = await client.run(call)
    while client._rings._tasks:
        await asyncio.sleep(0.001)
    return outcome


async def by_ring(client: EngineClient, call: Call) -> Outcome:
    """The call's outcome; AssertionError where it went by a frame."""
    sent = client._rings.start(call)
    assert sent is not None
    outcome = await sent.answer
    assert outcome is not None
    return outcome


def in_loop(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(run())


def slots_in_use(client: EngineClient) -> int:
    return sum(NUM_SLOTS - len(ring._free) for ring in client._rings._rings.values())


def two_ends() -> tuple[RingMemory, RingMemory]:
    descriptor = new_memory(SIZES)
    return RingMemory(descriptor, SIZES), RingMemory(descriptor, SIZES)


def taken(engines: list[RingMemory], *, has_waited: bool = False) -> list[Any]:
    """The columns and facts of TextRing.take, as arrays."""
    *columns, gone, kinds, groups, prompts, damaged = host.text_ring().take(
        [one.ring for one in engines], has_waited
    )
    arrays = [np.frombuffer(*pair) for pair in zip(columns, _COLUMN_TYPES, strict=True)]
    return [*arrays, np.frombuffer(gone, np.int64), kinds, groups, prompts, damaged]


def put(engines: list[RingMemory], indices: np.ndarray, rows: np.ndarray) -> None:
    host.text_ring().put([one.ring for one in engines], indices, rows.astype(np.float32))


def give(engines: list[RingMemory], indices: np.ndarray) -> list[int]:
    """The rings whose front-ends are to be woken."""
    return list(host.text_ring().give([one.ring for one in engines], indices, 0.5, 0.25))


def test_both_ends_see_the_same_slots() -> None:
    front, engine = two_ends()
    for number in range(50):  # the queues go round
        slots = np.array([number % 4, (number + 1) % 4], dtype=np.int32)
        front.token_ids[slots] = number
        facts = np.zeros(2, dtype=FACTS)
        facts["kind"], facts["group"], facts["seqlen"] = 5, number, (2, 8)
        facts["prompt_tokens"], facts["is_truncated"] = 1, (0, 1)
        front.facts[slots] = facts
        assert not front.ring.submit(slots)
        front.ring.submit(~slots[:1])
        *columns, cancelled, has_kinds, has_groups, has_prompts, damaged = taken([engine])
        found, kinds, groups, seqlens, prompt_tokens, is_truncated, ids = columns
        np.testing.assert_array_equal(found, slots[::-1])  # the longest first
        assert (kinds == 5).all() and (groups == number).all() and seqlens.tolist() == [8, 2]
        assert prompt_tokens.tolist() == [1, 1] and is_truncated.tolist() == [True, False]
        assert ids.tolist() == [number] * 10 and cancelled.tolist() == [slots[0]]
        assert (has_kinds, has_groups, has_prompts, damaged) == (False, number > 0, True, [])
        put([engine], found, np.full((2, 2), number))
        assert give([engine], found) == [0]
        assert np.frombuffer(front.ring.take_done(), np.int32).tolist() == found.tolist()
        assert (front.vectors[slots, :2] == number).all()
        assert (front.facts["queue_seconds"][slots] == 0.5).all()
    assert not engine.ring.has_entries() and front.ring.take_done() == b""


def test_all_rings_are_taken_and_given_at_once() -> None:
    """A step costs as many calls of the native core whether one front-end has texts or many."""
    ends = [two_ends() for _ in range(3)]
    fronts, engines = [front for front, _ in ends], [engine for _, engine in ends]
    for number, front in enumerate(fronts):
        front.facts["seqlen"], front.facts["kind"] = number + 1, number % 2
        front.token_ids[:] = number
        front.ring.submit(np.array([number], dtype=np.int32))
    assert engines[2].ring.start_waiting() is False
    *columns, _, has_kinds, has_groups, _, damaged = taken(engines)
    assert columns[0].tolist() == [2 * 4 + 2, 4 + 1, 0] and columns[3].tolist() == [3, 2, 1]
    assert columns[6].tolist() == [2, 2, 2, 1, 1, 0]
    assert has_kinds and not has_groups and not damaged
    put(engines, columns[0][:2], np.array([[2, 2, 2], [1, 1, 1]]))
    ring = host.text_ring()
    natives = [one.ring for one in engines]
    failed = ring.fail(natives, columns[0])  # the last one, which alone has nothing yet
    assert np.frombuffer(failed, np.int64).tolist() == [0]
    assert ring.fail(natives, columns[0]) == b""
    assert give(engines, columns[0]) == [0, 1, 2]
    for number, front in enumerate(fronts):
        assert np.frombuffer(front.ring.take_done(), np.int32).tolist() == [number]
        assert front.facts["state"][number] == (number == 0)
        assert (front.vectors[number] == number).all()


def test_what_no_ring_has_is_refused() -> None:
    _, engine = two_ends()
    for index in (-1, 4, 1 << 40):
        with pytest.raises(ValueError, match="no ring has such a text"):
            put([engine], np.array([index]), np.zeros((1, 3)))
    with pytest.raises(ValueError, match="too long"):
        put([engine], np.array([0]), np.zeros((1, 4)))
    with pytest.raises(ValueError, match="one row for each text"):
        put([engine], np.array([0]), np.zeros((2, 3)))


def test_a_front_end_that_has_not_read_is_not_woken_again() -> None:
    front, engine = two_ends()
    front.facts["seqlen"] = 1
    for slot in (0, 1):
        front.ring.submit(np.array([slot], dtype=np.int32))
        taken([engine])
        assert give([engine], np.array([slot])) == ([0] if slot == 0 else [])
    assert np.frombuffer(front.ring.take_done(), np.int32).tolist() == [0, 1]
    front.ring.submit(np.zeros(1, dtype=np.int32))
    taken([engine])
    assert give([engine], np.array([0])) == [0]


def test_an_engine_that_waits_is_woken_once() -> None:
    front, engine = two_ends()
    slot = np.zeros(1, dtype=np.int32)
    assert engine.ring.start_waiting()
    assert front.ring.submit(slot) and not front.ring.submit(~slot)
    assert not engine.ring.start_waiting()  # something has come
    taken([engine], has_waited=True)
    assert not front.ring.submit(~slot)


@pytest.mark.parametrize(("slot", "seqlen"), [(4, 1), (-6, 1), (0, 9), (0, -1)])
def test_a_slot_beyond_the_memory_is_refused(slot: int, seqlen: int) -> None:
    front, engine = two_ends()
    front.facts["seqlen"] = seqlen
    other, whole = two_ends()
    other.facts["seqlen"] = 2
    other.ring.submit(np.array([1], dtype=np.int32))
    front.ring.submit(np.array([3, slot], dtype=np.int32))
    indices, *_, damaged = taken([engine, whole])
    assert damaged == [0] and indices.tolist() == [4 + 1]  # the other one's texts run


def test_a_counter_that_ran_away_is_refused() -> None:
    front, engine = two_ends()
    for _ in range(9):  # more than either process can have
        front.ring.submit(np.zeros(1, dtype=np.int32))
    assert taken([engine])[-1] == [0]
    for _ in range(5):
        give([engine], np.array([0]))
    with pytest.raises(RuntimeError, match="done"):
        front.ring.take_done()


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="smaller"):
        RingMemory(new_memory(SIZES), RingSizes(1000, 8, 3))
    with pytest.raises(ValueError, match="sizes"):
        host.text_ring().num_bytes(0, 8, 3)


@pytest.mark.feature("Server", "token ids of front-ends in shared memory")
def test_vectors_are_models_bit_for_bit(in_process: InProcess, tmp_path: Path) -> None:
    model = in_process.model("embedder")

    async def main() -> None:
        async with connected(in_process, tmp_path) as (_, (client,)):
            for options in (
                {},
                {"normalize": False},
                {"dimensions": 7},
                {"prompt_name": "query"},
                {"truncate": False},
            ):
                await learnt(client, embed(["a"], **options))
                for texts in ([TEXTS[0]], TEXTS, ["é ü 中 fox"], ["fox " * 500, "a"][:1]):
                    if options.get("truncate") is False and len(texts[0]) > 1000:
                        continue
                    outcome = await by_ring(client, embed(texts, **options))
                    expected = model.embed(texts, **{**OPTIONS, **options})
                    np.testing.assert_array_equal(outcome.arrays[0], expected)
                    (ring,) = client._rings._rings.values()  # a slow reader holds no slot
                    assert not np.shares_memory(outcome.arrays[0], ring._memory.vectors)
                    stats, timings = expected.stats, outcome.timings
                    assert timings.num_texts == len(texts)
                    assert timings.num_tokens == stats.num_tokens
                    assert timings.num_truncated == stats.num_truncated
                    assert timings.compute_seconds > 0 and timings.tokenize_seconds > 0
            assert slots_in_use(client) == 0

    in_loop(main)


def test_a_tokenizer_crosses_a_process(in_process: InProcess) -> None:
    texts = [*TEXTS, "é ü 中 fox", "fox " * 500]
    for name in ("embedder", "writer"):
        own = in_process.model(name).tokenizer
        state = own.state()
        assert state is not None
        other = Tokenizer.from_state(own.backend.to_str(), state)
        for one, expected in zip(other.encode(texts), own.encode(texts), strict=True):
            assert one.ids == expected.ids
        given, wanted = other.encode_ids(texts), own.encode_ids(texts)
        np.testing.assert_array_equal(given.token_ids, wanted.token_ids)
        np.testing.assert_array_equal(given.is_truncated, wanted.is_truncated)
    own = in_process.model("embedder").tokenizer

    class Coded(Tokenizer):
        """One whose class has code of its own."""

    coded = Coded(own._copied_backend(), max_tokens=8, config={})
    assert coded.state() is None


def test_calls_of_all_frontends_share_steps(in_process: InProcess, tmp_path: Path) -> None:
    """Each gets its own vectors, whoever runs beside it."""
    model = in_process.model("embedder")
    numbers = random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    texts = [" ".join(numbers.choices(words, k=numbers.randint(1, 9))) for _ in range(300)]
    expected = dict(zip(texts, model.embed(texts, **OPTIONS), strict=True))

    async def main() -> None:
        async with connected(in_process, tmp_path, num_clients=3) as (_, clients):
            for client in clients:
                await learnt(client, embed(["a"]))
                await learnt(client, embed(["a"], dimensions=5))

            async def ask(number: int) -> None:
                own = numbers.sample(texts, numbers.choice((1, 1, 1, 2, 40)))
                size = numbers.choice((5, None))
                options = {} if size is None else {"dimensions": size}
                outcome = await by_ring(clients[number % 3], embed(own, **options))
                for text, row in zip(own, outcome.arrays[0], strict=True):
                    want = expected[text][:size]
                    np.testing.assert_allclose(row, want / np.linalg.norm(want), atol=2e-6)

            await asyncio.gather(*(ask(number) for number in range(400)))
            assert [slots_in_use(client) for client in clients] == [0, 0, 0]

    in_loop(main)
    assert in_process.served[0].model.stats().num_running == 0


def test_errors_are_those_of_calls_by_frames(in_process: InProcess, tmp_path: Path) -> None:
    """One call's error is not that of another one of the same turn."""

    async def main() -> None:
        async with connected(in_process, tmp_path) as (_, (client,)):
            await learnt(client, embed(["a"], truncate=False))
            wrong = [["fox " * 500], ["a", "dog " * 600]]
            found = await asyncio.gather(
                *(client.run(embed(texts, truncate=False)) for texts in (["a"], *wrong, ["fox"])),
                return_exceptions=True,
            )
            assert isinstance(found[0], Outcome) and isinstance(found[3], Outcome)
            for texts, error in zip(wrong, found[1:3], strict=True):
                backend = cast(LocalBackend, in_process.site.backend)
                assert isinstance(error, ServeError)
                with pytest.raises(ServeError) as raised:
                    await backend.run(embed(texts, truncate=False))
                assert (raised.value.kind, raised.value.message) == (error.kind, error.message)
            assert slots_in_use(client) == 0

    in_loop(main)


def test_other_calls_go_by_frames(in_process: InProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(in_process, tmp_path) as (_, (client,)):
            rings = client._rings
            for inputs, options in (
                ([[30, 31]], {}),
                (["a"] * 65, {}),
                (["a" * 70_000], {}),
                (["a"], {"left": True}),
                (["a", "fox"], {"task": [None, "query"]}),
                (["a"], {"dimensions": 4096}),
            ):
                call = embed(cast(Any, inputs), **options)
                with contextlib.suppress(ServeError):
                    await learnt(client, call)
                assert rings.start(call) is None
            assert rings.start(Call("classifier", "classify", ["a"], {})) is None

    in_loop(main)


def test_options_that_clients_make_up_are_forgotten(in_process: InProcess, tmp_path: Path) -> None:
    """They neither take memory nor keep others from rings."""

    async def main() -> None:
        async with connected(in_process, tmp_path) as (_, (client,)):
            rings = client._rings
            names = [f"none-{number}" for number in range(300)]
            for name in (*names, *("x" * 100_000 + name for name in names[:8])):
                with pytest.raises(ServeError):
                    await learnt(client, embed(["a"], prompt_name=name))
            assert sum(len(repr(key)) for key in rings._kinds) < 1_000_000
            assert len(rings._kinds) <= 256 and not rings._tasks
            await learnt(client, embed(["a"]))
            await by_ring(client, embed(["a"]))

    in_loop(main)


def test_a_large_call_that_is_cancelled_is_dropped(in_process: InProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(in_process, tmp_path) as (_, (client,)):
            await learnt(client, embed(["a"]))
            before = in_process.served[0].model.stats().num_dropped
            large = [asyncio.create_task(client.run(embed(["fox dog " * 30] * 64)))]
            large += [asyncio.create_task(client.run(embed(["fox"]))) for _ in range(8)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # they are sent
            for task in large:
                task.cancel()
            answer = await by_ring(client, embed(["the fox"]))
            assert np.isfinite(answer.arrays[0]).all()
            while slots_in_use(client):
                await asyncio.sleep(0.001)
            assert in_process.served[0].model.stats().num_dropped >= before

    in_loop(main)


def test_a_frontend_that_is_gone_leaves_nothing(in_process: InProcess, tmp_path: Path) -> None:
    """Its texts are forgotten; those of others, in the same steps, are answered."""

    async def main() -> None:
        async with connected(in_process, tmp_path, num_clients=2) as (calls, clients):
            for client in clients:
                await learnt(client, embed(["a"]))
            asked = [
                asyncio.create_task(client.run(embed(["the fox dog " * 9] * 16)))
                for _ in range(6)
                for client in clients
            ]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            clients[0]._rings.close()  # as the system does for a process that was killed
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(one, ServeError) for one in found[0::2])
            assert all(isinstance(one, Outcome) for one in found[1::2])
            rings = calls._rings.find("embedder")
            assert rings is not None
            while len(rings._set.rings) > 1 or rings._calls:
                await asyncio.sleep(0.001)
            await learnt(clients[0], embed(["a"]))  # and it can have another ring
            await by_ring(clients[0], embed(["a"]))

    in_loop(main)
    assert in_process.served[0].model.stats().num_running == 0


def test_a_damaged_ring_is_replaced(in_process: InProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(in_process, tmp_path) as (_, (client,)):
            await learnt(client, embed(["a"]))
            (ring,) = client._rings._rings.values()
            asked = asyncio.create_task(client.run(embed(["the fox"])))
            ring._submit(np.array([1 << 20], dtype=np.int32))
            with pytest.raises(ServeError) as raised:
                await asked
            assert raised.value.kind == "unhealthy"
            while client._rings._rings:
                await asyncio.sleep(0.001)
            await learnt(client, embed(["a"]))
            await by_ring(client, embed(["a"]))

    in_loop(main)


def test_an_engine_that_is_gone_is_503(in_process: InProcess, tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(in_process, tmp_path) as (calls, (client,)):
            await learnt(client, embed(["a"]))
            asked = [asyncio.create_task(client.run(embed([text]))) for text in TEXTS]
            await asyncio.sleep(0)
            client._on_close(cast(Any, client._protocol))
            for error in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(error, ServeError) and error.kind == "unhealthy"
                assert error.retry_after_s == 5

    in_loop(main)


def test_a_closed_engine_gives_no_vectors(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Nobody waits for ever: later calls go by frames, which say what is wrong."""
    settings = ServeSettings(model_sources([f"embedder={checkpoints['embedder']}"]), device="cpu")
    app = InProcess(settings, load_models(settings))

    async def main() -> None:
        async with connected(app, tmp_path) as (_, (client,)):
            await learnt(client, embed(["a"]))
            await close_models(app.served)
            with pytest.raises(ServeError) as raised:  # by the ring, whose end is not seen yet
                await client.run(embed(["a"]))
            assert raised.value.kind == "unhealthy"
            while client._rings._rings:
                await asyncio.sleep(0.001)
            for _ in range(2):
                with pytest.raises(ServeError, match="closed"):
                    await learnt(client, embed(["a"]))

    in_loop(main)


def test_a_full_queue_is_429(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    settings = ServeSettings(
        model_sources([f"embedder={checkpoints['embedder']}"]),
        device="cpu",
        max_queued_requests=20,
    )
    app = InProcess(settings, load_models(settings))

    async def main() -> None:
        async with connected(app, tmp_path) as (_, (client,)):
            await learnt(client, embed(["a"]))
            calls = (client.run(embed(["the fox dog " * 9] * 16)) for _ in range(40))
            found = await asyncio.gather(*calls, return_exceptions=True)
            refused = [one for one in found if not isinstance(one, Outcome)]
            assert len(refused) < len(found)
            for error in refused:
                assert isinstance(error, ServeError) and error.kind == "overloaded", error
            await by_ring(client, embed(["a"]))
            assert slots_in_use(client) == 0
            # More than the whole queue takes goes by a frame, in parts.
            sent = client._rings.start(embed(["a"] * 21))
            assert sent is not None and await sent.answer is None
            assert len((await client.run(embed(["a"] * 21))).arrays[0]) == 21
        await close_models(app.served)

    in_loop(main)


def test_the_way_of_a_ring_is_short(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """In both processes, from a front-end's call to its outcome."""
    settings = ServeSettings(model_sources([f"embedder={checkpoints['embedder']}"]), device="cpu")
    app = InProcess(settings, load_models(settings))
    loop = asyncio.new_event_loop()
    stack = contextlib.AsyncExitStack()

    def make() -> Callable[[], object]:
        context = connected(app, tmp_path)
        _, (client,) = loop.run_until_complete(stack.enter_async_context(context))
        loop.run_until_complete(learnt(client, embed(["a"])))
        return lambda: loop.run_until_complete(client.run(embed(["a fox"])))

    files, functions, _ = path_length(make)
    loop.run_until_complete(stack.aclose())
    loop.run_until_complete(close_models(app.served))
    loop.close()
    assert files <= 30, files
    assert functions <= 180, functions
