"""Names for the content of KV blocks: equal hashes mean equal keys and values.

The KV of a token depends on all tokens before it, so a block's hash covers its parent's hash and
its own tokens; the root of the chain covers everything else that changes KV or must keep users
apart. SHA-256, because a collision would show one user's text to another.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256

from jaxllm.media.item import ImageItem
from jaxllm.prompt_embeds.item import EmbedsItem


def root_hash(cache_salt: str | None, adapter: str | None = None) -> bytes:
    """Return the parent of the first block: only requests with the same salt and the same content
    of an adapter share blocks."""
    kind, salt = (b"open", "") if cache_salt is None else (b"salt", cache_salt)
    root = sha256(kind + salt.encode("utf-8", "surrogatepass")).digest()
    return root if adapter is None else sha256(b"lora" + root + adapter.encode()).digest()


def group_root_hash(group: int) -> bytes:
    """Return a root that only the requests of one group share."""
    return sha256(b"group%d" % group).digest()


def image_marks(
    images: Sequence[ImageItem], first: int, end: int, block_size: int
) -> Mapping[int, bytes]:
    """What the blocks [first, end) have of images: by the index of the block from `first` on, of
    each image its digest, where in it the block begins, and its time in a video. Equal images of
    equal sizes stand at equal tokens, so the tokens alone do not tell two images apart; and the
    pairs of frames of a video have other positions if it is faster."""
    marks: dict[int, bytes] = {}
    for image in images:
        for block in range(
            max(image.start // block_size, first), min(-(-image.end // block_size), end)
        ):
            offset = block * block_size - image.start
            mark = image.digest + offset.to_bytes(8, "little", signed=True)
            if image.time or image.continues:
                mark += b"time" + image.time.to_bytes(8, "little")
            marks[block - first] = marks.get(block - first, b"") + mark
    return marks


def embeds_marks(embeds: EmbedsItem, first: int, end: int) -> Mapping[int, bytes]:
    """Likewise of a prompt of embeddings, whose tokens have equal ids."""
    digests = {block - first: embeds.digest(block) for block in range(first, end)}
    return {block: b"embeds" + digest for block, digest in digests.items() if digest}


def block_hashes(
    parent: bytes, token_ids: list[int], block_size: int, marks: Mapping[int, bytes]
) -> list[bytes]:
    """Return the hashes of the full blocks of `token_ids`, which follow the block `parent`. `marks`
    has what some of them have beside their tokens."""
    assert len(token_ids) % block_size == 0, f"{len(token_ids)} tokens are not full blocks"
    tokens = array("i", token_ids)
    data, width = tokens.tobytes(), block_size * tokens.itemsize
    hashes = []
    for index, start in enumerate(range(0, len(data), width)):
        parent = sha256(parent + data[start : start + width] + marks.get(index, b"")).digest()
        hashes.append(parent)
    return hashes
