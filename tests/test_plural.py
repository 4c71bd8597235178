from jaxllm.plural import counted


def test_one_is_no_plural():
    told = [counted(num, "replica") for num in (0, 1, 2)]
    assert told == ["0 replicas", "1 replica", "2 replicas"]
    assert counted(1234, "file") == "1,234 files"
