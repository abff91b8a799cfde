"""Every command of README.md, docs/ and examples/README.md, run by bash as it stands there, or named here
with the reason why not."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.support.docs_kit import (
    PAGES,
    ROOT,
    Command,
    check_call,
    commands_of,
    inline_commands,
    name_of,
    nightjar_parts,
    other_lines,
)
from tests.support.forked_command import forked_nightjar
from tests.support.gpu_host import install_nvidia_smi
from tests.support.services import MotoS3
from tests.support.serving_kit import wav

COMMANDS = [command for page in PAGES for command in commands_of(page)]
#: How a command that goes on says that it is ready; it is ended when its page is done.
GOES_ON = {
    "nightjar worker": "worker up",
    "nightjar serve": "engine ready",
    "nightjar dev": "Ready. In another terminal",
    "nightjar flower": "Visit me at",
}
#: (command as a pattern, why it is not run here, what of ours runs it or holds it).
_CI, _PARITY = "it installs what these tests run in", "tests/parity runs the same cases"
NOT_RUN: list[tuple[str, str]] = [
    (r"make (demo|install)", f"{_CI}; a clean clone of CI runs make"),
    (r"make (test|check)", "it is what runs this test"),
    (
        r"(source \.venv/bin/activate|pip install .*)",
        f"{_CI}; tests/services/test_lock.py resolves every extra",
    ),
    (
        r"make voice-agent",
        "it installs Pipecat in another environment; the suite of integrations/pipecat-nightjar runs its command",
    ),
    (r"make wheel", "tests/services/test_wheel.py builds it"),
    (r"sudo .*", "it changes the machine; tests/unit/deploy/test_systemd.py reads the units"),
    (r"([A-Z_]+=\w+ )?sbatch .*", "there is no Slurm; tests/services/test_slurm.py runs the scripts"),
    (r"kubectl .*", "there is no cluster; tests/unit/deploy/test_kubernetes.py reads the manifests"),
    (r"docker build .*", "there is no Docker; tests/services/test_compose.py reads the Dockerfile"),
    (
        r"docker compose .*",
        "there is no Docker; tests/services/test_compose.py starts the command of every service",
    ),
    (r"python -m tests\.conformance \w+ tests/golden/\w+", _PARITY),
    (
        r"python -m benchmarks\.speech speechlm",
        "a benchmark of minutes on a GPU with vLLM; tests/services/test_benchmarks.py reads its options",
    ),
    (
        r"python -m benchmarks\.stream .*",
        "a measurement of minutes; tests/services/test_benchmarks.py runs it",
    ),
    (
        r"nightjar run .* --qa-set meters\.align\.model=.*",
        "it needs two models; tests/unit/worker/test_aligner.py",
    ),
    (
        r"nightjar (run dialogues\.jsonl|check JOB) --qa strict.*",
        "its meters download models; tests/services/worker/test_quality_jobs.py and test_later_checks.py",
    ),
    (
        r"nightjar (export|items) JOB --where .*",
        "the job of the pages has no such scores; tests/services/jobs/test_export_filters.py",
    ),
    (
        r"nightjar (export (--schedule|--name) .*|export JOB JOB .*|augment .*)",
        "it needs other jobs or folders of sounds; tests/services/jobs/test_export_sets.py and test_augment.py",
    ),
    (
        r"nightjar (run .* --output \w+|decode .*|export JOB --format interleaved .*)",
        "the job of the pages has no codes; tests/services/worker/test_qwen3_job.py and tests/unit/worker/test_codes_jobs.py",
    ),
    (
        r"nightjar export JOB .* --push .*",
        "there is no hub; tests/services/jobs/test_export_hub.py pushes to a stand-in",
    ),
    (
        r"nightjar run \w+\.jsonl --model path/to/speechlm-qwen3-8b .*",
        "it needs vLLM; tests/vllm/test_job.py",
    ),
    (
        r"nightjar models convert base\.pt .*",
        "it needs a training checkpoint; tests/unit/pipelines/test_speechlm_parts.py",
    ),
]
#: What a page takes for granted, in bash.
BEFORE = {
    "operate.md": "nightjar db upgrade\nnightjar worker >worker.log 2>&1 & BACKGROUND+=($!)",
    "nightly.md": r"""
nightjar db upgrade
nightjar worker >worker.log 2>&1 & BACKGROUND+=($!)
printf '[schedules.news]\ninput = "news/{date}.jsonl"\n' >nightjar.toml
mkdir news
for days in 0 1 2 3; do
    echo '{"example_id": "n", "messages": [["user", "text", "Good night."]]}' >news/$(date -u -d "-$days day" +%F).jsonl
done
""".strip(),
    "deploy.md": "unset SPEECH_BROKER_URL",
    "production.md": "export SPEECH_HOME=$FINISHED",
}
#: Lines of JSON, also with an arrow that says who sends it, of TOML and variables, of CSV, of listings (a path,
#: then what it is).
DATA = re.compile(
    r"""[{\["]|(?:->|<-) \{|.*\]\],?$|\[[\w.]+\]$|\w+ = |[A-Z_]+=\S+ +|(?:\w+|"[^"]*"),\S|[\w./-]+[/.][\w. /-]*( {2}|$|\.\.\.)"""
)
GOLDEN = ROOT / "tests/golden"
_LINE = '{"example_id": "d%d", "messages": [["user", "text", "%s"]]}\n'
_ASKED = '{"custom_id": "b1", "method": "POST", "url": "/v1/audio/speech", "body": {"model": "hibari", "input": "Hi.", "voice": "heart"}}\n'


def text_of(command: Command) -> str:
    """The command without the remark behind it."""
    return re.sub(r"\s+#.*$", "", command.text)


def not_run(command: Command) -> bool:
    return any(re.fullmatch(pattern, text_of(command)) for pattern, _ in NOT_RUN)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(state: Path, broker: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPEECH_", "AWS_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return clean | {
        "PATH": path,
        "XDG_STATE_HOME": str(state),
        "XDG_CACHE_HOME": str(state),
        "SPEECH_BROKER_URL": broker,
        "PYTHONPATH": str(ROOT),
    }


def found(variables: dict[str, str], programs: Path) -> dict[str, str]:
    """The variables, with a folder of programs that are found first."""
    return variables | {"PATH": f"{programs}:{variables['PATH']}"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """(home, folder of state, job) of a finished job that is large enough to learn a speaking rate from."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "in.jsonl").write_text("".join(_LINE % (number, "Good morning.") for number in range(32)))
    command = [
        sys.executable,
        "-m",
        "jobs",
        "run",
        "in.jsonl",
        "--speak",
        "all",
        "--timestamps",
        "--out",
        "out",
        "--json",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder, ""),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "out", folder, json.loads(done.stdout.splitlines()[-1])["job"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader stands: inputs under the names of the pages, and what a clone has."""
    (tmp_path / "dialogues.jsonl").write_text(_LINE % (1, "Good morning.") + _LINE % (2, "Good night."))
    (tmp_path / "batch.jsonl").write_text(_ASKED)
    (tmp_path / "anna.wav").write_bytes(wav(1.0))
    (tmp_path / "speakers").mkdir()
    (tmp_path / "speakers" / "anna.wav").write_bytes(wav(1.0))
    (tmp_path / "speakers.csv").write_text("recording,text,weight\nspeakers/anna.wav,What Anna says.,2\n")
    (tmp_path / "table.csv").write_text(
        "id,text,speaker,accent,gender,notes\nt1,Good morning.,anna,north,f,-\n"
    )
    (tmp_path / "common_voice.tsv").write_text("client_id\tpath\tsentence\n1\ta.mp3\tGood morning.\n")
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/text").write_text("anna-1 good morning\nben-1 good night\n")
    (tmp_path / "data/train/utt2spk").write_text("anna-1 anna\nben-1 ben\n")
    (tmp_path / "examples").mkdir()
    for path in (path for kind in ("*.csv", "*.py") for path in (ROOT / "examples").glob(kind)):
        (tmp_path / "examples" / path.name).write_text(path.read_text())
    for path in (ROOT / "examples").glob("*.jsonl"):
        (tmp_path / "examples" / path.name).write_text(
            "".join(path.read_text().splitlines(keepends=True)[:2])
        )
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/speechlm-qwen3-8b").symlink_to(GOLDEN / "speechlm/checkpoint")
    return tmp_path


def script_of(commands: list[Command], before: str, words: dict[str, str]) -> str:
    """Bash that runs the commands in turn and ends at the first that fails, whose number it prints last."""
    lines = [
        "BACKGROUND=()",
        "trap 'kill -TERM ${BACKGROUND[@]+\"${BACKGROUND[@]}\"} 2>/dev/null || true; wait' EXIT",
        'ready() { for _ in $(seq 600); do grep -q -- "$2" "$1" && return; kill -0 $! || break; sleep 0.2; done; cat "$1"; exit 1; }',
        "set -e -o pipefail",
        before,
    ]
    ran = False
    for number, command in enumerate(commands):
        text = re.sub(r"^(?:[\d*/,-]+ +){5}", "", text_of(command))  # what cron runs
        if re.match(r"\S*nightjar run ", text) and not re.search(r"--(dry-run|pack)\b", text):
            # What a second run of a page says differently are its options and its input.
            text, ran = f"{text} --dry-run" if ran else text, True
        for pattern, word in words.items():
            text = re.sub(pattern, word, text)
        lines.append(f"echo '### {number}'")
        marker = next((marker for start, marker in GOES_ON.items() if text.startswith(start)), None)
        lines.append(
            text
            if marker is None
            else f"{text} >ready.{number} 2>&1 & BACKGROUND+=($!); ready ready.{number} '{marker}'"
        )
    return "\n".join([*lines, "echo '### end'", ""])


PAGES_RUN = sorted({command.page for command in COMMANDS if not not_run(command)})


@pytest.mark.parametrize("page", PAGES_RUN)
def test_the_commands_of_a_page(
    page: str, folder: Path, finished: tuple[Path, Path, str], valkey_url: str, request: pytest.FixtureRequest
) -> None:
    home, state, job = finished
    commands = [command for command in COMMANDS if command.page == page and not not_run(command)]
    serving, second, flower = free_port(), free_port(), free_port()
    words = {
        r"\bJOB\b": job,
        r"\bPATH\b": str(GOLDEN / "qwen3_tts/checkpoint-base"),
        r"\b(PATH_OR_NAME|MODEL)\b": "hibari",
        r"/models/s2-pro": str(GOLDEN / "fish/checkpoint"),
        r"/srv/nightjar": str(folder),
        r"/data/": f"{folder}/",
        r"(nightjar serve (?!.*--port).*)$": rf"\1 --port {serving}",
        r"--port 8001$": f"--port {second}",
        r"127\.0\.0\.1:8000": f"127.0.0.1:{serving}",
    }
    more = {"FINISHED": str(home), "SPEECH_FLOWER__PORT": str(flower)}
    if any("postgresql://…" in command.text for command in commands):
        moto: MotoS3 = request.getfixturevalue("moto")
        words[r"postgresql://…"] = request.getfixturevalue("postgres_url")
        words[r"redis://…"] = valkey_url
        words[r"s3://bucket/prefix"] = f"s3://{moto.create_bucket('docs')}/prefix"
        more |= moto.environment()
        # The page starts a worker on each GPU of a host.
        install_nvidia_smi(folder / "bin", 1)
    script = script_of(commands, BEFORE.get(page, ""), words)
    with forked_nightjar(folder / "bin"), subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=found(environment(state, valkey_url), folder / "bin") | more, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
    ) as shell:  # fmt: skip
        try:
            said, _ = shell.communicate(timeout=300)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    reached = re.findall(r"^### (\d+|end)$", said, re.MULTILINE)
    assert reached, said
    assert reached[-1] == "end", f"{commands[int(reached[-1])].text}\n{said[-3000:]}"
    assert shell.returncode == 0, said[-3000:]


def test_every_reason_belongs_to_a_command_of_a_page() -> None:
    for pattern, reason in NOT_RUN:
        assert any(re.fullmatch(pattern, text_of(command)) for command in COMMANDS), pattern
        named = re.findall(r"tests/[\w/.]+", reason)
        assert all((ROOT / name).exists() for name in named), reason


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_call_on_a_page_is_one_that_the_command_takes(page: Path) -> None:
    calls = [
        *inline_commands(page),
        *(part for command in commands_of(page) for part in nightjar_parts(command.text)),
    ]
    refused = []
    for call in calls:
        try:
            check_call(call)
        except click.ClickException as error:
            refused.append(f"{call}: {error.format_message()}")
    assert refused == []


@pytest.mark.parametrize(
    "call",
    ["nightjar retry JOB --cod x", "nightjar lst", "nightjar wait JOB --timeout soon", "nightjar list a b"],
)
def test_a_call_that_the_command_does_not_take_is_seen(call: str) -> None:
    with pytest.raises(click.ClickException):
        check_call(call)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_indented_line_is_a_command_or_data(page: Path) -> None:
    """A command that the harness does not know as one would not be run."""
    assert [line for line in other_lines(page) if DATA.match(line) is None] == []
    assert DATA.match("unknown-program --option") is None
