"""`metalslots serve`: one command from nothing to an answered question.

Owns: the order of things (check, say where things are, start Ray, deploy, ask, stay, stop) and what is printed.
Must not know: how a model is loaded or a request is routed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from engine.model_source import ModelSource, resolve_model
from serve_app.cli.console import CommandFailedError, err, out, progress, reports_errors
from serve_app.cli.deploy import ask, deploy
from serve_app.cli.local_ray import LocalRay
from serve_app.cli.serve_checks import check_disk, check_https, check_log_folder, check_port
from serve_app.cli.serve_settings import ServeOptions, app_settings
from serve_app.config import AppConfig
from serve_app.keys import own_key

QUESTION = "What is the capital of France?"
WATCH_PERIOD_S = 1.0
# Who types Ctrl-C waits for the prompt; who sends SIGTERM (a supervisor) gives the time that is configured.
INTERRUPT_GRACE_S = 1.0


@reports_errors
def serve(
    config: Annotated[Path | None, typer.Option(help="An app file (configs/apps/*.yaml).")] = None,
    model: Annotated[str | None, typer.Option(help="demo, a folder, a .gguf file, or a Hugging Face id.")] = None,
    slots: Annotated[str | None, typer.Option(help="Conversations decoded together: a number, or auto.")] = None,
    speculation: Annotated[str | None, typer.Option(help="auto, or off: tokens are never guessed ahead.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", min=1, max=65535)] = None,
) -> None:
    """Start the endpoint on this machine, ask it one question, and stay until Ctrl-C.

    Starts a Ray of its own and never joins one that is already running.
    """
    settings = app_settings(ServeOptions(config, model, slots, speculation, host, port))
    sources = [resolve_model(engine.model, engine.adapter) for engine in settings.engines]
    check_port(settings.host, settings.port)
    check_https(settings.https)
    check_log_folder(settings.logs.folder)
    stop = _StopSignal()
    ray = LocalRay()
    try:
        check_disk(ray.folder)
        _say_where(settings, sources, ray)
        _start(settings, ray)
        stop.wait_while(ray.alive)
    finally:
        stop.ignore()
        grace_s = settings.replica.shutdown_grace_s if stop.number == signal.SIGTERM else INTERRUPT_GRACE_S
        err.print(f"stopping; running answers get up to {grace_s:.0f} s")
        ray.stop(lambda: _end_calls(settings, grace_s), grace_s)


class _StopSignal:
    """Ctrl-C and SIGTERM: they interrupt start-up, and end the stay."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self.number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._asked.set()
        raise KeyboardInterrupt

    def wait_while(self, alive: Callable[[], bool]) -> None:
        """Return at the signal. Raises CommandFailedError when ``alive()`` turns false before."""
        try:
            while not self._asked.wait(WATCH_PERIOD_S):
                if not alive():
                    raise CommandFailedError("Ray has ended by itself.", "start again; its logs are named above")
        except KeyboardInterrupt:
            return

    def ignore(self) -> None:
        """From now on nothing interrupts: the orderly end is bounded in time."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _say_where(settings: AppConfig, sources: list[ModelSource], ray: LocalRay) -> None:
    for model, source in zip(settings.models, sources, strict=True):
        out.print(f"model     {model.name} ({source.path}), slots: {model.engine.slots}", soft_wrap=True)
    out.print(f"address   {settings.url}")
    out.print(f"logs      {ray.log_folder}", soft_wrap=True)


def _start(settings: AppConfig, ray: LocalRay) -> None:
    key = ""
    if settings.keys:
        own, key = own_key()
        settings = settings.model_copy(update={"keys": (*settings.keys, own)})
    with progress("starting Ray") as update:
        ray.start()
        # Only now: Ray reads its environment when it is first imported, and `start` has set it.
        from serve_app.app import run_app

        update("starting the app", None)
        deploy(lambda: run_app(settings), update, ray.log_folder)
        update("asking one question", None)
        url = settings.url
        certificate = settings.https.certificate if settings.https else ""
        answer = ask(url, settings.models[0].name, QUESTION, key, certificate)
    out.print(f"\n[bold]{QUESTION}[/]\n{answer}\n", soft_wrap=True)
    out.print(f"ready: [bold]{url}/v1[/] (OpenAI API), {url}/dashboard. Ctrl-C stops it.", soft_wrap=True)


def _end_calls(settings: AppConfig, grace_s: float) -> None:
    from serve_app.app import stop_calls

    stop_calls(settings, grace_s)
