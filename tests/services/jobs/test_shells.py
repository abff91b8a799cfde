"""The command in the shells that people use: `jobs` is a builtin there, so `nightjar` is the name, and
completion brings ours back."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from jobs.ledger import Ledger
from jobs.settings import Settings
from tests.support import ledger_kit
from tests.support.cli_kit import LINE

BIN = Path(sys.executable).parent
#: How each shell is started without its user's files, for a script and at a prompt.
SCRIPT = {
    "bash": ["bash", "--norc", "-c"],
    "zsh": ["zsh", "-f", "-c"],
    "fish": ["fish", "--no-config", "-c"],
    "dash": ["dash", "-c"],
}
PROMPT = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
COMPLETING = ["bash", "zsh", "fish"]


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def environment(folder: Path, **more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SPEECH_", "FPATH"))}
    home = {
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    return clean | home | {"PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "> "} | more


def run(shell: str, script: str, folder: Path, **more: str) -> str:
    needs(shell)
    done = subprocess.run(
        [*SCRIPT[shell], script],
        cwd=folder,
        env=environment(folder, **more),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


EVAL = 'eval "$(nightjar completion %s)"\n'
#: Ours, inside and outside of a substitution; then the builtin with a job to show.
OURS = {
    "bash": 'J=$(jobs submit in.jsonl -q) && jobs status "$J" --json && jobs --version\n',
    "zsh": 'J=$(jobs submit in.jsonl -q) && jobs status "$J" --json && jobs --version\n',
    "fish": 'set J (jobs submit in.jsonl -q); and jobs status "$J" --json; and jobs --version\n',
}
BUILTIN = {
    "bash": 'sleep 300 &\njobs; jobs -l; jobs %1; echo "$!=$(jobs -p)"; kill $!\n',
    # In a substitution zsh's builtin lists nothing, with our function or without.
    "zsh": 'sleep 300 &\njobs; jobs -l; jobs %1; jobs -p >listed; echo "$!=$(<listed)"; kill $!\n',
    "fish": "sleep 300 &\njobs; jobs -l; jobs $last_pid; echo $last_pid=(jobs -p)[-1]; kill $last_pid\n",
}


@pytest.mark.parametrize("shell", COMPLETING)
def test_jobs_with_one_of_our_words_is_nightjar(shell: str, folder: Path, valkey_url: str) -> None:
    (folder / "in.jsonl").write_text(LINE % ("a", "Good morning."))
    said = run(shell, EVAL % shell + OURS[shell], folder, SPEECH_BROKER_URL=valkey_url).splitlines()
    assert '"schema":"nightjar.status/1"' in said[0].replace(": ", ":"), said
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", said[-1])


@pytest.mark.parametrize("shell", COMPLETING)
def test_jobs_without_is_the_builtin(shell: str, tmp_path: Path) -> None:
    said = run(shell, EVAL % shell + BUILTIN[shell], tmp_path)
    *listed, last = said.splitlines()
    assert len([line for line in listed if "sleep 300" in line]) == 3, said
    assert re.search(r"^(\d+)=.*\b\1\b", last), said


#: What is typed before the key, and what it becomes; JOB is the id of a job of another folder.
COMPLETED = [
    ("nightjar verif", "verify"),
    ("jobs verif", "verify"),
    ("nightjar run exa", "example-of-mine.jsonl"),
    ("nightjar run x --format fl", "flac"),
    ("nightjar submit x --model qwen3-tts-1.7b-v", "qwen3-tts-1.7b-voicedesign"),
    ("nightjar serve --model mine/check", "mine/checkpoint"),
    ("nightjar models hib", "hibari"),
    ("jobs export --form", "--format"),
    ("nightjar status 01", "JOB"),
    ("nightjar export 01", "JOB"),
]
#: What no completion imports: each takes a second or more at every press of the key.
COSTLY = ("torch", "transformers", "vllm", "celery", "sqlalchemy", "boto3", "pyarrow", "onnxruntime")
IMPORTED = f"""
import sys
from jobs.cli import main
try:
    main()
except SystemExit:
    print([name for name in {COSTLY} if name in sys.modules])
"""


@pytest.fixture
def desk(tmp_path: Path) -> tuple[Path, list[tuple[str, str]]]:
    """A folder with what there is to complete, and the cases."""
    (tmp_path / "example-of-mine.jsonl").touch()
    (tmp_path / "mine/checkpoint").mkdir(parents=True)
    with closing(Ledger(Settings(home=tmp_path / "elsewhere").ledger_url)) as ledger:
        ledger.migrate()
        job = ledger_kit.submit(ledger, (1,)).id
    (tmp_path / "state/nightjar/jobs").mkdir(parents=True)
    (tmp_path / "state/nightjar/jobs" / job).write_text(str(tmp_path / "elsewhere"))
    return tmp_path, [(typed.replace("JOB", job), whole.replace("JOB", job)) for typed, whole in COMPLETED]


@pytest.mark.parametrize("shell", list(PROMPT))
def test_a_prompt_completes_both_names_files_models_formats_and_jobs(
    shell: str, desk: tuple[Path, list[tuple[str, str]]]
) -> None:
    needs(shell)
    folder, cases = desk
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(shell, PROMPT[shell], environment(folder))
    try:
        type_line(terminal, (EVAL % shell).strip() + "; echo rea''dy\r", "ready")
        for typed, whole in cases:
            # The end of the whole is what the shell adds.
            type_line(terminal, f"{typed}\t", whole[len(typed.split()[-1]) :])
            type_line(terminal, "\x15echo nex''t\r", "next")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def test_fish_completes_both_names_files_models_formats_and_jobs(
    desk: tuple[Path, list[tuple[str, str]]],
) -> None:
    folder, cases = desk
    said = run(
        "fish", EVAL % "fish" + "".join(f"complete -C '{typed}'; echo end\n" for typed, _ in cases), folder
    )
    answers = [
        [line.partition("\t")[0].rstrip("/") for line in part.splitlines() if line]
        for part in said.split("end\n")[:-1]
    ]
    assert answers == [[whole] for _, whole in cases]


def test_a_completion_pays_for_no_library(desk: tuple[Path, list[tuple[str, str]]]) -> None:
    folder, cases = desk
    for typed, whole in cases:
        asked = {
            "_NIGHTJAR_COMPLETE": "bash_complete",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split()) - 1),
        }
        command = [sys.executable, "-c", IMPORTED]
        said = subprocess.run(
            command, cwd=folder, env=environment(folder, **asked), capture_output=True, text=True, check=True
        ).stdout
        *completed, costly = said.splitlines()
        assert completed in ([f"plain,{whole}"], [f"file,{typed.split()[-1]}"]), typed
        assert costly == "[]", typed


def type_line(terminal: int, keys: str, expected: str) -> None:
    """Types into a terminal and waits until it shows `expected`, which is not in what was typed."""
    assert expected not in keys
    os.write(terminal, keys.encode())
    shown, give_up = "", time.monotonic() + 60
    while expected not in shown:
        ready, _, _ = select.select([terminal], [], [], give_up - time.monotonic())
        assert ready, shown
        shown += os.read(terminal, 4096).decode(errors="replace")


def test_a_posix_shell_runs_nightjar_and_the_old_name_by_its_file(folder: Path, valkey_url: str) -> None:
    (folder / "in.jsonl").write_text(LINE % ("a", "Good morning."))
    script = f"""set -eu
J=$(nightjar submit in.jsonl -q)
nightjar status "$J" --json
env jobs status "$J" --json
{BIN}/jobs status "$J" --json
"""
    said = run("dash", script, folder, SPEECH_BROKER_URL=valkey_url).splitlines()
    assert len(said) == 3
    assert len(set(map(identity, said))) == 1


def identity(view: str) -> str:
    found = re.search(r'"job"\s*:\s*"([^"]+)"', view)
    assert found is not None, view
    return found[1]


def test_a_program_calls_either_name() -> None:
    said = [
        subprocess.run([BIN / name, "--version"], capture_output=True, text=True, check=True).stdout
        for name in ("nightjar", "jobs")
    ]
    assert said[0] == said[1] != ""
