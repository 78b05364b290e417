"""Joins everything into one Ray Serve application.

Owns: what is deployed, with which options. Must not know: how Ray is started or ended.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    BackpressureConfig,
    HTTPOptions,
    ProxyLocation,
    RequestRouterConfig,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from engine.core.async_engine import CLOSE_LIMIT_S
from serve_app.config import (
    APP_NAME,
    INGRESS_NAME,
    AppConfig,
    ModelConfig,
    ReplicaConfig,
    label_resource,
)
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.ledger import LEDGER_NAME, KeyLedger, lease_s
from serve_app.replica.deployment import MetalReplica

# A refusal by Ray's router, which does not know the engine's wait, says this.
ROUTER_RETRY_AFTER_S = 5.0
# How often a replica that is to stop looks whether it is idle.
SHUTDOWN_POLL_S = 0.5
# For what has come from a replica at its end, and for the ingress's own.
INGRESS_SLACK_S = 10.0
ROUTERS = {
    "cost": "serve_app.routing.request_router.MetalRouter",
    "power-of-two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "round-robin": "ray.serve.experimental.round_robin_router:RoundRobinRouter",
}
# Of all replicas, rounded down, and at least one: a share of any fleet that rounds down to one.
ONE_AT_A_TIME = 1e-6
SCALING_POLICY = "serve_app.autoscaling.serve_policy:ServeScaling"
# Serve averages what replicas report over this; the policy has delays of its own on top.
SCALING_LOOK_BACK_S = 2.0
SCALING_REPORT_PERIOD_S = 1.0


def run_app(config: AppConfig, replica: type[MetalReplica] = MetalReplica) -> DeploymentHandle[Any]:
    """Deploy on the Ray that this process is connected to; returns the ingress's handle when the app runs.

    Raises RuntimeError with Serve's words when a deployment cannot be started.
    """
    serve.start(
        proxy_location=ProxyLocation.EveryNode,
        http_options=_http_options(config),
        # The controller's log says why there are how many replicas.
        logging_config=_logging("INFO"),
    )
    handle: DeploymentHandle[Any] = serve.run(
        build_app(config, replica), name=APP_NAME, route_prefix="/", logging_config=_logging("WARNING")
    )
    return handle


def stop_calls(config: AppConfig, grace_s: float) -> None:
    """End every replica's engine: running answers get ``grace_s``, then their clients get an error and the end.

    For just before Serve is shut down: Serve would wait for answers as long as replicas are ever given.
    """
    waits = []
    for model in config.models:
        handle: Any = serve.get_deployment_handle(model.deployment_name, APP_NAME)
        waits.append(handle.broadcast("stop", grace_s))
    for wait in waits:
        wait.results(timeout_s=grace_s + CLOSE_LIMIT_S, return_exceptions=True)


def build_app(config: AppConfig, replica: type[MetalReplica] = MetalReplica) -> serve.Application:
    """Return the application: one deployment of replicas for each model, and the ingress in front of them."""
    replicas = {model.name: _replica(replica, model, config) for model in config.models}
    application: serve.Application = _ingress(config).bind(config, replicas, _ledger(config))
    return application


def _ledger(config: AppConfig) -> serve.Application | None:
    """Who counts what keys use, where several ingresses let requests in; one alone counts for itself."""
    if not config.keys or config.ingress.replicas == 1:
        return None
    deployment: Any = serve.deployment(
        name=LEDGER_NAME, num_replicas=1, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000
    )(KeyLedger)
    application: serve.Application = deployment.bind(config.keys, lease_s(config))
    return application


def _replica(replica: type[MetalReplica], model: ModelConfig, app: AppConfig) -> serve.Application:
    config = app.replica
    deployment: Any = serve.deployment(
        name=model.deployment_name,
        **_number_of_replicas(model),
        request_router_config=_router(model, config),
        # Every Mac offers one `metal`: so exactly one replica on each. The engine's threads are not Ray's business.
        ray_actor_options={"num_cpus": 0, "resources": _resources(model)},
        rolling_update_percentage=ONE_AT_A_TIME,
        max_ongoing_requests=model.max_ongoing_requests,
        max_queued_requests=config.max_queued_requests,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=ROUTER_RETRY_AFTER_S),
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=config.health_check_timeout_s,
        # Then Ray kills the replica; closing the engine comes after the calls and may take its own time.
        graceful_shutdown_timeout_s=config.shutdown_grace_s + CLOSE_LIMIT_S,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        max_constructor_retry_count=config.max_start_attempts,
    )(replica)
    application: serve.Application = deployment.bind(model, config, app.logs)
    return application


def _http_options(config: AppConfig) -> HTTPOptions:
    https = config.https
    files = {"ssl_certfile": https.certificate, "ssl_keyfile": https.key} if https else {}
    return HTTPOptions(host=config.host, port=config.port, **files)


def _resources(model: ModelConfig) -> dict[str, float]:
    # So small a part that the label never runs out: `metal` is what limits.
    label = {label_resource(model.only_on): 0.001} if model.only_on else {}
    return {"metal": 1, **label}


def _number_of_replicas(model: ModelConfig) -> dict[str, Any]:
    scaling = model.scaling
    if scaling is None:
        return {"num_replicas": model.replicas}
    slots = model.engine.slots if isinstance(model.engine.slots, int) else 1
    policy: Any = AutoscalingPolicy
    config = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        initial_replicas=min(max(model.replicas, scaling.min_replicas), scaling.max_replicas),
        max_replicas=scaling.max_replicas,
        metrics_interval_s=SCALING_REPORT_PERIOD_S,
        look_back_period_s=SCALING_LOOK_BACK_S,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=policy(policy_function=SCALING_POLICY, policy_kwargs={"rules": scaling.model_dump(), "slots": slots}),
    )
    return {"autoscaling_config": config}


def _router(model: ModelConfig, config: ReplicaConfig) -> RequestRouterConfig:
    is_ours = config.router == "cost"
    values: dict[str, Any] = {
        "request_router_class": ROUTERS[config.router],
        "request_router_kwargs": {"per_user": model.engine.prefix_cache == "per-user"} if is_ours else {},
        "request_routing_stats_period_s": config.report_period_s,
        "request_routing_stats_timeout_s": config.health_check_timeout_s,
    }
    return RequestRouterConfig(**values)


def _ingress(app: AppConfig) -> Any:
    config = app.ingress
    return serve.deployment(
        name=INGRESS_NAME,
        num_replicas=config.replicas,
        max_replicas_per_node=1,
        rolling_update_percentage=ONE_AT_A_TIME,
        ray_actor_options={"num_cpus": config.num_cpus},
        max_ongoing_requests=config.max_ongoing_requests,
        # An answer that its replica is given the time to finish has to get to its client as well.
        graceful_shutdown_timeout_s=app.replica.shutdown_grace_s + INGRESS_SLACK_S,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
    )(Ingress)


def _logging(level: str) -> LoggingConfig:
    # A line for every request would cost more than routing it does.
    return LoggingConfig(log_level=level, enable_access_log=False)
