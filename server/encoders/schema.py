"""The bodies of /v1/embeddings, as in OpenAI's API, and /v1/rerank, as in Cohere's and Jina's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from outrider.server.openai.fields import Body

# OpenAI's limit.
MAX_TEXTS = 2048
MAX_DIMENSIONS = 1 << 16


def check_text(text: str) -> str:
    """Raises PydanticCustomError for an empty text."""
    if not text:
        raise PydanticCustomError("empty", "a text must not be empty")
    return text


def check_input(value: Any) -> Any:
    """A text or a list, as a list. Raises PydanticCustomError for token ids."""
    if isinstance(value, str):
        return [value]
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list) or (isinstance(first, int) and not isinstance(first, bool)):
        message = "token ids are not accepted, because they may belong to another tokenizer; send text"
        raise PydanticCustomError("token_ids", message)
    return value


def text_of(value: Any) -> Any:
    """The text of a document that is an object, as in Cohere's and Jina's APIs."""
    return value["text"] if isinstance(value, dict) and isinstance(value.get("text"), str) else value


Text = Annotated[str, AfterValidator(check_text)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS), BeforeValidator(check_input)]
Document = Annotated[str, BeforeValidator(text_of)]


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    # Models that were trained with a prompt for queries and another one for documents use it.
    input_type: Literal["query", "document"] | None = None


class RerankBody(Body):
    """POST /v1/rerank."""

    model: str | None = None
    query: Text
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
