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
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ValidationError(f"{name}={shown}: {why}", parameter=name, value=value)


def not_utf8(where: object, error: UnicodeDecodeError) -> ValidationError:
    """The error for text that is in another encoding: where, and from which byte on."""
    return ValidationError(
        f"{where}: not UTF-8 at byte {error.start} ({error.reason}); convert the file"
    )


class CheckpointError(JaxLLMError):
    """The checkpoint on disk is missing something, damaged or contradicts its config."""


class UnsupportedModelError(JaxLLMError, ValueError):
    """The architecture, rope type or quantisation is not one that we can run."""


class OutOfMemoryError(JaxLLMError, MemoryError):
    """The model or its KV cache does not fit; said before anything is loaded."""


class EngineDeadError(JaxLLMError, RuntimeError):
    """The engine has ended and cannot come back: a part of it, on this host or another, is gone."""
