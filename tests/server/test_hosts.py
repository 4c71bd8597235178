"""Web pages of other sites do not reach a server that trusts whoever can reach it."""

import asyncio

import pytest

from jaxllm.server.hosts import KnownHosts
from jaxllm.server.options import ServerOptions

PATH = "/v1/models"


def ask(*headers, is_open=True, method="GET", path=PATH, **options):
    """The status that a request with these headers gets."""
    found = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        if message["type"] == "http.response.start":
            found.append(message["status"])

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(KnownHosts(app, ServerOptions(**options), is_open, {"/health"})(scope, None, send))
    return found[0]


@pytest.mark.parametrize(
    "name",
    ["localhost", "LocalHost.", "127.0.0.1", "127.9.9.9", "[::1]", "app.localhost"],
)
@pytest.mark.parametrize("port", ["", ":8000"])
def test_at_loopback_local_names_are_right(name, port):
    assert ask(("Host", name + port)) == 200
    assert ask(("Host", name + port), is_open=False) == 200


@pytest.mark.parametrize(
    "name",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
    + ["notlocalhost", "192.168.1.5", "[2001:db8::1]:8000", "", "localhost, evil.example"],
)
def test_at_loopback_any_other_name_is_wrong(name):
    for is_open in (True, False):
        assert ask(("Host", name), is_open=is_open) == 403
    assert ask(("Host", name), path="/health") == 200


def test_two_names_are_wrong_and_none_is_right():
    assert ask(("Host", "localhost"), ("Host", "evil.example")) == 403
    assert ask() == 200


def test_elsewhere_all_names_are_right_unless_some_are_named():
    assert ask(("Host", "a.example"), host="0.0.0.0") == 200
    options = {"host": "0.0.0.0", "allowed_hosts": ("a.example", "*.b.example")}
    for name, status in (
        ("a.example:80", 200),
        ("x.a.example", 403),
        ("x.b.example", 200),
        ("y.x.b.example", 200),
        ("b.example", 403),
        ("xb.example", 403),
        ("localhost", 403),
    ):
        assert ask(("Host", name), **options) == status
    assert ask(("Host", "evil.example"), allowed_hosts=("*",)) == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://LOCALHOST:8000", 200),
        ("http://localhost:8001", 403),
        ("http://evil.example", 403),
        ("http://localhost:8000.evil.example", 403),
        ("http://[", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_pages_of_other_sites_may_change_nothing(origin, status):
    headers = (("Host", "localhost:8000"), ("Origin", origin))
    assert ask(*headers, method="POST") == status
    assert ask(*headers, method="GET") == 200
    # What needs a key is not done for a page that has none.
    assert ask(*headers, method="POST", is_open=False) == 200


def test_pages_that_are_let_in_by_name_may():
    headers = (("Host", "localhost:8000"), ("Origin", "http://a.example"))
    assert ask(*headers, method="POST", allowed_origins=("http://a.example",)) == 200
    assert ask(*headers, method="POST", allowed_origins=("*",)) == 200
    assert ask(*headers, method="POST", allowed_origins=("http://b.example",)) == 403


@pytest.mark.slow
def test_a_real_server_does_so(host, client):
    asks = {"Host": "evil.example"}
    response = client.get(PATH, headers=asks)
    assert response.status_code == 403 and "--allowed-hosts" in response.text
    assert response.json()["error"]["type"] == "PermissionDeniedError"
    # Sent without being asked for leave first: as a form or as text.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        for headers, status in (({}, 415), ({"Origin": "http://evil.example"}, 403)):
            response = client.post(
                "/v1/completions",
                content=b'{"prompt": "a"}',
                headers={"Content-Type": kind, **headers},
            )
            assert response.status_code == status
    with host.serve(admin_without_key=True) as other:
        assert other.post("/sleep", headers={"Origin": "http://evil.example"}).status_code == 403
        assert other.get("/is_sleeping").json() == {"is_sleeping": False}
