"""Ids of calls in a conversation: every call and result gets one, in the form that the model's chat template takes.

Some templates refuse the ids of other servers, and a model imitates the ids that it sees. An id depends only on the
conversation up to its call, so a conversation that grows keeps its beginning.
"""

import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

HASH = "%hash"
HASH_CHARACTERS = 9
HASHED = re.compile(rf"[A-Za-z0-9]{{{HASH_CHARACTERS}}}")


def with_model_ids(messages: Sequence[dict[str, Any]], form: str = "") -> list[dict[str, Any]]:
    """The messages with ids of the form `form`, which has the slots of `ToolFormat.call_id`; empty: the client's.

    A missing id is made up, and so is one that a call has which still waits for its result. A result without an id belongs to
    the first call that waits for one, of the function whose name the result has, if any. A result gets its function's name.
    """
    ids = CallIds(form)
    changed = []
    for message in messages:
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": ids.call(call.get("id"), call["function"]["name"])} for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            id = ids.result(message.get("tool_call_id"), message.get("name"))
            name = message.get("name") or ids.names.get(id)
            message = {**message, "tool_call_id": id, **({"name": name} if name else {})}
        changed.append(message)
    return changed


class CallIds:
    """The ids of the conversation so far."""

    def __init__(self, form: str) -> None:
        self._form = form
        self.names: dict[str, str] = {}  # the function's name by the id of its last call
        self._ids: list[str] = []  # of each call
        self._latest: dict[str, str] = {}  # the id of the last call with each of the client's ids
        # Numbers of calls that wait for a result: all, and by the client's id and by the function's name. Those that have one
        # are removed from one queue at once, and from the others when they come first.
        self._queues: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        self._answered: set[int] = set()

    def call(self, given: str | None, name: str) -> str:
        number = len(self._ids)
        given = given or f"call_{number}"
        waits = self._first(("id", given)) is not None
        id = new_id(self._form, f"{given}-{number}" if waits else given, name, number)
        self._ids.append(id)
        self.names[id] = name
        self._latest[given] = id
        for key in (("id", given), ("name", name), ("all", "")):
            self._queues[key].append(number)
        return id

    def result(self, given: str | None, name: str | None) -> str:
        """The id of the call that the next result belongs to; if there is none, an id that no call has."""
        number = self._first(("id", given) if given else ("name", name) if name else ("all", ""))
        if number is not None:
            self._answered.add(number)
            return self._ids[number]
        missing = f"result_{len(self._ids)}"
        return self._latest.get(given or "") or (given if given else new_id(self._form, missing, name or "", len(self._ids)))

    def _first(self, key: tuple[str, str]) -> int | None:
        """The number of the first call in a queue that waits for a result."""
        queue = self._queues[key]
        while queue and queue[0] in self._answered:
            queue.popleft()
        return queue[0] if queue else None


def new_id(form: str, id: str, name: str, number: int) -> str:
    """The id of the conversation's call `number`. An id that is a hash already stays as it is."""
    if not form or (form == HASH and HASHED.fullmatch(id)):
        return id
    digest = hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_CHARACTERS]
    return form.replace(HASH, digest).replace("%number", str(number)).replace("%name", name)
