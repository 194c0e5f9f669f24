"""Not tests: a whole server with stand-ins for models, for a process of its own. options: fields of ServeSettings.

It writes its address, then "draining N" when its end begins. Answers stand still before their second piece until a line comes on
standard input. "slow": true has the models load until such a line comes; "fails": true has loading fail; "keeps": true has the
first close take forever, as one that writes to a slow disk.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from typing import Any

from nanovllm_cli.errors import CheckpointError, NanovllmError
from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.listen import listen
from nanovllm_cli.server.run import Interrupted, serve
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakeGenerates, FakeModels, FakePool, Script


class Loading:
    def __init__(self, go: asyncio.Event, slow: bool, fails: bool, keeps: bool) -> None:
        self.go, self.slow, self.fails, self.keeps = go, slow, fails, keeps

    async def start(self) -> None:
        read_lines(self.go)
        if self.slow:
            await self.go.wait()
            self.go.clear()
        if self.fails:
            raise CheckpointError("the weights are broken")

    async def close(self) -> None:
        if self.keeps:
            self.keeps = False
            print("keeping", flush=True)
            await asyncio.Event().wait()
        print("closed", flush=True)


def read_lines(go: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        for _ in sys.stdin:
            loop.call_soon_threadsafe(go.set)

    threading.Thread(target=read, daemon=True).start()


def main(options: dict[str, Any]) -> int:
    slow, fails, keeps = (options.pop(name, False) for name in ("slow", "fails", "keeps"))
    settings = ServeSettings(**{"port": 0, **options})
    go = asyncio.Event()
    models = FakeModels()
    generates = FakeGenerates(Script.of("Hello", " there", waits=go, waits_at=1), models)
    app = create_app(ServerContext(settings, models, generates, FakePool()))
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR)
    try:
        listener = listen(settings)
    except NanovllmError as error:
        print(error.message, error.hint, sep="\n", file=sys.stderr)
        return error.exit_code
    try:
        print(listener.url, flush=True)
        serve(
            app,
            settings,
            listener,
            Loading(go, slow, fails, keeps),
            on_ready=lambda: print("ready", flush=True),
            on_drain=lambda count: print("draining", count, flush=True),
        )
    except Interrupted as stop:
        return 128 + stop.signum
    except NanovllmError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    finally:
        listener.close()
    return 0
