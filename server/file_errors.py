"""Why a file of a principal could not be used: in words for a log or an answer, which name no private path."""

from pathlib import Path


def reason(error: BaseException, *private: Path | str) -> str:
    """An error's message, without the file of an OSError, and without the paths `private`, longest first."""
    text = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
    for path in private:
        text = text.replace(str(path), "its file")
    return text
