"""Builds what a release publishes: the source distribution, wheels that need no compiler, their SBOM, and SHA256SUMS.

`make wheels` runs it. It builds the last commit, so that two builds give the same bytes. zig compiles for all machines, and for
an old glibc.
"""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 17)
# zig has its own names of architectures. The library of C++ is linked in.
COMPILER = """#!/bin/sh
set -e
exec {python} -m ziglang c++ -target {machine}-linux-gnu.{glibc} -s -Wno-unknown-warning-option \\
    $(echo "$@" | sed 's/-march=x86-64-v4/-march=x86_64_v4 -mprefer-vector-width=512/; s/-march=armv8.2-a/-mcpu=generic+v8_2a/')
"""
# Calls a hook of PEP 517, without the flags that the Python which builds was compiled with.
HOOK = """
import sys, sysconfig
sysconfig.get_config_vars().update(CFLAGS="", CCSHARED="-fPIC")
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(*map(eval, sys.argv[2:]))
"""


def build_source(folder: Path, out: Path, epoch: int) -> Path:
    """The source distribution of the project in `folder`, with all times set to `epoch` (seconds)."""
    call(folder, "build_sdist", str(out))
    [file] = out.glob("outrider-*.tar.gz")
    packed = io.BytesIO()
    with tarfile.open(file) as source, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in sorted(source.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname, member.pax_headers = epoch, 0, 0, "", "", {}
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    with file.open("wb") as output, gzip.GzipFile("", "wb", 9, output, epoch) as zipped:
        zipped.write(packed.getvalue())
    return file


def build_wheel(source: Path, machine: str, out: Path, epoch: int, compiler: str = COMPILER) -> Path:
    """The wheel of a source distribution for a machine. `compiler` is the text of a program."""
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        program = Path(folder) / "compiler"
        program.write_text(compiler.format(python=sys.executable, machine=machine, glibc=f"{GLIBC[0]}.{GLIBC[1]}"))
        program.chmod(0o755)
        environment = {"CC": str(program), "CXX": str(program), "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
        environment |= {"LDSHARED": f"{program} -shared", "LDCXXSHARED": f"{program} -shared"}
        options = {"--build-option": [f"--plat-name={tag}"]}
        [project] = Path(folder).glob("outrider-*")
        call(project, "build_wheel", str(out), options, SOURCE_DATE_EPOCH=str(epoch), **environment)
    [wheel] = out.glob(f"*-{tag}.whl")
    return wheel


def call(folder: Path, hook: str, *arguments: object, **environment: str) -> None:
    """Calls a hook of setuptools in a project's folder."""
    command = [sys.executable, "-c", HOOK, hook, *map(repr, arguments)]
    subprocess.run(command, cwd=folder, env=os.environ | environment, check=True, stdout=subprocess.DEVNULL)


def check(wheel: Path) -> None:
    """Raises SystemExit unless auditwheel finds that the wheel's tag is true."""
    shown = subprocess.run(["auditwheel", "show", str(wheel)], check=True, capture_output=True, text=True).stdout
    tag = wheel.stem.rpartition("-")[2]
    if f'"{tag}"' not in shown:
        raise SystemExit(f"{wheel.name} is not {tag}:\n{shown}")


def write_sbom(wheel: Path, file: Path) -> None:
    """Installs a wheel with the pinned versions of what it needs, without a compiler, and lists all in CycloneDX's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        install = [sys.executable, "-m", "pip", "--python", folder, "install", "--quiet", "--only-binary", ":all:"]
        needed = Path(folder) / "requirements.txt"
        command = [sys.executable, "requirements.py", "."]
        needed.write_text(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        subprocess.run([*install, "-c", "constraints.txt", "-r", str(needed)], cwd=ROOT, check=True)
        subprocess.run([*install, "--no-deps", str(wheel)], check=True)
        command = ["cyclonedx-py", "environment", folder, "--pyproject", "pyproject.toml", "--output-reproducible"]
        listed = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    linked = {
        "type": "library",
        "name": "ziglang",
        "version": version("ziglang"),
        "purl": f"pkg:pypi/ziglang@{version('ziglang')}",
    }
    listed["components"].append(linked | {"description": "Compiled the libraries; its library of C++ is linked in."})
    file.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n")


def main() -> None:
    os.umask(0o022)  # the modes of files are in the archives
    DIST.mkdir(exist_ok=True)
    for old in DIST.iterdir():
        old.unlink()
    epoch = int(subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True).stdout)
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        source = build_source(Path(folder), DIST, epoch)
    wheels = [build_wheel(source, machine, DIST, epoch) for machine in MACHINES]
    for wheel in wheels:
        check(wheel)
    write_sbom(wheels[0], DIST / f"{source.name.removesuffix('.tar.gz')}.cdx.json")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")


if __name__ == "__main__":
    main()
