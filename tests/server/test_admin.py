"""Admin endpoints: who may use them, and that they do what they say without harm to requests."""

import threading
import time

import pytest
from jax.profiler import ProfileData

from jaxllm import ValidationError
from jaxllm.server.auth import Keys, read_keys
from jaxllm.server.options import ServerOptions

pytestmark = pytest.mark.slow  # the first one starts an engine

COMPLETIONS = "/v1/completions"
GREEDY = {"prompt": "Once", "max_tokens": 30, "ignore_eos": True, "temperature": 0}
ENDPOINTS = [
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/server_info"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
]
ADMIN = {"Authorization": "Bearer of-admin"}
USER = {"Authorization": "Bearer of-user"}


@pytest.fixture(scope="module")
def admin(host):
    with host.serve(keys=("of-user",), admin_keys=("of-admin", "other")) as client:
        yield client


def test_without_an_admin_key_there_are_no_admin_endpoints(host, client):
    for method, path in ENDPOINTS:
        assert client.request(method, path).status_code == 404
    with host.serve(keys=("of-user",)) as locked:
        for method, path in ENDPOINTS:
            assert locked.request(method, path, headers=USER).status_code == 404


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_only_an_admin_key_opens_them_and_it_opens_nothing_else(admin, method, path):
    for headers in ({}, USER, {"Authorization": "Bearer of-adminn"}):
        assert admin.request(method, path, headers=headers).status_code == 401
    assert admin.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}
    assert admin.get("/is_sleeping", headers={"Authorization": "Bearer other"}).status_code == 200
    for other in ("/v1/models", "/load", "/metrics", "/is_sleeping/x"):
        assert admin.get(other, headers=ADMIN).status_code == 401
    assert admin.get("/load", headers=USER).json() == {"server_load": 0}


def test_an_admin_key_locks_nothing_else(host):
    with host.serve(admin_keys=("of-admin",)) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/is_sleeping").status_code == 401


def test_a_flag_opens_them_to_all_that_are_let_in(host):
    with host.serve(admin_without_key=True) as client:
        assert client.get("/is_sleeping").status_code == 200
    with host.serve(admin_without_key=True, keys=("of-user",)) as client:
        assert client.get("/is_sleeping").status_code == 401
        assert client.get("/is_sleeping", headers=USER).status_code == 200


@pytest.mark.parametrize("level", [1, 2])
def test_requests_wait_for_an_engine_that_sleeps(host, admin, level):
    def ask():
        return admin.post(COMPLETIONS, json=GREEDY, headers=USER).json()["choices"][0]["text"]

    expected = ask()
    found = []
    with admin.stream("POST", COMPLETIONS, json=GREEDY | {"stream": True}, headers=USER) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert admin.post(f"/sleep?level={level}", headers=ADMIN).status_code == 200
        assert admin.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
        late = threading.Thread(target=lambda: found.append(ask()))
        late.start()
        while host.call(host.engine.stats()).num_requests_waiting < 1:
            time.sleep(0.01)
        assert admin.get("/health").status_code == 200
        assert not found
        for tag in ("weights", "kv_cache"):
            assert admin.post(f"/wake_up?tags={tag}", headers=ADMIN).status_code == 200
        assert admin.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}
        assert [line for line in lines if line][-1] == "data: [DONE]"
    late.join()
    assert found == [expected]


def test_a_profile_is_written_where_the_server_was_told_to(host, admin, profile_dir):
    assert admin.post("/stop_profile", headers=ADMIN).status_code == 400
    assert admin.post("/start_profile?directory=/tmp", headers=ADMIN).status_code == 400
    assert admin.post("/start_profile", headers=ADMIN).status_code == 200
    response = admin.post("/start_profile", headers=ADMIN)
    assert response.status_code == 400 and "stop it first" in response.text
    assert admin.post(COMPLETIONS, json=GREEDY, headers=USER).status_code == 200
    assert admin.post("/stop_profile", headers=ADMIN).status_code == 200
    (path,) = profile_dir.rglob("*.xplane.pb")
    lines = [line for plane in ProfileData.from_file(str(path)).planes for line in plane.lines]
    assert sum(event.name == "step" for line in lines for event in line.events) >= 30


def test_cached_prefixes_are_forgotten_when_nobody_uses_them(host, admin):
    def cached():
        body = {"prompt": [7] * 200, "max_tokens": 1}
        usage = admin.post(COMPLETIONS, json=body, headers=USER).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    host.wait_until_idle()
    assert admin.post("/reset_prefix_cache", headers=ADMIN).status_code == 200
    assert cached() == 0
    body = GREEDY | {"stream": True, "max_tokens": 1500}
    with admin.stream("POST", COMPLETIONS, json=body, headers=USER) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert admin.get("/load", headers=USER).json() == {"server_load": 1}
        assert admin.post("/reset_prefix_cache", headers=ADMIN).status_code == 409


def test_what_the_server_tells_of_itself_holds_no_key(host, engine_options):
    with host.serve(keys=("of-user",), admin_keys=("of-admin",)) as client:
        info = client.get("/server_info", headers=ADMIN)
    assert info.json()["engine"]["model"]["model"] == engine_options["model"]
    assert info.json()["server"]["max_json_depth"] == 64
    assert "of-user" not in info.text and "of-admin" not in info.text
    assert "api_key" not in info.json()["server"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/sleep?level=3", "level=3"),
        ("/sleep?level=1&level=2", "give it once"),
        ("/sleep?level=-1", "level='-1'"),
        ("/sleep?mode=wait", "mode='wait'"),
        ("/sleep?leve=1", "unknown parameter 'leve'; use level, mode"),
        ("/wake_up?tags=a", "tags='a'"),
    ],
)
def test_what_is_wrong_is_told(admin, path, message):
    response = admin.post(path, headers=ADMIN)
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert admin.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}


def test_admin_keys_come_of_flags_and_of_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("b\nc\n")
    options = ServerOptions(admin_api_key=("a",), admin_api_key_file=str(file))
    assert read_keys(options) == Keys(api=(), admin=("a", "b", "c"))
    for wrong in (
        ServerOptions(admin_api_key=("a b",)),
        ServerOptions(admin_api_key=("a",), admin_without_key=True),
    ):
        with pytest.raises(ValidationError, match="admin"):
            wrong.validate()
