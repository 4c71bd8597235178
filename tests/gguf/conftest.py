"""The cache of model directories is the test's own."""

import pytest

from jaxllm.gguf import directory


@pytest.fixture(autouse=True)
def gguf_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "CACHE", str(tmp_path / "gguf-cache"))
    return tmp_path / "gguf-cache"
