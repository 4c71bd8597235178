"""The page's files as routes, with headers under which they can load and run nothing else.

What a model writes is not trusted: scripts make DOM nodes of it as text only, and where one should
ever fail to, the browser refuses to run what comes out.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
    "img-src 'self'",
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

_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(Path(__file__).parent.iterdir())
    if path.suffix in _MEDIA_TYPES
}
# What each of them is.
PAGE_MEDIA_TYPES = {url: _MEDIA_TYPES[path.suffix] for url, path in _FILES.items()}
# Nobody needs a key for these: the page asks for it, and brings it with what it fetches.
PAGE_PATHS = frozenset(_FILES)


def page_routes() -> list[Route]:
    """A route for every file."""
    return [_route(url, path) for url, path in _FILES.items()]


def _route(url: str, path: Path) -> Route:
    content = path.read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=_MEDIA_TYPES[path.suffix])

    return Route(url, serve)
