"""The documents keep their word: README's Python runs, the names in them exist, and the tables match the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mok_modular.cli.commands import _make_parser, main
from mok_modular.protocol.roster import STAGES, roster
from mok_modular.protocol.swap_rules import SIGNATURES
from mok_modular.testing.contract import RULES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROTOCOL = ROOT / "csrc" / "protocol" / "README.md"
TARGETS = ROOT / "csrc" / "targets" / "README.md"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), PROTOCOL, TARGETS]
SOURCE_SUFFIXES = (".py", ".h", ".cu", ".cpp")


def section(text: str, title: str) -> str:
    """The text between a heading and the next one of its level."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    return found


def table(text: str) -> list[list[str]]:
    """The cells of the one Markdown table in `text`, without its header."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def words(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def test_python_blocks_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)
    num_lines = sum(bool(line.strip()) for line in blocks[0].splitlines())
    assert num_lines <= 10
    done = subprocess.run(
        [sys.executable, "-c", "".join(blocks)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(100, 256), (101, 256), (102, 256), (103, 256)]\n"


def test_variables_of_a_build_are_told() -> None:
    """Those of CMake's cache and of the environment, each in a row of docs/building.md."""
    text = (ROOT / "docs" / "building.md").read_text()
    told = set(re.findall(r"^\| `(MOK_\w+)` \| ", text, flags=re.M))
    there = set(re.findall(r"^set\((MOK_\w+) [^)]* CACHE ", (ROOT / "CMakeLists.txt").read_text(), flags=re.M))
    for path in (ROOT / "mok_modular").rglob("*.py"):
        code = path.read_text()
        if "os.environ" in code:
            there |= set(re.findall(r'"(MOK_[A-Z_]+)"', code))
    there.discard("MOK_SIGNALS_NVSHMEM")  # a macro of a kernel
    assert told == there == {"MOK_HOST_ARCH", "MOK_OPTIMIZE", "MOK_CACHE_DIR"}


def test_python_of_swapping_runs() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "swapping.md").read_text(), flags=re.M | re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["report"].is_ok
    assert list(names["config"].stages) == ["wgrad"]


def test_the_table_of_swapping_is_the_code() -> None:
    text = (ROOT / "docs" / "swapping.md").read_text()
    assert [row[0].strip("`") for row in table(text.partition("## When")[0])] == list(SIGNATURES)
    named = {word for row in table(section(text, "What goes wrong")) for word in words(row[0])}
    assert named == set(RULES)


def test_the_commands_that_ci_runs_are_there() -> None:
    """.ci/run takes the two lines of the first block."""
    block = re.findall(r"^```sh\n(.*?)^```", README, flags=re.M | re.S)[0]
    commands = [line.partition("  #")[0].rstrip() for line in block.splitlines()]
    assert commands == ["pip install . && mok-modular run", "pip install '.[test]' && pytest"]


def test_pytest_says_what_it_leaves_out() -> None:
    one_slow_test = Path(__file__).with_name("test_held_sms.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(one_slow_test)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "left out: 1 slow tests" in done.stdout
    assert "pip install '.[dev]' && pytest -m slow" in done.stdout


def test_commands_of_readme_exist(capsys: pytest.CaptureFixture[str]) -> None:
    console = "\n".join(re.findall(r"^```console\n(.*?)^```", README, flags=re.M | re.S))
    commands = re.findall(r"^\$ mok-modular (.*?)(?:  +#.*)?$", console, flags=re.M)
    assert {command.split()[0] for command in commands} == {
        "run",
        "ab",
        "stages",
        "build",
        "explain",
        "explore",
        "sweep",
        "doctor",
    }
    for command in commands:
        arguments = _make_parser().parse_args(command.split())
        assert callable(arguments.command)
    assert main(["run", "--tokens", "256"]) == 0
    out = capsys.readouterr().out

    def shown(text: str) -> list[list[str]]:
        """Stage, pass, kernel and rows of the table, and the names of the checked tensors."""
        rows = [line.split() for line in text.splitlines()]
        stages = [row[:4] for row in rows if row[1:2] in (["pass"], ["forward"], ["backward"]) and len(row) == 8]
        return stages + [row[:1] for row in rows if row[-1:] in (["verdict"], ["ok"]) and len(row) in (5, 6)]

    def header(row: list[str]) -> bool:
        return row[0] in ("stage", "check")

    table = [row for row in shown(out) if not header(row)]
    assert len(table) == 10 + 11 + 9
    assert [row for row in shown(console) if not header(row)] == table


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert targets or (path.name not in ("design.md", "status.md") and path != ROOT / "README.md")
    for target in targets:
        assert (path.parent / target).exists(), target


# ---- follow one token ------------------------------------------------------------------------------------

STEPS = re.findall(r"^\d+\. (.*?)(?=^\d+\. |\n\n|\Z)", section(README, "Follow one token"), flags=re.M | re.S)


def test_the_token_passes_every_stage_file() -> None:
    assert len(STEPS) >= 10
    named = {word for step in STEPS for word in words(step) if word.endswith(SOURCE_SUFFIXES)}
    stages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc" / "stages").glob("*.h")}
    assert stages - {"csrc/stages/stage.h"} <= named


@pytest.mark.parametrize("step", STEPS, ids=[f"step {i + 1}" for i in range(len(STEPS))])
def test_files_and_names_of_a_step_exist(step: str) -> None:
    files = [word for word in words(step) if word.endswith(SOURCE_SUFFIXES)]
    assert files
    text = "\n".join((ROOT / file).read_text() for file in files)
    for word in words(step):
        if word in files or not re.fullmatch(r"[A-Za-z_][\w.]+", word):
            continue
        for part in word.split("."):
            assert re.search(rf"\b{re.escape(part)}\b", text), f"{word} is in none of {files}"


# ---- tables ----------------------------------------------------------------------------------------------


def test_edge_table_is_that_of_the_code() -> None:
    rows = table(section(PROTOCOL.read_text(), "Edges"))
    assert [words(row[0])[0] for row in rows] == list(roster().edge_names)
    assert [row[4] for row in rows] == ["yes" if edge.is_across_ranks else "no" for edge in roster().edges]


def test_edge_table_names_the_stages_of_the_roster() -> None:
    stages = set(roster().stage_names)
    rows = {words(row[0])[0]: row for row in table(section(PROTOCOL.read_text(), "Edges"))}
    for edge in roster().edges:
        said = set(re.findall(r"\w+", rows[edge.name][1])) & stages
        is_of_every = set(edge.writers) == stages  # sent by whoever leaves last
        assert is_of_every or said >= set(edge.writers), edge.name


def test_picture_shows_the_edges_of_a_forward() -> None:
    picture = section(README, "Stages and edges")
    for edge in ("topk_ready", "input_ready", "done", "x_ready", "gate_up_ready", "hidden_ready", "y_ready"):
        assert edge in picture
    for name in (
        "slot_free",
        "shared_hidden_ready",
        "shared_ready",
        "publish",
        *STAGES,
        *roster().names("prologue", "forward"),
        "reduce",
    ):
        assert name in picture


@pytest.mark.parametrize("header", ["memory.h", "math.h", "worker.h", "driver.h"])
def test_every_target_has_the_names_of_the_target_table(header: str) -> None:
    (text,) = re.findall(rf"^## `{header}`.*?\n(.*?)(?=^## |\Z)", TARGETS.read_text(), flags=re.M | re.S)
    names = {re.split(r"[(<]", word)[0] for row in table(text) for word in words(row[0])}
    assert len(names) >= 4
    folders = [path for path in sorted((ROOT / "csrc" / "targets").iterdir()) if (path / header).exists()]
    assert ROOT / "csrc" / "targets" / "host" in folders
    for folder in folders:
        code = (folder / header).read_text()
        missing = {name for name in names if not re.search(rf"\b{name}\b", code)}
        assert not missing, folder


def test_support_table_says_what_runs() -> None:
    rows = table(section(README, "What runs today"))
    assert [words(row[0])[0] for row in rows] == ["host", "sm_90a", "sm_100f"]
    assert {cell for row in rows for cell in row[1:]} <= {"runs", "compiles", "not yet"}
    assert rows[0][1] == "runs"
    assert rows[1][1] == "runs"
