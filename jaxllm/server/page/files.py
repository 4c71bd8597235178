"""Serves the page's files, with headers that forbid the browser to load or run anything else.

The model's output is not trusted. The scripts insert it into the DOM as text only, and these
headers are a second defence: the browser does not run scripts from anywhere else.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.endpoint import Access, Endpoint, by
from jaxllm.server.service import Service

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",  # images that the user adds
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

_PAGES = {"index.html": "/", "docs.html": "/docs"}
_FILES = {
    _PAGES.get(path.name, f"/page/{path.name}"): path
    for path in sorted(Path(__file__).parent.iterdir())
    if path.suffix in _MEDIA_TYPES
}


def _endpoint(url: str, path: Path) -> Endpoint:
    content, media_type = path.read_bytes(), _MEDIA_TYPES[path.suffix]

    async def serve(service: Service, request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Endpoint(
        url,
        by(serve),
        "A file of the page",
        # The page asks the user for a key, and sends it with its own requests.
        access=Access.WITHOUT_KEY,
        content_type=media_type,
    )


PAGE = tuple(_endpoint(url, path) for url, path in _FILES.items())
