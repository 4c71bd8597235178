"""The page's files: who gets them, and under which rules."""

import re
from pathlib import Path

import pytest

import jaxllm.server.page
from jaxllm.server.page.files import PAGE

PATHS = [endpoint.path for endpoint in PAGE]
FILES = sorted(
    path
    for path in Path(jaxllm.server.page.__file__).parent.iterdir()
    if path.suffix in {".html", ".css", ".js", ".svg"}
)


@pytest.mark.slow
def test_files_need_no_key_and_may_load_nothing_from_elsewhere(host):
    with host.serve(keys=("secret",)) as client:
        for path in PATHS:
            response = client.get(path)
            assert response.status_code == 200
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy and "*" not in policy
        assert client.get("/").headers["Content-Type"] == "text/html; charset=utf-8"
        assert client.get("/page/main.js").headers["Content-Type"].startswith("text/javascript")
        assert client.get("/page/files.py").status_code == 401
        assert client.get("/v1/models").status_code == 401


@pytest.mark.slow
def test_nothing_else_of_the_package_is_served(client):
    for path in ("/page/files.py", "/page/index.html", "/page/..%2fapp.py", "/page/"):
        assert client.get(path).status_code == 404


@pytest.mark.slow
def test_a_server_without_page(host):
    with host.serve(disable_page=True) as client:
        assert {client.get(path).status_code for path in PATHS} == {404}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_need_neither_other_origins_nor_inline_code(path):
    text = path.read_text()
    names_of_formats = re.findall(r"http://www\.w3\.org/\S+", text)
    assert len(re.findall(r"https?:|//\w+\.", text)) == 2 * len(names_of_formats)
    assert not re.search(r"<script(?! type=\"module\" src=)|\son\w+=|\sstyle=|javascript:", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert len(text.splitlines()) <= 500
