"""The facts about this machine and server that a report of a fault needs, in one paste without secrets."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outrider.server.settings.printing import changed_yaml
from outrider.server.settings.sources import EffectiveSettings
from outrider.verify.checkpoint import stored_bytes
from outrider.verify.findings import processor_name
from outrider.verify.model.cpu.native.variants import runnable
from outrider.verify.system_memory import free_bytes

# Whose versions decide what a server computes and speaks.
PACKAGES = ("torch", "transformers", "tokenizers", "gguf", "llguidance", "numpy", "fastapi", "uvicorn", "pydantic")
# NVIDIA's driver lists its GPUs here.
GPUS = Path("/proc/driver/nvidia/gpus")


def report(effective: EffectiveSettings) -> str:
    lines = {
        "outrider": version("outrider"),
        "Python": f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}",
        "CPU": f"{processor_name()}, {os.cpu_count()} cores, {free_bytes() / 1e9:.1f} GB of memory free",
        "compiled library": ", ".join(file.name.partition(".")[0].removeprefix("_") for file in runnable()) or "none",
        "GPUs": ", ".join(gpus()) or "none",
        "packages": ", ".join(f"{name} {installed(name)}" for name in PACKAGES),
        "model": model(effective.settings.model.path),
    }
    listed = "\n".join(f"- {name}: {value}" for name, value in lines.items())
    changed = changed_yaml(effective) or "# all have their defaults\n"
    return f"{listed}\n\n```yaml\n{changed}```"


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def gpus() -> list[str]:
    """The names of NVIDIA's GPUs, as its driver lists them."""
    found = [line for file in sorted(GPUS.glob("*/information")) for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in found if line.startswith("Model:")]


def model(path: str) -> str:
    """The model's name without its folder, which may say more than its owner wants to publish, and its size."""
    size, is_local = stored_bytes(path), path.startswith((".", "/", "~"))
    name = Path(path).name if is_local or size is not None else path
    return name if size is None else f"{name}, {size / 1e6:.0f} MB"
