"""The drafters that there are, by the names of their methods."""

from jaxllm.speculation.drafter import Drafter
from jaxllm.speculation.ngram import Ngram
from jaxllm.speculative_config import Speculation

DRAFTERS = {"ngram": Ngram.of}


def make_drafter(speculation: Speculation) -> Drafter:
    """Make the drafter of an engine."""
    return DRAFTERS[speculation.method](speculation)
