"""`jaxllm chat`: a conversation in the terminal, streamed step by step from the engine.

The same loop serves a person and a pipe; only a person gets a prompt sign. Standard output
carries the answers alone, everything else goes to standard error.
"""

import argparse
import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from jaxllm.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    engine_options_from,
    sampling_params_from,
)
from jaxllm.errors import JaxLLMError, ValidationError
from jaxllm.frontend.tokenizer import render_chat
from jaxllm.messages import CompletionOutput, TokensPrompt
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.frontend.llm_engine import LLMEngine

HELP = """\
/reset   forget the conversation
/help    show this
/exit    leave; so does Ctrl-D
Ctrl-C   stop the answer"""

# A chat has one answer, as text, and shows no numbers.
UNUSED_SAMPLING = ("n", "detokenize", "logprobs", "prompt_logprobs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="Instructions at the head of the conversation."
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template in place of the tokenizer's own."
    )
    add_sampling_arguments(parser, without=UNUSED_SAMPLING)
    add_engine_arguments(parser, without=("skip_tokenizer_init",))


def run(args: argparse.Namespace) -> None:
    options = engine_options_from(args)
    template = read_template(args.chat_template) if args.chat_template else None
    # Refuse a bad flag before the model is loaded; its own defaults are known only afterwards.
    sampling_params_from(args, SamplingParams(max_tokens=None))

    from jaxllm.llm import LLM

    llm = LLM(**options)
    # An answer may be as long as the context has room, unless somebody says otherwise.
    defaults = llm.get_default_sampling_params().clone(max_tokens=None)
    params = sampling_params_from(args, defaults)
    chat = Chat(llm.llm_engine, params, system_prompt=args.system_prompt, chat_template=template)
    if sys.stdin.isatty():
        note(HELP)
    converse(chat)


def read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValidationError(f"{path}: not UTF-8 ({error.reason}); convert the file") from None


def converse(chat: "Chat") -> None:
    """Read lines and stream answers until the input ends. A person is told at once what had no
    answer; a pipe hears of it in the end, as an error."""
    is_person = sys.stdin.isatty()
    num_failed = 0
    if is_person:
        with contextlib.suppress(ImportError):  # not on every platform
            import readline  # noqa: F401  (gives input() line editing and history)
    while True:
        try:
            line = read_line(">>> " if is_person else "")
            match line.strip():
                case "":
                    continue
                case "/exit":
                    break
                case "/reset":
                    chat.reset()
                    note("The conversation is forgotten.")
                case "/help":
                    note(HELP)
                case command if command.startswith("/"):
                    note(f"There is no command {command!r}; /help lists them.")
                case _:
                    num_failed += not answer(chat, line)
        except EOFError:
            break
        except KeyboardInterrupt:
            if not is_person:
                raise
            note("\nCtrl-D or /exit leaves.")
    if num_failed and not is_person:
        raise JaxLLMError(f"{num_failed} lines had no answer")


def read_line(prompt: str) -> str:
    try:
        return input(prompt)
    except UnicodeDecodeError as error:
        raise ValidationError(f"standard input: not UTF-8 ({error.reason})") from None


def answer(chat: "Chat", line: str) -> bool:
    """Stream the answer to a line; False if there is none."""
    try:
        with interrupt_as_event() as stop:
            for text in chat.reply(line, stop):
                print(text, end="", flush=True)
            print(flush=True)
    except JaxLLMError as error:
        note(f"jaxllm: error: {error}")
        return False
    return True


class Chat:
    """The messages so far, and the model that goes on with them."""

    def __init__(
        self,
        engine: "LLMEngine",
        params: SamplingParams,
        *,
        system_prompt: str | None = None,
        chat_template: str | None = None,
    ):
        assert engine.tokenizer is not None, "chat has no flag to leave the tokenizer out"
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._params = params.clone(output_kind=RequestOutputKind.DELTA)
        self._head = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._template = chat_template
        self._ids = map(str, itertools.count())
        self.reset()
        # A missing or unfit template is said now, not at the first line that is typed.
        self._render([], "Hello")

    def reset(self) -> None:
        self.turns: list[tuple[str, str]] = []  # what was said, what was answered

    def reply(self, said: str, stop: threading.Event) -> Iterator[str]:
        """Stream the answer; what came of it before `stop` joins the conversation."""
        prompt, kept = self._fit(said)
        request_id = next(self._ids)
        self._engine.add_request(request_id, prompt, self._params)
        if len(kept) < len(self.turns):
            forgotten = len(self.turns) - len(kept)
            note(f"The context is full: the oldest {forgotten} turns are forgotten.")
        pieces: list[str] = []
        last: CompletionOutput | None = None
        while self._engine.has_unfinished_requests():
            if stop.is_set():
                self._engine.abort_request(request_id)
            for output in self._engine.step():
                [last] = output.outputs
                pieces.append(last.text)
                yield last.text
        if last is not None and last.finish_reason == "error":
            raise JaxLLMError(f"the answer ended in an error: {last.stop_reason}")
        self.turns = [*kept, (said, "".join(pieces))]
        if last is not None and last.finish_reason == "length":
            note("\nThe answer has reached its longest length.")

    def _fit(self, said: str) -> tuple[TokensPrompt, list[tuple[str, str]]]:
        """The prompt, and the latest turns that it has room for.

        A quarter of the context is kept for the answer, or what --max-tokens asks if that is less.
        """
        limit = self._engine.info.max_model_len
        room = min(limit // 4, self._params.max_tokens or limit)
        kept = self.turns
        while True:
            prompt = self._render(kept, said)
            if not kept or len(prompt["prompt_token_ids"]) + room <= limit:
                return prompt, kept
            kept = kept[1:]

    def _render(self, turns: list[tuple[str, str]], said: str) -> TokensPrompt:
        messages = list(self._head)
        for question, reply in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": said})
        return render_chat(self._tokenizer, messages, chat_template=self._template)


@contextlib.contextmanager
def interrupt_as_event() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event; an exception could hit the engine amid a step.

    A second one, for a step that does not end, leaves the program.
    """
    interrupted = threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            sys.exit(128 + signal.SIGINT)
        interrupted.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def note(text: str) -> None:
    """Say something that is not part of the answer."""
    print(text, file=sys.stderr, flush=True)
