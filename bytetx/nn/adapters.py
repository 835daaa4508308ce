"""LoRA adapters beside a model: of its tasks, and those that are added and removed by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from bytetx.arguments import check_adapter_name
from bytetx.checkpoint.files import ADAPTER_CONFIG, resolve_adapter
from bytetx.checkpoint.lora import Lora, read_lora
from bytetx.checkpoint.mixer_spec import MixerSpec
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.task_adapters import TaskAdapters
from bytetx.checkpoint.weight_changes import LowRank
from bytetx.checkpoint.weights import Weights
from bytetx.errors import CheckpointError, OptionError, shown
from bytetx.nn.adapted_rows import Adapter, AdapterSlots
from bytetx.nn.attended import OutputGate
from bytetx.nn.checkpoint_heads import Heads, load_heads
from bytetx.nn.head_rows import separate_heads
from bytetx.nn.layer import LayerWeights
from bytetx.nn.loading import LoadedCheckpoint, reopen_weights
from bytetx.nn.mixers import rows_in_order
from bytetx.nn.tensors import TensorLoader, is_finite
from bytetx.ops.gated import in_turn
from bytetx.ops.low_rank import LowRankChange
from bytetx.ops.weight import Weight
from bytetx.runtime.faults import is_out_of_memory

_ROW_MULTIPLE = 16  # the columns of word_rows are a multiple, for loads of whole vectors
_MERGE = "merge it into the base model (peft's merge_and_unload, then save_pretrained)"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter, and the heads of the model with it: the model's own unless it changes them."""

    adapter: Adapter
    heads: Heads


class Adapters:
    """The adapters of one loaded checkpoint by name; threads may share it.

    An adapter that is removed stays in memory until the last request that has it ends.
    The adapters of a checkpoint's own tasks are read at once, and stay.
    """

    def __init__(self, checkpoint: LoadedCheckpoint):
        """Raises CheckpointError for adapters of tasks that do not fit the model."""
        self._checkpoint, self._slots = checkpoint, AdapterSlots()
        self._by_name: dict[str, LoadedAdapter] = {}
        self._by_task: dict[str, Adapter] = {}
        self._lock = Lock()  # loads one at a time
        if checkpoint.tasks is not None and why_no_adapters(checkpoint) is None:
            rows, changes = _word_changes(checkpoint, checkpoint.tasks)
            self._slots = AdapterSlots(rows)
            self._by_task = _load_tasks(checkpoint, checkpoint.tasks, changes, self._slots)

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each, by name."""
        return {name: found.adapter.folder for name, found in list(self._by_name.items())}

    @property
    def num_bytes(self) -> int:
        """Bytes of the changes of layers of those that were added."""
        return sum(found.adapter.num_bytes for found in list(self._by_name.values()))

    def of_tasks(self, named: object) -> Adapter | list[Adapter | None] | None:
        """The adapter of all texts' task, or that of each of a list; None: the model without any.

        Raises OptionError for a name that is no task of the checkpoint, and where the model takes
        no adapters.
        """
        tasks = self._checkpoint.tasks
        if tasks is None:
            return None
        each = named if isinstance(named, list | tuple) else [named]
        found = [tasks.resolve(task) for task in each]
        if any(task is not None for task in found):
            check_takes_adapters(self._checkpoint)
        adapters = [None if task is None else self._by_task[tasks.adapters[task]] for task in found]
        return adapters if each is named else adapters[0]

    def add(self, name: str, path: str | Path) -> None:
        """Reads an adapter. Raises OptionError for a name that is taken or none, or a model that
        takes no adapters; CheckpointError for an adapter that does not fit it."""
        check_adapter_name(name)
        check_takes_adapters(self._checkpoint)
        folder = resolve_adapter(path)
        tasks = self._checkpoint.tasks
        if tasks is not None and name in tasks.adapters:
            raise OptionError(
                f"{name!r} is a task of this checkpoint; give the adapter another name"
            )
        with self._lock:
            if name in self._by_name:
                raise OptionError(f"an adapter {name!r} is there already; remove it first")
            self._by_name[name] = load_adapter(self._checkpoint, name, folder, self._slots)

    def remove(self, name: str) -> None:
        """Forgets an adapter; requests that have it end as if it were there.

        Raises OptionError for an unknown name.
        """
        with self._lock:
            self.get(name)
            del self._by_name[name]

    def get(self, name: object) -> LoadedAdapter:
        """Raises OptionError for an unknown name."""
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(map(repr, self._by_name)) or "none is loaded"
            raise OptionError(
                f"adapter must be the name of a loaded one ({known}), or None for the model "
                f"without any, got {shown(name)}"
            )
        return found


def named_adapters(
    adapters: Adapters, named: object, items: object
) -> Adapter | list[Adapter | None]:
    """The adapter of all items, or the one of each, or None, by a list of names.

    Raises OptionError for an unknown name, or a list that is not as long as sized items.
    """
    if not isinstance(named, list | tuple):
        return adapters.get(named).adapter
    check_count(named, items)
    return [None if name is None else adapters.get(name).adapter for name in named]


def check_count(named: Sequence[object], items: object, *, name: str = "adapter") -> None:
    """OptionError where a list of names is not as long as items that are sized."""
    if isinstance(items, Sized) and len(items) != len(named):
        raise OptionError(
            f"{name} must be one name, or a list with one for each of {len(items)} inputs, got "
            f"{len(named)}"
        )


def adapter_at(adapters: Sequence[Adapter | None], index: int) -> Adapter | None:
    """OptionError where there are more inputs than adapters."""
    if index >= len(adapters):
        raise OptionError(f"adapter has {len(adapters)} entries, and there are more inputs")
    return adapters[index]


def why_no_adapters(checkpoint: LoadedCheckpoint) -> str | None:
    """Why rows of this model cannot have an adapter each; None where they can."""
    if checkpoint.executor.has_workers or checkpoint.transformer.blocks.shard is not None:
        return "a model that several processes share (tp, grid): load it in one process"
    if checkpoint.router is not None:
        return "a checkpoint with a Router: load the folder of the route"
    if checkpoint.batch_invariant:
        return (
            "a batch-invariant model, because rows of an adapter are multiplied together: load it "
            "without batch_invariant"
        )
    if checkpoint.quantization == "fp8":
        return "a model in fp8: load it in bfloat16 or float16"
    return None


def check_takes_adapters(checkpoint: LoadedCheckpoint) -> None:
    """OptionError where rows of this model cannot have an adapter each."""
    reason = why_no_adapters(checkpoint)
    if reason is not None:
        raise OptionError(f"adapters of single requests are not for {reason}, or {_MERGE}")


def load_adapter(
    checkpoint: LoadedCheckpoint, name: str, folder: Path, slots: AdapterSlots
) -> LoadedAdapter:
    """The adapter in a folder, for the rows of a model that check_takes_adapters lets pass.

    Raises CheckpointError for an adapter that is damaged, is of another model, changes what single
    rows cannot have of their own, or does not fit the memory.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{folder} has no {ADAPTER_CONFIG}; give the folder that peft's save_pretrained wrote"
        )
    weights = reopen_weights(checkpoint)
    lora = read_lora(folder, weights, checkpoint.spec)
    _check_dora(folder, lora)
    return _loaded(checkpoint, name, folder, weights, lora, {}, slots)


def _loaded(
    checkpoint: LoadedCheckpoint,
    name: str,
    folder: Path,
    weights: Weights,
    lora: Lora,
    more: Mapping[int, LowRankChange],
    slots: AdapterSlots,
) -> LoadedAdapter:
    """more: changes of words, which `lora` does not have."""
    spec, transformer = checkpoint.spec, checkpoint.transformer
    word = transformer.embeddings.word
    try:
        reader = _ChangeReader(spec, lora, weights, dtype=word.dtype, device=word.device)
        changes = reader.changes(transformer.layers.weights, transformer.embeddings.project)
        changes.update(more)
        _check_finite(folder, changes.values(), word.dtype)
        _check_positions(folder, spec, reader.used)
        heads = _load_heads(checkpoint, folder, weights, lora.without(reader.used))
        adapter = Adapter.of(name, folder, changes, slots)
        if word.is_cuda:  # steps run on a stream of their own
            torch.cuda.current_stream(word.device).synchronize()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"the adapter in {folder} does not fit the memory of {word.device} beside the model: "
            f"{error}; free memory there, or remove another adapter"
        ) from error
    return LoadedAdapter(adapter, heads)


def _load_tasks(
    checkpoint: LoadedCheckpoint,
    tasks: TaskAdapters,
    words: Mapping[str, Mapping[int, LowRankChange]],
    slots: AdapterSlots,
) -> dict[str, Adapter]:
    """The adapters of tasks, by the names that `tasks.adapters` has for them."""
    weights, found = reopen_weights(checkpoint), {}
    names = checkpoint.spec.embeddings
    embeddings = {names[key] for key in ("word", "token_type") if key in names}
    for name, added in tasks.added.items():
        lora, folder = Lora(added, {}).without(embeddings), checkpoint.folder
        loaded = _loaded(checkpoint, name, folder, weights, lora, words[name], slots)
        found[name] = loaded.adapter
    return found


def _word_changes(
    checkpoint: LoadedCheckpoint, tasks: TaskAdapters
) -> tuple[Tensor | None, dict[str, dict[int, LowRankChange]]]:
    """(word_rows of AdapterSlots, the change of words by id() of it, for each adapter).

    The rows of all adapters' factors stand beside each other: a token's row is looked up once, and
    an adapter's first factor takes its own columns of it. The token type, of which there is one,
    is added to each word: the first column is 1.
    """
    names, word = checkpoint.spec.embeddings, checkpoint.transformer.embeddings.word
    type_name = names.get("token_type")
    lefts: list[Tensor] = [torch.ones(checkpoint.spec.vocab_size, 1)]
    found: dict[str, tuple[range, Tensor]] = {}
    column = 1
    for name, added in tasks.added.items():
        types = added.get(type_name, ()) if type_name is not None else ()
        if types and checkpoint.spec.num_token_types > 1:
            raise CheckpointError(
                f"{checkpoint.folder}: the adapter of {name!r:.200} changes token types, which "
                f"bytetx takes of models with one; this one has {checkpoint.spec.num_token_types}"
            )
        kind = torch.zeros(word.shape[1], 1)
        for part in types:
            left, right = part.factors()
            kind += (left @ right).t() * part.scaling
        rights, first = [kind], column
        for part in added.get(names["word"], ()):
            left, right = part.factors()
            lefts.append(left)
            rights.append(right.t() * part.scaling)
            column += left.shape[1]
        if types or column > first:
            found[name] = range(first, column), torch.cat(rights, dim=1)
    changes: dict[str, dict[int, LowRankChange]] = {name: {} for name in tasks.added}
    if not found:
        return None, changes
    lefts.append(torch.zeros(len(lefts[0]), -column % _ROW_MULTIPLE))
    rows = torch.cat(lefts, dim=1).to(word)
    for name, (own, b) in found.items():
        a = torch.zeros(b.shape[1], rows.shape[1])
        a[range(b.shape[1]), [0, *own]] = 1
        changes[name][id(rows)] = LowRankChange(a.to(word), b.to(word))
    return rows, changes


def _check_dora(folder: Path, lora: Lora) -> None:
    """A scale of the base model's own weight is none of the sums that rows have of their own."""
    scaled = [
        name for name, changes in lora.added.items() if any(change.needs_all for change in changes)
    ]
    if scaled:
        raise CheckpointError(
            f"{folder} scales the base model's {min(scaled)!r} (DoRA), and an adapter of single "
            f"requests may add to it only: {_MERGE}, or load the adapter's folder itself"
        )


def _check_finite(folder: Path, changes: Iterable[LowRankChange], dtype: torch.dtype) -> None:
    for change in changes:
        for tensor in (change.a, change.b, change.bias):
            if tensor is not None and tensor.numel() and not is_finite(tensor):
                raise CheckpointError(
                    f"{folder} holds values that are not finite in {dtype}; the adapter is "
                    "damaged, or needs a model in a wider dtype"
                )


def _check_positions(folder: Path, spec: ModelSpec, used: set[str]) -> None:
    """Disentangled attention multiplies its positions with the weights of queries and keys once."""
    relative = spec.layer_spec.disentangled
    if relative is None or not relative.shares_projections:
        return
    for i in range(spec.num_layers):
        names = spec.layer_names(i)
        for key in ("q", "k"):
            if not used.isdisjoint((f"{names[key]}.weight", f"{names[key]}.bias")):
                raise CheckpointError(
                    f"{folder} changes {names[key]!r}, with which {spec.family} projects relative "
                    f"positions, once for all texts: {_MERGE}"
                )


def _load_heads(checkpoint: LoadedCheckpoint, folder: Path, weights: Weights, rest: Lora) -> Heads:
    """The model's heads with what an adapter changes beside layers; the same where that is nothing.

    Raises CheckpointError where it changes more than heads.
    """
    unread = set(checkpoint.unused_tensors)  # such as a pooler that no head reads
    changed = {
        name for name in (*rest.added, *rest.replaced) if weights.saved_name(name) not in unread
    }
    if not changed:
        return checkpoint.heads
    kept = checkpoint.heads
    weights = weights.changed(rest.added, rest.replaced).cast(checkpoint.dtype)
    weights.used.clear()
    loader = TensorLoader(
        weights,
        dtype=checkpoint.dtype,
        device=checkpoint.device,
        prepack=checkpoint.device.type == "cpu",
    )
    heads = Heads()
    if kept.lm is None and kept.decision is None and kept != Heads():
        heads = load_heads(
            checkpoint.spec,
            loader,
            checkpoint.transformer,
            may_lack=True,
            decision=None,
            label_ids=(),
        )
    if others := sorted(changed - weights.used):
        more = f" and {len(others) - 1} more tensors" if len(others) > 1 else ""
        raise CheckpointError(
            f"{folder} changes {others[0]!r}{more}, and an adapter of single requests may change "
            "linear layers of attention and of dense feed-forward layers with their biases, the "
            "projection of an embedding, and heads of "
            "classification, tags, answers and masked tokens, but no embedding, norm, expert or "
            f"language model head: {_MERGE}, or load the adapter's folder itself"
        )
    return heads


def _mixer_rows(rows: Tensor, height: int, mixer: MixerSpec) -> Tensor:
    """Rows of a mixer's two tensors, the first of so many, in the order of its weight's."""
    parts = rows_in_order([(rows[:height], None), (rows[height:], None)], mixer)
    return torch.cat([part for part, _ in parts if isinstance(part, Tensor)])


@dataclass(frozen=True, slots=True)
class _Change:
    """An addition to a linear layer, f32: b [n, rank] @ a [rank, k], and bias [n] or None."""

    b: Tensor
    a: Tensor
    bias: Tensor | None

    def in_order(self, ordered: Callable[[Tensor], Tensor]) -> "_Change":
        """The change of a layer with its outputs in another order."""
        bias = None if self.bias is None else ordered(self.bias)
        return _Change(ordered(self.b), self.a, bias)


class _ChangeReader:
    """Reads the changes of a model's layers, in the order in which each weight has its rows.

    used: the names of the tensors that they change.
    """

    def __init__(
        self,
        spec: ModelSpec,
        lora: Lora,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._spec, self._lora, self._weights = spec, lora, weights
        self._is_transposed = spec.layer_spec.weight_layout == "conv1d"
        self._dtype, self._device = dtype, device
        self.used: set[str] = set()

    def changes(
        self, layers: Sequence[LayerWeights], project: Weight | None
    ) -> dict[int, LowRankChange]:
        """By id() of each weight.  project: of the embedding."""
        found: dict[int, LowRankChange] = {}
        key = "project_in" if "project_in" in self._spec.embeddings else "project"
        if project is not None and (change := self._of(self._spec.embeddings, key)) is not None:
            found[id(project)] = self._placed(change)
        for i, layer in enumerate(layers):
            if id(layer.qkv) in found or id(layer.attn_out) in found:
                continue  # layers that share their weights
            names = self._spec.layer_names(i)
            out_key = "attn_out" if layer.mixer is None else "mixer_out"
            parts = [(layer.qkv, self._qkv(names)), (layer.attn_out, self._of(names, out_key))]
            if layer.feed_forward.linears:
                first, out = layer.feed_forward.linears
                parts += [(first, self._first(names, first.block))]
                parts += [(out, self._of(names, "ffn_out"))]
            if isinstance(layer.attended, OutputGate):
                parts.append((layer.attended.gate, self._query_gates(names)))
            for weight, change in parts:
                if change is not None:
                    found[id(weight)] = self._placed(change)
        return found

    def _placed(self, change: _Change) -> LowRankChange:
        a, b, bias = (
            None if one is None else one.to(device=self._device, dtype=self._dtype).contiguous()
            for one in (change.a, change.b, change.bias)
        )
        assert a is not None and b is not None
        return LowRankChange(a, b, bias)

    def _qkv(self, names: Mapping[str, str]) -> _Change | None:
        layers = self._spec.layer_spec
        if "mixer_in" in names:
            mixer = layers.mixer
            assert mixer is not None  # a layer has it
            keys = tuple(mixer.parts(self._spec.hidden_size))
            found = self._stacked(names, keys)
            if found is None or not mixer.is_interleaved:
                return found
            height = self._shape(names, keys[0])[0]
            return found.in_order(lambda rows: _mixer_rows(rows, height, mixer))
        if layers.qkv == "separate":
            found = self._stacked(names, ("q", "k", "v"))
            if found is None or not layers.gates_queries:
                return found
            height = self._shape(names, "q")[0]
            return found.in_order(
                lambda rows: torch.cat([self._half(rows[:height], 0), rows[height:]])
            )
        found = self._of(names, "qkv")
        if found is None or layers.qkv != "interleaved":
            return found
        return found.in_order(lambda rows: separate_heads(rows, self._spec))

    def _query_gates(self, names: Mapping[str, str]) -> _Change | None:
        """The gates that q has beside each head's queries."""
        found = self._of(names, "q")
        return None if found is None else found.in_order(lambda rows: self._half(rows, 1))

    def _half(self, rows: Tensor, half: int) -> Tensor:
        """Each head's queries, 0, or gates, 1, which take turns."""
        pairs: Tensor = rows.unflatten(0, (-1, 2, self._spec.head_dim))
        return pairs[:, half].flatten(0, 1)

    def _first(self, names: Mapping[str, str], block: int) -> _Change | None:
        """block: as of the weight."""
        keys = ("ffn_gate_up", "ffn_up_gate")
        key = next((key for key in keys if key in names), None)
        if key is not None:
            found = self._of(names, key)
        elif "ffn_gate" in names:
            found = self._stacked(names, ("ffn_gate", "ffn_in"))
        else:
            return self._of(names, "ffn_in")

        def turned(rows: Tensor) -> Tensor:
            halves = rows.chunk(2)
            gate, up = halves[::-1] if key == "ffn_up_gate" else halves
            return in_turn(gate, up, block)

        return None if found is None else found.in_order(turned)

    def _stacked(self, names: Mapping[str, str], keys: Sequence[str]) -> _Change | None:
        """The changes of several tensors whose rows follow one another, as those of one."""
        found = [self._of(names, key) for key in keys]
        changes = [change for change in found if change is not None]
        if not changes:
            return None
        heights = [self._shape(names, key)[0] for key in keys]
        a = torch.cat([change.a for change in changes])
        b, bias = a.new_zeros(sum(heights), len(a)), a.new_zeros(sum(heights))
        row = column = 0
        for height, change in zip(heights, found, strict=True):
            rows = slice(row, row + height)
            if change is not None:
                rank = change.b.shape[1]
                b[rows, column : column + rank] = change.b
                column += rank
                if change.bias is not None:
                    bias[rows] = change.bias
            row += height
        has_bias = any(change.bias is not None for change in changes)
        return _Change(b, a, bias if has_bias else None)

    def _of(self, names: Mapping[str, str], key: str) -> _Change | None:
        """The change of one linear layer; None where nothing is added to it."""
        if key not in names:
            return None
        name, bias = f"{names[key]}.weight", self._bias(names, key)
        parts = [p for p in self._lora.added.get(name, ()) if isinstance(p, LowRank)]
        if not parts and bias is None:
            return None
        if parts:
            self.used.add(name)
        n, k = self._shape(names, key)
        factors = [self._factors(part) for part in parts]
        a = torch.cat([right for _, right in factors]) if parts else torch.zeros(0, k)
        b = a.new_zeros(n, len(a))
        column = 0
        for part, (left, _) in zip(parts, factors, strict=True):
            rows = slice(part.first_row, part.first_row + len(left))
            b[rows, column : column + left.shape[1]] = left * part.scaling
            column += left.shape[1]
        return _Change(b, a, bias)

    def _bias(self, names: Mapping[str, str], key: str) -> Tensor | None:
        """The addition to the bias of one linear layer, which may have none: f32 [n]."""
        name = f"{names[key]}.bias"
        added, saved = self._lora.added.get(name, ()), self._lora.replaced.get(name)
        if not added and saved is None:
            return None
        self.used.add(name)
        before = torch.zeros(self._shape(names, key)[0])
        if name in self._weights:
            before = self._weights.cast(torch.float32)[name]
        after = before.clone() if saved is None else saved.read(torch.float32)
        for change in added:
            change.apply_to(after, None)
        return None if torch.equal(after, before) else after - before

    def _factors(self, part: LowRank) -> tuple[Tensor, Tensor]:
        left, right = part.factors()
        return (right.t(), left.t()) if self._is_transposed else (left, right)

    def _shape(self, names: Mapping[str, str], key: str) -> tuple[int, ...]:
        """(n, k) of a tensor."""
        shape = self._weights.shape(f"{names[key]}.weight")
        return shape[::-1] if self._is_transposed else shape
