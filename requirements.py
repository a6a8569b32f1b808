"""Prints what projects need, so that pip can install it before them: a project's folder has no hash that pip could check.

python requirements.py '.[pictures,ray]' ./bench > requirements.txt
"""

import re
import sys
import tomllib
from pathlib import Path


def needed(project: dict, lists: list[list[str]]) -> list[str]:
    """The requirements in these lists, with those of the project's own extras in the place of their names."""
    own = re.compile(rf"{project['name']}\[(.+)\]")
    found = []
    for requirement in (each for listed in lists for each in listed):
        named = own.fullmatch(requirement)
        extras = [project["optional-dependencies"][each] for each in named[1].split(",")] if named else []
        found += needed(project, extras) if named else [requirement]
    return found


for argument in sys.argv[1:]:
    folder, extras = re.fullmatch(r"([^\[]+)(?:\[(.+)\])?", argument).groups()
    project = tomllib.loads((Path(folder) / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][each] for each in (extras or "").split(",") if each)]
    print(*dict.fromkeys(needed(project, lists)), sep="\n")
