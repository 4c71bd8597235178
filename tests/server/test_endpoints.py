"""The table of endpoints is what the server does, and what is told of it."""

import re
from pathlib import Path

import pytest

import jaxllm
from jaxllm.server.endpoint import Access
from jaxllm.server.endpoints import ENDPOINTS, FOR_POOLING
from jaxllm.server.options import ServerOptions

README = Path(jaxllm.__file__).parent / "server" / "README.md"
OPEN = (Access.ANYBODY, Access.WITHOUT_KEY)


def paths(*accesses):
    return {one.path for one in ENDPOINTS if one.access in accesses}


def test_an_operation_is_there_once():
    operations = [(one.path, method) for one in ENDPOINTS for method in one.methods]
    assert len(set(operations)) == len(operations)


@pytest.mark.slow
def test_every_route_is_in_the_table_and_described_and_open_or_not_as_it_says(host_with_adapters):
    found = {}
    keys = {"keys": ("of-user",), "admin_keys": ("of-admin",)}
    options = {"enable_tokenizer_info_endpoint": True, "access_log": False}
    with host_with_adapters.serve(**keys, **options) as client:
        routes = client.server.config.app.routes
        user = {"Authorization": "Bearer of-user"}
        described = client.get("/openapi.json", headers=user).json()["paths"]
        for endpoint in ENDPOINTS:
            for method in endpoint.methods:
                status = client.request(method, endpoint.path.replace(":path", "")).status_code
                found.setdefault(status != 401, set()).add(endpoint.path)
    offered = [one for one in ENDPOINTS if one not in FOR_POOLING]  # the engine generates
    assert {route.path for route in routes} == {endpoint.path for endpoint in offered}
    operations = {(path, method.upper()) for path, item in described.items() for method in item}
    assert operations == {
        (re.sub(":path", "", one.path), method) for one in offered for method in one.methods
    }
    assert found == {True: paths(*OPEN), False: paths(Access.KEY, Access.ADMIN)}


@pytest.mark.slow
def test_what_only_watches_is_not_counted(host):
    with host.serve(enable_tokenizer_info_endpoint=True, access_log=False) as client:
        for endpoint in ENDPOINTS:
            if "GET" in endpoint.methods:
                client.get(endpoint.path.replace("{name:path}", "x"))
        text = client.get("/metrics").text
    counted = set(re.findall(r'^http_requests_total{handler="([^"]*)"', text, re.MULTILINE))
    assert counted - {"none"} == {
        one.path
        for one in ENDPOINTS
        if one.is_counted and "GET" in one.methods and one.access is not Access.ADMIN
    }


def test_help_and_readme_name_all_paths():
    named = {
        name: set(re.findall(r"(?<!\w)/[\w.]+\b", field.metadata["help"]))
        for name, field in ServerOptions.__dataclass_fields__.items()
    }
    assert named["api_key"] == paths(Access.ANYBODY)
    assert named["admin_api_key"] <= paths(*Access)
    readme = README.read_text()
    of_programs = paths(*Access) - paths(Access.WITHOUT_KEY)  # the page has files
    assert {path for path in of_programs if path.partition("/{")[0] not in readme} == set()
