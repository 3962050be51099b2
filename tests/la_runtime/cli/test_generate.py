"""`la-runtime generate`, run in-process and, where signals matter, as a process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from la_runtime.bundle import GRAPH_PATH, MANIFEST_NAME
from la_runtime.cli.group import commands
from la_runtime.errors import ExitCode

PROMPT = "The cat sat"
ROOT = Path(__file__).parents[3]


START = "from la_runtime.cli import main; main()"


def start(*arguments, program=START, **options):
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*arguments, stdin=b""):
    return CliRunner().invoke(commands, ["generate", *map(str, arguments)], input=stdin)


def test_text_goes_to_stdout_and_statistics_to_stderr(tiny_bundle, engine):
    expected = engine.generate(PROMPT, k=2, max_new_tokens=12)

    result = run(tiny_bundle, "--prompt", PROMPT, "--k", 2, "--max-new-tokens", 12, "--stats")

    assert result.exit_code == ExitCode.DONE
    assert result.stdout == expected.text + "\n"
    for line in (
        f"prompt tokens {expected.stats.prompt_tokens}",
        "new tokens 12 (ended by: length)",
        f"passes {expected.stats.passes} (1 of them prefill)",
        f"tokens per pass {expected.stats.tokens_per_pass:.2f}",
        f"position 1 {expected.stats.accepted[0]} of {expected.stats.drafted[0]} accepted",
    ):
        assert line in re.sub(" +", " ", result.stderr)


def test_sources_are_counted_and_the_text_is_the_same(tiny_bundle, engine):
    expected = engine.generate(PROMPT, k=0, max_new_tokens=12)

    result = run(
        tiny_bundle, "--prompt", PROMPT, "--sources", "suffix, recycled", "--drafts", 4,
        "--calibrate", "--max-new-tokens", 12, "--stats",
    )  # fmt: skip

    assert result.exit_code == ExitCode.DONE
    assert result.stdout == expected.text + "\n"
    assert re.search(r"  by (suffix|recycled) +\d+ of \d+ accepted", result.stderr)
    assert "by lookahead" not in result.stderr


def test_json_has_the_fields_of_the_api(tiny_bundle, engine):
    expected = engine.generate(PROMPT, chat=True, k=4, layout="full", max_new_tokens=9)

    result = run(
        tiny_bundle, "--prompt", PROMPT, "--chat", "--layout", "full", "--max-new-tokens", 9,
        "--json",
    )  # fmt: skip

    record = json.loads(result.stdout)
    times = {"queued_s", "ttft_s", "decode_s"}
    stats = {key: value for key, value in asdict(expected.stats).items() if key not in times}
    assert {key: record[key] for key in ("text", "token_ids", "finish_reason")} == {
        "text": expected.text,
        "token_ids": list(expected.token_ids),
        "finish_reason": "length",
    }
    found = record["stats"]
    assert {key: found[key] for key in stats} == json.loads(json.dumps(stats))
    assert found["tokens_per_pass"] == expected.stats.tokens_per_pass
    assert found["tokens_per_s"] > 0
    assert found["ttft_s"] > 0


def test_the_prompt_may_come_from_a_file_or_stdin(tiny_bundle, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    options = (tiny_bundle, "--max-new-tokens", 4)

    said = run(*options, "--prompt", PROMPT).stdout

    assert run(*options, "--prompt-file", file).stdout == said
    assert run(*options, stdin=PROMPT.encode()).stdout == said


def test_sampling_options_are_those_of_the_api(tiny_bundle, engine):
    options = {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "seed": 3,
        "min_new_tokens": 2,
        "max_new_tokens": 12,
    }
    expected = engine.generate(PROMPT, stop=("e",), **options)
    flags = [
        flag for name, value in options.items() for flag in (f"--{name.replace('_', '-')}", value)
    ]

    result = run(tiny_bundle, "--prompt", PROMPT, "--stop", "e", *flags, "--json")

    assert json.loads(result.stdout)["token_ids"] == list(expected.token_ids)
    assert json.loads(result.stdout)["finish_reason"] == expected.finish_reason


def test_threshold_reports_agreement(tiny_bundle):
    result = run(
        tiny_bundle, "--prompt", PROMPT, "--select", "threshold", "--tau", 0, "--stats",
        "--max-new-tokens", 20,
    )  # fmt: skip

    assert result.exit_code == ExitCode.DONE
    assert re.search(r"agreement +\d+\.\d% of 12 emitted proposals", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--k", "-1"], ExitCode.USAGE, "error: k must be 0 or more, got -1"),
        (["--sources", "oracle"], ExitCode.USAGE, "error: sources must be among 'lookahead',"),
        (["--sources", ","], ExitCode.USAGE, "error: sources names none; leave it out"),
        (["--drafts", "3"], ExitCode.USAGE, "error: drafts is for requests that name sources"),
        (["--k", "5"], ExitCode.USAGE, "largest this bundle was built for, 4; got 5"),
        (["--select", "threshold", "--tau", "1.5"], ExitCode.USAGE, "tau must be a probability"),
        (["--select", "threshold"], ExitCode.USAGE, "needs tau"),
        (["--tau", "0.5"], ExitCode.USAGE, "tau is for select 'threshold' only"),
        (
            ["--select", "threshold", "--tau", "0.5", "--layout", "full"],
            ExitCode.USAGE,
            "layout 'full' is for select 'exact' only",
        ),
        (["--layout", "wide"], ExitCode.USAGE, "'wide' is not one of 'root-only', 'full'"),
        (["--max-new-tokens", "0"], ExitCode.USAGE, "max_new_tokens must be at least 1"),
        (["--temperature", "-1"], ExitCode.USAGE, "temperature must be at least 0, got -1.0"),
        (["--top-p", "0"], ExitCode.USAGE, "top_p must be more than 0"),
        (["--stop", ""], ExitCode.USAGE, "a stop string is empty"),
        (["--threads", "-2"], ExitCode.USAGE, "threads must be at least 0, got -2"),
        (["--prompt-file", "absent"], ExitCode.USAGE, "'absent' does not exist"),
    ],
)
def test_bad_options_have_their_own_message(tiny_bundle, arguments, code, message):
    result = run(tiny_bundle, "--prompt", PROMPT, *arguments)

    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--prompt", ""], []], ids=["option", "stdin"])
def test_an_empty_prompt_is_refused(tiny_bundle, arguments):
    result = run(tiny_bundle, *arguments)

    assert result.exit_code == ExitCode.USAGE
    assert "the prompt is empty" in result.stderr


def test_a_prompt_longer_than_the_context_says_both_lengths(tiny_bundle, engine):
    context = engine.bundle.manifest.model.context
    length = len(engine.encode("One " * context))

    result = run(tiny_bundle, "--prompt", "One " * context)

    assert result.exit_code == ExitCode.USAGE
    assert f"has {length} tokens, but the context of {context}" in result.stderr


def test_invalid_utf8_names_the_byte(tiny_bundle, tmp_path):
    content = b"ok \xff\xfe"
    file = tmp_path / "latin"
    file.write_bytes(content)

    for result, source in (
        (run(tiny_bundle, stdin=content), "standard input"),
        (run(tiny_bundle, "--prompt-file", file), str(file)),
    ):
        assert result.exit_code == ExitCode.USAGE
        assert f"{source} is not valid UTF-8: byte 3 is 0xff" in result.stderr


def test_two_prompts_are_refused(tiny_bundle, tmp_path):
    (tmp_path / "p").write_text("x")

    result = run(tiny_bundle, "--prompt", PROMPT, "--prompt-file", tmp_path / "p")

    assert result.exit_code == ExitCode.USAGE
    assert "not both" in result.stderr


def test_damaged_bundles_have_their_own_message(tiny_bundle, tmp_path):
    def copy(name):
        return shutil.copytree(tiny_bundle, tmp_path / name)

    flipped = copy("flipped")
    content = bytearray((flipped / GRAPH_PATH).read_bytes())
    content[100] ^= 1
    (flipped / GRAPH_PATH).write_bytes(content)
    missing = copy("missing")
    (missing / "tokenizer.json").unlink()
    newer = copy("newer")
    manifest = json.loads((newer / MANIFEST_NAME).read_text())
    (newer / MANIFEST_NAME).write_text(json.dumps(manifest | {"schema_version": "9.0"}))
    outside = copy("outside")
    files = manifest["files"] | {"../x": manifest["files"][GRAPH_PATH]}
    (outside / MANIFEST_NAME).write_text(json.dumps(manifest | {"files": files}))

    for bundle, code, message in (
        (flipped, ExitCode.FAILED, "is damaged: onnx/model.onnx has sha256"),
        (missing, ExitCode.FAILED, "is incomplete: tokenizer.json is missing"),
        (newer, ExitCode.FAILED, "upgrade the package or rebuild"),
        (outside, ExitCode.FAILED, "must be relative and stay inside the bundle"),
        (tmp_path / "absent", ExitCode.USAGE, "no bundle at"),
        (tmp_path, ExitCode.FAILED, "is not a bundle"),
    ):
        result = run(bundle, "--prompt", PROMPT)
        assert (result.exit_code, result.stdout) == (code, "")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


def test_ctrl_c_ends_generation_with_130(tiny_bundle):
    """Interrupted in its third pass, it has printed what there was, ends and says so."""
    program = f"""
import os, signal, threading
from la_runtime.cli import main
from la_runtime.batch import Batch
step, passes, heard = Batch.step, [], threading.Event()
def interrupt(*_):
    heard.set()
    raise KeyboardInterrupt
def interrupted_step(batch):
    passes.append(1)
    if len(passes) == 3:
        {INTERRUPT}
        heard.wait(30)
    return step(batch)
signal.signal(signal.SIGINT, interrupt)
Batch.step = interrupted_step
main()
"""
    options = ("--prompt", PROMPT, "--ignore-eos", "--max-new-tokens", 40, "--k", 0)
    whole = run(tiny_bundle, *options).stdout

    process = start("generate", tiny_bundle, *options, program=program, stdout=subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == ExitCode.INTERRUPTED
    assert stderr.strip() == "interrupted"
    assert whole.startswith(stdout)
    assert len(stdout) < len(whole) // 2


@pytest.mark.parametrize(
    "stub",
    [
        INTERRUPT,
        f"try:\n    {INTERRUPT}\nexcept KeyboardInterrupt as error:\n"
        "    raise ImportError('initialization failed') from error",
    ],
    ids=["as it is", "as an import that failed"],
)
@pytest.mark.parametrize("module", ["click", "numpy", "tokenizers", "onnxruntime"])
def test_ctrl_c_during_the_imports_ends_with_130(tiny_bundle, tmp_path, module, stub):
    (tmp_path / f"{module}.py").write_text(f"import os, signal\n{stub}\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])

    process = start("generate", tiny_bundle, "--prompt", "x", env=os.environ | {"PYTHONPATH": path})
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == ExitCode.INTERRUPTED
    assert stderr.strip() == "interrupted"


@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    "arguments", [["--max-new-tokens", "2"], ["--max-new-tokens", "2", "--json"], ["--help"]]
)
def test_a_full_disk_behind_stdout_is_the_environments_fault(tiny_bundle, arguments, buffering):
    env = os.environ | {"PYTHONUNBUFFERED": buffering}
    with open("/dev/full", "w") as full:
        process = start(
            "generate", tiny_bundle, "--prompt", PROMPT, *arguments, stdout=full, env=env
        )
        _, stderr = process.communicate(timeout=60)

    assert process.returncode == ExitCode.ENVIRONMENT
    assert stderr == "error: could not write the output: No space left on device\n"


@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["--k", "-1"], ["--no-such-option"]])
def test_a_full_disk_behind_stderr_leaves_the_exit_code(tiny_bundle, arguments, buffering):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", START, "generate", tiny_bundle, "--prompt", "x", *arguments],
            stderr=full,
            env=os.environ | {"PYTHONUNBUFFERED": buffering},
            check=False,
        )

    assert done.returncode == ExitCode.USAGE


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(tiny_bundle, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    process = start("generate", tiny_bundle, "--prompt", PROMPT, *arguments, stdout=writer)
    os.close(writer)
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == ExitCode.FAILED
    assert stderr == ""


def test_closed_stdin_is_named(tiny_bundle):
    program = "import sys; sys.stdin = None\n" + START

    process = start("generate", tiny_bundle, program=program)
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == ExitCode.USAGE
    assert stderr == "error: standard input is closed; give --prompt or --prompt-file\n"


def test_a_prompt_file_that_cannot_be_read_is_named(tiny_bundle):
    result = run(tiny_bundle, "--prompt-file", "/proc/self/mem")

    assert result.exit_code == ExitCode.USAGE
    assert result.stderr.startswith("error: /proc/self/mem cannot be read: Input/output error")
    assert result.stderr.count("\n") == 1


def start_in_latin_1(*arguments, program):
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    return start(*arguments, program=program, stdout=subprocess.PIPE, env=env)


def test_a_character_that_stdout_cannot_encode_is_escaped():
    program = """
import click
from la_runtime.cli import main
from la_runtime.cli.group import commands
commands.add_command(click.Command("write", callback=lambda: click.echo("a \\u4f60")))
main(["write"])
"""
    process = start_in_latin_1(program=program)
    stdout, stderr = process.communicate(timeout=60)

    assert (process.returncode, stderr) == (ExitCode.DONE, "")
    assert stdout == "a \\u4f60\n"


def test_json_stays_json_where_stdout_cannot_encode_its_characters(tiny_bundle):
    program = """
import la_runtime.cli.generate
la_runtime.cli.generate._as_record = lambda result: {"text": "a \\u4f60 \\U0001f642"}
la_runtime.cli.main()
"""
    options = ("--prompt", PROMPT, "--max-new-tokens", 1, "--json")

    process = start_in_latin_1("generate", tiny_bundle, *options, program=program)
    stdout, _ = process.communicate(timeout=60)

    assert json.loads(stdout) == {"text": "a 你 🙂"}


@pytest.mark.parametrize("prompt", ["The cat", "\ufeffThe cat", "The cat\n", " The cat\r\n\r\n"])
def test_a_prompt_is_used_as_it_is_but_for_a_byte_order_mark(tiny_bundle, tmp_path, engine, prompt):
    file = tmp_path / "prompt.txt"
    file.write_bytes(prompt.encode())
    length = len(engine.encode(prompt.removeprefix("\ufeff")))

    for result in (
        run(tiny_bundle, "--prompt-file", file, "--json", "--max-new-tokens", 1),
        run(tiny_bundle, "--json", "--max-new-tokens", 1, stdin=prompt.encode()),
    ):
        assert json.loads(result.stdout)["stats"]["prompt_tokens"] == length


def test_version_is_the_distributions():
    result = CliRunner().invoke(commands, ["--version"])

    assert result.exit_code == ExitCode.DONE
    assert re.fullmatch(r"la-runtime, version \d+\.\d+\.\d+\n", result.stdout)
