"""The build of the compiled library, with a compiler that only writes down what it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

from outrider.verify.model.cpu.native import variants

ROOT = Path(__file__).parents[1]
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
    assert len(objects) == len(set(objects)) == 2 * len(variants.VARIANTS) + 1  # and the drafters' library
    linked = {
        words[words.index("-o") + 1]: [word for word in words if word.endswith(".o")] for words in calls if "-c" not in words
    }
    assert len(linked) == len(variants.VARIANTS) + 1
    for library_file, parts in linked.items():
        variant = Path(library_file).name.partition(".")[0]
        assert len(parts) == (1 if variant == "_drafters" else 2) and all(f"/{variant}/" in part for part in parts)
