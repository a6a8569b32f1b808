"""JSON as careless clients write it: NaN, lone surrogates, and values that the json module cannot write."""

from __future__ import annotations

import json
import re
from typing import Any

RAW = re.compile(r'"RAW((?:[^"\\]+|\\.)*)"')


def raw(text: str) -> str:
    """Text that `encode` writes as it is: values that the json module cannot write, such as very deep ones."""
    return "RAW" + text


def nested(levels: int) -> str:
    """A list in lists, `levels` deep."""
    return raw("[" * levels + "]" * levels)


def encode(body: Any) -> bytes:
    """Serializes like a careless client: with NaN, lone surrogates and lists of any depth."""
    text = RAW.sub(lambda match: str(json.loads(f'"{match[1]}"')), json.dumps(body))
    return text.encode("utf-8", "surrogatepass")
