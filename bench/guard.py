"""`outrider bench guard`: this checkout beside an earlier one, in turns on this machine; names what became slower."""

import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles
from zipfile import ZipFile

from bench import report
from bench.http.chat import Answer
from bench.http.process import start_server
from bench.pair.run import Choice, Server, measure
from bench.plan import BenchError

ROOT = Path(__file__).parent.parent
# A figure is slower if it is so by more than this share in the median, and at all in three quarters of the pairs.
TOLERANCE = 0.03
# Prompts are those of `rag`, about 2,000 tokens; the other tasks are answered with drafts and without.
CHOICE = Choice(("chat", "code", "edit", "rag"), (0,), (0.0,), questions=2, max_tokens=64)
PLAIN = {"speculation": {"drafter": "none"}, "prediction": None}
LEGEND = (
    "Time over the earlier commit's: more than 1 is slower. Of tokens per second and per step, the earlier commit's over this "
    "one's. Medians of pairs measured in turns, and their middle half."
)


def run(against: str, model: str, minutes: float, flags: Sequence[str], out: Path | None) -> list[str]:
    """Measures for about `minutes`, prints, and saves if `out` is given; returns what became slower. Raises BenchError."""
    against = against or last_release()
    earlier = {**os.environ, "PYTHONPATH": str(packages(against))}
    arguments, end = ["--model.path", model, "--sessions.automatic", "off", *flags], time.monotonic() + 60 * minutes
    found: dict[str, list[float]] = defaultdict(list)
    while not found or time.monotonic() < end:
        # New processes for each round: where its memory lies makes one of two equal servers faster by several percent.
        order = (None, earlier) if len(found["start"]) % 2 else (earlier, None)
        with ExitStack() as stack:
            started = {each is None: stack.enter_context(start_server(arguments, environment=each)) for each in order}
            found["start"].append(started[True].seconds_to_start / started[False].seconds_to_start)
            urls = [started[True].url, started[False].url]
            servers = [stack.enter_context(closing(Server(url, fields=each))) for each in ({}, PLAIN) for url in urls]
            for name, (ours, theirs) in measured(servers):
                found[name].append(ours / theirs)
    rows = {name: (median(each), *middle(each), len(each)) for name, each in found.items()}
    slower = slowdowns(found)
    cells = [(name, f"{row[0]:.3f}", f"{row[1]:.3f}-{row[2]:.3f}", row[3]) for name, row in rows.items()]
    report.print_table(f"This checkout over {against}", ("figure", "median", "middle half", "pairs"), cells, LEGEND)
    print(f"Slower by more than {TOLERANCE:.0%}: {', '.join(slower) or 'nothing'}.")
    if out:
        report.save(out, {"against": against, "model": Path(model).name, "ratios": rows, "slower": slower})
    return slower


def slowdowns(found: Mapping[str, Sequence[float]]) -> list[str]:
    """The names of ratios that say that something is slower."""
    return [name for name, each in found.items() if median(each) > 1 + TOLERANCE and middle(each)[0] > 1]


def measured(servers: Sequence[Server]) -> Iterator[tuple[str, tuple[float, float]]]:
    """Names of figures, each with times or their inverses of this checkout and the earlier one.

    The servers are those of both, first with drafts and then without.
    """
    for part in measure(servers, CHOICE):
        for ours, theirs, plain, earlier_plain in part.answers:
            if part.task == "rag":
                yield "prompt", (first_token(ours), first_token(theirs))
                continue
            for name, pair in (("plain steps", (plain, earlier_plain)), (f"fusion, {part.task}", (ours, theirs))):
                if all(each.rate for each in pair):  # else most of a text came at once
                    yield name, (1 / pair[0].rate, 1 / pair[1].rate)
            yield f"steps per token, {part.task}", (steps(ours), steps(theirs))
            if part.task == "chat":
                yield "first token", (first_token(ours), first_token(theirs))


def first_token(answer: Answer) -> float:
    return answer.first_token_seconds or answer.seconds


def steps(answer: Answer) -> float:
    return (answer.steps or answer.tokens) / answer.tokens


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    quarters = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values]
    return quarters[0], quarters[-1]


def last_release() -> str:
    """The last tag. Raises BenchError."""
    try:
        return report.git(ROOT, "describe", "--tags", "--abbrev=0")
    except (OSError, subprocess.CalledProcessError):
        raise BenchError("There is no release yet; name a commit or a wheel to compare with.") from None


def packages(against: str) -> Path:
    """The folder of the packages of a wheel or a commit, which is compiled on first use. Raises BenchError."""
    wheel = Path(against)
    try:
        name = wheel.stem if wheel.suffix == ".whl" else report.git(ROOT, "rev-parse", "--verify", f"{against}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        raise BenchError(f"There is no commit {against}; name one, or a wheel.") from None
    folder = ROOT / "build" / "guard" / name
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "packages").mkdir(parents=True)
        if wheel.suffix == ".whl":
            ZipFile(wheel).extractall(folder / "packages")
        else:
            compile_commit(name, folder)
        (folder / "complete").touch()
    return folder / "packages"


def compile_commit(commit: str, folder: Path) -> None:
    """Writes the sources of a commit to a folder, and compiles its libraries for this machine. Raises BenchError."""
    print(f"Compiling {commit[:12]}, once; this takes some minutes.")
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    (folder / "packages" / "outrider").mkdir()
    for each in ("server", "drafters", "verify", "models"):
        (folder / "packages" / "outrider" / each).symlink_to(folder / each)
    ended = subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=folder, capture_output=True)
    if ended.returncode:
        raise BenchError(f"{commit[:12]} cannot be compiled: {ended.stderr.decode().strip().splitlines()[-1]}")
