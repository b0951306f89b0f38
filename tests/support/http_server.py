"""The server of the documentation, run by uvicorn on a port of this machine."""

import json
import re
import threading
from contextlib import contextmanager
from pathlib import Path

from hf_specgen import from_openai

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def documented_app(backend):
    """The app that the page builds, over `backend`."""
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Starlette(" in block
    ]
    names = {"backend": backend}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["app"]


def dropping_app(backend):
    """An app that leaves the stream of a client that disconnects to the garbage collector."""
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    def lines_of(body):
        with backend.stream(body["messages"], from_openai(body)) as stream:
            for piece in stream:
                yield f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\n\n"

    async def answer(request):
        return StreamingResponse(lines_of(await request.json()))

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


@contextmanager
def running(app):
    """The address at which the app answers."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    started = threading.Event()
    startup = server.startup

    async def starting(*args, **kwargs):
        await startup(*args, **kwargs)
        started.set()

    server.startup = starting
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(60), "the server does not start"
    (port,) = [socket.getsockname()[1] for listener in server.servers for socket in listener.sockets]
    try:
        yield f"http://127.0.0.1:{port}/v1/chat/completions"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"
