"""References of JSON schemas: to pointers and names within the schema itself. Fetches nothing.

Promises time linear in the schema for the index. Data (`enum`, `const`, `default`, `examples`) is never read as schemas.
"""

from typing import Any
from urllib.parse import unquote

from outrider.server.chat.schemas.keywords import is_schema, subschemas

# References are found in this many schemas, and a schema of more is not read to its end.
MAX_SCHEMAS = 5000


class References:
    """The schemas that the references of one schema lead to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._named: dict[str, Any] = {}  # schemas by their `$id`, or by `#` and their anchor
        found = self._read(root)
        # Identities of the schemas that something refers to.
        self.targets = {id(target) for target in map(self.target, found) if isinstance(target, dict)}

    def _read(self, root: Any) -> list[dict[str, Any]]:
        """The schemas in a schema, and those that only a reference leads to, whose names are kept."""
        waiting, found, seen = [root], list[dict[str, Any]](), set[int]()
        while waiting and len(seen) <= MAX_SCHEMAS:
            schema = waiting.pop()
            if isinstance(schema, dict) and id(schema) not in seen:
                seen.add(id(schema))
                found.append(schema)
                for keyword, sign in (("$id", ""), ("$anchor", "#")):
                    if isinstance(name := schema.get(keyword), str):
                        self._named.setdefault(sign + name, schema)
                waiting += subschemas(schema)
                waiting.append(self.target(schema))
        return found

    def target(self, schema: dict[str, Any]) -> Any:
        """The schema that another one refers to; None if it is not in the root."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return None
        uri, _, fragment = reference.partition("#")
        is_pointer = not uri and "#" in reference and fragment[:1] in ("", "/")
        found = pointed(self._root, unquote(fragment)) if is_pointer else self._named.get(reference)
        return found if is_schema(found) else None


def pointed(value: Any, pointer: str) -> Any:
    """What a JSON pointer (RFC 6901) leads to; None if there is nothing."""
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isascii() and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
