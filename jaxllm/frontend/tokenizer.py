"""The tokenizer of a model: text to ids and back, and chat templates.

A request that arrives as text comes here first. Hugging Face's tokenizer does the work. Only this
module loads it, and to import this module does not load transformers.
"""

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from jaxllm import bundled
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ValidationError, refused
from jaxllm.frontend.chat_messages import plain_message
from jaxllm.frontend.chat_template import Conversation, render
from jaxllm.frontend.detokenizer import Detokenizer
from jaxllm.frontend.long_text import Encode, Shape, encode_at_most, encode_end
from jaxllm.frontend.tokenizer_files import SmallFiles, defect, refuse_unread
from jaxllm.importing import without_collections
from jaxllm.media.chat import take_images
from jaxllm.prompts import TokensPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The names, in tokenizer_config.json, of the class that needs only tokenizer.json.
_GENERAL_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# The model types for which AutoTokenizer takes the named class. For qwen2, as an example, it takes
# the model's own class, whatever the directory names.
_TRUSTED_MODEL_TYPES = ("llama", "qwen3")


# Texts with more characters take from a quarter of a second to many seconds.
LONG_TEXT = 1 << 18


class Tokenizer:
    """A Hugging Face tokenizer (`hf`) and what the frontend needs of it.

    Threads may share it: to encode a short text never waits for a long text.
    """

    def __init__(self, hf: "PreTrainedTokenizerBase"):
        self.hf = hf
        # Locks, since encoding sets modes of the tokenizer.
        self._lock, self._long_lock = threading.Lock(), threading.Lock()

    @functools.cached_property
    def detokenizer(self) -> Detokenizer:
        """Turns ids into text, incrementally; all requests share it."""
        return Detokenizer(self.hf)

    @functools.cached_property
    def _hf_for_long(self) -> "PreTrainedTokenizerBase":
        with self._lock:
            return copy.deepcopy(self.hf)

    @property
    def eos_token_id(self) -> int | None:
        token = self.hf.eos_token_id
        return token if isinstance(token, int) else None

    @functools.cached_property
    def start_of_document(self) -> list[int]:
        """The ids of an empty prompt, after which a model begins a document: what the tokenizer
        adds to texts, or else the token that is before a document. That is the end of another one
        in families that have no token for a beginning."""
        begin = (self.hf.bos_token_id, self.hf.eos_token_id)
        return self.encode("") or [token for token in begin if isinstance(token, int)][:1]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """All ids of a text of any length. Text from requests needs one of the next two methods."""
        return self._encoder(text)(text, add_special_tokens)

    def encode_at_most(self, text: str, most: int, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; raises TooManyTokens if they are certainly more than `most`, and
        TooLongToTell if that would cost too much to find out. The result may still have more."""
        encode = self._encoder(text)
        return encode_at_most(encode, self._shape, text, most, add_special_tokens)

    def encode_end(
        self, text: str, num: int, most: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The last `num` ids of a text. Tokenizes no more of the text than needed; raises
        TooLongToTell if that is more than `most` tokens justify."""
        encode = self._encoder(text)
        return encode_end(encode, self._shape, text, num, most, add_special_tokens)

    def encode_cut(
        self,
        text: str,
        pair: str | None,
        *,
        num: int | None,
        side: Literal["left", "right"],
        add_special_tokens: bool = True,
    ) -> tuple[list[int], list[int]]:
        """The ids of one text, or of two that belong together, and the types of the ids. With `num`
        no more than that many are left, with all special tokens: the longer text is cut."""
        with self._lock:
            self.hf.truncation_side = side
            encoded = self.hf(
                text,
                pair,
                add_special_tokens=add_special_tokens,
                truncation=num is not None,
                max_length=num,
                return_token_type_ids=True,
                verbose=False,
            )
        ids: Any = encoded["input_ids"]
        return list(ids), list(encoded.get("token_type_ids") or [0] * len(ids))

    def head_of(self, text: str, num: int) -> str:
        """The text up to its last character of which the first `num` tokens have a part."""
        with self._lock:
            encoded = self.hf(
                text,
                add_special_tokens=False,
                truncation=False,
                return_offsets_mapping=bool(self.hf.is_fast),
                verbose=False,
            )
            ids: Any = encoded["input_ids"]
            if len(ids) <= num:
                return text
            if not self.hf.is_fast:
                return str(self.hf.decode(ids[:num], clean_up_tokenization_spaces=False))
        offsets: Any = encoded["offset_mapping"]
        return text[: max(end for _, end in offsets[:num])]

    @functools.cached_property
    def _shape(self) -> Shape:
        with self._lock:
            return Shape.of(self.hf)

    def _encoder(self, text: str) -> Encode:
        """Return a function that encodes this text, or pieces of it, one at a time."""
        is_long = len(text) > LONG_TEXT
        hf, lock = (self._hf_for_long, self._long_lock) if is_long else (self.hf, self._lock)

        def encode(piece: str, add_special_tokens: bool) -> list[int]:
            with lock:
                return _encode(hf, piece, add_special_tokens)

        return encode

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> str:
        """The text of these tokens after the prompt's text."""
        stream = self.detokenizer.stream(
            skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
        )
        return stream.append(token_ids)


def _encode(hf: "PreTrainedTokenizerBase", text: str, add_special_tokens: bool) -> list[int]:
    # verbose=False: no warning about the length, for which the engine has its own limit.
    encoded = hf(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoded["input_ids"])


def load_tokenizer(config: ModelConfig, model_dir: str) -> Tokenizer:
    """Load the tokenizer that a config names, or else the one in the model's directory."""
    # transformers would warn that there is no PyTorch, which it does not need here.
    logging.getLogger("transformers").addFilter(_is_not_about_torch)
    # A tokenizer revision is not the revision of the model's directory.
    source = config.tokenizer or (config.model if config.tokenizer_revision else model_dir)
    source = str(bundled.path(source) or source)
    directory = Path(source)
    is_local = directory.is_dir()
    files = SmallFiles(directory) if is_local else None
    if files is not None and not config.trust_remote_code:
        refuse_unread(directory)
    loader = _auto_loader() if files is None else _loader(files)
    try:
        hf = loader.from_pretrained(
            source,
            revision=config.tokenizer_revision or config.revision,
            cache_dir=config.download_dir,
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # the Rust library raises nothing more special
        reason = str(error).strip().partition("\n")[0]
        remedy = "pass tokenizer=..., or skip_tokenizer_init=True and prompts as prompt_token_ids"
        if "trust_remote_code" in str(error):
            remedy = "pass trust_remote_code=True if you trust it"
        elif is_local and (found := defect(directory, reason)) is not None:
            raise CheckpointError(f"{found}; correct it, or {remedy}") from error
        raise ValidationError(
            f"cannot load a tokenizer from {source!r}: {reason}; {remedy}",
            parameter="tokenizer",
            value=source,
        ) from error
    # Models with towers may have the template in a file of their processor.
    if files is not None and not hf.chat_template:
        hf.chat_template = files["chat_template.json"].get("chat_template")
    return Tokenizer(hf)


def _loader(files: SmallFiles) -> Any:
    """Return AutoTokenizer, or the general class if AutoTokenizer would take that.

    The general class needs only tokenizer.json. AutoTokenizer would first load the configurations
    of all models, and torch if it is installed: two seconds and hundreds of megabytes.
    """
    model, tokenizer = files["config.json"], files["tokenizer_config.json"]
    # Of a GGUF file, whose tokenizer is whole.
    is_whole = tokenizer.get("made_of") == "gguf"
    if (
        (is_whole or model.get("model_type") in _TRUSTED_MODEL_TYPES)
        and tokenizer.get("tokenizer_class") in _GENERAL_CLASSES
        and "auto_map" not in tokenizer
    ):
        with without_collections():
            from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    return _auto_loader()


def _auto_loader() -> Any:
    with without_collections():
        from transformers import AutoTokenizer

    return AutoTokenizer


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")


class TextLength(Protocol):
    """A limit for the length of texts."""

    def encode(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of a text; raise ValidationError if there are too many."""
        ...


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    render: Callable[[Conversation], str] = render,
    length: "TextLength | None" = None,
    add_special_tokens: bool = False,
) -> TokensPrompt:
    """Turn a conversation into a prompt by the model's chat template, or by `chat_template`.
    Without `length` the prompt may have any length.

    Templates write the special tokens, so the tokenizer would add a second BOS. A template that
    does not needs `add_special_tokens`.
    """
    seen = take_images(messages)
    conversation = _conversation(
        tokenizer,
        seen.messages,
        chat_template,
        add_generation_prompt,
        continue_final_message,
        tools,
        chat_template_kwargs,
    )
    text = render(conversation)
    if length is None:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    else:
        ids = length.encode(tokenizer, text, add_special_tokens=add_special_tokens)
    prompt = TokensPrompt(prompt=text, prompt_token_ids=ids)
    if seen.data:
        prompt["multi_modal_data"] = seen.data
    return prompt


def _conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    chat_template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Conversation:
    """Validate the arguments of `render_chat`, and make the template's input."""
    for name, value, kind in (
        ("messages", messages, list | tuple),
        ("chat_template", chat_template, str | None),
        ("tools", tools, list | tuple | None),
        ("chat_template_kwargs", chat_template_kwargs, Mapping | None),
    ):
        if not isinstance(value, kind):
            raise refused(name, value, f"it must be {_KINDS[name]}")
    if chat_template is None and not tokenizer.hf.chat_template:
        raise ValidationError(
            "the tokenizer has no chat template; pass chat_template=..., or use generate() with "
            "a prompt in the form the model expects",
            parameter="chat_template",
        )
    if continue_final_message and add_generation_prompt:
        raise ValidationError(
            "continue_final_message=True and add_generation_prompt=True exclude each other; "
            "set add_generation_prompt=False to continue the last message",
            parameter="continue_final_message",
        )
    reserved = _reserved(tokenizer, chat_template_kwargs)
    if reserved:
        raise refused("chat_template_kwargs", reserved, "these are not the template's; leave out")
    conversation = [
        plain_message(message, f"messages[{place}]") for place, message in enumerate(messages)
    ]
    if not conversation:
        raise ValidationError("messages is empty; give at least one", parameter="messages")
    template = find_chat_template(tokenizer, chat_template, tools)
    if "image" not in template and any(isinstance(one["content"], list) for one in conversation):
        raise ValidationError(
            "messages: there are images, and the chat template has no place for any; send text, "
            "or, if the model sees images, pass chat_template=...",
            parameter="messages",
        )
    return Conversation(
        template=template,
        # Leave out fields that are None: templates would write "None".
        messages=[{k: v for k, v in one.items() if v is not None} for one in conversation],
        tools=None if tools is None else list(tools),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables={**tokenizer.hf.special_tokens_map, **(chat_template_kwargs or {})},
    )


def find_chat_template(tokenizer: Tokenizer, given: str | None, tools: object) -> str:
    """The text of the template: a tokenizer may have several, by name."""
    try:
        return tokenizer.hf.get_chat_template(given, tools)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ValidationError(f"chat_template: {error}", parameter="chat_template") from error


def _reserved(tokenizer: Tokenizer, names: Mapping[str, Any] | None) -> list[str]:
    """The names that a request must not use: parameters of apply_chat_template, and names that
    every template has."""
    if not names:
        return []
    taken = {*inspect.signature(tokenizer.hf.apply_chat_template).parameters, *_OF_TEMPLATES}
    return sorted(name for name in names if name in taken and name != "documents")


_OF_TEMPLATES = (
    "conversations",
    "cycler",
    "dict",
    "joiner",
    "lipsum",
    "messages",
    "namespace",
    "raise_exception",
    "range",
    "strftime_now",
)


_KINDS = {
    "messages": "a list of messages",
    "chat_template": "a string",
    "tools": "a list of dicts",
    "chat_template_kwargs": "a dict",
}
