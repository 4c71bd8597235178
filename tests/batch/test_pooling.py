"""Lines for an engine that pools: each has the answer that it would have alone over HTTP."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, LoRARequest
from jaxllm.cli.main import main
from tests.pooling.models import TEXTS, describe, write_adapter, write_model
from tests.profile import TINY, as_flags

pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}


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
        line("adapted", "/v1/embeddings", model="adapter", input=TEXTS[0]),
        line("unknown", "/v1/embeddings", model="other", input=TEXTS[0]),
    ]
    given.write_text("\n".join(lines))
    options = {"model": str(path), **TINY}
    adapter = write_adapter(tmp_path / "adapter", path, ("q_proj", "down_proj"))
    flags = [*as_flags(options | LORA), "--lora-modules", f"adapter={adapter}"]
    main(["run-batch", "-i", str(given), "-o", str(answers), *flags])
    found = {
        one["custom_id"]: one["response"]["body"]
        for one in map(json.loads, answers.read_text().splitlines())
    }
    llm = LLM(**options, **LORA)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    want = np.array([output.outputs.embedding for output in outputs])
    got = [item["embedding"] for item in found["floats"]["data"]]
    np.testing.assert_allclose(got, want, atol=1e-5)
    (item,) = found["bytes"]["data"]
    first = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_allclose(first, want[0], atol=1e-5)
    scores = [item["score"] for item in found["scores"]["data"]]
    np.testing.assert_allclose(scores, want @ want[0], atol=1e-5)
    assert [one["index"] for one in found["order"]["results"]] == [0]
    lora = LoRARequest("adapter", 1, str(adapter))
    (output,) = llm.embed(TEXTS[0], lora_request=lora, use_tqdm=False)
    (item,) = found["adapted"]["data"]
    np.testing.assert_allclose(item["embedding"], output.outputs.embedding, atol=1e-5)
    assert found["adapted"]["model"] == "adapter"
    assert want[0] @ item["embedding"] < 0.99
    errors = (tmp_path / "out.errors.jsonl").read_text()
    assert "dimensions=7" in errors and "generates no text" in errors
    assert "model='other' is not served here" in errors
