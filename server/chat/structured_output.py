"""Structured output: from JSON schemas, regexes, grammars and tools to one checked llguidance grammar.

A grammar is built and compiled before its request is queued, in a process of its own, so that an invalid one fails only that
request. Promises that no grammar harms the front end, and that many grammars of one client delay another client's by one at
most.
"""

import hashlib
import logging
import signal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.server.chat.grammar_job import Built, GrammarJob, Structure, decode_built, encode
from outrider.server.engine.helper import BlockingHelper, HelperEnded
from outrider.server.fair_threads import FairThreads
from outrider.server.http.errors import APIError

MODULE = "outrider.server.chat.grammar_validator"
# A process that makes no progress gets this time, and more if it has to start. It limits its processor time itself.
ANSWER_SECONDS, START_SECONDS = 10.0, 30.0
log = logging.getLogger("outrider")
GRAMMAR_BYTES = 1 << 16
# A process with such an exit code was killed from outside, or stopped, or could not start: that says nothing about the grammar.
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, 1)
TRIES = 2
# Valid grammars are cached, and the oldest are evicted.
CACHED_GRAMMARS, CACHED_BYTES = 256, 16 << 20
# This is the reason given if the process dies.
FATAL = "it is nested too deeply or takes too long to compile; simplify it."


class Enforced(NamedTuple):
    """A checked grammar, and what of the request it does not enforce."""

    grammar: str | None = None  # None = any text
    ignored: Sequence[str] = ()  # names for the header, such as "tools.save.slug.pattern"


class GrammarChecker:
    """Builds and checks the grammars of requests, in one process: started on first use, and replaced when one has ended it."""

    def __init__(self, max_bytes: int = GRAMMAR_BYTES) -> None:
        self._max_bytes = max_bytes  # of a schema, regex or grammar, and of all tools of a request
        self._process: BlockingHelper | None = None
        self._pool = FairThreads([self], "outrider-grammars")
        self._valid: OrderedDict[bytes, Built] = OrderedDict()  # results by the job's digest

    async def grammar(
        self,
        structures: Mapping[str, Structure],
        principal: str = "",
        prefix: str = "",
        special: Mapping[str, int] | None = None,
    ) -> Enforced:
        """The grammar of a request's structures, by field. Raises APIError.

        `prefix`: see `joined`. `special`: see `Vocabulary.grammar_tokens`.
        """
        name, structure = only(structures)
        if structure is None:
            return Enforced()
        named = {}
        if structure.kind == "grammar":
            named = {token: id for token, id in (special or {}).items() if token in structure.value}
        return await self.check(GrammarJob(structure=structure, name=name, prefix=prefix, special=named), principal)

    async def check(self, job: GrammarJob, principal: str = "") -> Enforced:
        """The grammar that a job describes, if it is valid. Principals take turns. Raises APIError."""
        name = job.name or "tools"
        try:
            built = await self._pool.run(principal, lambda _: self._build(job))
        except OSError:
            raise APIError(503, "The server cannot check grammars now; try again shortly.", name, "unavailable") from None
        if built.reason:
            raise APIError(400, f"Invalid '{name}': {built.reason}", name, built.code)
        return Enforced(built.grammar, built.ignored)

    def _build(self, job: GrammarJob) -> Built:
        """The grammar that a job describes, or why there is none. Raises OSError if no process can be started."""
        job = job.within(self._max_bytes)
        if job.size_bytes > self._max_bytes:
            return Built("", f"it is larger than {self._max_bytes} bytes; shorten it.", "too_long")
        message = encode(job)
        key = hashlib.blake2b(message, digest_size=16).digest()
        if key in self._valid:
            self._valid.move_to_end(key)
            return self._valid[key]
        built = self._validated(message)
        if built.reason == FATAL and job.lenient:
            built = self._validated(encode(job.without(job.lenient)))
        if not built.reason:
            self._keep(key, built)
        return built

    def _validated(self, message: bytes) -> Built:
        """The answer of the process, which is started if there is none. Raises OSError if it is killed from outside again."""
        for _ in range(TRIES):
            seconds = ANSWER_SECONDS
            if self._process is None or not self._process.alive:
                self._end_process()
                self._process, seconds = BlockingHelper(MODULE), START_SECONDS + ANSWER_SECONDS
            try:
                return decode_built(self._process.ask(message, seconds))
            except HelperEnded as ended:
                self._process, code = None, ended.code
                log.warning("the process that validates grammars has ended, and is replaced (exit code %s)", code)
            if code not in FROM_OUTSIDE:
                return Built("", FATAL, "invalid_grammar")
        raise OSError("The process that validates grammars was killed or stopped.")

    def _keep(self, key: bytes, built: Built) -> None:
        self._valid[key] = built
        while len(self._valid) > CACHED_GRAMMARS or sum(len(each.grammar) for each in self._valid.values()) > CACHED_BYTES:
            self._valid.popitem(last=False)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def close(self) -> None:
        """Ends the process. Blocks until a grammar that is being validated is finished."""
        self._pool.close()
        self._end_process()


def only(structures: Mapping[str, Structure]) -> tuple[str, Structure | None]:
    """The only structure and its field; None if there is none. Raises APIError if there are several."""
    if len(structures) > 1:
        names = " and ".join(f"'{name}'" for name in structures)
        raise APIError(400, f"Give only one of {names}.", next(iter(structures)), "invalid_value")
    return next(iter(structures.items()), ("", None))
