"""The errors a user may see. Everything else that is raised is a bug of ours."""


class JaxLLMError(Exception):
    """Base of all errors that are answers to the user and not bugs."""


class ValidationError(JaxLLMError, ValueError):
    """A request or a configuration was refused at the door.

    The message says what was given, what is allowed and what to change. `prompt_index` is the place
    of the prompt in the batch, if the error is about one.
    """

    def __init__(
        self,
        message: str,
        *,
        parameter: str | None = None,
        value: object = None,
        prompt_index: int | None = None,
    ):
        super().__init__(message)
        self.parameter = parameter
        self.value = value
        self.prompt_index = prompt_index


def refused(name: str, value: object, why: str) -> ValidationError:
    """The error for a parameter that is refused: what was given, and why it cannot be."""
    return ValidationError(f"{name}={shown(value)}: {why}", parameter=name, value=value)


def shown(value: object) -> str:
    """A value as an error shows it: on one line, and not the whole of a long one."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def not_utf8(where: object, error: UnicodeDecodeError) -> ValidationError:
    """The error for text that is in another encoding: where, and from which byte on."""
    return ValidationError(
        f"{where}: not UTF-8 at byte {error.start} ({error.reason}); convert the file"
    )


class UnauthorizedError(JaxLLMError):
    """A server wants a key, or another one than it was given."""


class CheckpointError(JaxLLMError):
    """The checkpoint on disk is missing something, damaged or contradicts its config."""


class UnsupportedModelError(JaxLLMError, ValueError):
    """The architecture, rope type or quantisation is not one that we can run."""


class OutOfMemoryError(JaxLLMError, MemoryError):
    """The model or its KV cache does not fit; said before anything is loaded."""


class EngineDeadError(JaxLLMError, RuntimeError):
    """The engine has ended and cannot come back: a part of it, on this host or another, is gone."""
