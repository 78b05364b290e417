"""The HTTP application: addresses, and errors in OpenAI's shape for all of them.

Owns: the application's parts and their order, errors, models and status. Must not know: Ray. Bodies are checked by
FastAPI against the request models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.errors import EngineError
from serve_app import errors
from serve_app.ingress.auth import KeyBook, KeyGuard
from serve_app.ingress.body_limit import BodyLimit
from serve_app.ingress.dashboard.routes import add_dashboard
from serve_app.ingress.fleet import Fleet, ServedModel, find_model
from serve_app.ingress.generation_routes import Generation, add_anthropic_routes, add_openai_routes
from serve_app.ingress.metrics import metrics_text
from serve_app.ingress.observing import IngressWatch, Observing
from serve_app.ingress.primed import ResponseLimits, error_response
from serve_app.ingress.request_ids import RequestIds
from serve_app.ingress.validation import explain
from serve_app.routing.journal import JOURNAL
from serve_app.telemetry.families import CONTENT_TYPE

NUM_DECISIONS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the HTTP side needs of the configuration. ``name``: what this ingress is called in its status."""

    max_body_bytes: int
    request_timeout_s: float
    keep_alive_s: float
    cors_origins: tuple[str, ...] = ()
    echoes_request_ids: bool = True
    name: str = ""


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorObject


def build_http_app(
    fleet: Fleet, settings: HttpSettings, book: KeyBook | None = None, watch: IngressWatch | None = None
) -> ASGIApp:
    """Return the application. Without ``book``, or with an empty one, it asks for no keys."""
    book, watch = book or KeyBook(()), watch or IngressWatch()
    app = FastAPI(
        title="metalslots",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    _add_error_handlers(app)
    generation = Generation(fleet, ResponseLimits(settings.request_timeout_s, settings.keep_alive_s))
    add_openai_routes(app, generation)
    add_anthropic_routes(app, generation)
    _add_models(app, fleet)
    _add_status(app, fleet, book, settings.name)
    _add_metrics(app, fleet, watch)
    add_dashboard(app, fleet, book, generation, watch)
    guarded: ASGIApp = KeyGuard(BodyLimit(app, settings.max_body_bytes), book)
    if settings.cors_origins:
        # Outermost: a browser asks whether it may ask before it sends any key.
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-route", "x-queue-ms", "x-ttft-ms", "retry-after"],
        )
    return RequestIds(Observing(guarded, watch), echoes=settings.echoes_request_ids)


def _add_models(app: FastAPI, fleet: Fleet) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_object(model) for model in fleet.models]}

    # A path, not a segment: names of models from a hub have a slash.
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model_object(find_model(fleet, name))


def _add_status(app: FastAPI, fleet: Fleet, book: KeyBook, name: str) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """200 when at least one replica would compute a request now."""
        num_ready = {model.name: 0 for model in fleet.models}
        for replica in await fleet.statuses():
            num_ready[replica.model] += replica.ready
        usable = any(num_ready.values())
        content = {"status": "ok" if usable else "unavailable", "ready_replicas": num_ready}
        return JSONResponse(content, 200 if usable else 503, None if usable else {"Retry-After": "5"})

    @app.get("/status")
    async def status() -> dict[str, Any]:
        """Everything that every replica says of itself, and what this ingress chose last; null is unknown."""
        return {
            "ingress": name,
            "models": [{"name": model.name, "aliases": list(model.aliases)} for model in fleet.models],
            "replicas": [asdict(replica) for replica in await fleet.statuses()],
            "keys": await book.door.usage(),
            "decisions": [asdict(decision) for decision in JOURNAL.newest(NUM_DECISIONS_SHOWN)],
        }


def _add_metrics(app: FastAPI, fleet: Fleet, watch: IngressWatch) -> None:
    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """The whole fleet's figures as Prometheus reads them."""
        return Response(await metrics_text(fleet, watch), media_type=CONTENT_TYPE)


def _add_error_handlers(app: FastAPI) -> None:
    async def show(request: Request, error: Exception) -> Response:
        return error_response(error, request.url.path)

    async def show_findings(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(explain(error.errors()), request.url.path)

    async def show_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_of_http(request, error), request.url.path, error.headers)

    for kind in (errors.ServeAppError, EngineError, Exception):
        app.add_exception_handler(kind, show)
    app.add_exception_handler(RequestValidationError, show_findings)
    app.add_exception_handler(HTTPException, show_http_error)


def _of_http(request: Request, error: HTTPException) -> Exception:
    match error.status_code:
        case 404:
            return errors.RouteUnknownError(f"There is nothing at {request.method} {request.url.path}.")
        case 405:
            return errors.MethodNotAllowedError(f"{request.url.path} does not answer to {request.method}.")
        case _:
            return errors.MalformedRequestError("The body cannot be read as JSON in UTF-8.")


def _model_object(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.since_unix_s, "owned_by": "metalslots"}
