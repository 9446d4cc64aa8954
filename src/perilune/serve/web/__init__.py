"""The chat page that the server shows at `/`: four files, no build step, nothing from elsewhere.

The page talks to the same `/v1` endpoints as everybody, so it needs no rights of its own and is served without a key;
a server that asks for one is answered with the key the person types, which stays in the tab. What a model writes is
shown as text (web/markdown.js): the Content-Security-Policy below, which allows no script but these files and no
request but to this server, is the second lock on the same door.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html"),
    "/web/chat.css": ("chat.css", "text/css"),
    "/web/chat.js": ("chat.js", "text/javascript"),
    "/web/markdown.js": ("markdown.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",  # asks again each time, so that a new version is never mixed with an old one
}


def web_routes() -> list[Route]:
    """What the server adds to its own routes."""
    return [_route(path, name, kind) for path, (name, kind) in FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    file = Path(__file__).parent / name

    async def answer(request: Request) -> Response:
        return FileResponse(file, media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    return Route(path, answer, methods=["GET", "HEAD"], name=f"web:{name}")
