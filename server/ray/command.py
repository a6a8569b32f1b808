"""The command `outrider deploy`. Ray is imported inside it: without the extra `ray`, all other commands work."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from server.command import EXTRA_FLAGS, ConfigOption, ModelOption, SettingsCommand, fail

if TYPE_CHECKING:
    from server.ray.scale import Scale
    from server.settings import Settings

NAME = "outrider"  # of the Serve application
# What a Ray that this command starts is told: calls between deployments go straight through gRPC, and the application runs in
# its process's main event loop. Both take milliseconds off the first token. Nodes of other clusters need them in their own
# environment.
ENVIRONMENT = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}


def register(outrider: typer.Typer) -> None:
    """Adds the command to the `outrider` application."""
    outrider.command("deploy", cls=SettingsCommand, context_settings=EXTRA_FLAGS)(deploy)


def deploy(
    context: typer.Context,
    config: ConfigOption = None,
    model: ModelOption = None,
    replicas: Annotated[int, typer.Option(help="Model replicas; the fewest with --max-replicas.", min=1)] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="The most model replicas: their number follows the running requests.", min=1)
    ] = None,
    ingress_replicas: Annotated[int, typer.Option(help="Processes that answer HTTP.", min=1)] = 1,
    cpus: Annotated[float, typer.Option(help="Cores that each model replica reserves.", min=0)] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs that each model replica reserves.", min=0)] = 0.0,
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster; default: the one of this machine, or else a new one.")
    ] = None,
) -> None:
    """Serve a model on many machines, with Ray Serve.

    Every setting of `outrider serve` is a flag. On a running cluster the command returns once the model is served; a cluster
    that it has started itself ends with it.
    """
    from server.settings import SettingsError, load_settings, parse_flags

    if find_spec("ray") is None:
        raise fail("`outrider deploy` needs Ray; install it with `pip install 'outrider[ray]'`.")
    if max_replicas is not None and max_replicas < replicas:
        raise fail("--max-replicas must be at least --replicas.")
    from server.ray.scale import Scale

    try:
        options = [option for parameter in context.command.params for option in parameter.opts]
        flags = parse_flags(context.args, options) | ({} if model is None else {"model.path": model})
        scale = Scale(replicas=replicas, max_replicas=max_replicas, ingress_replicas=ingress_replicas, cpus=cpus, gpus=gpus)
        run(load_settings(config, flags), scale, address)
    except (SettingsError, ConnectionError) as error:
        raise fail(str(error)) from None


def run(settings: Settings, scale: Scale, address: str | None) -> None:
    """Deploys, and waits for Ctrl-C if this process has started the cluster. Raises SettingsError and ConnectionError."""
    from server.front_end import check_address

    check_address(settings)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    from server.ray.deployment import application

    started = connect(address)
    app = application(settings, scale)
    serve.start(http_options={"host": settings.server.host, "port": settings.server.port})
    serve.run(app, name=NAME, blocking=started)
    ray.shutdown()


def connect(address: str | None) -> bool:
    """Connects to a Ray cluster; returns whether it is a new one. Raises ConnectionError."""
    import ray

    try:
        ray.init(address=address or "auto")
    except ConnectionError:
        if address is not None:
            raise ConnectionError(f"There is no Ray cluster at {address}; start one with `ray start --head`.") from None
        ray.init(include_dashboard=False)
        return True
    return False
