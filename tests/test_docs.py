from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import click
import pytest

from la_export.pages.blocks import fill_blocks
from la_export.pages.command_page import COMMAND_BLOCKS, COMMANDS
from la_export.pages.contract_page import CONTRACT_BLOCKS
from la_runtime.contract import Contract
from tests.error_messages import VARIES, error_classes, find_messages
from tests.markdown import CodeBlock, find_code_blocks, split_row

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"

# Python blocks that are shown and not run, by page; each says why in a comment above it.
NOT_RUN: dict[str, int] = {}

# A message's row spells at least this many letters of it, or all it has.
FEWEST_LETTERS = 8


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_to_files_of_the_repository_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8"))

    assert [target for target in targets if not (path.parent / target).exists()] == []


# --- generated blocks


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_generated_blocks_are_what_the_code_says(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    filled = fill_blocks(text, {**CONTRACT_BLOCKS, **COMMAND_BLOCKS})

    assert filled == text, "run scripts/docs"


def test_every_block_that_can_be_generated_is_on_a_page() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in PAGES)

    missing = [
        name
        for name in (*CONTRACT_BLOCKS, *COMMAND_BLOCKS)
        if f"<!-- generated:{name} -->" not in texts
    ]

    assert not missing


def test_the_contract_page_names_every_tensor_of_a_graph() -> None:
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    contract = Contract(
        num_layers=1,
        num_kv_heads=2,
        head_dim=4,
        hidden_size=8,
        vocab_size=16,
        k_max=3,
        top_c=5,
    )

    names = [spec.name.replace(".0.", ".{i}.") for spec in (*contract.inputs, *contract.outputs)]

    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_the_command_page_names_every_option_of_every_command() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")

    for program, group in COMMANDS.items():
        for name, command in group.commands.items():
            section = text.partition(f"### `{program} {name}`")[2].partition("\n###")[0]
            for option in command.params:
                if isinstance(option, click.Option) and not option.hidden:
                    assert f"`{option.opts[-1]}" in section, f"{program} {name}"


# --- troubleshooting


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row of the troubleshooting page."""

    heading: str
    message: str
    cause: str
    remedy: str
    line: int


def _entries() -> Iterator[Entry]:
    heading = ""
    for number, line in enumerate(TROUBLESHOOTING.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| `"):
            message, cause, remedy = split_row(line)
            yield Entry(
                heading=heading,
                message=message.strip("`"),
                cause=cause,
                remedy=remedy,
                line=number,
            )


ENTRIES = list(_entries())


def _explains(entry: Entry, *, kind: str, text: str) -> bool:
    """Whether the row stands under the error's class and is the beginning of its text."""
    return entry.heading.startswith(f"`{kind}`") and text.startswith(entry.message)


def test_the_troubleshooting_page_has_a_row_for_every_error_message() -> None:
    missing = [
        f"{message.place}: under `{message.kind}` write\n| `{message.text}` | … | … |"
        for message in find_messages(ROOT)
        if message.text
        and not any(_explains(entry, kind=message.kind, text=message.text) for entry in ENTRIES)
    ]

    assert not missing, f"{TROUBLESHOOTING.name} lacks rows:\n" + "\n".join(missing)


def test_every_error_message_is_written_where_the_error_is_made() -> None:
    assert [message.place for message in find_messages(ROOT) if not message.text] == []


def test_the_troubleshooting_page_has_no_row_for_a_message_that_is_gone() -> None:
    messages = list(find_messages(ROOT))
    kinds = tuple(f"`{kind}`" for kind in error_classes())

    gone = [
        f"line {entry.line}: {entry.message}"
        for entry in ENTRIES
        if entry.heading.startswith(kinds)
        and not any(_explains(entry, kind=m.kind, text=m.text) for m in messages)
    ]

    assert not gone, "\n".join(gone)


def test_rows_are_long_enough_to_be_found_and_say_what_to_do() -> None:
    texts = {message.text for message in find_messages(ROOT)}

    for entry in ENTRIES:
        letters = sum(character.isalpha() for character in entry.message)
        assert letters >= FEWEST_LETTERS or entry.message in texts, f"line {entry.line}: too short"
        assert entry.cause, f"line {entry.line}: no cause"
        assert entry.remedy or entry.message == "interrupted", f"line {entry.line}: no remedy"


def test_headings_name_every_error_class_with_its_exit_code() -> None:
    text = TROUBLESHOOTING.read_text(encoding="utf-8")
    used = {message.kind for message in find_messages(ROOT)}

    for name in used:
        code = int(error_classes()[name].exit_code)
        assert f"\n## `{name}`, exit code {code}\n" in text


def test_lines_that_are_no_such_errors_are_in_the_source() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for package in ("la_runtime", "la_export")
        for path in (ROOT / package).rglob("*.py")
    )
    kinds = tuple(f"`{kind}`" for kind in error_classes())

    others = [entry for entry in ENTRIES if not entry.heading.startswith(kinds)]

    assert others
    for entry in others:
        for part in entry.message.split(VARIES):
            assert part in sources, f"line {entry.line}"


# --- code blocks


PYTHON_BLOCKS = {
    _name(path): [b for b in find_code_blocks(path) if b.language == "python"] for path in PAGES
}


@pytest.mark.parametrize("page", [page for page, blocks in PYTHON_BLOCKS.items() if blocks])
def test_python_blocks_run(page: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other, as a reader would paste them."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for block in PYTHON_BLOCKS[page]:
        if block.not_run:
            continue
        # Empty lines in front let a traceback name the page's own line.
        code = compile("\n" * (block.line - 1) + block.code, page, "exec")
        exec(code, vars(module))


def test_blocks_that_are_not_run_are_counted() -> None:
    counts = {page: sum(bool(b.not_run) for b in blocks) for page, blocks in PYTHON_BLOCKS.items()}

    assert {page: count for page, count in counts.items() if count} == NOT_RUN


def _command_lines(block: CodeBlock) -> Iterator[list[str]]:
    """The calls of our commands in a block, split as a shell does."""
    for line in block.code.replace("\\\n", "").splitlines():
        for command in line.split(" | "):
            if command.startswith(tuple(f"{program} " for program in COMMANDS)):
                yield shlex.split(command, comments=True)


COMMAND_LINES = [
    (_name(path), words)
    for path in PAGES
    for block in find_code_blocks(path)
    if block.language not in {"python", "json"}
    for words in _command_lines(block)
]


def _is_cheap(name: str, arguments: list[str]) -> bool:
    """Whether a command can run here: not what builds, reads standard input or wants a GPU."""
    match name:
        case "inspect":
            return True
        case "generate":
            return "--prompt" in arguments and "--backend" not in arguments
        case "verify":
            return "self" in arguments
        case _:
            return False


@pytest.mark.parametrize(
    ("page", "words"),
    COMMAND_LINES,
    ids=[f"{page}: {' '.join(words)}" for page, words in COMMAND_LINES],
)
def test_command_lines_are_right_and_the_cheap_ones_run(
    page: str, words: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, name, *arguments = words
    group = COMMANDS[program]

    group.commands[name].make_context(f"{program} {name}", list(arguments))

    if _is_cheap(name, arguments):
        with pytest.raises(SystemExit) as end:
            group.main([name, *arguments])
        assert not end.value.code, f"{page}: {capsys.readouterr().err}"


def test_each_command_that_can_run_here_is_shown_and_run() -> None:
    run = {name for _, (_, name, *arguments) in COMMAND_LINES if _is_cheap(name, arguments)}

    assert run == {"inspect", "generate", "verify"}
