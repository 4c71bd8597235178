"""What the engine would get of a request: its prompts as token ids, and its parameters."""

from functools import partial
from typing import Any

import msgspec

from jaxllm.errors import ValidationError
from jaxllm.openai.endpoints import CHAT, COMPLETIONS, Endpoint
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


def render(endpoint: Endpoint, service: Service, body: object) -> list[Rendered]:
    """The prompts of a request in the words of the engine; raise ValidationError."""
    request = endpoint.request.read(body, live=True)
    served = service.served.named(request.model)
    params = request.sampling_params(served)
    beams = request.beam_search(params, served)
    of_prompt = params.n if beams is None else beams.beam_width
    service.admission.check_answers(request.num_prompts * of_prompt)
    shown = {
        name: value
        for name, value in msgspec.to_builtins(params).items()
        if name != "output_kind" and value not in (None, [])
    }
    params = params.clone(structured_outputs=None)  # no grammar is made here
    truncate = request.truncate_prompt_tokens
    options = None if truncate is None else {"truncate_prompt_tokens": truncate}
    found = []
    for place, prompt in enumerate(request.prompts(served)):
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


def _render_chat(service: Service, body: object) -> Rendered:
    (rendered,) = render(CHAT, service, body)
    return rendered


render_chat = partial(JSONEndpoint, _render_chat)
render_completions = partial(JSONEndpoint, partial(render, COMPLETIONS))
