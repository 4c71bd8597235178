"""/metrics tells what happened, under names that dashboards know."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.cache_groups import CacheGroup
from jaxllm.metrics.memory import DeviceMemory, EngineMemory
from jaxllm.metrics.stats import EngineStats
from jaxllm.server.engine_metrics import Figures

pytestmark = pytest.mark.slow  # the first one starts an engine

BODY = {"prompt": "Once upon", "max_tokens": 6, "ignore_eos": True}
NUM_PROMPT = 8


def read(client):
    """The value of every sample, by its name and all labels but the model's."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert sample.name.startswith("http_") or labels.pop("model_name") == "tiny"
            key = (sample.name, *(f"{name}={value}" for name, value in sorted(labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


class Page:
    """What has changed between two looks."""

    def __init__(self, client):
        self._client = client
        self._before = read(client)

    def look(self):
        self._after = read(self._client)

    def now(self, name, *labels):
        return self._after[(f"vllm:{name}", *sorted(labels))]

    def more(self, name, *labels, prefix="vllm:"):
        key = (prefix + name, *sorted(labels))
        return self._after[key] - self._before.get(key, 0)

    def engine(self, name, *labels):
        return self.more(name, "engine=0", *labels)


@pytest.fixture
def page(host):
    with host.serve(metrics_prefix="vllm", access_log=False) as client:
        page = Page(client)
        page.client = client
        yield page


def post(page, **fields):
    response = page.client.post("/v1/completions", json=BODY | fields)
    assert response.status_code == 200, response.text


def test_what_happened_is_counted(page, piece_by_piece):
    post(page, n=2)
    post(page, stream=True)
    page.look()
    assert page.engine("generation_tokens_total") == 18
    assert page.engine("prompt_tokens_total") == 3 * NUM_PROMPT
    by_source = [
        page.engine("prompt_tokens_by_source_total", f"source={source}")
        for source in ("local_compute", "local_cache_hit")
    ]
    assert sum(by_source) == 3 * NUM_PROMPT
    assert page.engine("request_success_total", "finished_reason=length") == 3
    assert page.engine("request_prompt_tokens_sum") == 2 * NUM_PROMPT
    assert page.engine("request_prefill_kv_computed_tokens_count") == 2
    assert page.engine("request_generation_tokens_sum") == 18
    assert page.engine("request_max_num_generation_tokens_sum") == 12
    assert page.engine("request_params_max_tokens_sum") == 12
    assert page.engine("request_params_n_sum") == 3
    assert page.engine("request_num_preemptions_bucket", "le=0.0") == 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert page.engine(f"{name}_seconds_count") == 2
    assert page.engine("time_to_first_token_seconds_sum") > 0
    # Of the stream every token but the first; of the other request the mean.
    assert page.engine("inter_token_latency_seconds_count") == 5 + 1

    num_steps = page.engine("engine_steps_total")
    assert num_steps >= 6
    assert page.engine("iteration_tokens_total_count") == num_steps
    assert page.engine("iteration_tokens_total_sum") == page.engine("scheduled_tokens_total")
    assert page.engine("scheduled_tokens_total") <= page.engine("token_rows_total")
    for phase in ("schedule", "pack", "update"):
        assert page.engine("host_seconds_total", f"phase={phase}") > 0
    waited = page.engine("device_wait_seconds_total")
    assert page.engine("engine_step_seconds_total") > waited > 0

    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert page.now(name, "engine=0") == 0
    for reason in ("capacity", "deferred"):
        assert page.now("num_requests_waiting_by_reason", "engine=0", f"reason={reason}") == 0
    assert page.now("overlap", "engine=0") == 1
    for process in ("server", "engine"):
        assert page.now("resident_memory_bytes", f"process={process}") > 10 << 20


def test_the_kv_cache_is_told_as_it_is(page, host):
    page.look()
    [labels] = [key[1:] for key in page._after if key[0] == "vllm:cache_config_info"]
    info = host.engine.info
    assert f"block_size={info.block_size}" in labels
    assert f"num_gpu_blocks={info.cache_groups[0].num_blocks}" in labels
    for name, count in (
        ("kv_group_blocks", info.cache_groups[0].num_blocks),
        ("kv_group_blocks_used", 0),
    ):
        assert page.now(name, "engine=0", "group=0", "window=none") == count
    assert f"kv_cache_memory_bytes={16 << 20}" in labels
    assert "enable_prefix_caching=True" in labels and "engine=0" in labels


def test_a_stream_of_several_answers_is_counted_as_one_request(page):
    # Each ends where it may, one before the other.
    post(page, n=3, stream=True, temperature=1, seed=1, ignore_eos=False, stop=["e"])
    page.look()
    reasons = [
        page.more("request_success_total", "engine=0", f"finished_reason={reason}")
        for reason in ("length", "stop")
        if ("vllm:request_success_total", "engine=0", f"finished_reason={reason}") in page._after
    ]
    assert sum(reasons) == 3
    assert page.engine("request_params_n_sum") == 3
    assert page.engine("request_params_n_count") == 1


def test_http_is_counted_by_path_and_status(page):
    post(page)
    post(page, stream=True)
    client = page.client
    client.post("/v1/completions", json={"prompt": 1})
    client.get("/v1/models/tiny")
    client.get("/v1/models/other")
    client.get("/nowhere/at/all")
    client.request("PROPFIND", "/nowhere")
    client.get("/health")
    page.look()

    def count(handler, method, status):
        labels = (f"handler={handler}", f"method={method}", f"status={status}")
        return page.more("http_requests_total", *labels, prefix="")

    assert count("/v1/completions", "POST", 200) == 2
    assert count("/v1/completions", "POST", 400) == 1
    assert count("/v1/models/{name:path}", "GET", 200) == 1
    assert count("/v1/models/{name:path}", "GET", 404) == 1
    assert count("none", "GET", 404) == count("none", "other", 404) == 1
    labels = ("handler=/v1/completions", "method=POST")
    assert page.more("http_request_duration_seconds_count", *labels, prefix="") == 3
    assert not [key for key in page._after if "handler=/health" in key]


def test_what_is_refused_is_counted_by_the_limit(host):
    with host.serve(max_queued_bytes=100, access_log=False) as client:
        assert client.post("/v1/completions", json=BODY | {"prompt": "a" * 99}).status_code == 503
        found = read(client)
    assert found["jaxllm:admission_rejections_total", "reason=max_queued_bytes"] == 1
    assert found["jaxllm:admission_rejections_total", "reason=max_queued_requests"] == 0


def test_requests_without_a_key_are_counted(host):
    with host.serve(keys=("secret",), access_log=False) as client:
        assert client.post("/v1/completions", json=BODY).status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        found = read(client)
    labels = ("handler=/v1/completions", "method=POST", "status=401")
    assert found["http_requests_total", *labels] == 1


def test_each_replica_has_its_own_figures(engine_options, make_host, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    host = make_host(engine_options | {"data_parallel_size": 2})
    with host.serve(metrics_prefix="vllm", access_log=False) as client:
        page = Page(client)
        prompts = [f"Once upon a {place}" for place in range(4)]
        # All at once, so that they are dealt out.
        assert client.post("/v1/completions", json=BODY | {"prompt": prompts}).status_code == 200
        page.look()
    for engine in ("engine=0", "engine=1"):
        assert page.more("generation_tokens_total", engine) == 12
        assert page.more("request_generation_tokens_sum", engine) == 12
        assert page.more("request_success_total", engine, "finished_reason=length") == 2
        assert page.more("time_to_first_token_seconds_count", engine) == 2
        assert page.now("kv_blocks", engine) == host.engine.info.cache_groups[0].num_blocks
    stats = host.call(host.engine.stats())
    assert stats.num_generation_tokens == 24
    assert stats.num_blocks == 2 * host.engine.info.cache_groups[0].num_blocks


def test_blocks_are_told_by_group_of_layers():
    groups = [
        CacheGroup(window=None, num_blocks=8, max_blocks_per_request=4),
        CacheGroup(window=16, num_blocks=6, max_blocks_per_request=2),
    ]
    stats = EngineStats(group_blocks=[8, 6], group_blocks_used=[5, 2], group_shortages=[0, 7])
    families = Figures("jaxllm", "tiny").of_groups([stats], groups)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert found == {
        ("jaxllm:kv_group_blocks", "tiny", "0", "0", "none"): 8,
        ("jaxllm:kv_group_blocks", "tiny", "0", "1", "16"): 6,
        ("jaxllm:kv_group_blocks_used", "tiny", "0", "0", "none"): 5,
        ("jaxllm:kv_group_blocks_used", "tiny", "0", "1", "16"): 2,
        ("jaxllm:kv_group_shortages_total", "tiny", "0", "0", "none"): 0,
        ("jaxllm:kv_group_shortages_total", "tiny", "0", "1", "16"): 7,
    }


def test_tokens_of_experts_are_told_by_layer():
    replicas = [EngineStats(expert_tokens={1: [5, 0], 3: [2, 3]}) for _ in range(2)]
    assert EngineStats.total(replicas).expert_tokens == {1: [10, 0], 3: [4, 6]}
    families = Figures("jaxllm", "tiny").of_experts(replicas[:1])
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert found == {
        ("jaxllm:expert_tokens_total", "tiny", "0", "1", "0"): 5,
        ("jaxllm:expert_tokens_total", "tiny", "0", "1", "1"): 0,
        ("jaxllm:expert_tokens_total", "tiny", "0", "3", "0"): 2,
        ("jaxllm:expert_tokens_total", "tiny", "0", "3", "1"): 3,
    }
    assert not list(Figures("jaxllm", "tiny").of_experts([EngineStats()]))


def test_memory_of_accelerators_is_told_by_device():
    devices = [[DeviceMemory(0, 5, 7, 9)], [DeviceMemory(1, 6, 8, 9)]]
    families = Figures("jaxllm", "tiny").of_memory(EngineMemory(100, devices), 50)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert found == {
        ("jaxllm:resident_memory_bytes", "tiny", "server"): 50,
        ("jaxllm:resident_memory_bytes", "tiny", "engine"): 100,
        ("jaxllm:device_memory_used_bytes", "tiny", "0", "0"): 5,
        ("jaxllm:device_memory_used_bytes", "tiny", "1", "1"): 6,
        ("jaxllm:device_memory_peak_bytes", "tiny", "0", "0"): 7,
        ("jaxllm:device_memory_peak_bytes", "tiny", "1", "1"): 8,
        ("jaxllm:device_memory_limit_bytes", "tiny", "0", "0"): 9,
        ("jaxllm:device_memory_limit_bytes", "tiny", "1", "1"): 9,
    }
