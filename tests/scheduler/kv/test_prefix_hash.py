from jaxllm.media.item import ImageItem
from jaxllm.scheduler.kv.prefix_hash import (
    block_hashes,
    group_root_hash,
    image_marks,
    root_hash,
)


def test_equal_content_has_equal_hashes():
    assert block_hashes(root_hash(None), [1, 2], 2, {}) == block_hashes(
        root_hash(None), [1, 2], 2, {}
    )


def test_a_chain_may_be_made_in_pieces():
    root = root_hash("salt")
    whole = block_hashes(root, [1, 2, 3, 4, 5, 6], 2, {})
    first = block_hashes(root, [1, 2], 2, {})
    assert whole == first + block_hashes(first[-1], [3, 4, 5, 6], 2, {})


def test_whatever_changes_kv_changes_the_hash():
    root = root_hash(None)
    parents = [root, root_hash(""), root_hash("a"), group_root_hash(0), group_root_hash(1)]
    parents += block_hashes(root, [0, 0], 2, {})
    contents = [[1, 2], [2, 1], [1, 3], [258, 0], [1, 2, 0]]
    hashes = {
        block_hashes(parent, tokens, len(tokens), {})[0]
        for parent in parents
        for tokens in contents
    }
    assert len(hashes) == len(parents) * len(contents)


def test_salt_may_be_any_text():
    assert root_hash("\ud800") != root_hash("é")


def test_equal_tokens_of_other_images_are_told_apart():
    """Blocks of 4 tokens, of which images have all, the end of one, or the ends of two."""

    def hashes(*images):
        items = [
            ImageItem(digest=digest, start=start, end=end, rows=1, columns=1, pixels=b"")
            for digest, start, end in images
        ]
        marks = image_marks(items, 0, 5, 4)
        return block_hashes(root_hash(None), [7] * 20, 4, marks)

    a, b = b"a" * 32, b"b" * 32
    one = hashes((a, 4, 10))
    assert one[0] == hashes()[0]  # it begins behind the first block
    for others, num_equal in (
        ([(b, 4, 10)], 1),
        ([(a, 5, 10)], 1),
        ([(a, 4, 10), (b, 10, 12)], 2),
        ([], 1),
    ):
        same = [x == y for x, y in zip(one, hashes(*others), strict=True)]
        assert same == [index < num_equal for index in range(5)], others
