from jaxllm.scheduler.prefix_hash import block_hash, group_root_hash, root_hash


def test_equal_content_has_equal_hashes():
    assert block_hash(root_hash(None), [1, 2]) == block_hash(root_hash(None), [1, 2])


def test_whatever_changes_kv_changes_the_hash():
    root = root_hash(None)
    parents = [root, root_hash(""), root_hash("a"), group_root_hash(0), group_root_hash(1)]
    parents.append(block_hash(root, [0, 0]))
    contents = [[1, 2], [2, 1], [1, 3], [258, 0], [1, 2, 0]]
    hashes = {block_hash(parent, tokens) for parent in parents for tokens in contents}
    assert len(hashes) == len(parents) * len(contents)


def test_salt_may_be_any_text():
    assert root_hash("\ud800") != root_hash("é")
