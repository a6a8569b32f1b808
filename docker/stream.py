"""Streams one answer from a server and prints it. Uses only the standard library.

    OUTRIDER_KEY=sk-alices-key python docker/stream.py http://127.0.0.1:8000

The exit code is 1 if the stream ends early or without tokens.
"""

import json
import os
import sys
import time
import urllib.request

PROMPT = "The capital of France is"
TOKENS = 64


def main() -> int:
    url = f"{sys.argv[1]}/v1/completions"
    body = {"model": sys.argv[2] if len(sys.argv) > 2 else "SmolLM2-135M-Instruct", "prompt": PROMPT, "max_tokens": TOKENS}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OUTRIDER_KEY', 'none')}"}
    began = time.perf_counter()
    first, chunks, usage, ended = 0.0, 0, None, False
    print(PROMPT, end="")
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        for line in answer:
            event = line.decode().strip().removeprefix("data: ")
            if not line.startswith(b"data: "):
                continue
            if event == "[DONE]":
                ended = True
                break
            chunk = json.loads(event)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                first = first or time.perf_counter() - began
                chunks += 1
                print(choice["text"], end="", flush=True)
    seconds = time.perf_counter() - began
    tokens = usage["completion_tokens"] if usage else 0
    print(f"\n[{tokens} tokens in {chunks} chunks; first chunk after {first * 1e3:.0f} ms, last after {seconds * 1e3:.0f} ms]")
    return 0 if ended and tokens else 1


if __name__ == "__main__":
    sys.exit(main())
