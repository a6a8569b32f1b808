"""The command `outrider deploy`. Ray is imported inside it: without the extra `ray`, all other commands work."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.server.command import ConfigOption, ModelOption, fail, failing

if TYPE_CHECKING:
    from outrider.server.ray.scale import Scale
    from outrider.server.settings import Settings

NAME = "outrider"
# A Ray that this command starts gets these variables: calls between deployments go straight through gRPC, and the application
# runs in its process's main event loop. Both take milliseconds off the first token. Nodes of other clusters need them in their
# own environment.
ENVIRONMENT = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}


def deploy(
    context: typer.Context,
    config: ConfigOption = None,
    model: ModelOption = None,
    replicas: Annotated[int, typer.Option(help="Number of model replicas; with --max-replicas, the least number.", min=1)] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(help="The largest number of model replicas, which then follows the number of running requests.", min=1),
    ] = None,
    ingress_replicas: Annotated[int, typer.Option(help="Processes that answer HTTP.", min=1)] = 1,
    cpus: Annotated[float, typer.Option(help="Cores that each model replica reserves.", min=0)] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs that each model replica reserves.", min=0)] = 0.0,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster; default: the cluster that this machine belongs to, or else a new one."),
    ] = None,
) -> None:
    """Serve a model on many machines, with Ray Serve.

    Every setting of `outrider serve` is a flag. On a running cluster, the command returns once the model is served. A cluster
    that it starts itself ends with it.
    """
    from outrider.server.settings import SettingsError, load_settings, parse_flags

    if find_spec("ray") is None:
        raise fail("`outrider deploy` needs Ray; install it with `pip install 'outrider[ray]'`.")
    if max_replicas is not None and max_replicas < replicas:
        raise fail("--max-replicas must be at least --replicas.")
    from outrider.server.ray.scale import Scale

    with failing(SettingsError, ConnectionError):
        options = [option for parameter in context.command.params for option in parameter.opts]
        flags = parse_flags(context.args, options) | ({} if model is None else {"model.path": model})
        scale = Scale(replicas=replicas, max_replicas=max_replicas, ingress_replicas=ingress_replicas, cpus=cpus, gpus=gpus)
        run(load_settings(config, flags), scale, address)


def run(settings: Settings, scale: Scale, address: str | None) -> None:
    """Deploys, and waits for Ctrl-C if this process has started the cluster. Raises SettingsError and ConnectionError."""
    from outrider.server.serve import check_address
    from outrider.server.settings import SettingsError

    check_address(settings)
    if settings.models.paths:
        raise SettingsError("A cluster serves one model; leave out models.paths, and set model.path.")
    if settings.server.socket_file or settings.server.tls_certificate:
        raise SettingsError(
            "A cluster listens on an address and a port by plain HTTP; leave out the UNIX socket and the TLS certificate, and "
            "put a proxy with TLS in front of it."
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    from outrider.server.ray.deployment import application

    app = application(settings, scale)
    started = connect(address, scale)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # must follow Ray's own handler, which prints the process's stack
    try:
        check_room(ray.cluster_resources(), scale, started)
        say(
            f"starting {settings.model.served_name} on {scale.replicas} replica{'s' * (scale.replicas > 1)} (loading the model)"
        )
        serve.start(http_options={"host": settings.server.host, "port": settings.server.port})
        serve.run(app, name=NAME)
        say(f"serving {settings.model.served_name} at http://{settings.server.host}:{settings.server.port}/v1")
        while started:
            time.sleep(60)
    except KeyboardInterrupt:
        say("stopping")
    except RuntimeError as error:  # only says which deployment
        failed = serve.status().applications[NAME].deployments.values()
        raise SettingsError(reason([each.message for each in failed]) or str(error)) from None
    finally:
        ray.shutdown()


def connect(address: str | None, scale: Scale) -> bool:
    """Connects to a Ray cluster; returns whether it is a new one. Raises ConnectionError."""
    import ray
    from ray._private.services import get_ray_address_from_environment

    named = os.environ.get("RAY_ADDRESS") or address
    try:
        found = get_ray_address_from_environment(named or "auto", None)
        if host_port := re.fullmatch(
            r"(?:ray://)?(.+):(\d+)", found
        ):  # Ray would try for minutes, also to reach one that ended
            socket.create_connection((host_port[1], int(host_port[2])), timeout=5).close()
        ray.init(address=found)
    except OSError:
        if named is not None:
            raise ConnectionError(f"There is no Ray cluster at {named}; start one with `ray start --head`.") from None
        # On one machine, a replica more than there are cores is slow, but without this it would wait for a further machine.
        ray.init("local", num_cpus=max(os.cpu_count() or 1, math.ceil(scale.reserved_cpus)), include_dashboard=False)
        return True
    return False


def check_room(resources: Mapping[str, float], scale: Scale, started: bool) -> None:
    """Warns if the cluster lacks cores or GPUs. Raises SettingsError if it is new: no further machines join it."""
    from outrider.server.settings import SettingsError

    for name, reserved in (("CPU", scale.reserved_cpus), ("GPU", scale.reserved_gpus)):
        found = resources.get(name, 0.0)
        if found < reserved:
            lack = f"The deployment reserves {reserved:g} {name}s, and the cluster has {found:g}"
            if started:
                raise SettingsError(f"{lack}; use fewer --replicas or --{name.lower()}s, or a Ray cluster of several machines.")
            say(f"{lack}; what has no room waits for further machines.")


def reason(messages: list[str]) -> str:
    """The sentence of the exception that ends the last traceback among `messages`."""
    traces = [message for message in messages if "Traceback" in message]
    return traces[-1].rstrip().rsplit("\n", 1)[-1].split(": ", 1)[-1] if traces else ""


def say(message: str) -> None:
    """Prints a line about the deployment."""
    print(f"outrider: {message}", file=sys.stderr, flush=True)
