"""/metrics tells what happened, under names that dashboards know."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.slow  # the first one starts an engine


def read(client):
    """Sample name -> value; of samples that differ by labels, the sum."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
            found[sample.name] = found.get(sample.name, 0) + sample.value
            reason = sample.labels.get("finished_reason")
            if reason is not None:
                found[sample.name, reason] = sample.value
    return found


def test_what_happened_is_counted(host):
    body = {"prompt": "Once upon", "max_tokens": 6, "ignore_eos": True}
    with host.serve(metrics_prefix="vllm") as client:
        before = read(client)
        assert client.post("/v1/completions", json=body | {"n": 2}).status_code == 200
        assert client.post("/v1/completions", json=body | {"stream": True}).status_code == 200
        after = read(client)
    num_prompt = 8
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 18
    assert after["vllm:request_success_total", "length"] == 3
    assert after["vllm:request_prompt_tokens_sum"] == 2 * num_prompt
    assert after["vllm:request_generation_tokens_sum"] == 18
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert after[f"vllm:{name}_seconds_count"] == 2
    assert after["vllm:time_to_first_token_seconds_sum"] > 0
    # Of the stream every token but the first; of the other request the mean.
    assert 2 <= after["vllm:inter_token_latency_seconds_count"] <= 6
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert 0 <= before["vllm:engine_step_seconds_total"] < after["vllm:engine_step_seconds_total"]
    assert {"vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"} <= after.keys()
