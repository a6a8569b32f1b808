"""Prints what projects need, so that pip can install it before them: a project's folder has no hash that pip could check.

python requirements.py '.[pictures,ray]' ./bench > requirements.txt
"""

import re
import sys
import tomllib
from pathlib import Path

for argument in sys.argv[1:]:
    folder, extras = re.fullmatch(r"([^\[]+)(?:\[(.+)\])?", argument).groups()
    project = tomllib.loads((Path(folder) / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][each] for each in (extras or "").split(",") if each)]
    print(*(requirement for each in lists for requirement in each), sep="\n")
