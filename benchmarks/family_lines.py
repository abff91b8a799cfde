"""How many lines of code a family has that only run its LM:
`python -m benchmarks.family_lines [COMMIT ...]`, HEAD where none is named.

Counted are lines with code, without docstrings, comments and blank lines, in the files that a family would
not have if its LM were somebody else's matter. Prompts, codecs, recordings and the pipeline are needed on
any engine and are not counted.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: By what runs the LM: a family's files. One that a commit does not have counts nothing.
FILES: dict[str, tuple[str, ...]] = {
    "Qwen3-TTS, native": tuple(f"pipelines/qwen3_tts/{name}.py" for name in ("model", "execution")),
    "SparkTTS, native": tuple(f"pipelines/spark_tts/{name}.py" for name in ("language_model", "pipeline")),
    "Fish Speech, native": tuple(f"pipelines/fish_speech/{name}.py" for name in ("model", "engines")),
    "Fish Speech, vLLM": ("pipelines/fish_speech/vllm_model.py",),
}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Lines with code."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []

    def end() -> None:
        # A statement that is a string alone is a docstring.
        if any(token.type != tokenize.STRING for token in statement):
            lines.update(line for token in statement for line in range(token.start[0], token.end[0] + 1))
        statement.clear()

    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            end()
        elif token.type not in _NO_CODE:
            statement.append(token)
    return len(lines)


def lines_at(commit: str, files: Iterable[str]) -> dict[str, int]:
    """Lines with code of those files that a commit has. Raises ValueError for a commit that the repository
    does not have."""
    known = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if known.returncode:
        raise ValueError(f"the repository has no commit {commit}")
    there = set(known.stdout.splitlines())
    found: dict[str, int] = {}
    for file in files:
        if file in there:
            shown = subprocess.run(
                ["git", "show", f"{commit}:{file}"], capture_output=True, text=True, check=True, cwd=ROOT
            )
            found[file] = code_lines(shown.stdout)
    return found


def main(commits: Sequence[str]) -> int:
    for commit in commits or ["HEAD"]:
        for name, files in FILES.items():
            found = lines_at(commit, files)
            parts = ", ".join(f"{Path(file).name} {lines}" for file, lines in found.items())
            print(f"{commit:12}{name:22}{sum(found.values()):6}  {parts}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
