"""What requests may name as images, and what they may not."""

import base64
import http.server
import socket
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("PIL")

from jaxllm.media import fetch
from jaxllm.media.chat import has_images, take_images
from jaxllm.media.resizing import UndecodableError
from jaxllm.media.sources import read_url
from jaxllm.media_config import MediaConfig

NOTHING = MediaConfig()


def test_a_data_url_has_its_bytes():
    text = base64.b64encode(b"picture").decode()
    for head in ("image/png", "image/svg+xml;charset=utf-8", ""):
        assert read_url(f"data:{head};base64,{text}", NOTHING) == b"picture"


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,abc", "data:image/png;base64,a b=", "data:image/png;base64,abc",
        "data:;x=" + "y" * 5000 + ";base64,", "DATA", "",
    ],
)  # fmt: skip
def test_malformed_data_urls_are_refused(url):
    with pytest.raises(UndecodableError):
        read_url(url, NOTHING)


def test_a_data_url_may_not_be_endless():
    with pytest.raises(UndecodableError, match="longer than 33554432 bytes"):
        read_url("data:image/png;base64," + "A" * (45 << 20), NOTHING)


@pytest.fixture
def folder(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (allowed / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "x").write_bytes(b"outside")
    return allowed


def test_files_come_from_the_allowed_directory(folder):
    config = MediaConfig(allowed_local_media_path=str(folder))
    assert read_url(f"file://{folder}/a%20b.png", config) == b"inside"
    assert read_url(f"file://localhost{folder}/a%20b.png", config) == b"inside"


@pytest.mark.parametrize(
    "path", ["/../secret", "/%2e%2e/secret", "/link", "/../allowed-too/x", "/missing", ""]
)
def test_no_path_leads_out_of_the_allowed_directory(folder, path):
    config = MediaConfig(allowed_local_media_path=str(folder))
    with pytest.raises(UndecodableError):
        read_url(f"file://{folder}{path}", config)


def test_no_file_is_read_unless_allowed(folder):
    with pytest.raises(UndecodableError, match="--allowed-local-media-path"):
        read_url(f"file://{folder}/a%20b.png", NOTHING)
    with pytest.raises(UndecodableError, match="not in the directory"):
        read_url("file://host/etc/passwd", MediaConfig(allowed_local_media_path=str(folder)))


class Handler(http.server.BaseHTTPRequestHandler):
    places = {}  # path -> (status, headers, body)

    def do_GET(self):
        status, headers, body = self.places[self.path]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def host():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


LOCAL = MediaConfig(allowed_media_domains=("127.0.0.1", "inside.example", "localhost"))


def test_a_host_that_the_operator_names_is_asked(host):
    Handler.places = {
        "/a?b=1": (200, {"Content-Length": "7"}, b"picture"),
        "/moved": (302, {"Location": "/a?b=1", "Content-Length": "0"}, b""),
    }
    assert read_url(f"http://{host}/a?b=1#part", LOCAL) == b"picture"
    assert read_url(f"http://{host}/moved", LOCAL) == b"picture"


def test_more_bytes_have_more_time(host, monkeypatch):
    Handler.places = {"/a": (200, {"Content-Length": "1"}, b"a")}
    deadlines = []
    get = fetch._get
    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(fetch, "_get", lambda *args: deadlines.append(args[1]) or get(*args))
    for most in (1 << 10, fetch.MAX_BYTES, fetch.MAX_VIDEO_BYTES):
        assert read_url(f"http://{host}/a", LOCAL, most) == b"a"
    assert (
        deadlines[0]
        == deadlines[1]
        < deadlines[2]
        == (deadlines[0] * fetch.MAX_VIDEO_BYTES / fetch.MAX_BYTES)
    )


def test_redirects_are_checked_as_urls_are(host):
    Handler.places = {
        "/away": (302, {"Location": "http://other.example/"}, b""),
        "/file": (302, {"Location": "file:///etc/passwd"}, b""),
        "/round": (302, {"Location": "/round", "Content-Length": "0"}, b""),
        "/gone": (404, {"Content-Length": "0"}, b""),
        "/endless": (200, {"Content-Length": str(1 << 40)}, b""),
        "/packed": (200, {"Content-Encoding": "gzip", "Content-Length": "1"}, b"x"),
    }
    for path, reason in (
        ("away", "host is not allowed"), ("file", "must begin with http"),
        ("round", "redirected more than"), ("gone", "status 404"),
        ("endless", "longer than"), ("packed", "compressed"),
    ):  # fmt: skip
        with pytest.raises(UndecodableError, match=reason):
            read_url(f"http://{host}/{path}", LOCAL)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/x", "not allowed"),
        ("ftp://127.0.0.1/x", "must begin with http"),
        ("http://user@127.0.0.1/x", "name a user"),
        ("http://example.com\\@127.0.0.1/", "characters"),
        ("http://127.0.0.1 /x", "characters"),
        ("http://127.0.0.1\r\nX: y/", "characters"),
        ("http://127.0.0.1:port/", "not a URL"),
        ("http://[::1/", "not a URL"),
        ("http:///x", "name a host"),
        ("http://localhost/x", "private network"),
        ("javascript:alert(1)", "must begin with http"),
    ],
)
def test_urls_are_refused_with_their_reason(url, reason):
    with pytest.raises(UndecodableError, match=reason):
        read_url(url, LOCAL)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1", "127.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1",
        "fe80::1", "fc00::1", "::ffff:10.0.0.1", "2002:a00:1::", "64:ff9b::a00:1",
    ],
)  # fmt: skip
def test_an_allowed_name_may_not_lead_inside(monkeypatch, address):
    """Where a name has several addresses, all must be public: the next look-up may give another."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80)),
        (family, socket.SOCK_STREAM, 6, "", (address, 80)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(UndecodableError, match="private network"):
        read_url("http://inside.example/x", LOCAL)


def test_images_are_taken_out_of_messages():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}, "uuid": "u"},
        {"type": "input_image", "image_url": "data:y"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]
    assert has_images(messages) and not has_images(messages[1:])
    seen = take_images(messages)
    assert seen.messages[0]["content"] == [parts[0], {"type": "image"}, {"type": "image"}]
    assert [one.given for one in seen.images] == ["data:x", "data:y"]
    assert seen.images[0].name == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "uuid": "known"},
        {"type": "image_pil", "image_pil": "/etc/hostname"},
        {"type": "image_pil", "image_pil": ["/etc/hostname"]},
        {"type": "image_url", "image_url": {"url": 3}},
        {"type": "image_url", "image_url": {"url": "data:x", "size": 3}},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "huge"}},
        {"type": "image_url", "image_url": "data:x", "uuid": 3},
        {"type": "image_url", "image_url": "data:x", "more": 3},
    ],
)
def test_malformed_parts_are_refused(part):
    with pytest.raises(ValueError, match=r"messages\[0\].content\[0\]"):
        take_images([{"role": "user", "content": [part]}])
