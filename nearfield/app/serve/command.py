"""`nearfield serve`: a model and its documents behind a page and an endpoint."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from rich.console import Console

from nearfield.app.chat.start import Start
from nearfield.app.evaluate.models import read_text


def serve(start: Start, host: str, port: int, waiting: int, seconds: float, tokens: int, most_tokens: int, body: int) -> None:
    """All of `nearfield serve`. Raises ValueError, OSError or ImportError with a remedy if it cannot be done."""
    if tokens > most_tokens:
        raise ValueError(f"--tokens {tokens} is more than --most-tokens {most_tokens}")
    for path in start.documents:
        read_text(path)
    console = Console(stderr=True)
    with console.status("importing the server"):
        try:
            import uvicorn
        except ImportError as error:
            raise ImportError("nearfield serve needs starlette and uvicorn: pip install 'nearfield[serve]'") from error
    # Before the model is loaded: whether the port is free should not take minutes to find out.
    with _bound(host, port) as place:
        from nearfield.app.serve.asgi import LOCAL, make_app
        from nearfield.app.serve.turns import Limits

        engine = start.engine(console)
        name = Path(start.model).name or start.model
        limits = Limits(waiting, seconds, tokens, most_tokens, body)
        app = make_app(engine, name, limits, () if is_any(host) else (*LOCAL, host.lower(), f"[{host.lower()}]"))
        shown = "localhost" if is_any(host) else f"[{host}]" if ":" in host else host
        port = place.getsockname()[1]
        console.print(f"http://{shown}:{port} (Ctrl-C ends it)", highlight=False, soft_wrap=True)
        if not _is_local(host):
            console.print("others on the network can reach it, and there is no password", style="yellow")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, server_header=False)
        uvicorn.Server(config).run(sockets=[place])


def _bound(host: str, port: int) -> socket.socket:
    """A socket at this place. Raises ValueError if it is taken, or is no place of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ValueError(f"cannot listen at --host {host} --port {port} ({error.strerror}); give another one") from error
    return found


def is_any(host: str) -> bool:
    """Whether this stands for all addresses of the machine."""
    return host in ("0.0.0.0", "::")


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
