"""What the engine would get of a request: its prompts as token ids, and its parameters."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from jaxllm.errors import ValidationError
from jaxllm.openai.endpoints import CHAT, COMPLETIONS, Endpoint, Request
from jaxllm.openai.served_model import ServedModel
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.json_endpoint import JSONEndpoint
from jaxllm.server.service import Service


class Rendered(msgspec.Struct, kw_only=True):
    """One prompt. `sampling_params` has what differs from the defaults of SamplingParams."""

    request_id: str
    model: str
    prompt: str | None
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    cache_salt: str | None
    priority: int


class RenderEndpoint(JSONEndpoint):
    """Renders requests as they are served: images are decoded in threads of their own, where they
    delay no text."""

    def __init__(self, endpoint: Endpoint, service: Service, *, takes_one: bool):
        super().__init__(partial(_read, endpoint), service)
        self._takes_one = takes_one

    async def _answer(self, value: object, size: int) -> object:
        engine = self._service.engine
        asked = cast(_Asked, await super()._answer(value, size))
        prompts = await engine.images.loaded(asked.prompts)
        render = partial(_render, self._service, asked._replace(prompts=prompts))
        rendered = await engine.in_tokenizer_thread(render, size)
        return rendered[0] if self._takes_one else rendered


class _Asked(NamedTuple):
    request: Request
    served: ServedModel
    params: SamplingParams
    prompts: Sequence[PromptType]


def _read(endpoint: Endpoint, service: Service, body: object) -> _Asked:
    """Read a request and its prompts; raise ValidationError."""
    request = endpoint.request.read(body, live=True)
    served = service.served.named(request.model)
    params = request.sampling_params(served)
    beams = request.beam_search(params, served)
    of_prompt = params.n if beams is None else beams.beam_width
    service.admission.check_answers(request.num_prompts * of_prompt)
    return _Asked(request, served, params, request.prompts(served))


def _render(service: Service, asked: _Asked) -> list[Rendered]:
    """The prompts in the words of the engine; raise ValidationError."""
    request, served, params, prompts = asked
    shown = {
        name: value
        for name, value in msgspec.to_builtins(params).items()
        if name != "output_kind" and value not in (None, [])
    }
    params = params.clone(structured_outputs=None)  # no grammar is made here
    truncate = request.truncate_prompt_tokens
    options = None if truncate is None else {"truncate_prompt_tokens": truncate}
    found = []
    for place, prompt in enumerate(prompts):
        try:
            one = service.engine.process_input(
                f"render-{place}",
                prompt,
                params,
                priority=request.priority or 0,
                tokenization_kwargs=options,
                lora_request=served.lora_request,
            )
        except ValidationError as error:
            raise request.in_its_words(error, place) from error
        found.append(
            Rendered(
                request_id=request.id_of(f"render-{place}"),
                model=served.names[0],
                prompt=one.prompt,
                token_ids=one.prompt_token_ids,
                sampling_params=shown,
                stream=bool(request.stream),
                cache_salt=one.requests[0].cache_salt,
                priority=request.priority or 0,
            )
        )
    return found


render_chat = partial(RenderEndpoint, CHAT, takes_one=True)
render_completions = partial(RenderEndpoint, COMPLETIONS, takes_one=False)
