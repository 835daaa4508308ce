"""llama.cpp as a rival on a CPU: greedy answers of a batch, by its own batched decode."""

import ctypes
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

NAME = "llama.cpp"
_BATCH_TOKENS = 2048  # of one call; it computes 512 rows at a time


def why_missing() -> str | None:
    """Why it cannot run here, None where it can."""
    missing = [name for name in ("llama_cpp", "gguf") if find_spec(name) is None]
    packages = {"llama_cpp": "llama-cpp-python"}
    names = " ".join(packages.get(name, name) for name in missing)
    return f"{NAME} left out: pip install {names}" if missing else None


def write_llama(folder: Path, path: Path) -> None:
    """The GGUF file of a Llama checkpoint of transformers in bf16, norms in f32; no tokenizer."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        count = heads.get(name.split(".")[-2])
        if count is not None:  # pairs of a rotation are neighbours there
            halves = tensor.unflatten(0, (count, 2, -1))
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        values = tensor.to(torch.float32).numpy()
        known = names.get_name(name, try_suffixes=(".weight",))
        assert known is not None  # the names of the format
        if values.ndim == 1:
            writer.add_tensor(known, values)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(known, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A model for sequences of at most max_tokens tokens each, as many at a time."""

    def __init__(self, path: Path, *, num_sequences: int, max_tokens: int, num_threads: int):
        llama_cpp: Any = import_module("llama_cpp")
        self._api = llama_cpp
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p())
        self._silent = silent  # called as long as the library lives
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        sizes = llama_cpp.llama_context_default_params()
        sizes.n_ctx = num_sequences * max_tokens
        sizes.n_batch, sizes.n_seq_max, sizes.kv_unified = _BATCH_TOKENS, num_sequences, True
        sizes.n_threads = sizes.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, sizes)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp does not load {path}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """The greedy tokens of each prompt; prompts are put together in calls, too."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        rows = [
            (token, place, number, place + 1 == len(prompt))
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(rows), _BATCH_TOKENS):
            self._step(rows[start : start + _BATCH_TOKENS], answers)
        for step in range(num_tokens - 1):
            self._step(
                [
                    (answer[-1], len(prompt) + step, number, True)
                    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
                ],
                answers,
            )
        return answers

    def _step(
        self, rows: Sequence[tuple[int, int, int, bool]], answers: Sequence[list[int]]
    ) -> None:
        """Rows (token, position, sequence, is_last); the last ones give a token of the answer."""
        api = self._api
        batch = api.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for i, (token, place, number, is_last) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.logits[i] = token, place, is_last
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
            if api.llama_decode(self._context, batch):
                raise RuntimeError("llama.cpp's decode failed")
            for i, (_, _, number, is_last) in enumerate(rows):
                if is_last:
                    logits = api.llama_get_logits_ith(self._context, i)
                    found = np.ctypeslib.as_array(logits, shape=(self._vocab_size,))
                    answers[number].append(int(found.argmax()))
        finally:
            api.llama_batch_free(batch)
