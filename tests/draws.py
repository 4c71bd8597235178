"""Models, options and requests of every kind, drawn at random."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxllm import LoRARequest, SamplingParams, StructuredOutputsParams
from jaxllm.models.registry import family_names
from jaxllm.testing import make_tiny_adapter, make_tiny_checkpoint
from tests.media import models
from tests.media.models import picture
from tests.profile import TINY

ENCODERS = ("bert", "roberta", "modernbert")
# Options that say what is computed, so the plain engine has them, too. Most engines have none.
WHAT = {
    "quantization": (None, None, None, "int8", "fp8", "int4"),
    "kv_cache_dtype": ("auto", "auto", "auto", "auto", "fp8", "int8"),
    "native_kernels": (True, True, True, True, False),
}
# Options that only say how.
HOW = {
    "max_num_batched_tokens": (8, 16, 32, 64),
    "block_size": (8, 16, 32),
    "max_num_seqs": (2, 4, 8),
    "async_scheduling": (True, True, False),
    "enable_prefix_caching": (True, True, False),
    "long_prefill_token_threshold": (0, 0, 0, 6),
    "scheduling_policy": ("fcfs", "fcfs", "priority"),
    "kv_offloading_size": (None, None, None, 0.01),
    "max_loras": (1, 2),
    "batch_invariant": (False,) * 9 + (True,),
}
MESHES = (
    *({},) * 6,
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 4},
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
)
PARAMS = {
    "temperature": (0, 0, 0.6, 1),
    "ignore_eos": (True, False),
    "top_k": (-1, -1, -1, 20),
    "top_p": (1, 1, 1, 0.8),
    "min_p": (0, 0, 0, 0.05),
    "repetition_penalty": (1, 1, 1, 1.3),
    "frequency_penalty": (0, 0, 0, 0.5),
    "presence_penalty": (0, 0, 0, -0.5),
    "logit_bias": (None, None, None, {10: 3.0, 11: -100.0}),
    "prompt_logprobs": (None, None, None, 1),
    "min_tokens": (0, 0, 0, 3),
    "stop": (None, None, None, ["a", "th"]),
    "stop_token_ids": (None, None, None, list(range(100, 130))),
    "allowed_token_ids": (None,) * 6 + (list(range(5, 300)),),
    "bad_words": (None,) * 6 + (["e", " the", "on"],),
}
FORMS = ({"regex": "[a-f]{3,30}x"}, {"choice": ["yes", "no, never"]}, {"json": {"type": "object"}})
# Models that see images, and what stands for an image in their prompts.
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
SEEING: dict[str, tuple[Callable[..., Path], str]] = {
    "mistral3": (models.make_model, "[IMG]"),
    "qwen2": (models.make_qwen2_5, _QWEN),
    "qwen3": (models.make_qwen3, _QWEN),
    "qwen3_5": (models.make_qwen3_5, _QWEN),
    "gemma3": (models.make_gemma3, "<start_of_image>"),
    "gemma4": (models.make_gemma4, "<|image|>"),
}


class Request(NamedTuple):
    prompt: dict[str, Any]
    params: SamplingParams
    lora: LoRARequest | None


def draw(rng, choices):
    return {name: rng.choice(values) for name, values in choices.items()}


class Model:
    """A model of a family, what it is given beside others of the family, and its adapters."""

    def __init__(self, rng, path):
        self.path, self.mark, self.adapters = path, None, []
        self.family = rng.choice([name for name in family_names() if name not in ENCODERS])
        self.plain = TINY | draw(rng, WHAT)
        if self.family in SEEING and rng.random() < 0.6:
            make, self.mark = SEEING[self.family]
            self.name = make(path / "seeing")
            self.plain |= {"max_model_len": 256}
        else:
            self.name = self.checkpoint(self.family)
        if rng.random() < 0.3:
            self.plain |= {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
            for i, rank in enumerate((4, 8, 7), 1):
                adapter = make_tiny_adapter(path / f"adapter-{i}", self.name, seed=i, rank=rank)
                self.adapters.append(LoRARequest(f"adapter-{i}", i, adapter))

    def checkpoint(self, family, seed=0):
        path = self.path / f"{family}-{seed}"
        return path if path.exists() else make_tiny_checkpoint(path, family, seed=seed)

    def ways(self, rng):
        """Options of an engine that answers as a plain one."""
        meshes = [mesh for mesh in MESHES if math.prod(mesh.values()) <= jax.device_count()]
        how = draw(rng, HOW) | rng.choice(meshes) | {"check_invariants": True}
        if not self.adapters:
            del how["max_loras"]
            how["enable_lora"] = rng.random() < 0.25  # and no request has an adapter
        # From what a single request needs on.
        length = self.plain["max_model_len"]
        blocks = rng.choice((1, 2, 4)) * length // how["block_size"]
        how["num_gpu_blocks_override"] = blocks + rng.randint(1, 3)
        if rng.random() < 0.15:
            how |= {"enable_chunked_prefill": False, "max_num_batched_tokens": length}
        method = rng.choice([None, None, None, "ngram", "draft_model", "draft_model", "mtp"])
        if method is not None:
            drafts = {"method": method, "num_speculative_tokens": rng.randint(1, 5)}
            if method == "draft_model":
                # Its own weights draft what is accepted, and others what is not.
                family = rng.choice([self.family, "llama"])
                drafts["model"] = str(self.checkpoint(family, seed=rng.randint(0, 1)))
            how["speculative_config"] = drafts
        return how

    def request(self, rng, seed):
        lora = rng.choice([None, *self.adapters])
        # The first ids of a model that sees images stand for them.
        prompt = {"prompt_token_ids": _ids(rng, first=20 if self.mark else 3)}
        if self.mark and rng.random() < 0.5:
            pictures = [picture(*rng.choice(((64, 64), (9, 3), (30, 50))), rng.randint(0, 1))]
            prompt = {"prompt": f"Look: {self.mark} What is it?" + " again" * rng.randint(0, 9)}
            prompt["multi_modal_data"] = {"image": pictures}
        return Request(prompt, _params(rng, seed), lora)


def _ids(rng, first):
    """A prompt of any length, which may begin as others do, or repeat itself."""
    ids = rng.choices(range(first, 380), k=rng.choice([1, 2, 5, 16, 17, 33, 60]))
    if rng.random() < 0.4:
        ids = list(range(50, 50 + rng.choice([16, 32, 40]))) + ids[:50]
    return (ids[:7] * 10)[:64] if rng.random() < 0.2 else ids


def _params(rng, seed):
    fields = draw(rng, PARAMS)
    if rng.random() < 0.2:
        fields["structured_outputs"] = StructuredOutputsParams(**rng.choice(FORMS))
    if fields["temperature"] and rng.random() < 0.3:
        fields["n"] = 2
    return SamplingParams(**fields, seed=seed, logprobs=2, max_tokens=rng.randint(4, 24))
