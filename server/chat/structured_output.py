"""Structured output: from JSON schemas, regexes, grammars and tools to one checked llguidance grammar.

A grammar is built and compiled before its request is queued, in a process of its own, so that an invalid one fails only that
request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from outrider.server.chat.grammar_job import GrammarJob, InputGrammar, Structure, TooDeep
from outrider.server.chat.grammar_process import GrammarValidator
from outrider.server.chat.tools.formats import ToolFormat
from outrider.server.chat.tools.grammar import MAX_CALLS
from outrider.server.http.errors import APIError

SCHEMA_DEPTH = 64
RULE_DEPTH = 256
GRAMMAR_BYTES = 1 << 16


class Enforced(NamedTuple):
    """A checked grammar, and what of the request it does not enforce."""

    grammar: str | None = None  # None = any text
    ignored: Sequence[str] = ()  # names for the header, such as "tools.save.slug.pattern"


class GrammarChecker:
    """Builds and checks the grammars of requests."""

    def __init__(self, max_bytes: int = GRAMMAR_BYTES, schema_depth: int = SCHEMA_DEPTH, rule_depth: int = RULE_DEPTH) -> None:
        """A JSON schema, regex or grammar has at most `max_bytes`.

        JSON schemas nest at most `schema_depth` deep, and the rules of a grammar refer at most `rule_depth` deep.
        """
        self._depths = schema_depth, rule_depth
        self._validator = GrammarValidator(max_bytes)

    async def tool_calls(
        self,
        functions: Mapping[str, Any],
        format: str | ToolFormat,
        special: Mapping[str, int],
        single: bool = False,
        principal: str = "",
        prefix: str = "",
        inputs: Mapping[str, InputGrammar] | None = None,
        structures: Mapping[str, Structure] | None = None,
        strict: Collection[str] = (),
    ) -> Enforced:
        """The grammar of one or more calls of `functions` (schemas of the parameters by name). Raises APIError.

        With `single`, exactly one call is allowed; with `structures`, as in `grammar`, an answer has calls or the structure.
        `special`: see `Vocabulary.grammar_tokens`. `prefix`: see `joined`.
        `inputs`: the grammars of custom tools, which stand among the functions. `strict`: the functions whose schemas must be
        enforced wholly; those of others are relaxed where that is not possible.
        """
        name, structure = only(structures or {})
        job = self._job(
            structure=structure,
            name=name,
            functions={name: parameters or {"type": "object"} for name, parameters in functions.items()},
            inputs=inputs or {},
            format=format,
            special=special,
            max_calls=1 if single else MAX_CALLS,
            prefix=prefix,
            strict=strict,
        )
        return await self._checked(name or "tools", job, principal)

    async def grammar(
        self,
        structures: Mapping[str, Structure],
        principal: str = "",
        prefix: str = "",
        special: Mapping[str, int] | None = None,
    ) -> Enforced:
        """The grammar of a request's structures, by field. Raises APIError if there are several.

        `prefix`: see `joined`. `special`: see `Vocabulary.grammar_tokens`.
        """
        name, structure = only(structures)
        if structure is None:
            return Enforced()
        named = {}
        if structure.kind == "grammar":
            named = {token: id for token, id in (special or {}).items() if token in structure.value}
        return await self._checked(name, self._job(structure=structure, name=name, prefix=prefix, special=named), principal)

    def close(self) -> None:
        """Ends the process that validates grammars. Blocks until the current one is finished."""
        self._validator.close()

    def _job(self, **what: Any) -> GrammarJob:
        return GrammarJob(*self._depths, **what)

    async def _checked(self, name: str, job: GrammarJob, principal: str) -> Enforced:
        """The grammar that a job describes, if it is valid. Raises APIError, naming the field `name`."""
        try:
            built = await self._validator.build(job, principal)
        except UnicodeEncodeError:
            raise  # it has an error response of its own
        except TooDeep as error:
            raise APIError(400, f"Invalid '{name}': {error}", name, "too_deep") from None
        except OSError:
            raise APIError(503, "The server cannot check grammars now; try again shortly.", name, "unavailable") from None
        if built.reason:
            raise APIError(400, f"Invalid '{name}': {built.reason}", name, built.code)
        return Enforced(built.grammar, built.ignored)


def only(structures: Mapping[str, Structure]) -> tuple[str, Structure | None]:
    """The only structure and its field; None if there is none. Raises APIError if there are several."""
    if len(structures) > 1:
        names = " and ".join(f"'{name}'" for name in structures)
        raise APIError(400, f"Give only one of {names}.", next(iter(structures)), "invalid_value")
    return next(iter(structures.items()), ("", None))
