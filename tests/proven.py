"""Slow tests that nothing else can break are left out while their sources are those with which they passed.

`python -m tests.proven` runs the groups of `tests/proven.toml` whose sources have changed, and notes there that
they passed; `--all` runs every group, as `make soak` does.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipelines.options import has_gpu

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "proven.toml"
#: Set to run all tests, whatever changed.
ALL_TESTS = "NIGHTJAR_ALL_TESTS"


@dataclass(frozen=True, slots=True)
class Proof:
    """A group of tests that passed with these sources."""

    name: str
    #: Paths of test files, and of everything that can break them, as patterns from the repository's root.
    tests: Sequence[str]
    sources: Sequence[str]
    #: Of the sources with which all the tests passed.
    sha256: str

    def digest(self, root: Path = ROOT) -> str:
        """SHA-256 of the names and the contents of the tests and their sources."""
        whole = hashlib.sha256()
        for path in sorted(set(self._files(root, (*self.tests, *self.sources)))):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
        return whole.hexdigest()

    def holds(self, root: Path = ROOT) -> bool:
        """Whether the sources are those with which the tests passed."""
        return self.digest(root) == self.sha256

    def files_of_tests(self, root: Path = ROOT) -> set[Path]:
        return set(self._files(root, self.tests))

    @staticmethod
    def _files(root: Path, patterns: Iterable[str]) -> Iterable[Path]:
        for pattern in patterns:
            yield from (
                path for path in root.glob(pattern) if path.is_file() and "__pycache__" not in path.parts
            )


def proofs(path: Path = LIST) -> list[Proof]:
    """The groups of `tests/proven.toml`."""
    return [Proof(name, **fields) for name, fields in tomllib.loads(path.read_text()).items()]


@cache
def left_out() -> dict[Path, str]:
    """Of the files and folders that a run leaves out unless they are named: the reason."""
    return left_out_of(proofs(), has_gpu())


def left_out_of(groups: Iterable[Proof], gpu: bool) -> dict[Path, str]:
    """What a run leaves out of these groups, of benchmarks, and of GPUs on a machine without one; nothing if
    all tests are asked for."""
    if os.environ.get(ALL_TESTS):
        return {}
    found = {
        path: f"passed with these sources: {proof.name} of tests/proven.toml"
        for proof in groups
        if proof.holds()
        for path in proof.files_of_tests()
    }
    found[ROOT / "tests" / "services" / "test_benchmarks.py"] = "`make soak` tries the benchmarks"
    if not gpu and "TRITON_INTERPRET" not in os.environ:
        found[ROOT / "tests" / "gpu"] = "needs a CUDA device"
    return found


def passes(proof: Proof) -> bool:
    """Runs the tests of a group, its files side by side."""
    files = sorted(map(str, proof.files_of_tests()))
    processes = min(len(files), os.cpu_count() or 1)
    command = [sys.executable, "-m", "pytest", "-n", str(processes), "--dist", "loadfile", *files]
    return subprocess.run(command, env={**os.environ, ALL_TESTS: "1"}, check=False).returncode == 0


def note(proof: Proof, digest: str) -> None:
    """Writes the digest of the sources with which a group passed."""
    text = LIST.read_text()
    pattern = rf'(^\[{proof.name}\]\n(?:(?!^\[).*\n)*?sha256 = )"[^"]*"'
    LIST.write_text(re.sub(pattern, rf'\1"{digest}"', text, flags=re.M))


def main(arguments: list[str]) -> int:
    failed = False
    for proof in proofs():
        digest = proof.digest()
        if digest == proof.sha256 and "--all" not in arguments:
            print(f"{proof.name}: unchanged")
        elif passes(proof):
            note(proof, digest)
        else:
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
