"""Checkpoints with random settings, against transformers: every family, beside golden.json's cases.

The classes of transformers write the checkpoints, so names of tensors and fields of config.json are
theirs. All constant parameters are made random.
"""

import copy
import random

import numpy as np
import pytest
from huggingface_hub.errors import StrictDataclassError

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.models.registry import family_names
from jaxllm.testing import tiny_config

SETTINGS = 6  # of each family
PROMPT_LEN = 150
FLAGS = (
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "attention_out_bias",
    "qk_layernorm", "use_qk_norm", "use_parallel_residual", "tie_word_embeddings",
    "norm_topk_prob", "scale_attn_by_inverse_layer_idx", "rope_interleave",
)  # fmt: skip
CHOICES = {
    "head_dim": (12, 16, 24, 40),
    "v_head_dim": (12, 20),
    "sliding_window": (1, 5, 40, 200),
    "attention_chunk_size": (5, 64),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("gelu", "gelu_pytorch_tanh"),
    "query_pre_attn_scalar": (16, 100),
    "attn_logit_softcapping": (None, 2.0, 50.0),
    "final_logit_softcapping": (None, 2.0, 30.0),
    "logit_scale": (0.0625, 1.5),
    "embedding_multiplier": (1.0, 12.0),
    "residual_multiplier": (0.22, 1.0),
    "attention_multiplier": (0.0156, 1.0),
    "logits_scaling": (0.5, 8.0),
    "clip_qkv": (None, 0.5),
    "num_experts_per_tok": (1, 2),
    "n_shared_experts": (1, 2),
    "routed_scaling_factor": (1.0, 2.827),
    "first_k_dense_replace": (0, 1, 2),
    "q_lora_rank": (16, 40),
    "kv_lora_rank": (16, 40),
    "use_sliding_window": (False, True),
    "max_window_layers": (0, 1, 2),
}
SCALINGS = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)


def draw(family, seed):
    """A config.json near the family's tiny one, with other values for some of its fields."""
    rng = random.Random(f"{family} {seed}")
    fields = {name: value for name, value in tiny_config(family).items() if value is not None}
    fields["pad_token_id"] = 0  # a class may have one that is not in this vocabulary
    known = class_of(fields)().to_dict()
    others = {name: rng.random() < 0.5 for name in FLAGS}
    others |= {name: rng.choice(values) for name, values in CHOICES.items()}
    if any("expert" in name for name in known):
        del others["hidden_act"]  # other functions than the usual one are refused
    others = {name: value for name, value in others.items() if name in known}
    fields |= {name: value for name, value in others.items() if rng.random() < 0.5}
    if "kv_lora_rank" in fields:
        fields.pop("head_dim", None)  # follows from other fields
    elif "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = rng.choice((1, 2, 4))
    has_one_rope = "full_attention" not in (known.get("rope_parameters") or {})
    if has_one_rope and "rope_theta" in fields and rng.random() < 0.5:
        theta = fields.pop("rope_theta")
        fields.pop("rope_scaling", None)
        fields["rope_parameters"] = rng.choice(SCALINGS) | {"rope_theta": theta}
    return fields


def class_of(fields):
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[fields["model_type"]]


def class_named(fields):
    import transformers

    return getattr(transformers, fields["architectures"][0])


def write(fields, path, seed):
    """Write a checkpoint of transformers, and return its logits for a prompt."""
    import torch

    model_class = class_named(fields)
    torch.manual_seed(seed)  # vectors keep what they begin with
    config = class_of(fields)(**copy.deepcopy(fields))
    model = model_class._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    stored = model.state_dict()
    with torch.no_grad():
        for name, tensor in stored.items():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim == 1 or "norm" in name:
                # Some are not initialised.
                tensor.copy_(torch.nan_to_num(tensor).clamp(-2, 2) + 0.2 * noise)
            else:
                tensor.copy_(noise * (0.5 if "embed" in name else tensor.shape[-1] ** -0.5))
        prompt = np.random.default_rng(seed).integers(3, fields["vocab_size"], PROMPT_LEN).tolist()
        model.tie_weights()
        model.save_pretrained(path)
    return prompt, logits_of(model_class, path, prompt, torch.float32)


def logits_of(model_class, path, prompt, dtype):
    """The logits of a class of transformers that computes everything in one type."""
    import torch

    # Its grouped product takes no float64.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = model_class.from_pretrained(path, dtype=dtype, **eager)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        # Recurrent layers compute in float32, whatever the model's type is.
        patch.setattr(torch, "float32", dtype)
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor.to(dtype))
        return model(torch.tensor([prompt]), use_cache=False).logits[0].numpy()


@pytest.mark.sweep
@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(SETTINGS))
@pytest.mark.parametrize("family", family_names())
def test_logits_match_transformers_or_the_setting_is_refused(family, seed, tmp_path, single_row):
    torch = pytest.importorskip("torch")
    fields = draw(family, seed)
    try:
        prompt, expected = write(fields, tmp_path, seed)
    except (
        KeyError,
        ValueError,
        RuntimeError,
        StrictDataclassError,
    ) as error:  # sizes that do not fit each other, too
        pytest.skip(f"transformers refuses {fields}: {error}")
    try:
        model = single_row(tmp_path, num_blocks=40)
    except (CheckpointError, UnsupportedModelError) as error:
        pytest.skip(f"refused: {error}")
    spread = max(1.0, expected.std())
    logits = model.logits(prompt, chunks=[37, 1, 112])
    atol = 2e-4 * spread
    if model.abstract_model.state_configs:
        # Recurrent layers normalise outputs that may be near zero, so that float32 rounds single
        # tokens of some checkpoints to 5e-4. So they are compared with float64, which has no such
        # error of its own.
        expected = logits_of(class_named(fields), tmp_path, prompt, torch.float64)
        atol = 5e-4 * spread
    np.testing.assert_allclose(logits, expected, atol=atol, rtol=0, err_msg=str(fields))
    # A formula that is wrong somewhere moves the mean, and rounding does not.
    assert np.sqrt(np.square(logits - expected).mean()) < 3e-5 * spread, fields
