"""References of JSON schemas: to pointers, anchors and ids within the schema itself. Fetches nothing.

Promises time linear in the schema for the index. Data (`enum`, `const`, `default`, `examples`) is never read as schemas.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

from outrider.server.chat.schemas.keywords import OLD_IDS, OLD_REFERENCES, REFERENCES, UNNAMED_OLD, subschemas

# References are found in this many schemas, and a schema of more is not read to its end.
MAX_SCHEMAS = 5000


class Place(NamedTuple):
    """A schema, and what its references depend on."""

    schema: Any
    base: str = ""  # the URI that its references are relative to
    draft: str = ""  # the `$schema` that applies

    @property
    def hides_siblings(self) -> bool:
        """Whether `$ref` is the only keyword that has an effect."""
        return "$ref" in self.schema and bool(OLD_REFERENCES.search(self.draft))

    def inner(self, schema: Any) -> Place:
        """A schema inside this one."""
        return Place(schema, self.base, self.draft).entered()

    def entered(self) -> Place:
        """The same schema, with the base and draft that it names itself."""
        if not isinstance(self.schema, dict):
            return self
        given = self.schema.get("$schema")
        place = self._replace(draft=given) if isinstance(given, str) else self
        name = place.schema.get("id" if OLD_IDS.search(place.draft) else "$id")
        if not isinstance(name, str) or name.startswith("#") or place.hides_siblings:
            return place
        return place._replace(base=joined(place.base, name.partition("#")[0]))


def joined(base: str, reference: str) -> str:
    """The URI of a reference without fragment."""
    try:
        return urljoin(base, reference) if reference else base
    except ValueError:
        return reference


class References:
    """The places that the references of one schema lead to."""

    def __init__(self, root: Any) -> None:
        is_old = isinstance(root, dict) and "definitions" in root and "$defs" not in root
        self.root = Place(root, draft=UNNAMED_OLD if is_old else "").entered()
        self._resources = {"": self.root, self.root.base: self.root}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._dynamic: dict[str, int] = {}  # how many schemas have an anchor of this name that is chosen at run time
        self._seen: set[int] = set()
        self.targets: set[int] = set()  # identities of the schemas that something refers to
        self._read(self.root)

    def _read(self, root: Place) -> None:
        """Finds ids, anchors, and then the targets of references, which may be anywhere."""
        waiting, found = [root], list[Place]()
        while waiting and len(self._seen) <= MAX_SCHEMAS:
            while waiting and len(self._seen) <= MAX_SCHEMAS:
                place = waiting.pop()
                if isinstance(place.schema, dict) and id(place.schema) not in self._seen:
                    self._seen.add(id(place.schema))
                    self._name(place)
                    found.append(place)
                    waiting += [place.inner(each) for each in subschemas(place.schema)]
            for place in found:
                for keyword in REFERENCES:
                    target = self.target(place, keyword)
                    if target is not None:
                        self.targets.add(id(target.schema))
                        waiting.append(target)
            found.clear()

    def _name(self, place: Place) -> None:
        schema = place.schema
        self._resources.setdefault(place.base, place)
        for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
            name = schema.get(keyword)
            if isinstance(name, str) and (keyword.endswith("nchor") or name.startswith("#")):
                self._anchors.setdefault((place.base, name.removeprefix("#")), place)
                if keyword == "$dynamicAnchor":
                    self._dynamic[name] = self._dynamic.get(name, 0) + 1
        if schema.get("$recursiveAnchor") is True:
            self._dynamic["#"] = self._dynamic.get("#", 0) + 1

    def target(self, place: Place, keyword: str = "$ref") -> Place | None:
        """The schema that a keyword refers to; None if it is not in this schema, or depends on the path that leads here."""
        reference = place.schema.get(keyword)
        if not isinstance(reference, str):
            return None
        uri, _, fragment = reference.partition("#")
        resource = self._resources.get(joined(place.base, uri))
        if resource is None:
            return None
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            found = pointed(resource, fragment)
        else:
            found = self._anchors.get((resource.base, fragment))
        if found is None or not isinstance(found.schema, (bool, dict)):
            return None
        is_dynamic = isinstance(found.schema, dict) and (
            (keyword == "$dynamicRef" and found.schema.get("$dynamicAnchor") == fragment)
            or (keyword == "$recursiveRef" and found.schema.get("$recursiveAnchor") is True)
        )
        several = self._dynamic.get("#" if keyword == "$recursiveRef" else fragment, 0) > 1
        return None if is_dynamic and several else found


def pointed(resource: Place, pointer: str) -> Place | None:
    """The place at a JSON pointer (RFC 6901) in a resource."""
    place = resource
    for step in pointer.split("/")[1:]:
        value, step = place.schema, step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and step in value:
            place = place.inner(value[step])
        elif isinstance(value, list) and step.isascii() and step.isdigit() and int(step) < len(value):
            place = place.inner(value[int(step)])
        else:
            return None
    return place
