"""Requests to /v1/completions: the continuations of prompts."""

from dataclasses import replace
from typing import Any, ClassVar, Self

from jaxllm.errors import refused
from jaxllm.frontend.fill_in_the_middle import fill_in, find_marks
from jaxllm.openai.fields import RequestFields
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
from jaxllm.sampling_params import SamplingParams

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a completion request."""

    NEUTRAL: ClassVar = {
        "add_generation_prompt": (),
        "chat_template": (),
        "chat_template_kwargs": (),
        "continue_final_message": (),
        "include_reasoning": (True, False),
        "max_completion_tokens": (),
        "messages": (),
        "parallel_tool_calls": (True, False),
        "tool_choice": ("none", "auto"),
        "tools": (),
        "top_logprobs": (),
    }

    # One prompt or several, each a string or a list of token ids; null is an empty text.
    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    # Prompts of embeddings, before the others: a file in base64, or several.
    prompt_embeds: str | list[str] | None = None

    @classmethod
    def read(cls, body: object, *, live: bool = False) -> Self:
        if isinstance(body, dict) and body.get("prompt_embeds") is not None:
            body = {"prompt": None, **body}  # it may be left out
        return super().read(body, live=live)

    @property
    def num_prompts(self) -> int:
        return len(self._given)

    @property
    def num_prompt_copies(self) -> int:
        """Each of the n choices contains the prompt, or has it beside its text."""
        is_shown = self.echo or self.return_token_ids or self.prompt_logprobs is not None
        return (self.n or 1) if is_shown else 0

    def prompts(self, served: ServedModel) -> list[PromptType]:
        """Return the prompts of the request."""
        num = self.num_prompts
        if num > MAX_PROMPTS:
            raise refused("prompt", f"{num} prompts", f"at most {MAX_PROMPTS} are allowed")
        self._check_embeds()
        return [self._prompt(place, one, served) for place, one in enumerate(self._given)]

    def sampling_params(self, served: ServedModel) -> SamplingParams:
        """Return the sampling parameters. With `echo` the prompt has logprobs, too."""
        params: dict[str, Any] = {"logprobs": self.logprobs}
        if self._is_choosy:
            params |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        asked = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        # The engine always makes one token. A mere echo does not show it.
        params["max_tokens"] = 1 if self.is_mere_echo else asked
        if self.echo and self.prompt_logprobs is None:
            params["prompt_logprobs"] = self.logprobs
        return self.params_over(served, **params)

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        name, embeds = "prompt", len(self._embeds)
        if place is not None and self._has_several and place >= embeds:
            name = f"prompt[{place - embeds}]"
        names = {"prompt": name, "prompt_token_ids": name}
        if place is not None and isinstance(self.prompt_embeds, list):
            names["prompt_embeds"] = f"prompt_embeds[{place}]"
        if self.echo and self.prompt_logprobs is None:
            names["prompt_logprobs"] = "logprobs"
        if self.best_of is not None:
            names["n"] = "best_of"
        elif self.n in (None, 1):  # then the number of prompts exceeds the limit
            names["n"] = "prompt"
        return super().names_of_fields(place) | names

    def chosen(self, output: RequestOutput) -> RequestOutput:
        """The output with the answers that are shown: of `best_of`, the n whose tokens are
        likeliest."""
        if not self._is_choosy:
            return output
        ranked = sorted(output.outputs, key=_mean_logprob, reverse=True)[: self.n or 1]
        best = [replace(one, index=index) for index, one in enumerate(ranked)]
        return replace(output, outputs=best)

    @property
    def _is_choosy(self) -> bool:
        if self.best_of is None or self.best_of == (self.n or 1):
            return False
        if self.best_of < (self.n or 1):
            raise refused("best_of", self.best_of, f"it must be at least n={self.n or 1}")
        if self.stream:
            raise refused("best_of", self.best_of, "a stream does not wait for the best")
        return True

    @property
    def is_mere_echo(self) -> bool:
        """Whether the client asks only for the prompt, with its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def _given(self) -> list[Any]:
        """The prompts: files of embeddings, then the others."""
        embeds = self._embeds
        # Clients of OpenAI must give one, and give an empty one.
        if embeds and self.prompt in (None, "", []):
            return embeds
        return [*embeds, *(self.prompt if self._has_several else [self.prompt])]

    @property
    def _embeds(self) -> list[str]:
        given = self.prompt_embeds
        return [given] if isinstance(given, str) else given or []

    def _check_embeds(self) -> None:
        """Refuse what embeddings have not."""
        if self.prompt_embeds is not None and not self._embeds:
            raise refused("prompt_embeds", self.prompt_embeds, "give one file at least")
        if not self._embeds:
            return
        for name in ("echo", "suffix", "prompt_logprobs"):
            if (value := getattr(self, name)) not in (None, False, ""):
                why = "a prompt of embeddings has no text and no logprobs; leave it out"
                raise refused(name, value, why)

    @property
    def _has_several(self) -> bool:
        given = self.prompt
        return isinstance(given, list) and bool(given) and isinstance(given[0], str | list)

    def id_of(self, answer_id: str) -> str:
        return f"cmpl-{self.request_id or answer_id}"

    def _prompt(self, place: int, given: object, served: ServedModel) -> PromptType:
        prompt: TextPrompt | TokensPrompt | EmbedsPrompt
        if given is None:
            given = ""
        if place < len(self._embeds):
            prompt = EmbedsPrompt(prompt_embeds=self._embeds[place])
        elif self.suffix:
            prompt = TokensPrompt(prompt_token_ids=self._with_suffix(place, given, served))
        elif isinstance(given, str):
            if self.add_special_tokens is False and served.tokenizer is not None:
                length = served.prompt_length(self.truncate_prompt_tokens)
                ids = length.encode(served.tokenizer, given, add_special_tokens=False)
                prompt = TokensPrompt(prompt=given, prompt_token_ids=ids)
            else:
                prompt = TextPrompt(prompt=given)
        elif isinstance(given, list):
            prompt = TokensPrompt(prompt_token_ids=given)
        else:
            raise refused(
                self.names_of_fields(place)["prompt"],
                given,
                "it must be a string, a list of token ids, or a list of several of these",
            )
        if self.cache_salt is not None:
            prompt["cache_salt"] = self.cache_salt
        return prompt

    def _with_suffix(self, place: int, given: object, served: ServedModel) -> list[int]:
        marks = None if served.tokenizer is None else find_marks(served.tokenizer)
        if served.tokenizer is None or marks is None:
            why = "the model has no tokens for a text between two others; leave it out"
            raise refused("suffix", self.suffix, why)
        if not isinstance(given, str):
            raise refused(self.names_of_fields(place)["prompt"], given, "suffix needs a text")
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self, name):
                raise refused(name, getattr(self, name), "not with suffix, which is in the prompt")
        assert self.suffix is not None
        return fill_in(
            served.tokenizer,
            marks,
            given,
            self.suffix,
            served.prompt_length(None),
            add_special_tokens=self.add_special_tokens is not False,
        )


def _mean_logprob(one: CompletionOutput) -> float:
    return (one.cumulative_logprob or 0.0) / max(1, len(one.token_ids))
