"""The default command, errors as sentences, and progress on a stream that is no terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import click
import pytest

from expert_network.commandline import (
    INTERNAL_ERROR,
    DefaultGroup,
    cluster_key,
    progress,
    run_command,
)
from expert_network.errors import InputError, NodeTimeout, StoreError
from expert_network.net.auth import ClusterKey


@click.group(
    cls=DefaultGroup,
    default="run",
    lazy={
        "absent": ("expert_network.no_such_module:command", "A command whose module is missing."),
        "later": (
            "tests.network.lazy_command:command",
            "A command that is imported when it is run.",
        ),
    },
)
@click.version_option("7")
def group() -> None:
    """A group to test with."""


@group.command()
@click.argument("store", required=False)
@click.option("--chat", is_flag=True)
def run(store: str | None, chat: bool) -> None:
    """The default one."""
    click.echo(f"run {store} {chat}")


@group.command()
def status() -> None:
    """A known one."""
    click.echo("status")


def outcome(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = run_command(group, argv, "tool")
    out, err = capsys.readouterr()
    return code, out, err


def failing(error: BaseException) -> click.Command:
    def callback() -> None:
        raise error

    return click.Command("fail", callback=callback)


@pytest.mark.parametrize(
    ("argv", "printed"),
    [
        (["status"], "status\n"),
        (["./status"], "run ./status False\n"),
        (["store", "--chat"], "run store True\n"),
        (["--chat"], "run None True\n"),
        (["run", "status"], "run status False\n"),
        (["later"], "imported\n"),
        (["--version"], "tool, version 7\n"),
    ],
)
def test_the_first_word_chooses(
    capsys: pytest.CaptureFixture[str], argv: list[str], printed: str
) -> None:
    """A first word that names no command, or an option, means the default command."""
    assert outcome(capsys, *argv) == (0, printed, "")


def test_help_imports_no_lazy_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Help lists commands whose modules are missing, and does not import the others."""
    sys.modules.pop("tests.network.lazy_command", None)
    code, out, _ = outcome(capsys, "--help")
    assert code == 0
    assert "A command whose module is missing." in out
    assert "tests.network.lazy_command" not in sys.modules


def test_help_shows_the_options_of_the_default_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The options that need no command's name are in the first help a person reads."""
    assert "--chat" in outcome(capsys, "--help")[1]


def test_a_missing_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A command whose module cannot be imported says so and breaks no other command."""
    code, out, err = outcome(capsys, "absent")
    assert (code, out) == (INTERNAL_ERROR, "")
    assert "ModuleNotFoundError" in err and "EXPERT_NETWORK_DEBUG=1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (
            StoreError("/s", "it is empty", "make it again"),
            3,
            "error: /s: it is empty; make it again.\n",
        ),
        (NodeTimeout("a", "is silent", "look at it"), 4, "error: node a is silent; look at it.\n"),
        (PermissionError(13, "Permission denied", "/f"), 1, "error: /f: Permission denied.\n"),
        (OSError(28, "No space left on device", "/f"), 5, "error: /f: No space left on device.\n"),
    ],
)
def test_errors_become_sentences(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, sentence: str
) -> None:
    """An error is one sentence on stderr and its own exit code, with no traceback."""
    assert run_command(failing(error), [], "tool") == code
    assert capsys.readouterr().err == sentence


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXPERT_NETWORK_DEBUG=1 shows where an unforeseen error came from."""
    monkeypatch.setenv("EXPERT_NETWORK_DEBUG", "1")
    assert run_command(failing(ZeroDivisionError("by zero")), [], "tool") == INTERNAL_ERROR
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends a command with 130 and without a traceback."""
    assert run_command(failing(KeyboardInterrupt()), [], "tool") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_usage_errors_are_2(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown option is a usage error."""
    code, _, err = outcome(capsys, "status", "--nope")
    assert code == 2 and "--nope" in err


def test_a_command_chooses_its_exit_code() -> None:
    """What a command returns or gives to `ctx.exit` is the exit code."""
    assert run_command(click.Command("x", callback=lambda: 4), [], "tool") == 4
    code = run_command(
        click.Command("x", callback=lambda: click.get_current_context().exit(4)), [], "t"
    )
    assert code == 4


def test_a_reader_that_goes_away_is_no_error() -> None:
    """A closed pipe on stdout ends the command quietly."""
    script = (
        "import sys, click; from expert_network.commandline import run_command\n"
        "def spam():\n"
        "    for _ in range(100000): click.echo('x' * 100)\n"
        "sys.exit(run_command(click.Command('spam', callback=spam), [], 'spam'))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_plain_progress_is_a_line_per_stage() -> None:
    """Off a terminal each stage is one line, written when it is complete."""
    stream = io.StringIO()
    with progress(stream) as report:
        report(0, 2000, "loading the trunk")
        report(1000, 2000, "loading the trunk")
        assert stream.getvalue() == ""
        report(2000, 2000, "loading the trunk")
        report(2000, 2000, "loading the trunk")
    assert stream.getvalue().startswith("loading the trunk: 2.0 KB in ")
    assert stream.getvalue().count("\n") == 1


def test_progress_counts_other_things_than_bytes() -> None:
    """What is counted is named."""
    stream = io.StringIO()
    with progress(stream, counts="blocks") as report:
        report(3, 3, "hashing")
    assert stream.getvalue().startswith("hashing: 3 blocks in ")


def test_the_key_is_read_from_its_file_else_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file comes before the variable, with a warning if others can read it; no key is None."""
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert cluster_key(None, "SOME_KEY") is None
    monkeypatch.setenv("SOME_KEY", "ab" * 32)
    assert cluster_key(None, "SOME_KEY") == ClusterKey.from_text("ab" * 32, "test")
    file = tmp_path / "key"
    file.write_text("cd" * 32)
    file.chmod(0o644)
    assert cluster_key(file, "SOME_KEY") == ClusterKey.from_text("cd" * 32, "test")
    assert capsys.readouterr().err.startswith("warning: ")
    monkeypatch.setenv("SOME_KEY", "short")
    with pytest.raises(InputError, match="SOME_KEY"):
        cluster_key(None, "SOME_KEY")
