"""An engine that pools, over HTTP: the same numbers as offline, in the shapes of the protocols."""

import base64
import json
import time

import numpy as np
import pytest

from jaxllm import LLM, ValidationError
from jaxllm.openai.pooling.score import RerankRequest, ScoreRequest
from jaxllm.openai.served_model import ServedModel
from tests.pooling.models import TEXTS, describe, write_model
from tests.profile import TINY

pytest.importorskip("torch")
openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.slow, pytest.mark.oracle]  # it starts two engines

QUIET = {"use_tqdm": False}
KEY = "a-key"


class Pooled:
    """A model offline, and behind a server."""

    def __init__(self, llm, client):
        self.llm, self.client = llm, client

    def post(self, path, status=200, **body):
        answer = self.client.post(path, json=body, headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == status, answer.text
        return answer.json()

    def error(self, path, **body):
        return self.post(path, 400, **body)["error"]


def served(path, new_host):
    llm = LLM(path, **TINY)  # it compiles what the server's engine then finds
    llm.encode("a", pooling_task=llm.llm_engine.info.pooling.tasks[0], **QUIET)
    host = new_host({"model": str(path), **TINY})
    try:
        with host.serve(keys=(KEY,), batch_dir=f"{path}-batches") as client:
            yield Pooled(llm, client)
    finally:
        host.close()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory, new_host):
    path = write_model(tmp_path_factory.mktemp("embedder"), "Qwen3Model", is_matryoshka=True)
    yield from served(describe(path, "pooling_mode_lasttoken", prompts={"query": "Q: "}), new_host)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, new_host):
    names = {0: "fits"}
    path = tmp_path_factory.mktemp("classifier")
    write_model(path, "LlamaForSequenceClassification", "llama", id2label=names, num_labels=1)
    yield from served(path, new_host)


def offline(pooled, prompts, **how):
    outputs = pooled.llm.embed(prompts, **how, **QUIET)
    return np.array([output.outputs.embedding for output in outputs])


def test_the_openai_client_gets_the_vectors_of_offline(embedder):
    base = str(embedder.client.base_url).rstrip("/") + "/v1"
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        # It asks for base64 by itself, and reads that.
        found = client.embeddings.create(model="tiny", input=TEXTS)
        floats = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        cut = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8)
        ids = client.embeddings.create(model="tiny", input=[[5, 6, 7], [8]])
    want = offline(embedder, TEXTS)
    for answer in (found, floats):
        got = np.array([one.embedding for one in answer.data])
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert [one.index for one in answer.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose(np.linalg.norm(cut.data[0].embedding), 1, atol=1e-5)
    assert len(cut.data[0].embedding) == 8
    np.testing.assert_allclose(
        [one.embedding for one in ids.data], offline(embedder, [[5, 6, 7], [8]]), atol=1e-5
    )
    assert ids.usage.prompt_tokens == ids.usage.total_tokens == 4


def test_an_answer_is_of_the_types_that_openai_knows(embedder):
    body = embedder.post("/v1/embeddings", model="tiny", input="a", encoding_format="float")
    assert openai.types.CreateEmbeddingResponse.model_validate(
        body, strict=True
    ).model_extra.keys() == {
        "id",
        "created",
    }


def test_a_batch_has_the_vectors_of_its_requests(embedder):
    path, window = "/v1/embeddings", {"completion_window": "24h"}
    lines = [
        json.dumps({"custom_id": text, "method": "POST", "url": path, "body": {"input": text}})
        for text in TEXTS
    ]
    base_url = f"{embedder.client.base_url}/v1"
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        file = client.files.create(file=("in", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=path, **window)
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress"), batch
            time.sleep(0.1)
            batch = client.batches.retrieve(batch.id)
        found = client.files.content(batch.output_file_id).text.splitlines()
    answers = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, found)}
    for text in TEXTS:
        alone = embedder.post(path, input=text)["data"][0]["embedding"]
        np.testing.assert_allclose(answers[text]["data"][0]["embedding"], alone, atol=1e-5)


def test_conversations_named_words_and_cut_texts(embedder):
    messages = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n"
    of_chat = embedder.post("/v1/embeddings", messages=messages)["data"][0]["embedding"]
    np.testing.assert_allclose(of_chat, offline(embedder, text)[0], atol=1e-5)
    named = embedder.post("/v1/embeddings", input="a", prompt_name="query")["data"][0]["embedding"]
    np.testing.assert_allclose(named, offline(embedder, "Q: a")[0], atol=1e-5)
    cut = embedder.post("/v1/embeddings", input="one two three " * 99, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 128


def test_vectors_at_every_token(embedder):
    (item,) = embedder.post("/pooling", input=TEXTS[0], encoding_format="base64")["data"]
    (output,) = embedder.llm.encode(TEXTS[0], pooling_task="token_embed", **QUIET)
    got = np.frombuffer(base64.b64decode(item["data"]), "<f4").reshape(-1, 64)
    np.testing.assert_allclose(got, output.outputs.data, atol=1e-5)
    whole = embedder.post("/pooling", input=TEXTS[0], task="embed")["data"][0]["data"]
    np.testing.assert_allclose(whole, offline(embedder, TEXTS[:1])[0], atol=1e-5)


def test_embeddings_in_coheres_protocol(embedder):
    kinds = ["float", "base64", "binary", "ubinary"]
    body = embedder.post(
        "/v2/embed", texts=TEXTS, input_type="search_query", embedding_types=kinds, model="tiny"
    )
    want = offline(embedder, ["Q: " + text for text in TEXTS])
    found = body["embeddings"]
    np.testing.assert_allclose(found["float"], want, atol=1e-5)
    np.testing.assert_array_equal(np.unpackbits(np.uint8(found["ubinary"]), axis=1), want > 0)
    np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])
    first = np.frombuffer(base64.b64decode(found["base64"][0]), "<f4")
    np.testing.assert_allclose(first, want[0], atol=1e-5)
    assert body["texts"] == TEXTS and body["meta"]["billed_units"]["input_tokens"] > 0
    part = {"content": [{"type": "text", "text": TEXTS[0]}]}
    inputs = embedder.post("/v2/embed", inputs=[part])["embeddings"]["float"]
    np.testing.assert_allclose(inputs, offline(embedder, TEXTS[:1]), atol=1e-5)


@pytest.mark.parametrize("which", ["embedder", "classifier"])
def test_scores_and_documents_in_their_order(which, request):
    pooled = request.getfixturevalue(which)
    outputs = pooled.llm.score(TEXTS[0], TEXTS[1:], **QUIET)
    want = [output.outputs.score for output in outputs]
    for names in (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2")):
        data = pooled.post("/score", **dict(zip(names, (TEXTS[0], TEXTS[1:]), strict=True)))["data"]
        np.testing.assert_allclose([one["score"] for one in data], want, atol=1e-5)
    documents = [*TEXTS[1:3], *({"text": text} for text in TEXTS[3:])]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = pooled.post(path, query=TEXTS[0], documents=documents, top_n=3)["results"]
        order = sorted(range(len(want)), key=lambda place: -want[place])[:3]
        assert [one["index"] for one in results] == order
        assert [one["document"]["text"] for one in results] == [TEXTS[1 + i] for i in order]


@pytest.mark.parametrize("which", ["embedder", "classifier"])
def test_each_side_of_a_pair_is_cut(which, request):
    pooled = request.getfixturevalue(which)
    tokenizer = pooled.llm.llm_engine.tokenizer

    def head(text, num):
        return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:num])

    query, *documents = TEXTS
    cut = [head(text, 4) for text in documents]
    assert cut[0] == documents[0] and len(cut[1]) < len(documents[1])
    outputs = pooled.llm.score(head(query, 3), cut, **QUIET)
    want = [output.outputs.score for output in outputs]
    lengths = {"max_tokens_per_query": 3, "max_tokens_per_doc": 4}
    data = pooled.post("/score", queries=query, documents=documents, **lengths)["data"]
    np.testing.assert_allclose([one["score"] for one in data], want, atol=1e-5)
    results = pooled.post("/rerank", query=query, documents=documents, **lengths)["results"]
    by_index = {one["index"]: one for one in results}
    found = [by_index[place]["relevance_score"] for place in range(len(want))]
    np.testing.assert_allclose(found, want, atol=1e-5)
    assert by_index[1]["document"]["text"] == documents[1]


def test_an_instruction_is_for_a_template_of_pairs(embedder, classifier):
    template = "{{ instruction }}|{{ messages[0].content }}|{{ messages[1].content }}"
    engine = classifier.llm.llm_engine
    served = ServedModel.of(engine, chat_template=template)
    body = {"query": "a b", "documents": ["c d", {"text": "e"}], "instruction": "Find it"}
    assert RerankRequest.read(body).work(served).prompts == ["Find it|a b|c d", "Find it|a b|e"]
    named = ScoreRequest.read({"queries": ["a", "b"], "documents": ["c", "d"]})
    assert named.work(served).prompts == ["|a|c", "|b|d"]
    served = ServedModel.of(engine, chat_template="{{ messages[0].content }}")
    with pytest.raises(ValidationError, match="instruction='Find it': .*does not know it"):
        RerankRequest.read(body).work(served)
    served = ServedModel.of(embedder.llm.llm_engine, chat_template=template)
    with pytest.raises(ValidationError, match="instruction='Find it': .*embeds each text alone"):
        RerankRequest.read(body).work(served)
    assert RerankRequest.read(body | {"instruction": None}).work(served).task == "embed"


def test_classes(classifier):
    data = classifier.post("/classify", input=TEXTS)["data"]
    want = [output.outputs.probs for output in classifier.llm.classify(TEXTS, **QUIET)]
    np.testing.assert_allclose([one["probs"] for one in data], want, atol=1e-5)
    assert {(one["label"], one["num_classes"]) for one in data} == {("fits", 1)}


def test_refusals_name_the_field(embedder, classifier):
    for path, body, param, words in [
        ("/v1/embeddings", {"input": "a", "normalize": True}, "normalize", "use_activation"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "it is empty"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "has 64"),
        ("/v1/embeddings", {"input": "a " * 500}, "input", "at most 128"),
        ("/v1/embeddings", {}, "input", "input or messages"),
        ("/v1/embeddings", {"input": [3.5]}, "input", "integers"),
        ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature", "unknown field"),
        ("/pooling", {"input": "a", "task": "score"}, "task", "now called 'classify'"),
        ("/classify", {"input": "a"}, "task", "runs the model for embed"),
        ("/score", {"text_1": "a"}, "queries", "text_1 and text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "from 1"),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1},
            "max_tokens_per_doc",
            "0, for whole texts",
        ),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "no pair"),
        ("/v2/embed", {"texts": ["a"], "images": ["b"]}, "images", "texts only"),
        ("/v1/completions", {"prompt": "a"}, "runner", "generates no text"),
    ]:
        error = embedder.error(path, **body)
        assert error["param"] == param and words in error["message"], error
    assert "runs the model for classify" in classifier.error("/v1/embeddings", input="a")["message"]


def test_an_engine_that_generates_says_what_it_lacks(client):
    answer = client.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 404 and "--runner pooling" in answer.json()["error"]["message"]


def test_figures_count_prompts_and_nothing_generated(embedder):
    embedder.post("/v1/embeddings", input=TEXTS)
    text = embedder.client.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    values = {name.partition("{")[0]: float(value) for name, value in counts.items()}
    assert values["jaxllm:generation_tokens_total"] == 0
    assert values["jaxllm:prompt_tokens_total"] > 0
    assert values["jaxllm:e2e_request_latency_seconds_count"] >= len(TEXTS)
