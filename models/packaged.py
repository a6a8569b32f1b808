"""Models that people know: GGUF files that the package index has, whole or in parts, fetched by pip, joined, checked.

`outrider pull NAME` prints where the file is. models/NAME.txt pins the versions and hashes of the packages, and names the
license. The packages are data for Outrider: nothing in them is imported.
"""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

REQUIREMENTS = Path(__file__).parent
FOLDER = Path("~/.cache/outrider/models").expanduser()
NAMES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
# The model of a server that is started without one, and its file where its package is installed.
SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_FILE = f"{SMOLLM2}.Q4_1.gguf"
# Each package has one file with a model or a part of it.
PART = re.compile(r"/data/.*part\d+(\.bin)?$|\.gguf$")
PACKAGE = re.compile(r"^([\w-]+)==", re.MULTILINE)


def place(name: str) -> Path:
    """Where the file of a model is: in its package, if that is installed, or where it is fetched to."""
    packages = PACKAGE.findall((REQUIREMENTS / f"{name}.txt").read_text())
    try:
        found = [file for file in files(packages[0]) or () if PART.search(f"/{file}")] if len(packages) == 1 else []
    except PackageNotFoundError:
        found = []
    installed = Path(str(found[0].locate())) if found else None
    return installed if installed and installed.is_file() else FOLDER / f"{name}.gguf"


def fetch(name: str) -> Path:
    """The file of a model, which is downloaded first if it is not there. Raises OSError with one sentence."""
    import hashlib
    import subprocess
    import tempfile

    file = place(name)
    if file.is_file():
        return file
    FOLDER.mkdir(parents=True, exist_ok=True)
    requirements = REQUIREMENTS / f"{name}.txt"
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        pip = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir", "--no-deps")
        source = ("--only-binary", ":all:", "--require-hashes", "--dest", folder, "--requirement", str(requirements))
        if subprocess.run([*pip, *source], stdout=2).returncode:  # standard error
            raise OSError(
                f"{name} cannot be downloaded: pip could not get the packages of {requirements}; its message is above. Without "
                "a network, serve a model of this machine, such as --model outrider-embedded."
            )
        digest, joined = hashlib.sha256(), Path(folder) / file.name
        with joined.open("wb") as output:
            for part in parts(Path(folder), requirements):
                digest.update(part)
                output.write(part)
        if f"sha256: {digest.hexdigest()}\n" not in requirements.read_text():
            raise OSError(f"{name} is not complete: its parts, joined, do not have the hash that {requirements} names.")
        joined.replace(file)
    return file


def parts(folder: Path, requirements: Path) -> Iterator[bytes]:
    """The parts of a model from the downloaded packages, in the order in which `requirements` lists these."""
    from zipfile import ZipFile

    for package in PACKAGE.findall(requirements.read_text()):
        [wheel] = folder.glob(f"{package.replace('-', '_')}-*.whl")
        with ZipFile(wheel) as archive:
            [part] = filter(PART.search, archive.namelist())
            yield archive.read(part)
