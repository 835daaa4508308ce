"""Damages the files beside a checkpoint's weights at random, and loads and runs it each time.

Only CheckpointError and InputError may come out of bytetx.load and a first embed or generate.

    python tests/fuzz_side_files.py --mutations 2000 --seed 0

runs that many for every file; tests/checkpoint/test_side_files.py runs a few of each.
"""

import argparse
import faulthandler
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import HIDDEN_SIZE, make_tokenizer, save_sentence_model
from decisions import REQUESTS, save_jev, save_judge
from model2vec import StaticModel
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.errors import CheckpointError, InputError

# A load and a first pass take some 20 ms.
HANG_SECONDS = 60
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
# Chats start a process; other files say nothing about them.
_OF_CHATS = ("chat_template.jinja", "special_tokens_map.json", "tokenizer_config.json")
_DEEP = "[" * 3000 + "]" * 3000
# Written as they stand, for Python's writer has no way to say some of them.
_VALUES = (
    *("null", "true", "false", "0", "1", "-1", "2", "1.5", "-0.0", "1e-320", "1e308", "1e999"),
    *("NaN", "Infinity", "-Infinity", str(2**31), str(2**63), str(2**70), "9" * 5000, "512"),
    *('""', '"x"', '"\\ud800"', '"\\u0000"', '"../../etc"', '"a.b.C"', '"right"', '"\U0001f642"'),
    *("[]", "{}", "[1]", '["x"]', "[[]]", "[null]", '{"a": 1}', '{"content": 1}', '{"0": "x"}'),
    *('[{"name": "default", "template": 1}]', '["a", 1]', '{"x": {"y": {"z": []}}}'),
    '"' + "x" * 70_000 + '"',
)
_BYTES = (b"\xff", b"\x00", b"\xef\xbb\xbf", b"{", b"]", b'"', b",", b"\\", b"e9999", b"-")


@dataclass(frozen=True)
class Target:
    """A checkpoint's folder, and what to do with it."""

    folder: Path
    run: Callable[[Path, str], None]  # given the folder, and the name of the file that is damaged

    def files(self) -> list[Path]:
        """Every JSON or text file."""
        suffixes = (".json", ".jinja")
        return sorted(path for path in self.folder.rglob("*") if path.suffix in suffixes)


def targets(folder: Path) -> Iterator[Target]:
    """An encoder that sentence-transformers saved, a causal model of several shards, a decider, one
    whose head lies beside its trunk, and a static embedding that model2vec saved."""
    modules = [
        Pooling(HIDDEN_SIZE, "mean"),
        Dense(HIDDEN_SIZE, 16),
        LayerNorm(16),
        Normalize(),
    ]
    options = {"prompts": {"query": "find: "}, "default_prompt_name": "query"}
    encoder = save_sentence_model(folder / "sentence", modules, max_seq_length=30, **options)
    yield Target(encoder, _embed)
    causal = folder / "causal"
    tokenizer = make_tokenizer("bpe")
    tokenizer.chat_template = TEMPLATE
    model = tiny_decoder("llama", vocab_size=len(tokenizer))
    model.save_pretrained(causal, max_shard_size="60KB")
    tokenizer.save_pretrained(causal)
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    (causal / "special_tokens_map.json").write_text(json.dumps(special))
    yield Target(causal, _generate)
    decider = save_jev(folder / "decider", num_verbalizers=40)
    settings = {"labels": {"noul": ["a", "b"]}, "temperature": {"choice": 2.0}}
    (decider / "decision.json").write_text(json.dumps(settings))
    (decider / "decision_template.jinja").write_text(
        "{{ state | tojson }}{% for q in questions %}{{ q.name }}:<|mark|>{% endfor %}"
    )
    yield Target(decider, _decide)
    judge = save_judge(folder / "judge")
    (judge / "decision.json").write_text(json.dumps({"temperature": {"choice": 2.0}}))
    yield Target(judge, _decide)
    static = folder / "static"
    words = make_tokenizer("unigram").backend_tokenizer
    vectors = np.random.default_rng(0).standard_normal((words.get_vocab_size(), 8))
    StaticModel(vectors.astype(np.float32), words, max_length=30).save_pretrained(static)
    (static / "modules.json").unlink()
    yield Target(static, _embed)


def _embed(folder: Path, name: str) -> None:
    model = bytetx.load(folder, device="cpu")
    model.embed(["a dog", "", "the quick brown fox"], truncate=True)
    model.embed([("a", "b"), [5, 6]], prompt="", truncate=True)
    model.info()


def _generate(folder: Path, name: str) -> None:
    model = bytetx.load(folder, device="cpu")
    params = bytetx.SamplingParams(max_tokens=3, temperature=0)
    prompts: list[Any] = ["the dog", [5, 6]]
    if name in _OF_CHATS:
        prompts.append([{"role": "user", "content": "a fox"}])
    for prompt in prompts:
        model.generate([prompt], params, on_error="return")


def _decide(folder: Path, name: str) -> None:
    bytetx.load(folder, device="cpu").decide(REQUESTS[:1])


def mutations(raw: bytes, draw: random.Random) -> Iterator[bytes]:
    """Damaged copies of a file, without end."""
    while True:
        damaged = raw
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            damaged = _damage(damaged, draw)
        if damaged != raw:
            yield damaged


def _damage(raw: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.25:
        return _damage_bytes(raw, draw)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return _damage_bytes(raw, draw)
    return _damage_json(content, draw)


def _damage_bytes(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw) + 1)
    kind = draw.randrange(5)
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + draw.choice(_BYTES) + raw[at:]
    if kind == 2:
        return raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
    if kind == 3:
        return raw[:at] + raw[at + draw.randrange(1, 20) :]
    return _DEEP.encode() if draw.random() < 0.1 else raw[:at] + raw[at // 2 :]


def _damage_json(content: Any, draw: random.Random) -> bytes:
    """One value replaced, taken out, or written twice under its key."""
    places = list(_places(content))
    if not places:
        return draw.choice(_VALUES).encode()
    # Keys near the top matter most; of a vocabulary's thousand entries a few are enough.
    parent, key = draw.choice(places if draw.random() < 0.3 else places[:60])
    mark = "a mark that no file holds"
    kind = draw.randrange(4)
    if kind == 0:
        del parent[key]
        return json.dumps(content).encode()
    if kind == 1 and isinstance(parent, dict):
        twice = f"{json.dumps(parent[key])}, {json.dumps(key)}: {draw.choice(_VALUES)}"
        parent[key] = mark
        return json.dumps(content).replace(json.dumps(mark), twice).encode("utf-8", "replace")
    parent[key] = mark
    value = _DEEP if draw.random() < 0.03 else draw.choice(_VALUES)
    return json.dumps(content).replace(json.dumps(mark), value).encode("utf-8", "replace")


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key or index) of every value, those of outer ones first."""
    level = [content]
    while level:
        parts = [part for part in level if isinstance(part, dict | list)]
        level = []
        for part in parts:
            keys = list(part) if isinstance(part, dict) else range(len(part))
            for key in keys:
                yield part, key
                level.append(part[key])


def try_one(target: Target, path: Path, damaged: bytes) -> Exception | None:
    """Return the errors that are neither of the two; the file is as before afterwards."""
    raw = path.read_bytes()
    path.write_bytes(damaged)
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        target.run(target.folder, path.name)
    except (CheckpointError, InputError):
        return None
    except BaseException as error:
        return error
    finally:
        faulthandler.cancel_dump_traceback_later()
        path.write_bytes(raw)
    return None


def fuzz(target: Target, *, count: int, seed: int, keep: Path | None = None) -> list[str]:
    """`count` mutations of every file of a target; a line for each that ends wrong."""
    found = []
    for path in target.files():
        name = path.relative_to(target.folder).as_posix()
        draw = random.Random(f"{seed} {target.folder.name} {name}")
        raw = path.read_bytes()
        for number, damaged in zip(range(count), mutations(raw, draw), strict=False):
            error = try_one(target, path, damaged)
            if error is None:
                continue
            found.append(f"{name} mutation {number}: {type(error).__name__}: {error!s:.200}")
            if keep is not None:
                (keep / f"{target.folder.name}-{number}-{path.name}").write_bytes(damaged)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=2000, help="of every file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the files that end wrong")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for target in targets(Path(folder)):
            began = time.monotonic()
            found = fuzz(target, count=given.mutations, seed=given.seed, keep=given.keep)
            print("\n".join(found))
            seconds = time.monotonic() - began
            print(
                f"{target.folder.name}: {len(target.files())} files, {given.mutations} mutations "
                f"of each, {len(found)} ended wrong, {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
