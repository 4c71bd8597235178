from jaxllm.scheduler.kv.prefix_hash import block_hashes, group_root_hash, root_hash


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
