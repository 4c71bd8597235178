"""The messages between frontends and an engine: typed structs that cross processes as msgpack.
No pickle."""

import enum

import msgspec

from jaxllm.cache_groups import CacheGroup, StateSnapshots
from jaxllm.config import EngineConfig
from jaxllm.handover.source import BlockSource, HandOver
from jaxllm.lora.request import Adapter, AdapterLimits
from jaxllm.media.item import ImageItem, ImageSpec
from jaxllm.metrics.startup import Phase
from jaxllm.pooler_config import Pooling
from jaxllm.pooling_params import PoolingTask
from jaxllm.prompt_embeds.item import EmbedsItem, EmbedsSpec
from jaxllm.sampling_params import SamplingParams
from jaxllm.speculative_config import Speculation

# ---- frontend -> engine core


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A validated request: the engine core never refuses one for its content."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # resolved: never None, prompt + max_tokens fits max_model_len
    seed: int  # resolved: the request's own, or one drawn by the frontend; 0 <= seed < 2**64
    eos_token_ids: list[int] = []  # [] with ignore_eos; finish with stop_reason None
    # The user's ids, and all ends of sequence but the first; finish with the id as stop_reason.
    stop_token_ids: list[int] = []
    bad_word_ids: list[list[int]] = []  # token sequences that must not appear
    priority: int = 0  # lower is served first
    arrival_time: float = 0.0  # time.time() when the request arrived
    cache_salt: str | None = None
    # With n > 1 samples of one prompt, all but the first wait until the prompt of the first, the
    # leader, is dispatched, and then share its blocks.
    prefix_leader_id: str | None = None
    # What is pooled of the prompt; None: the request generates.
    pooling_task: PoolingTask | None = None
    # The form of the answer, from its first token on: a grammar of llguidance.
    grammar: str | None = None
    adapter: Adapter | None = None
    images: list[ImageItem] = []  # in the order of their places
    embeds: EmbedsItem | None = None  # in place of the tokens of the prompt
    # Of engines that hand prompts over: whether others are to have the blocks, and who has them.
    gives_blocks: bool = False
    source: BlockSource | None = None
    replica: int = 0  # the replica that serves it; the engine chooses it


# ---- engine core -> frontend


class EngineInfo(msgspec.Struct, kw_only=True):
    """What the frontend must know of the engine to validate requests; fixed at start."""

    model: str
    model_dir: str  # local directory with config.json
    vocab_size: int  # rows of the output head: ids at or above it do not exist
    max_model_len: int
    max_logprobs: int  # resolved: -1 in the config is the vocabulary size here
    eos_token_ids: list[int]  # from config.json and generation_config.json
    max_num_seqs: int
    max_num_batched_tokens: int
    cache_groups: tuple[CacheGroup, ...]
    block_size: int
    speculation: Speculation | None = None
    pooling: Pooling | None = None  # None: the engine generates
    # Whether layers keep a state of each request, which a cached prefix of tokens does not have.
    keeps_states: bool = False
    # Copies of such states, so that requests go on from a prefix; None: they share none.
    snapshots: StateSnapshots | None = None
    adapters: AdapterLimits | None = None  # None: the engine has none
    # Of the second home of KV blocks: places on the host by cache group, and whether there are
    # files too. Empty: there is none.
    host_places: tuple[int, ...] = ()
    has_block_files: bool = False
    hand_over: HandOver | None = None  # None: it has nothing to do with other engines
    # The number of experts of each layer that has some, if their tokens are counted.
    counted_experts: dict[int, int] = {}
    images: ImageSpec | None = None  # None: prompts are text
    num_image_rows: int = 0  # how many tokens of images the device's pool holds
    embeds: EmbedsSpec | None = None  # None: prompts have tokens
    # The parameters that the model recommends, for requests without any.
    default_sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    # The longest answer that the model recommends, if any; servers enforce it.
    max_new_tokens: int | None = None

    @property
    def num_cache_tokens(self) -> int:
        """How many tokens fit in the cache of the layers that keep the most tokens."""
        return self.cache_groups[0].num_blocks * self.block_size


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class PositionLogprobs(msgspec.Struct, array_like=True):
    """Logprobs at one position: first the token at the position, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the first entry, from 1


class RequestStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Times of one request in the engine, on time.monotonic(); 0.0 means not yet."""

    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_preemptions: int = 0
    is_corrupted: bool = False  # it ended because its logits were not finite
    replica: int = 0


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The result of one step for one request."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: list[PositionLogprobs] | None = None  # one per new token, if asked for
    # Of a request that pools: f32, little-endian, one vector after another.
    new_vectors: bytes | None = None
    new_prompt_logprobs: list[PositionLogprobs] | None = None  # prompt positions from 1 on
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    # With the first and the last output, and with the first one after a preemption.
    stats: RequestStats | None = None
    error: str | None = None  # with FinishReason.ERROR


# ---- between a frontend and an engine in a process of its own


class Assignment(msgspec.Struct):
    """The input of a new engine process."""

    config: EngineConfig
    directory: str  # of its sockets; only this user may enter it
    python_path: list[str]  # where classes that the config names are found

    @property
    def input_address(self) -> str:
        return f"ipc://{self.directory}/input"

    @property
    def output_address(self) -> str:
        return f"ipc://{self.directory}/output"


class Hello(msgspec.Struct, tag=True):
    """A frontend has connected, and waits for Ready."""


# Stands after the frontend's name in the ids of its requests.
OWNER_MARK = "/"


class Sibling(msgspec.Struct, array_like=True):
    """What differs in another answer to the same prompt."""

    request_id: str
    seed: int


class Add(msgspec.Struct, tag=True):
    """The requests of one prompt. Their shared fields travel once: prompts are long, and n may be
    large."""

    first: EngineRequest
    others: list[Sibling] = []

    @classmethod
    def of(cls, requests: list[EngineRequest]) -> "Add":
        first, *others = requests
        return cls(first, [Sibling(one.request_id, one.seed) for one in others])

    def requests(self) -> list[EngineRequest]:
        first = self.first
        if not self.others:
            return [first]
        # Only the first brings the prompt's logprobs.
        params = first.sampling_params.clone(prompt_logprobs=None)
        return [first] + [
            msgspec.structs.replace(
                first,
                request_id=one.request_id,
                seed=one.seed,
                sampling_params=params,
                prefix_leader_id=first.request_id,
                source=None,  # it finds the blocks of the first
            )
            for one in self.others
        ]


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class Call(msgspec.Struct, tag=True):
    """A command for the engine, which answers with a Returned or a CallFailed of the same number.
    The engine's loop decodes the command, so it can answer a malformed one too."""

    number: int
    command: msgspec.Raw


class Stop(msgspec.Struct, tag=True):
    """End now. The frontends have already ended the unfinished requests."""


ToEngine = Hello | Add | Abort | Call | Stop


class Ready(msgspec.Struct, tag=True):
    """The engine takes requests."""

    info: EngineInfo
    startup: list[Phase] = []


class Follows(msgspec.Struct, tag=True):
    """The process follows rank 0 of an engine over several hosts. It takes no requests, and ends
    with rank 0."""


class Outputs(msgspec.Struct, tag=True):
    """The outputs of a step for the requests of one frontend."""

    outputs: list[EngineOutput]


class Failure(msgspec.Struct):
    """An error. `kind` is the name of its type, from which the other side makes the same error if
    it is one that users may see."""

    reason: str
    kind: str


class Returned(msgspec.Struct, tag=True):
    """A command's answer, as bytes: its type is the command's."""

    number: int
    answer: msgspec.Raw


class CallFailed(msgspec.Struct, tag=True):
    """Why a command has no answer."""

    number: int
    failure: Failure


class Beat(msgspec.Struct, tag=True):
    """The engine's process lives."""


class Dead(msgspec.Struct, tag=True):
    """The engine has ended, and why."""

    failure: Failure


FromEngine = Ready | Follows | Outputs | Returned | CallFailed | Beat | Dead
