"""A program for test_worker_process."""

import sys


def main(argument: str) -> None:
    print(argument, len(sys.path))
