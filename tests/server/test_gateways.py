"""What the endpoint pickers of gateways read, by the protocol for model servers that the Gateway
API inference extension publishes (its proposal 003) and llm-d follows, with vLLM's names."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.lora.request import AdapterLimits
from jaxllm.metrics.stats import EngineStats
from jaxllm.server.engine_metrics import Figures
from jaxllm.testing import make_tiny_adapter

BODY = {"prompt": "Once upon", "max_tokens": 4, "ignore_eos": True}
REQUIRED = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")


def gauge(page, name):
    """The labels and the value of a gauge of one engine, as a picker finds them."""
    (family,) = [one for one in text_string_to_metric_families(page) if one.name == f"vllm:{name}"]
    assert family.type == "gauge"
    (sample,) = family.samples
    return sample.labels, sample.value


@pytest.mark.slow
def test_a_picker_reads_load_and_cache_without_a_key(host):
    with host.serve(keys=("secret",), metrics_prefix="vllm", metrics_without_key=True) as client:
        assert client.post("/v1/completions", json=BODY).status_code == 401
        answer = client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        for name in REQUIRED:
            assert gauge(answer.text, name)[1] == 0
        labels, _ = gauge(answer.text, "cache_config_info")
        info = host.engine.info
        assert int(labels["block_size"]) == info.block_size
        assert int(labels["num_gpu_blocks"]) == info.cache_groups[0].num_blocks
        document = client.get("/openapi.json", headers={"X-Api-Key": "secret"}).json()
        assert "security" not in document["paths"]["/metrics"]["get"]
        assert "security" in document["paths"]["/load"]["get"]
    with host.serve(keys=("secret",)) as client:
        assert client.get("/metrics").status_code == 401


@pytest.mark.slow
def test_a_picker_reads_which_adapters_are_in_use(host_with_adapters, engine_options, tmp_path):
    path = make_tiny_adapter(tmp_path / "sql", engine_options["model"], seed=1)
    began = time.time()
    with host_with_adapters.serve(
        metrics_prefix="vllm", lora_modules=(f"sql={path}",), access_log=False
    ) as client:
        done = threading.Event()

        def ask_until_seen():
            while not done.is_set():
                body = BODY | {"model": "sql", "max_tokens": 500, "n": 4}
                assert client.post("/v1/completions", json=body).status_code == 200

        def is_seen(page):
            in_use = gauge(page, "lora_requests_info")[0]["running_lora_adapters"] == "sql"
            return in_use and all(gauge(page, name)[1] > 0 for name in REQUIRED[1:])

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask_until_seen)
            try:
                while not is_seen(page := client.get("/metrics").text):
                    assert time.time() < began + 300, page
            finally:
                done.set()
            asking.result()
        labels, read_at = gauge(page, "lora_requests_info")
        assert labels["max_lora"] == "2"
        assert began <= read_at <= time.time()
        host_with_adapters.wait_until_idle()
        labels, later = gauge(client.get("/metrics").text, "lora_requests_info")
        assert labels["running_lora_adapters"] == labels["waiting_lora_adapters"] == ""
        assert later > read_at  # so the later one counts


@pytest.mark.slow
def test_the_ids_of_a_gateway_are_taken_over(client):
    # And test_tracing.py sends `traceparent`.
    headers = {"X-Request-Id": "3c1f-gateway"}
    for fields in ({}, {"stream": True}):
        answer = client.post("/v1/completions", json=BODY | fields, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["X-Request-Id"] == "3c1f-gateway"
        assert "3c1f-gateway" in answer.text


def test_adapters_are_told_apart_by_commas_and_by_engine():
    limits = AdapterLimits(max_loras=3, max_lora_rank=8, dtype="float32", layers={})
    replicas = [
        EngineStats(adapters_running=["poems", "sql"], adapters_waiting=["law"]),
        EngineStats(),
    ]
    (family,) = Figures("vllm", "tiny").of_adapters(limits, replicas)
    found = {tuple(sample.labels.values()) for sample in family.samples}
    assert family.name == "vllm:lora_requests_info"
    assert found == {("tiny", "0", "3", "poems,sql", "law"), ("tiny", "1", "3", "", "")}
