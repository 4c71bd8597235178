"""Validates requests: a prompt and SamplingParams become EngineRequests, or a ValidationError.

This is the last place where a request can be refused. The engine core and the sampler rely on every
bound that is checked here: ids exist, lists fit the device tables, prompt and output fit the
context.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.answer_form import AnswerForms
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.frontend.prompt_reader import PromptReader
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.handover.params import Transfer, Transfers
from jaxllm.lora.catalog import AdapterCatalog
from jaxllm.lora.request import LoRARequest
from jaxllm.media.images import Images
from jaxllm.messages import EngineInfo, EngineRequest
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.plural import counted
from jaxllm.pooling_params import PoolingParams
from jaxllm.prompt_embeds.arrays import take_embeds
from jaxllm.prompts import PromptType
from jaxllm.sampling.logits_processor import encode_request, load_logits_processors
from jaxllm.sampling_params import (
    Limits,
    RequestOutputKind,
    SamplingParams,
)


class ProcessedInput(NamedTuple):
    """An accepted request. It shares no object with the user's input."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    requests: list[EngineRequest]  # one for each of n answers; they share the prompt's list
    trace_headers: Mapping[str, str] | None = None  # W3C headers of the request's parent span
    lora_request: LoRARequest | None = None
    # Makes the kv_transfer_params of its answer, of the replica that gave it.
    transfer_of: Callable[[int], dict[str, Any]] | None = None

    @property
    def output_kind(self) -> RequestOutputKind:
        params = self.params
        is_pooling = isinstance(params, PoolingParams)
        return RequestOutputKind.FINAL_ONLY if is_pooling else params.output_kind


class InputProcessor:
    """Validates and tokenises for one engine."""

    def __init__(self, config: EngineConfig, info: EngineInfo, tokenizer: Tokenizer | None):
        self._info = info
        self._tokenizer = tokenizer
        self._reader = PromptReader(config, info, tokenizer)
        self._seeds = random.Random(config.model.seed)  # for requests without a seed
        self.adapters = AdapterCatalog(info.adapters)
        self.images = Images(config, info.images, tokenizer, info.max_model_len)
        self._forms = AnswerForms(config, info, tokenizer)
        self._transfers = Transfers(config, info.hand_over)
        self._logits_processors = load_logits_processors(config.model.logits_processors, config)
        of_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
        if of_tokenizer is None or of_tokenizer >= info.vocab_size:
            self._eos_token_ids = list(info.eos_token_ids)
        else:
            self._eos_token_ids = list(dict.fromkeys([of_tokenizer, *info.eos_token_ids]))

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end an answer, of the tokenizer and of the model. The first is the end of
        sequence proper. The others count as stop tokens, which `stop_reason` reports."""
        return self._eos_token_ids

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        truncate_prompt_tokens: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
        reasoning: Reasoning | None = None,
        lora_request: LoRARequest | None = None,
    ) -> ProcessedInput:
        """Turn a prompt into n engine requests; raise ValidationError.

        Args:
          reasoning: what may come before the form of the answer, if the request asks for one;
            None leaves it to the engine's options.
        """
        if self._info.pooling is not None:
            raise ValidationError(
                "the engine pools (runner='pooling'), and generates no text; ask it for "
                f"{' or '.join(self._info.pooling.tasks)}, or start one with runner='generate'",
                parameter="runner",
            )
        priority, arrival_time = self._reader.check_request(
            request_id, priority, arrival_time, trace_headers
        )
        adapter = None if lora_request is None else self.adapters.check(lora_request)
        length = PromptLength.of(self._info.max_model_len, truncate_prompt_tokens)
        prompt, embeds = take_embeds(prompt, self._info.embeds, length, self._info.block_size)
        prompt, media = self.images.taken(prompt)
        text, token_ids, cache_salt = self._reader.read(prompt, length, may_be_empty=True)
        token_ids, items = self.images.placed(token_ids, media, length)
        params, transfer = self._resolve_params(params)
        if embeds is not None and params.prompt_logprobs is not None:
            why = "a prompt of embeddings has no tokens that could have some; leave it out"
            raise refused("prompt_logprobs", params.prompt_logprobs, why)
        self.images.check_logprobs(items, params.prompt_logprobs)
        read_ids = token_ids if embeds is None else []
        grammar = self._forms.grammar(params.structured_outputs, text, read_ids, reasoning)
        params.structured_outputs = None  # the engine gets the grammar alone
        bad_word_ids = self._tokenize_bad_words(params.bad_words or [])

        eos_token_ids = [] if params.ignore_eos else self._eos_token_ids
        asked = params.stop_token_ids or []
        stop_token_ids = asked + [token for token in eos_token_ids[1:] if token not in asked]
        eos_token_ids = eos_token_ids[:1]
        num_stop = len({*eos_token_ids, *stop_token_ids})
        if num_stop > Limits.MAX_STOP_TOKEN_IDS:
            raise refused(
                "stop_token_ids",
                len(asked),
                f"with the end-of-sequence ids there are {num_stop} stop ids; at most "
                f"{Limits.MAX_STOP_TOKEN_IDS} are allowed",
            )
        self._check_some_token_is_left(params, bad_word_ids, {*eos_token_ids, *stop_token_ids})
        room = self._info.max_model_len - len(token_ids)
        seed = self._seeds.getrandbits(64) if params.seed is None else int(params.seed)
        ids = [request_id] if params.n == 1 else [f"{i}_{request_id}" for i in range(params.n)]
        # All have the same prompt and share the lists. Only the first brings the prompt's logprobs.
        others = params.clone(prompt_logprobs=None) if params.n > 1 else params
        requests = [
            EngineRequest(
                request_id=engine_id,
                prompt_token_ids=token_ids,
                sampling_params=others if i else params,
                max_tokens=room if params.max_tokens is None else min(int(params.max_tokens), room),
                seed=(seed + i) % 2**64,
                eos_token_ids=eos_token_ids,
                stop_token_ids=stop_token_ids,
                bad_word_ids=bad_word_ids,
                priority=priority,
                arrival_time=arrival_time,
                cache_salt=cache_salt,
                grammar=grammar,
                adapter=adapter,
                images=items,
                embeds=embeds,
                gives_blocks=transfer.gives,
                source=None if i else transfer.source,
                prefix_leader_id=ids[0] if i else None,
            )
            for i, engine_id in enumerate(ids)
        ]
        # A second copy, since the user may change the list of the output.
        return ProcessedInput(
            request_id,
            text,
            list(token_ids),
            params,
            requests,
            trace_headers,
            lora_request,
            self._transfers.of_answer if transfer.gives else None,
        )

    # ---- sampling parameters

    def _resolve_params(self, params: SamplingParams) -> tuple[SamplingParams, Transfer]:
        """Return a validated copy, with the fields resolved that depend on the model, and what it
        asks of other engines."""
        if not isinstance(params, SamplingParams):
            raise refused("sampling_params", params, "it must be a SamplingParams")
        params = params.clone()  # this validates again: a field may have been assigned
        vocab_size, max_logprobs = self._info.vocab_size, self._info.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = wanted = getattr(params, name)
            if wanted == -1:
                setattr(params, name, wanted := vocab_size)
            if wanted is not None and wanted > max_logprobs:
                raise refused(
                    name,
                    asked,
                    f"the engine gives at most max_logprobs={max_logprobs}; ask for fewer or "
                    f"start it with max_logprobs={wanted if wanted < vocab_size else -1}",
                )
        self._reader.check_in_vocabulary("stop_token_ids", params.stop_token_ids or ())
        self._reader.check_in_vocabulary("logit_bias", params.logit_bias or ())
        self._reader.check_in_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        if params.stop and self._tokenizer is None:
            raise refused(
                "stop",
                params.stop,
                "there is no tokenizer (skip_tokenizer_init=True) to find strings with; use "
                "stop_token_ids",
            )
        transfer = self._transfers.take(params)
        self._check_extra_args(params)
        return params, transfer

    def _check_extra_args(self, params: SamplingParams) -> None:
        """Replace `extra_args` by a deep copy, and refuse what a logits processor refuses."""
        if params.extra_args:
            if not self._logits_processors:
                raise refused(
                    "extra_args",
                    params.extra_args,
                    "the engine has no logits processor to read it; start it with "
                    "logits_processors=(...)",
                )
            try:
                packed = msgspec.msgpack.encode(params.extra_args)
            except (TypeError, ValueError, OverflowError) as error:
                raise refused(
                    "extra_args", params.extra_args, f"it must hold plain data: {error}"
                ) from error
            params.extra_args = msgspec.msgpack.decode(packed)
        try:
            encode_request(self._logits_processors, params)
        except ValueError as error:
            raise refused("extra_args", params.extra_args, str(error)) from error

    def _tokenize_bad_words(self, words: list[str]) -> list[list[int]]:
        """The token sequences of bad words, each at the head of a text and after a space."""
        if not words:
            return []
        if self._tokenizer is None:
            raise refused(
                "bad_words",
                words,
                "there is no tokenizer (skip_tokenizer_init=True); use logit_bias",
            )
        sequences: list[list[int]] = []
        for word in words:
            bare = word.lstrip()
            for variant in (bare, " " + bare) if bare else (word,):
                ids = self._tokenizer.encode(variant, add_special_tokens=False)
                if not ids or len(ids) > Limits.MAX_BAD_WORD_TOKENS:
                    raise refused(
                        "bad_words",
                        word,
                        f"it is {counted(len(ids), 'token')} long; between 1 and "
                        f"{Limits.MAX_BAD_WORD_TOKENS} are allowed",
                    )
                self._reader.check_in_vocabulary("bad_words", ids)
                if ids not in sequences:
                    sequences.append(ids)
        if len(sequences) > Limits.MAX_BAD_WORDS:
            raise refused(
                "bad_words",
                words,
                f"they make {len(sequences)} token sequences; at most {Limits.MAX_BAD_WORDS} are "
                "allowed",
            )
        return sequences

    def _check_some_token_is_left(
        self, params: SamplingParams, bad_word_ids: list[list[int]], stop_ids: set[int]
    ) -> None:
        """Refuse masks that leave no token. A bad word of one token always masks it; a longer one
        masks its last token only after the others."""
        banned = {ids[0] for ids in bad_word_ids if len(ids) == 1}
        if params.min_tokens:
            banned |= stop_ids
        allowed = params.allowed_token_ids or range(self._info.vocab_size)
        if len(banned) < len(allowed) or not banned.issuperset(allowed):
            return
        causes = ["bad_words"] if bad_word_ids else []
        if params.min_tokens:
            causes.append(f"min_tokens={params.min_tokens}, which puts off stop ids")
        raise refused(
            "allowed_token_ids",
            params.allowed_token_ids,
            f"{' and '.join(causes)} would leave none of them; allow others",
        )


def tokenization_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Turn `tokenization_kwargs` into arguments of `process`."""
    if options is not None and not isinstance(options, Mapping):
        raise refused("tokenization_kwargs", options, "it must be a dict")
    options = dict(options or {})
    unknown = options.keys() - {"truncate_prompt_tokens"}
    if unknown:
        raise ValidationError(
            f"tokenization_kwargs: {sorted(map(str, unknown))} are not supported; "
            "only 'truncate_prompt_tokens' is",
            parameter="tokenization_kwargs",
        )
    return options
