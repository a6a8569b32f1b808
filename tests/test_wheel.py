"""The build of the compiled library, and the wheel: one top-level package, which serves beside packages of the same names."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import models
from outrider.verify.model.cpu.native import variants
from release import wheels

ROOT = Path(__file__).parents[1]
SOURCES = ("server", "drafters", "verify", "models", "bench", "pyproject.toml", "setup.py", "README.md", "LICENSE")
FOREIGN = ("server", "drafters", "verify", "models")


def copy(folder: Path, copy_file: Callable[[str, str], Any] = shutil.copy2) -> None:
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored, copy_function=copy_file)
        else:
            shutil.copy(ROOT / name, folder)


@pytest.fixture(scope="module", params=["x86_64", pytest.param("aarch64", marks=pytest.mark.slow)])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def released(machine: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As `release`."""
    return release(tmp_path_factory.mktemp("released") / "first", machine)


def build(folder: Path, **environment: str) -> Path:
    """A wheel of the checkout, built without a network."""
    source = folder / "source"
    copy(source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, env=os.environ | environment, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, environment: Path) -> Path:
    """Makes an environment with nothing but the wheel. Returns the folder of its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    command = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    return packages


# Stands in for the compiler of wheels, which takes minutes.
STUB = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo {machine} > "$2"
"""


def copy_without_weights(source: str, target: str) -> None:
    """Weights take seconds to compress."""
    Path(target).write_bytes(b"" if source.endswith(".safetensors") else Path(source).read_bytes())


def release(folder: Path, machine: str) -> dict[str, Path]:
    """A machine's wheel and the source distribution of a release, from a copy of the checkout without weights."""
    folder.mkdir()
    copy(folder / "source", copy_without_weights)
    source = wheels.build_source(folder / "source", folder, epoch=1)
    return {"source": source, "wheel": wheels.build_wheel(source, machine, folder, epoch=1, compiler=STUB)}


@pytest.mark.slow
def test_a_released_wheel_has_the_libraries_of_its_machine(released: dict[str, Path], machine: str) -> None:
    kinds = {"x86_64": variants.X86, "aarch64": variants.ARM}[machine]
    assert released["wheel"].name == f"outrider-0.1.0-py3-none-manylinux_2_17_{machine}.whl"
    with zipfile.ZipFile(released["wheel"]) as wheel:
        libraries = [name for name in wheel.namelist() if name.endswith(".so")]
        assert {wheel.read(name) for name in libraries} == {f"{machine}\n".encode()}
        assert not any(name.endswith((".cpp", ".h")) for name in wheel.namelist())
    assert {Path(name).stem for name in libraries} == {"_drafters", "_pieces", "_portable", *(f"_{kind}" for kind in kinds)}


@pytest.mark.slow
def test_two_builds_of_a_release_give_the_same_bytes(released: dict[str, Path], machine: str, tmp_path: Path) -> None:
    for name, file in release(tmp_path / "again", machine).items():
        assert file.read_bytes() == released[name].read_bytes(), name


@pytest.mark.slow
def test_without_a_compiler_an_installation_ends_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build(tmp_path, CC="no-such-compiler", CXX="no-such-compiler")
    assert failed.value.stderr.count(b"error: Outrider's libraries could not be compiled: install g++") == 1


@pytest.mark.slow
def test_the_wheel_holds_the_server_alone(released: dict[str, Path]) -> None:
    names = zipfile.ZipFile(released["wheel"]).namelist()
    assert {name.partition("/")[0] for name in names} == {"outrider", "outrider-0.1.0.dist-info"}
    assert {name.split("/")[1] for name in names if name.startswith("outrider/")} == set(FOREIGN)
    for folder in FOREIGN:
        assert f"outrider/{folder}/py.typed" in names
        modules = {file.relative_to(ROOT).as_posix() for file in (ROOT / folder).rglob("*.py")}
        assert {f"outrider/{name}" for name in modules} == {
            name for name in names if name.startswith(f"outrider/{folder}/") and name.endswith(".py")
        }
    assert {"outrider/models/embedded/target/model.safetensors", "outrider/models/embedded/README.md"} <= set(names)


def write_package(folder: Path) -> None:
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('this package is of another project')\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_serves_beside_packages_with_the_folders_names(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    packages = install(build(tmp_path), environment)
    # The dependencies; site.py does not read the .pth files there, so the checkout is not among them.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = tmp_path / "work"
    work.mkdir()
    for name in FOREIGN:
        write_package(packages / name)
        write_package(work / name)
    program = "from outrider.verify.model.cpu.native import library; print(library.__file__)"
    python = environment / "bin" / "python"
    printed = subprocess.run([python, "-c", program], cwd=work, check=True, capture_output=True, text=True).stdout.strip()
    assert Path(printed).is_relative_to(packages)
    libraries = {file.name.partition(".")[0] for file in Path(printed).parent.glob("*.so")}
    assert libraries == {f"_{variant}" for variant in variants.VARIANTS}
    command = [str(environment / "bin" / "outrider"), "serve", "--model", models.NAME, "--port", "0"]
    command += ["--speculation.cost_folder", str(tmp_path)]
    with subprocess.Popen(command, cwd=work, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            # A line before it says that the commands of the checkout's benchmarks are missing: its metadata is among the
            # dependencies, its code is not.
            address = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+/v1", line)))
            body = {"model": models.NAME, "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{address}/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 8
        finally:
            process.terminate()
            process.communicate()


COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
while [ "$1" != -o ]; do shift; done
touch "$2"
"""


def test_variants_that_are_compiled_at_once_share_no_files(tmp_path: Path) -> None:
    """They have the same sources; an object of one that is linked into another stops on a CPU without its instructions."""
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-temp", str(tmp_path / "objects")]
    environment = os.environ | {"CC": str(compiler), "CXX": str(compiler)}
    subprocess.run(
        [*command, "--build-lib", str(tmp_path / "built")], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    calls = [line.split() for line in log.read_text().splitlines()]
    objects = [words[words.index("-o") + 1] for words in calls if "-c" in words]
    libraries = len(variants.VARIANTS) + 2  # and those of drafters and of vocabularies
    assert len(objects) == len(set(objects)) == libraries + len(variants.VARIANTS)
    linked = {
        words[words.index("-o") + 1]: [word for word in words if word.endswith(".o")] for words in calls if "-c" not in words
    }
    assert len(linked) == libraries
    for library_file, parts in linked.items():
        variant = Path(library_file).name.partition(".")[0]
        assert len(parts) == (1 if variant in ("_drafters", "_pieces") else 2) and all(f"/{variant}/" in part for part in parts)
