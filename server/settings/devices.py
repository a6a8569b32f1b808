"""The devices and the data types of a model, as settings."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

Quantize = Literal["none", "int8", "int4"]
KVDtype = Literal["auto", "int8", "fp8"]


def check_devices(names: str) -> str:
    """The devices of a model, in a comma list, without spaces. Raises ValueError."""
    devices = names.replace(" ", "").split(",")
    if len(devices) == 1 and re.fullmatch(r"auto|cpu|cuda(:\d+)?", devices[0]):
        return devices[0]
    if len(devices) == 1 or not all(re.fullmatch(r"cuda:\d+", each) for each in devices):
        raise ValueError("it must be auto, cpu, cuda, cuda:N, or several GPUs such as cuda:0,cuda:1")
    if len(set(devices)) < len(devices):
        raise ValueError("it must name each GPU once")
    return ",".join(devices)


Devices = Annotated[str, AfterValidator(check_devices)]
