"""Sets up all loggers. An environment variable sets their level."""

import logging
import os
import sys

_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"
_TIME = "%H:%M:%S"


# Both packages that log in our processes. The kernels do not import this module.
_PACKAGES = ("jaxllm", "jaxllm_kernels")


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module. The first call sets up those of `jaxllm` and the kernels.

    JAXLLM_LOGGING_LEVEL sets the level (default INFO). Log lines go to stderr, so that the
    output of a command can be piped.
    """
    if not logging.getLogger("jaxllm").handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt=_TIME))
        for package in map(logging.getLogger, _PACKAGES):
            package.addHandler(handler)
            package.setLevel(os.environ.get("JAXLLM_LOGGING_LEVEL", "INFO").upper())
            package.propagate = False
    return logging.getLogger(name)


def name_process(name: str) -> None:
    """Begin all later log lines of this process with its name."""
    formatter = logging.Formatter(f"{name}: {_FORMAT}", datefmt=_TIME)
    for package in map(logging.getLogger, _PACKAGES):
        for handler in package.handlers:
            handler.setFormatter(formatter)
