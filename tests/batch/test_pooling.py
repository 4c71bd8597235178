"""Lines for an engine that pools: each has the answer that it would have alone over HTTP."""

import base64
import json

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.cli.main import main
from tests.pooling.models import TEXTS, describe, write_model
from tests.profile import TINY, as_flags

pytest.importorskip("torch")
pytestmark = pytest.mark.oracle


def line(custom_id, url, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def test_lines_of_all_kinds(tmp_path):
    path = write_model(tmp_path / "model", "Qwen3Model")
    describe(path, "pooling_mode_lasttoken")
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line("floats", "/v1/embeddings", input=TEXTS),
        line("bytes", "/v1/embeddings", input=TEXTS[0], encoding_format="base64"),
        line("scores", "/v1/score", text_1=TEXTS[0], text_2=TEXTS),
        line("order", "/rerank", query=TEXTS[0], documents=TEXTS, top_n=1),
        line("bad", "/v1/embeddings", input="a", dimensions=7),
        line("text", "/v1/completions", prompt="a"),
    ]
    given.write_text("\n".join(lines))
    options = {"model": str(path), **TINY}
    main(["run-batch", "-i", str(given), "-o", str(answers), *as_flags(options)])
    found = {
        one["custom_id"]: one["response"]["body"]
        for one in map(json.loads, answers.read_text().splitlines())
    }
    outputs = LLM(**options).embed(TEXTS, use_tqdm=False)
    want = np.array([output.outputs.embedding for output in outputs])
    got = [item["embedding"] for item in found["floats"]["data"]]
    np.testing.assert_allclose(got, want, atol=1e-5)
    (item,) = found["bytes"]["data"]
    first = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_allclose(first, want[0], atol=1e-5)
    scores = [item["score"] for item in found["scores"]["data"]]
    np.testing.assert_allclose(scores, want @ want[0], atol=1e-5)
    assert [one["index"] for one in found["order"]["results"]] == [0]
    errors = (tmp_path / "out.errors.jsonl").read_text()
    assert "dimensions=7" in errors and "generates no text" in errors
