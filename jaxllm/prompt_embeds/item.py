"""A prompt of embeddings on its way to the engine, and what is known of its model."""

import msgspec

DIGEST_BYTES = 32


class EmbedsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the embeddings of an engine's model are."""

    hidden_size: int
    dtype: str  # the model's, in which they are kept
    first_row: int  # of the device's pool, whose rows before it are of images


class EmbedsItem(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings of a whole prompt, one for each of its tokens."""

    data: bytes  # [tokens, hidden], in the model's type
    # Of the embeddings of each block of the cache, of the last one as far as they go: what its keys
    # and values depend on, since all these tokens have the same id.
    digests: bytes

    def digest(self, block: int) -> bytes:
        """That of a block; empty: no token of it has an embedding."""
        return self.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
