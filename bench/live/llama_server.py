"""`python -m bench.live.llama_server`: llama-server from the package xllamacpp.

Its defaults stay, except that no request reuses what an earlier one computed.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Annotated

import typer

PLAIN = "plain"
# The members of its enumeration, by the names of llama-server's --spec-type.
KINDS: Mapping[str, str] = {
    "ngram-simple": "NGRAM_SIMPLE",
    "ngram-map-k": "NGRAM_MAP_K",
    "ngram-map-k4v": "NGRAM_MAP_K4V",
    "ngram-mod": "NGRAM_MOD",
    "ngram-cache": "NGRAM_CACHE",
}


def main(
    model: Annotated[str, typer.Option(help="GGUF file.")],
    port: Annotated[int, typer.Option(help="Port of 127.0.0.1.")],
    context: Annotated[int, typer.Option(help="Tokens of context.")],
    threads: Annotated[int, typer.Option(help="Threads of a forward.")],
    speculation: Annotated[str, typer.Option(help="A kind of n-gram speculation, or plain.")] = PLAIN,
) -> None:
    """Serve until SIGTERM."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = model
    options.port, options.n_ctx, options.n_parallel = port, context, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.cache_prompt, options.cache_ram_mib = False, 0
    options.verbosity = 1
    if speculation != PLAIN:
        options.speculative.types = [xllamacpp.common_speculative_type[f"COMMON_SPECULATIVE_TYPE_{KINDS[speculation]}"]]
    server = xllamacpp.Server(options)  # serves as long as it is referenced
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # before the server's threads, for sigwait
    typer.run(main)
