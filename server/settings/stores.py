"""Settings of what the server keeps between requests: sessions and corpora, and the bound of stored responses."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from outrider.server.settings.section import Section

# All stored responses of /v1/responses take at most this much memory.
RESPONSES_BYTES = 256 << 20


class Sessions(Section):
    """State kept between the requests of a session."""

    capacity: int = Field(32, ge=0, description="Maximum sessions; the least recently used idle one is evicted first.")
    kv_bytes: int | None = Field(
        None,
        ge=0,
        description="Maximum bytes of the sessions' keys and values, where shared prefixes count once; null allows a quarter "
        "of the free memory.",
    )
    automatic: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Find sessions by the prompt's text; auto does unless the address is public and there are no API keys.",
    )
    learn: Literal["session", "key"] = Field(
        "session",
        description="Drafts learn from their session, or with key also from earlier sessions of the same API key that are "
        "found by text.",
    )
    ttl_seconds: float = Field(1800.0, gt=0, description="Idle time after which a session is evicted.")
    folder: Path | None = Field(
        None, description="Folder where sessions are saved, so that they outlive a restart; null saves nothing."
    )
    folder_bytes: int = Field(
        16 << 30, ge=0, description="Maximum bytes of sessions.folder per model; the oldest files are removed first."
    )
    slots: int | None = Field(
        None,
        ge=1,
        description="Number of KV caches on the device; other sessions are swapped out to host memory. With null, their "
        "number follows from the free memory.",
    )


class Corpora(Section):
    """Texts that clients post for the drafts of their requests."""

    total_bytes: int = Field(
        64 << 20, ge=0, description="Maximum size of all corpora, as indexed; each key may use an equal share. 0 keeps none."
    )
