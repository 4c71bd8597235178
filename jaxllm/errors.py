"""The errors that a user may see. Any other exception is a bug of ours."""


class JaxLLMError(Exception):
    """The base of all errors that answer the user and are not bugs."""


class ValidationError(JaxLLMError, ValueError):
    """A request or a configuration was refused.

    The message says what was given, what is allowed and what to change. `prompt_index` is the place
    in the batch of the prompt that the error is about, if it is about one.
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
    """Make the error for a refused parameter: what was given, and why it is refused."""
    return ValidationError(f"{name}={shown(value)}: {why}", parameter=name, value=value)


def shown(value: object) -> str:
    """A value as an error shows it: on one line, and cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def not_utf8(where: object, error: UnicodeDecodeError) -> ValidationError:
    """Make the error for text in another encoding: where it is, and the first wrong byte."""
    return ValidationError(
        f"{where}: not UTF-8 at byte {error.start} ({error.reason}); convert the file"
    )


class UnauthorizedError(JaxLLMError):
    """A server requires a key, or refuses the given one."""


class CheckpointError(JaxLLMError):
    """The checkpoint on disk is incomplete, is damaged or contradicts its config."""


class UnsupportedModelError(JaxLLMError, ValueError):
    """We do not support the model's architecture, rope type or quantisation."""


class OutOfMemoryError(JaxLLMError, MemoryError):
    """The model or its KV cache does not fit. It is raised before anything is loaded."""


class EngineDeadError(JaxLLMError, RuntimeError):
    """The engine has ended for good: a part of it, on this host or another, is lost."""
