"""What both programs' command lines share: a default command, errors as sentences, progress."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from expert_network.errors import ExpertNetworkError
from expert_network.net.auth import ClusterKey, key_file_warning
from expert_network.progress import Progress
from expert_network.units import size

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

INTERNAL_ERROR = 70
INTERRUPTED = 130
DEBUG = "EXPERT_NETWORK_DEBUG"


class DefaultGroup(click.Group):
    """A group whose `default` command is meant when the first word names no other one.

    `lazy` maps a command's name to ("module:attribute", "one line of help"): the module is imported
    when the command is run, so that `--help` stays fast and one broken command breaks no other.
    """

    def __init__(
        self,
        *args: Any,
        default: str,
        lazy: Mapping[str, tuple[str, str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.default = default
        self.lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if (
            args
            and args[0] not in self.list_commands(ctx)
            and not self._is_own_option(ctx, args[0])
        ):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def _is_own_option(self, ctx: click.Context, word: str) -> bool:
        return any(word in parameter.opts for parameter in self.get_params(ctx))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        command = self.get_command(ctx, self.default)
        if command is None:
            return
        records = [record for option in command.params if (record := option.get_help_record(ctx))]
        with formatter.section(f"Options of `{self.default}`, which is meant when none is named"):
            formatter.write_dl(records)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self._short_help(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _short_help(self, ctx: click.Context, name: str) -> str:
        if name in self.lazy:
            return self.lazy[name][1]
        command = super().get_command(ctx, name)
        return command.get_short_help_str(limit=80) if command else ""


def cluster_key(file: Path | None, variable: str) -> ClusterKey | None:
    """The key in `file`, else that in the environment's `variable`, if there is one.

    Warns on stderr of a file that others can read. Raises InputError for what is no key.
    """
    if file is None:
        text = os.environ.get(variable)
        return ClusterKey.from_text(text, variable) if text else None
    found = ClusterKey.read(file)
    if warning := key_file_warning(file):
        warn(warning)
    return found


def warn(sentence: str) -> None:
    """Say on stderr what somebody may want to do something about."""
    click.echo(f"warning: {sentence}", err=True)


def run_command(command: click.Command, argv: Sequence[str] | None, prog: str) -> int:
    """Run `command` on `argv` (None: the process's own) and return the exit code.

    Whatever goes wrong becomes one sentence on stderr; EXPERT_NETWORK_DEBUG=1 adds the traceback.
    A command's own exit code is what it passes to `ctx.exit`, or the int that it returns.
    """
    try:
        result = command.main(None if argv is None else list(argv), prog, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except Exception as error:
        return _report(error)
    return result if isinstance(result, int) else 0


def _report(error: Exception) -> int:
    """Print the sentence for `error` and return its exit code."""
    if os.environ.get(DEBUG, "") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, ExpertNetworkError):
        return _say(str(error), error.exit_code)
    if isinstance(error, OSError) and error.filename is not None:
        code = 5 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1
        return _say(f"{error.filename}: {error.strerror}.", code)
    reason = " ".join(str(error).split())
    what = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return _say(
        f"something unforeseen happened ({what}); set {DEBUG}=1 for the traceback.", INTERNAL_ERROR
    )


def _say(sentence: str, code: int) -> int:
    click.echo(f"error: {sentence}", err=True)
    return code


def _forget_stdout() -> None:
    # Python flushes stdout once more at exit and would complain about the same broken pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def progress(stream: TextIO | None = None, *, counts: str = "bytes") -> Iterator[Progress]:
    """A progress display on `stream` (stderr), moved by calling what this yields.

    `counts` is "bytes", shown with speed, or the plural of what is counted ("blocks"). On a
    terminal each new `what` gets a bar with an ETA; elsewhere one line when it is complete.
    """
    target = sys.stderr if stream is None else stream
    if not target.isatty():
        yield _PlainReport(target, counts)
        return
    with _bars(target, counts) as bars:
        yield _BarReport(bars)


class _PlainReport:
    def __init__(self, stream: TextIO, counts: str) -> None:
        self._stream, self._counts = stream, counts
        self._started: dict[str, float] = {}
        self._finished: set[str] = set()

    def __call__(self, done: int, total: int, what: str) -> None:
        started = self._started.setdefault(what, time.monotonic())
        if done < total or what in self._finished:
            return
        self._finished.add(what)
        amount = size(total) if self._counts == "bytes" else f"{total} {self._counts}"
        seconds = time.monotonic() - started
        print(f"{what}: {amount} in {seconds:.1f} s", file=self._stream, flush=True)


class _BarReport:
    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def __call__(self, done: int, total: int, what: str) -> None:
        if what not in self._tasks:
            # What an earlier run did is not this one's speed.
            self._tasks[what] = self._bars.add_task(what, total=total, completed=done)
        self._bars.update(self._tasks[what], completed=done, total=total)


def _bars(stream: TextIO, counts: str) -> Bars:
    # rich takes a tenth of a second to import: only where a person looks at a bar.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    amount: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()]
    if counts != "bytes":
        amount = [MofNCompleteColumn(), TextColumn(counts)]
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        *amount,
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(file=stream),
    )
