"""`python -m bench.peers.llama_server`: llama-cpp-python's server, without the kernels that crash on CPUs with AMX."""

from __future__ import annotations

from llama_cpp.server.__main__ import main

from bench.peers.llama_model import avoid_amx

if __name__ == "__main__":
    avoid_amx()
    main()
