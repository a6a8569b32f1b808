"""A model in several GGUF files: each name says which part it is and how many there are. The first one has the metadata."""

import re

PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)


def parts_of(name: str) -> list[str]:
    """The names of all files of the model whose first file has this name; the name alone if it says nothing of others."""
    found = PART.search(name)
    if found is None or int(found[1]) != 1:
        return [name]
    return [PART.sub(f"-{number:05}-of-{found[2]}", name) for number in range(1, 1 + int(found[2]))]
