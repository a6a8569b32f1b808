"""Settings of what the server keeps between requests: sessions, responses and corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from outrider.server.settings.section import Section


class Sessions(Section):
    """State kept between the requests of a session."""

    capacity: int = Field(32, ge=0, description="Maximum sessions; the least recently used idle one is evicted first.")
    kv_bytes: int | None = Field(
        None,
        ge=0,
        description="Maximum bytes of the sessions' keys and values, in which shared prefixes count once; null allows a "
        "quarter of the free memory.",
    )
    automatic: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Find sessions by the prompt's text, also for requests that name no session; auto does so unless the "
        "address is public and there are no API keys.",
    )
    learn: Literal["session", "key"] = Field(
        "session",
        description="What drafts learn from: their session, or with key also earlier sessions of the same API key, if "
        "sessions are found by text.",
    )
    ttl_seconds: float = Field(1800.0, gt=0, description="Idle time after which a session is evicted.")
    folder: Path | None = Field(
        None,
        description="Folder where sessions are saved, so that they outlive a restart; only its owner can read the files. "
        "null saves nothing.",
    )
    folder_bytes: int = Field(
        16 << 30, ge=0, description="Maximum bytes of sessions.folder per model; the oldest files are removed first."
    )
    slots: int | None = Field(
        None,
        ge=1,
        description="Number of KV caches on the device; other sessions are swapped out to host memory. null makes as many "
        "as fit. On a GPU, all sessions share the pages of this many full contexts.",
    )


class Responses(Section):
    """Responses stored in memory for /v1/responses."""

    total_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Maximum size of all stored responses, as JSON; each key may use an equal share, at most 64 MiB.",
    )


class Corpora(Section):
    """Texts that clients post for the drafts of their requests."""

    total_bytes: int = Field(
        64 << 20,
        ge=0,
        description="Maximum size of all corpora of all models, as indexed; each key may use an equal share. They are kept "
        "with the sessions if sessions.folder is set, else in a temporary folder. 0 keeps none.",
    )
