"""Break the code on purpose, one place at a time, and see that a test fails each time.

    python tests/mutants/run.py               # all lists, half an hour
    python tests/mutants/run.py dqn_snake     # one list
    python tests/mutants/run.py dqn_snake -k epsilon

A list is a text file in this folder: mutants separated by lines of `====`, each with a first line
`file | test file::test or -k expression | what is wrong`, the code as it is, a line `----`, and the code as it is then.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def read(name: str) -> list[tuple[str, str, str, str, str]]:
    """file, tests, title, old and new code of the mutants in list `name`."""
    mutants = []
    for text in re.split(r"^====\n", (HERE / f"{name}.txt").read_text(), flags=re.MULTILINE):
        if text.strip():
            head, body = text.strip("\n").split("\n", 1)
            file, tests, title = (part.strip() for part in head.split(" | "))
            old, new = (body + "\n").split("----\n")
            mutants.append((file, tests, title, old.rstrip("\n"), new.rstrip("\n")))
    return mutants


def run_tests(root: Path, words: list[str]) -> None:
    """In a process of its own."""
    os.setsid()
    os.chdir(root)
    os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    sys.dont_write_bytecode = True  # Python would not see a change within a second
    sys.path.insert(0, str(root))
    os._exit(pytest.main(words))


def survives(root: Path, file: str, tests: str, old: str, new: str) -> bool:
    """Whether the tests pass with `old` replaced by `new`."""
    path = root / file
    source = path.read_text()
    assert source.count(old) == 1, f"{file} has {source.count(old)} times: {old}"
    path.write_text(source.replace(old, new))
    target, *names = tests.split("::")
    words = ["-q", "-x", "--all", target, *(["-k", names[0]] if names else [])]
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(root, words))
    process.start()
    process.join(900)
    path.write_text(source)
    if process.is_alive():  # a fault that hangs is found too
        os.killpg(process.pid, signal.SIGKILL)
        return False
    assert process.exitcode not in (2, 3, 4, 5), (root / "output.txt").read_text()  # no test ran; a crash is below 0
    return process.exitcode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", default=sorted(path.stem for path in HERE.glob("*.txt")))
    parser.add_argument("-k", default="", help="only mutants with this in their title")
    options = parser.parse_args()
    import stable_baselines3  # noqa: F401  (with PyTorch: each mutant's process is a copy of this one)
    import torch.utils.tensorboard  # noqa: F401

    lives = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        for name in options.lists:
            for file, tests, title, old, new in read(name):
                if options.k in title:
                    lives.append(survives(root, file, tests, old, new))
                    print(f"{'SURVIVES' if lives[-1] else 'caught  '}  {file}: {title}", flush=True)
    print(f"{sum(lives)} of {len(lives)} survive")
    raise SystemExit(any(lives))


if __name__ == "__main__":
    main()
