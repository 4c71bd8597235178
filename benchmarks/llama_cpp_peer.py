"""llama.cpp as a peer: its library, through llama-cpp-python's bindings, in a minimal loop of
continuous batching. Each step has the next token of every sequence, and chunks of prompts.

It runs in an environment with llama-cpp-python and gguf, and imports nothing of jaxllm.
"""

import ctypes
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import llama_cpp  # type: ignore[import-not-found]
import numpy as np

_TOKENS_AT_ONCE = 512
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
# llama.cpp's names of architectures. It rotates neighbours in the former, and halves in the latter.
_ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}
_ROTATES_NEIGHBOURS = {"llama"}
_TYPES = {"bfloat16": ("BF16", "MOSTLY_BF16"), "float32": ("F32", "ALL_F32")}


class Peer:
    """A model from a checkpoint, with slots for sequences."""

    version = f"llama-cpp-python {llama_cpp.__version__}"

    def __init__(self, model: str, dtype: str, max_model_len: int, max_num_seqs: int):
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(Path(model), path, dtype)
            options = llama_cpp.llama_model_default_params()
            options.n_gpu_layers = 0
            options.use_mmap = False  # the file is deleted before the model
            self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = max_model_len * max_num_seqs
        options.n_batch, options.n_ubatch = 2 * _TOKENS_AT_ONCE, _TOKENS_AT_ONCE
        options.n_seq_max = max_num_seqs
        options.n_threads = options.n_threads_batch = os.cpu_count() or 1
        options.kv_unified = True
        options.type_k = options.type_v = int(gguf.GGMLQuantizationType[_TYPES[dtype][0]])
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        assert self._context, "llama.cpp has made no context"
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        self._max_num_seqs = max_num_seqs

    def run(self, requests: list[tuple[list[int], int]]) -> list[float]:
        """Answer greedily; return the seconds to each first token."""
        start, first_tokens = time.perf_counter(), [0.0] * len(requests)
        llama_cpp.llama_memory_clear(self._memory, False)
        tokens = [list(prompt) for prompt, _ in requests]
        num_done = [0] * len(requests)  # number of each request's tokens that llama.cpp has seen
        waiting, places = list(range(len(requests)))[::-1], list(range(self._max_num_seqs))
        running: dict[int, int] = {}  # request: its slot
        while waiting or running:
            while waiting and places:
                running[waiting.pop()] = places.pop()
            self._batch.n_tokens, ask = 0, []
            # Decodes first, then prompts, as far as there is room.
            for request in sorted(running, key=lambda r: len(tokens[r]) - num_done[r] > 1):
                room = _TOKENS_AT_ONCE - self._batch.n_tokens
                for token in tokens[request][num_done[request] :][:room]:
                    num_done[request] += 1
                    is_last = num_done[request] == len(tokens[request])
                    self._add(token, num_done[request] - 1, running[request], is_last)
                    if is_last:
                        ask.append((request, self._batch.n_tokens - 1))
            assert llama_cpp.llama_decode(self._context, self._batch) == 0
            for request, place in ask:
                logits = llama_cpp.llama_get_logits_ith(self._context, place)
                row = np.ctypeslib.as_array(logits, shape=(self._vocab_size,))
                tokens[request].append(int(row.argmax()))
                first_tokens[request] = first_tokens[request] or time.perf_counter() - start
                prompt, wanted = requests[request]
                if len(tokens[request]) == len(prompt) + wanted:
                    places.append(running.pop(request))
                    llama_cpp.llama_memory_seq_rm(self._memory, places[-1], -1, -1)
        return first_tokens

    def _add(self, token: int, position: int, place: int, wants_logits: bool) -> None:
        batch, i = self._batch, self._batch.n_tokens
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.logits[i] = 1, ctypes.c_int8(wants_logits)
        batch.seq_id[i][0] = place
        batch.n_tokens += 1


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """Write a checkpoint of a Llama or a Qwen3-MoE in llama.cpp's format, with a vocabulary of
    numbers."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    name, file_type = _TYPES[dtype]
    kind = gguf.GGMLQuantizationType[name]
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[config["model_type"]])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_tokenizer_model("no_vocab")
    rotated = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
    for key, tensor in _stacked(_tensors(model)):
        inner = key.removesuffix(".weight")
        prefix = ""
        if inner.startswith("model.layers."):
            _, _, layer, inner = inner.split(".", 3)
            prefix = f"blk.{layer}."
        if inner in rotated and config["model_type"] in _ROTATES_NEIGHBOURS:
            tensor = _interleaved(tensor, rotated[inner])
        if tensor.ndim > 1 and name != "F32" and inner != "mlp.gate":
            tensor = gguf.quants.quantize(tensor, kind)
            writer.add_tensor(f"{prefix}{_NAMES[inner]}.weight", tensor, raw_dtype=kind)
        else:
            writer.add_tensor(f"{prefix}{_NAMES[inner]}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stacked(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The same, with all experts of a layer in one tensor."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors:
        before, is_expert, after = name.partition(".experts.")
        if is_expert:
            number, matrix = after.split(".", 1)
            experts.setdefault(f"{before}.experts.{matrix}", {})[int(number)] = tensor
        else:
            yield name, tensor
    for name, each in experts.items():
        yield name, np.stack([each[number] for number in sorted(each)])


def _tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values. numpy lacks bfloat16, which is the upper half of a float32."""
    for file in sorted(model.glob("*.safetensors")):
        data = file.read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:size]).items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            raw = data[size + first : size + last]
            if entry["dtype"] == "BF16":
                tensor = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
            else:
                tensor = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
            yield name, tensor.astype(np.float32).reshape(entry["shape"])


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows: llama.cpp rotates neighbours, checkpoints rotate halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
