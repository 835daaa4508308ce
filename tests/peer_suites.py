"""Runs transformers' own model tests with each model wrapped, each call held against the stock one.

    python tests/peer_suites.py CHECKOUT [FAMILY ...]

CHECKOUT: transformers' repository (`git clone --depth 1 --branch v5.24.0 URL`), since its model
tests are in no package; the transformers of its src/ runs, in an environment that has what that
one requires, and `parameterized`.  FAMILY: folders of tests/models; without any, all of FAMILIES.

Each call, and each `generate`, of a float32 model in eval mode is made twice, by the stock model
and by a wrapped copy.  Where the copy ran packed, its values at tokens must be the stock ones and
those at pads zeros, and the test goes on with its output.  A test that fails is run again without
wrap; one that then passes is a difference.  Differences that are meant are in peer_suites.toml,
each with its reason.  Exits with 1 for any other.
"""

import copy
import fnmatch
import functools
import inspect
import os
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# Not camembert and xlm_roberta, whose tests all need trained weights.  Those of deberta_v2 run
# the original forward: their config has a pos_att_type that bytetx does not run.
FAMILIES = (
    *("albert", "bert", "deberta", "deberta_v2", "distilbert", "electra", "eurobert"),
    *("modernbert", "mpnet", "nomic_bert", "roberta", "roberta_prelayernorm"),
    *("xlm_roberta_xl", "t5", "bloom", "falcon", "gemma", "gemma2", "gemma3", "gpt2"),
    *("gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "llama", "mistral", "mixtral"),
    *("olmo2", "opt", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)
TOLERANCE = 1e-4  # of hidden states and logits in fp32, by the largest of them where it is above 1
KNOWN = Path(__file__).with_suffix(".toml")
# A wrapped model is neither compiled nor exported nor trained, and calls in half types differ.
LEFT_OUT = (
    "not (compil or export or onnx or training or checkpointing or fsdp or dtype or fp16 or bf16)"
)


class WrappedRun:
    """A pytest plugin: models' calls are compared, as long as `active`."""

    def __init__(self) -> None:
        self.active = True
        self.test = ""
        self.packed: Counter[str] = Counter()
        self.stock: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self._inside = False

    def install(self) -> None:
        from transformers import PreTrainedModel
        from transformers.generation import GenerationMixin

        for kind, name in ((PreTrainedModel, "__call__"), (GenerationMixin, "generate")):
            setattr(kind, name, self._compared(getattr(kind, name), name))

    def _compared(self, stock: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The method in place of a stock one; inside of a comparison it is the stock one."""

        @functools.wraps(stock)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not self.active or not _is_taken(model):
                return stock(model, *args, **kwargs)
            self._inside = True
            try:
                return self._compare(functools.partial(stock, model), model, name, args, kwargs)
            finally:
                self._inside = False

        return method

    def _compare(
        self,
        stock: Callable[..., Any],
        model: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        import torch

        from bytetx import wrap
        from bytetx.hf import FallbackWarning

        given = [_detached(value) for value in args], {n: _detached(v) for n, v in kwargs.items()}
        try:
            twin, twin_args, twin_kwargs = copy.deepcopy((model, *given))
            wrap(twin)
        except (RuntimeError, TypeError):  # caches with gradients; a class that wrap does not take
            return stock(*args, **kwargs)
        state = torch.get_rng_state()
        want = stock(*args, **kwargs)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            have = getattr(twin, name)(*twin_args, **twin_kwargs)
        torch.set_rng_state(after)
        for one in caught:
            if issubclass(one.category, FallbackWarning):
                self.stock[str(one.message)] += 1
                return want
        self.packed[type(model).__module__.split(".")[2]] += 1
        mask = None if name == "generate" else _mask_of(model, args, kwargs)
        for what in _differences(want, have, mask, "the output"):
            self.wrong.append(f"{self.test}: {type(model).__name__}: {name}: {what}")
        return want if torch.is_grad_enabled() else have

    def pytest_runtest_setup(self, item: Any) -> None:
        self.test = item.nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.when == "call":
            self.failed.append(report.nodeid)


def _is_taken(model: Any) -> bool:
    """Whether a call is compared: of a float32 model on a CPU in eval mode."""
    import torch

    first = next(model.parameters(), None)
    is_plain = first is not None and first.dtype == torch.float32 and first.device.type == "cpu"
    return is_plain and not model.training and not torch.compiler.is_compiling()


def _detached(value: Any) -> Any:
    """A tensor without its gradients, so that it can be copied; any other value as it is."""
    return value.detach() if hasattr(value, "detach") else value


def _mask_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """bool [..., num_columns]: the call's attention_mask; None without one."""
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    mask = given.get("attention_mask")
    return mask.bool() if getattr(mask, "ndim", 0) in (2, 3) else None


def _differences(want: Any, have: Any, mask: Any, name: str) -> Iterator[str]:
    """Every value of a packed output, or of a part of it, that is not as it must be."""
    import torch

    if hasattr(want, "layers") and hasattr(have, "layers"):  # a cache
        want, have = (
            [t.transpose(1, 2) for layer in cache.layers for t in (layer.keys, layer.values)]
            for cache in (want, have)
        )
    if type(want) is not type(have):
        yield f"{name} is a {type(have).__name__}, not a {type(want).__name__}"
    elif isinstance(want, dict):
        if list(want) != list(have):
            yield f"{name} has {list(have)}, not {list(want)}"
        for key in want.keys() & have.keys():
            yield from _differences(want[key], have[key], mask, key)
    elif isinstance(want, list | tuple):
        if len(want) != len(have):
            yield f"{name} has {len(have)} entries, not {len(want)}"
        for i, (one, other) in enumerate(zip(want, have, strict=False)):
            yield from _differences(one, other, mask, f"{name}[{i}]")
    elif isinstance(want, torch.Tensor):
        yield from _tensor_differences(want.detach(), have, mask, name)
    elif want != have:
        yield f"{name} is {have!r:.60}, not {want!r:.60}"


def _tensor_differences(want: Any, have: Any, mask: Any, name: str) -> Iterator[str]:
    import torch

    if want.shape != have.shape or want.dtype != have.dtype:
        yield f"{name} is {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}"
        return
    for is_token in () if mask is None else (mask, mask.flatten(0, -2)):
        last = is_token.ndim - 1  # the dimension of columns
        has_features = want.ndim > is_token.ndim and want.shape[:last] == is_token.shape[:-1]
        if has_features or want.shape == is_token.shape:
            # Fewer columns with logits_to_keep and under windows.
            is_token = is_token[..., -want.shape[last] :]
            if bool(have[~is_token].any()):
                yield f"{name} is not zeros at pads"
            want, have = want[is_token], have[is_token]
            break
    if want.numel():
        scale = max(1.0, want.abs().max().item())
        if not torch.allclose(have, want, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
            yield f"{name} is off by {(want - have).abs().max().item():.2g}"


def _unknown(found: Iterable[str]) -> list[str]:
    with KNOWN.open("rb") as file:
        known = [one["found"] for one in tomllib.load(file)["difference"]]
    return [one for one in found if not any(fnmatch.fnmatchcase(one, meant) for meant in known)]


def main(checkout: Path, families: list[str]) -> int:
    import pytest

    os.chdir(checkout)
    sys.path[:0] = [str(checkout), str(checkout / "src")]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    files = [f"tests/models/{name}/test_modeling_{name}.py" for name in families]
    missing = [name for name in files if not Path(name).exists()]
    if missing:
        raise SystemExit(f"{checkout} has no {missing[0]}; give a checkout of transformers")
    from transformers import testing_utils

    options = ["-q", "-p", "no:cacheprovider", "--tb=no", "-W", "ignore", "-k", LEFT_OUT]
    options += ["-o", "log_cli=false"]
    run = WrappedRun()
    run.install()
    if pytest.main([*options, *files], plugins=[run]) not in (0, 1):
        return 2
    failed, run.active, run.failed = sorted(set(run.failed)), False, []
    if failed:
        testing_utils.pytest_opt_registered.clear()  # their conftest.py adds options once a process
        pytest.main([*options, *failed], plugins=[run])
    found = [f"DIFFERENT {test}" for test in sorted(set(failed) - set(run.failed))]
    found += [f"WRONG {line}" for line in run.wrong]
    unknown = _unknown(found)
    for name, count in sorted(run.packed.items()):
        print(f"{name}: {count} packed calls")
    for reason, count in run.stock.most_common():
        print(f"{count} calls: {reason}")
    print(*unknown, sep="\n")
    print(
        f"{run.packed.total()} packed calls in {len(run.packed)} families; {len(unknown)} differ, "
        f"{len(found) - len(unknown)} as known; {len(set(run.failed))} tests fail without wrap, too"
    )
    return 1 if unknown else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:] or list(FAMILIES)))
