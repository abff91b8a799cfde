"""`python -m tests.mutants [NAME ...]`: plants faults one at a time in a copy of the code, runs the tests
that have to see each, and prints what survives. Exit status 1 where one survives, 2 where one cannot be
tried."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.faults import REPOSITORY, BadFaultError, Fault, of_the_day, read_faults

#: Of pytest: all passed; some failed.
PASSED, FAILED = 0, 1
SECONDS_A_DAY = 86_400
TEST_TIMEOUT_SECONDS = 120
#: Of all tests of a fault. A fault may keep a test, or a process that it started, from ending at all.
RUN_TIMEOUT_SECONDS = 600


class Sandbox:
    """A copy of the checkout's files, in which one fault at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(
            listed, cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.split("\0")
        for name in filter(None, names):
            if not (REPOSITORY / name).is_file():
                continue
            to = folder / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, to)

    def run(self, project: str, tests: tuple[str, ...]) -> tuple[int, str]:
        """Exit status and output of pytest, in an environment without the settings of whoever runs this."""
        command = [
            str(python_of(project)),
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            f"--timeout={TEST_TIMEOUT_SECONDS}",
        ]
        command += [test.removeprefix(f"{project}/") for test in tests]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SPEECH_") and name != "CI"
        }
        folder = self.folder / project
        environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+") as output:
            tests_run = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = tests_run.wait(RUN_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                raise BadFaultError(f"its tests did not end within {RUN_TIMEOUT_SECONDS} s") from None
            finally:
                # What the tests have left running too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(tests_run.pid, signal.SIGKILL)
                tests_run.wait()
            output.seek(0)
            return status, output.read()

    def try_fault(self, fault: Fault) -> tuple[str, str]:
        """`seen`, `SURVIVED` or `BROKEN`, and why where it is not `seen`."""
        path = self.folder / fault.file
        source = path.read_text()
        try:
            path.write_text(fault.planted(source))
            status, output = self.run(fault.project, fault.tests)
        except BadFaultError as error:
            return "BROKEN", str(error)
        finally:
            path.write_text(source)
        if status == FAILED:
            return "seen", ""
        return (
            ("SURVIVED", "")
            if status == PASSED
            else ("BROKEN", f"pytest ended with {status}:\n{output[-2000:]}")
        )


def check_unharmed(sandbox: Sandbox, faults: list[Fault]) -> str:
    """The tests of these faults pass without any fault; what they say where they do not."""
    for project in dict.fromkeys(fault.project for fault in faults):
        tests = tuple(
            dict.fromkeys(test for fault in faults if fault.project == project for test in fault.tests)
        )
        status, output = sandbox.run(project, tests)
        if status != PASSED:
            return output[-4000:]
    return ""


def python_of(project: str) -> Path:
    """The interpreter of a distribution's own environment, which its `make install` makes."""
    return REPOSITORY / project / ".venv/bin/python" if project else Path(sys.executable)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these faults")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests")
    parser.add_argument("--of-the-day", type=int, metavar="COUNT", help="only so many, others each day")
    parser.add_argument("--processes", type=int, default=1, help="tried at once (default 1)")
    options = parser.parse_args(arguments)
    faults = read_faults()
    if options.names:
        unknown = set(options.names) - {fault.name for fault in faults}
        if unknown:
            parser.error(f"no such fault: {', '.join(sorted(unknown))}")
        faults = [fault for fault in faults if fault.name in options.names]
    if options.of_the_day is not None:
        faults = of_the_day(faults, int(time.time()) // SECONDS_A_DAY, options.of_the_day)
    if options.list:
        for fault in faults:
            print(f"{fault.name}  {fault.file}  {' '.join(fault.tests)}")
        return 0
    return try_all(faults, options.processes)


def try_all(faults: list[Fault], processes: int) -> int:
    """Tries the faults and prints a line for each; the exit status."""
    started = time.monotonic()
    for fault in [fault for fault in faults if not python_of(fault.project).exists()]:
        print(f"left out  {fault.name}  ({fault.file}): make -C {fault.project} install")
        faults.remove(fault)
    with (
        tempfile.TemporaryDirectory(prefix="nightjar-mutants-") as folder,
        ThreadPoolExecutor(processes) as pool,
    ):
        free: SimpleQueue[Sandbox] = SimpleQueue()
        for number in range(processes):
            free.put(Sandbox(Path(folder) / str(number)))

        def attempt(fault: Fault) -> tuple[str, str, float]:
            sandbox, began = free.get(), time.monotonic()
            try:
                return *sandbox.try_fault(fault), time.monotonic() - began
            finally:
                free.put(sandbox)

        sandbox = free.get()
        harmed = check_unharmed(sandbox, faults)
        free.put(sandbox)
        if harmed:
            print(f"The tests fail without any fault:\n{harmed}")
            return 2
        verdicts: list[str] = []
        for fault, (verdict, why, seconds) in zip(faults, pool.map(attempt, faults)):
            verdicts.append(verdict)
            about = f"{seconds:4.0f} s  {fault.name}  ({fault.file})"
            print(f"{verdict:9} {about}{f': {why}' if why else ''}", flush=True)
    seen = verdicts.count("seen")
    print(f"{seen} of {len(faults)} planted faults were seen, in {time.monotonic() - started:.0f} s.")
    return 2 if "BROKEN" in verdicts else 1 if "SURVIVED" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
