"""An adapter in training: the base's weights stay, and two thin matrices a layer are trained.

The base computes as it does when adapters are served, with one adapter in one slot.
"""

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.low_rank.api import LowRank
from jaxllm_kernels.low_rank.xla import XlaLowRank
from safetensors.numpy import save_file

from jaxllm.errors import UnsupportedModelError, refused
from jaxllm.files import read_json
from jaxllm.lora.adapter_config import CONFIG
from jaxllm.lora.adapter_file import WEIGHTS
from jaxllm.lora.device import Target, adapted, targets_of
from jaxllm.models.architecture import read_architecture
from jaxllm.models.checkpoint_map import Concat, Tensor
from jaxllm.training.export import write_json
from jaxllm.training.forward import RowModel
from jaxllm.training.options import AdapterOptions


class AdapterModel:
    """Maps an adapter's matrices, beside the base's weights, and token ids to logits."""

    def __init__(self, model_dir: Path, options: AdapterOptions):
        self._options = options
        self.config = read_json(model_dir / "config.json")
        self.base = RowModel(read_architecture(self.config))
        self.frozen = self.base.load(model_dir)
        self._targets = [its for its in targets_of(self.base.abstract) if self._layers_of(its)]
        if not self._targets:
            raise refused("lora_targets", options.lora_targets, "the model has no such layers")
        # By the names of a checkpoint's layers, as PEFT has them.
        self.parameters: dict[str, jax.ShapeDtypeStruct] = {}
        for target in self._targets:
            self._check_rows(target)
            for layer, part in self._layers_of(target).items():
                sizes = {"lora_A": (options.lora_rank, target.num_inputs)}
                sizes["lora_B"] = (target.parts[part].rows, options.lora_rank)
                for side, shape in sizes.items():
                    self.parameters[f"{layer}.{side}"] = jax.ShapeDtypeStruct(shape, jnp.float32)

    def initial_weights(self, seed: int) -> dict[str, jax.Array]:
        """Random A and zeros for B, so that the adapter changes nothing at first."""
        random = np.random.default_rng(seed)

        def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
            if name.endswith("lora_B"):
                return jnp.zeros(shape)
            bound = (1 / shape[1]) ** 0.5  # as PEFT draws them
            return jnp.asarray(random.uniform(-bound, bound, shape), jnp.float32)

        return {name: draw(name, its.shape) for name, its in self.parameters.items()}

    def logits(self, weights: Mapping[str, jax.Array], token_ids: jax.Array) -> jax.Array:
        """Compute float32 logits [B, length, V] from the weights of both."""
        adapters = {target.name: self._matrices(target, weights) for target in self._targets}
        slots = jnp.zeros(token_ids.size, jnp.int32)
        change = functools.partial(adapted, adapters=adapters, slots=slots, op=XlaLowRank())
        return self.base.logits(weights, token_ids, change)

    def export(self, folder: Path, weights: Mapping[str, jax.Array]) -> None:
        """Write the adapter as PEFT does. It is written beside its place and then renamed."""
        beside = folder.with_name(folder.name + ".new")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        names = sorted({name.split(".")[-2] for name in self.parameters})
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._options.lora,
            "r": self._options.lora_rank,
            "lora_alpha": self._options.lora_alpha,
            "target_modules": names,
            "bias": "none",
            "inference_mode": True,
        }
        write_json(beside / CONFIG, config)
        tensors = {f"base_model.model.{n}.weight": np.asarray(w) for n, w in weights.items()}
        save_file(tensors, beside / WEIGHTS, metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)

    def _layers_of(self, target: Target) -> dict[str, int]:
        """The layers of a target that are trained, and their parts."""
        wanted = self._options.lora_targets
        return {
            layer: part
            for part, layer in enumerate(target.layers)
            if not wanted or layer.rpartition(".")[2] in wanted
        }

    def _check_rows(self, target: Target) -> None:
        """Refuse a layer whose rows are not one after the other as in the checkpoint."""
        source = self.base.sources[f"{target.name}.weight"]
        parts = source.sources if isinstance(source, Concat) else (source,)
        if not all(isinstance(part, Tensor) for part in parts) or len(parts) != len(target.parts):
            raise UnsupportedModelError(
                f"{target.name}: adapters of layers with such rows are served, and not trained"
            )

    def _matrices(self, target: Target, weights: Mapping[str, jax.Array]) -> LowRank:
        """The matrices of a fused layer, in one slot; zeros for parts that are not trained."""
        rank, scale = self._options.lora_rank, self._options.lora_alpha / self._options.lora_rank
        a, b, trained = [], [], self._layers_of(target)
        for layer, part in zip(target.layers, target.parts, strict=True):
            if layer in trained:
                a.append(weights[f"{layer}.lora_A"])
                b.append(weights[f"{layer}.lora_B"].T * scale)
            else:
                a.append(jnp.zeros((rank, target.num_inputs)))
                b.append(jnp.zeros((rank, part.rows)))
        return LowRank(jnp.stack(a)[None], tuple(one[None, :, None] for one in b))
