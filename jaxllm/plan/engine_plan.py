"""What will run: the frozen EnginePlan. `jaxllm.plan.make_plan` makes it.

Nothing downstream chooses again: the runner takes the plan as it is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxllm_kernels.add_norm.api import AddNorm
from jaxllm_kernels.common import cdiv
from jaxllm_kernels.dense.api import ROUNDED_XLA, Matmul
from jaxllm_kernels.experts.api import ExpertsOp
from jaxllm_kernels.head_products.api import HeadProducts
from jaxllm_kernels.platform import OPTIONS_OF_FIXED_ORDER, Chip
from jaxllm_kernels.row_sums.api import RowSums

from jaxllm.cache_groups import CacheGroup, StateSnapshots, room_for
from jaxllm.layers.context import MixerBackend, MixerConfig
from jaxllm.layers.latent_attention import HeadMatrices
from jaxllm.layers.linear import Linear, Product
from jaxllm.layers.moe import Experts
from jaxllm.layers.norm import Summing
from jaxllm.layers.state import StateOps
from jaxllm.lora.device import AdapterArrays
from jaxllm.messages import EngineInfo
from jaxllm.models.base import Model
from jaxllm.models.draft_head import DraftHead
from jaxllm.models.specs import Architecture
from jaxllm.parallel.sharding import TENSOR, num_pieces
from jaxllm.plan.abstract import abstract_model
from jaxllm.plan.adapters import AdapterPlan
from jaxllm.plan.between_steps import logits_sharding
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.choose_kv_cache import KVCachePlan
from jaxllm.plan.draft_head import DraftHeadPlan
from jaxllm.plan.draft_model import DraftModelPlan
from jaxllm.plan.draft_plan import DraftPlan
from jaxllm.plan.embeds import EmbedsPlan, given_rows
from jaxllm.plan.gpu_compiler import AutotuneResults
from jaxllm.plan.images import ImagePlan
from jaxllm.plan.offload import OffloadPlan
from jaxllm.plan.stages import StagePlan
from jaxllm.pooler_config import Pooling
from jaxllm.quantization.linear import CodedExperts, CodedHead, CodedLinear, put_on_mesh
from jaxllm.sampling.layout import Layout
from jaxllm.sampling_params import MAX_STEP_LOGPROBS, SamplingParams
from jaxllm.speculative_config import Speculation


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """All choices that the runner needs and the start-up summary prints."""

    model_name: str
    model_dir: Path
    architecture: Architecture
    model_class: type[Model]
    chip: Chip
    dtype: Any
    load_format: Literal["auto", "safetensors", "dummy", "orbax"]
    seed: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    cache_groups: tuple[CacheGroup, ...]
    kv_cache: KVCachePlan | None  # None: keys and values are cached in the model's type
    num_logits: int  # the vocabulary, and padding if it is sharded
    attention: MixerBackend
    attention_configs: tuple[MixerConfig, ...]
    matmul: Matmul
    head_products: HeadProducts  # of latent attention
    experts: ExpertsOp | None  # None: the model has none
    coded_products: tuple[str, ...]  # how products with codes are computed, in words
    state_ops: StateOps | None  # None: no mixer has a state
    snapshots: StateSnapshots | None  # None: no states, or requests share no prefixes
    sampling: Layout
    add_norm: AddNorm | None
    row_sums: RowSums | None  # None: XLA adds up
    stages: tuple[StagePlan, ...]
    buckets: tuple[Bucket, ...]
    max_logprobs: int
    # Whether rows may sample late, under masks of grammars; these need a tokenizer.
    samples_late: bool
    logits_processors: tuple[Any, ...]
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams
    max_new_tokens: int | None
    compiles: Literal["ahead", "behind", "late"]
    autotune_results: AutotuneResults | None
    graph_options: tuple[tuple[str, str], ...]
    speculation: Speculation | None = None
    adapters: AdapterPlan | None = None
    offload: OffloadPlan | None = None  # None: evicted blocks are gone
    # The tail of a step; None: it samples.
    pooling: Pooling | None = None
    # Whether steps count the tokens of each expert of each layer.
    counts_experts: bool = False
    images: ImagePlan | None = None  # None: prompts are text
    embeds: EmbedsPlan | None = None  # None: prompts have tokens
    # The directory of this plan's programs, compiled ahead.
    program_bundle: Path | None = None

    @property
    def compiler_options(self) -> tuple[tuple[str, str], ...]:
        """The options of all programs, in addition to XLA's defaults."""
        results = self.autotune_results.compiler_options if self.autotune_results else ()
        fixed = () if self.row_sums is None else OPTIONS_OF_FIXED_ORDER
        # The last of equal ones holds.
        return self.chip.compiler_options + self.graph_options + results + fixed

    def step_options(self, num_tokens: int) -> tuple[tuple[str, str], ...]:
        """The options of steps of a number of tokens."""
        return self.chip.step_options(num_tokens) + self.compiler_options

    @property
    def num_given_rows(self) -> int:
        """The rows for embeddings that stand in place of those of tokens; 0: there are none."""
        return given_rows(self.images, self.embeds)

    @property
    def step_logprobs(self) -> int:
        """The most logprobs that a step computes for a position."""
        return min(self.max_logprobs, MAX_STEP_LOGPROBS)

    @property
    def leaves_logits(self) -> bool:
        """Whether steps leave their logits on the device."""
        return self.samples_late or (self.pooling is None and self.host_reads_logits)

    @property
    def verifies_late(self) -> bool:
        """Whether late rows may have drafts."""
        speculation = self.speculation
        return self.samples_late and speculation is not None and speculation.verifies_late

    @property
    def verifies_states_late(self) -> bool:
        """Whether states go on over the drafts of late rows that are right, so that steps leave
        what their layers got of drafts."""
        return self.verifies_late and self.state_ops is not None

    @property
    def num_ahead_rows(self) -> int:
        """For how many late rows a program of its own can make drafts, so that the host has them
        when it makes masks; 0: there is none, since nothing drafts, or at the end of steps."""
        speculation = self.speculation
        if speculation is None or speculation.proposes or not self.verifies_late:
            return 0
        return speculation.max_rows

    @property
    def host_reads_logits(self) -> bool:
        """Whether the host reads logits, for requests that want more logprobs."""
        return self.max_logprobs > MAX_STEP_LOGPROBS

    def logits_sharding(self, stage: StagePlan) -> NamedSharding:
        """The sharding of the logits that a step leaves."""
        return logits_sharding(stage.mesh, host_reads=self.host_reads_logits)

    @property
    def num_blocks(self) -> int:
        """The blocks of the first cache group, which determine those of the others."""
        return self.cache_groups[0].num_blocks

    @property
    def blocks_per_seq(self) -> int:
        return cdiv(self.max_model_len, self.block_size)

    def room_for(self, context: int) -> int:
        """How many requests with contexts of `context` tokens the cache has room for."""
        return room_for(self.cache_groups, context, self.block_size)

    @property
    def experts_shape(self) -> tuple[int, int]:
        """The number of layers, and of experts of the layer with the most."""
        return self.architecture.num_layers, max(self.architecture.num_experts.values())

    @property
    def num_devices(self) -> int:
        return sum(stage.mesh.size for stage in self.stages)

    @property
    def weights_bytes(self) -> int:
        """The bytes on the device with the most."""
        return max(stage.weights_bytes for stage in self.stages)

    @property
    def kv_cache_bytes(self) -> int:
        """The bytes on the device with the most."""
        return max(stage.kv_cache_bytes for stage in self.stages)

    @property
    def states_bytes(self) -> int:
        """The bytes of the states of all slots, on the device with the most."""
        return max(stage.states_bytes for stage in self.stages)

    @property
    def snapshots_bytes(self) -> int:
        """The bytes of the snapshots of states, on the device with the most."""
        return max(stage.snapshots_bytes for stage in self.stages)

    @property
    def between_bytes(self) -> int:
        """The bytes beside weights, caches and states between steps, on the device with the
        most."""
        return max(stage.between.num_bytes for stage in self.stages)

    def abstract_model(self, stage: StagePlan) -> Model:
        """The part of the model in a stage, with shapes in place of weights."""
        model = abstract_model(
            self.model_class, self.architecture, self.dtype, stage.mesh, stage.part
        )
        return self._with_kernels(model, self.experts, stage.mesh)

    def adapter_arrays(self, stage: StagePlan) -> AdapterArrays:
        """The arrays of adapters in a stage."""
        assert self.adapters is not None
        return self.adapters.arrays(self.abstract_model(stage), self.dtype, stage.mesh)

    @property
    def draft(self) -> DraftPlan | None:
        """The weights that draft; None: there are none."""
        return self.stages[0].draft

    @property
    def draft_model(self) -> DraftModelPlan | None:
        """The second model, which drafts."""
        return self.draft if isinstance(self.draft, DraftModelPlan) else None

    @property
    def draft_head(self) -> DraftHeadPlan | None:
        """The head that drafts from the model's hidden states."""
        return self.draft if isinstance(self.draft, DraftHeadPlan) else None

    def abstract_draft(self) -> Model | DraftHead:
        """The model or the head that drafts, with shapes in place of weights."""
        mesh = self.stages[0].mesh
        if (head := self.draft_head) is not None:
            abstract = head.spec.abstract(self.dtype, mesh.shape[TENSOR])
            return self._with_kernels(abstract, head.experts, mesh)
        assert (draft := self.draft_model) is not None
        model = abstract_model(draft.model_class, draft.architecture, self.dtype, mesh)
        return self._with_kernels(model, draft.experts, mesh)

    def _with_kernels(self, model: Any, experts: ExpertsOp | None, mesh: Mesh) -> Any:
        """The model, computed by the kernels of the plan on a mesh."""
        for _, module in nnx.iter_graph(model):
            if isinstance(module, CodedLinear | CodedHead):
                put_on_mesh(module, mesh)
            if isinstance(module, Summing):
                module.row_sums = self.row_sums
            if isinstance(module, Product):
                # CPUs are slow at products with 16-bit results.
                rounds = isinstance(module, HeadMatrices) or (
                    isinstance(module, Linear) and self._rounds(module)
                )
                on_cpu = self.chip.platform == "cpu"
                module.matmul = ROUNDED_XLA if rounds and not on_cpu else self.matmul
            if isinstance(module, HeadMatrices):
                module.products = self.head_products
            elif isinstance(module, Experts) and not isinstance(module, CodedExperts):
                assert experts is not None
                module.op = experts
        return model

    def _rounds(self, linear: Linear) -> bool:
        """Whether products are rounded at once: before a bias only if devices add them up, since
        they would exchange twice the bytes."""
        inputs = linear.weight.get_metadata()["axes"][-1:]
        return linear.bias is None or num_pieces(self.stages[0].mesh, inputs) > 1

    def info(self) -> EngineInfo:
        """The limits by which the frontend validates requests."""
        return EngineInfo(
            model=self.model_name,
            model_dir=str(self.model_dir),
            vocab_size=self.architecture.vocab_size,
            max_model_len=self.max_model_len,
            max_logprobs=self.max_logprobs,
            eos_token_ids=list(self.eos_token_ids),
            default_sampling_params=self.default_sampling_params,
            max_new_tokens=self.max_new_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            cache_groups=self.cache_groups,
            block_size=self.block_size,
            speculation=self.speculation,
            pooling=self.pooling,
            keeps_states=self.state_ops is not None,
            snapshots=self.snapshots,
            adapters=None if self.adapters is None else self.adapters.limits(self.dtype),
            host_places=() if self.offload is None else self.offload.places,
            has_block_files=self.offload is not None and self.offload.directory is not None,
            counted_experts=self.architecture.num_experts if self.counts_experts else {},
            images=None if self.images is None else self.images.spec,
            num_image_rows=0 if self.images is None else self.images.num_rows,
            embeds=None if self.embeds is None else self.embeds.spec,
        )
