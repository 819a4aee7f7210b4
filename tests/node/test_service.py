"""expert_node.service: files that launchd and systemd understand, and what is said about them."""

from __future__ import annotations

import codecs
import plistlib
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from expert_network.errors import ServiceError
from expert_node import cli, service
from expert_node.config import NodeConfig
from expert_node.service import Launchd, Systemd, manager_for, systemd_word, template
from tests.node.test_config import ALL
from tests.support.stores import write_store

NASTY = replace(ALL, stop_at_eof=False, me="n-1.x", drain_seconds=2.5)
EXPECTED = [sys.executable, "-P", "-m", "expert_node", *NASTY.arguments()]
HOME = Path("/home/x")


# What is written


def test_plist_holds_the_command() -> None:
    """The plist parses, and its arguments are the node's, whatever characters they have."""
    agent = plistlib.loads(Launchd(Path("/Users/x & y")).render(NASTY).encode())
    assert agent["ProgramArguments"] == EXPECTED
    assert agent["Label"] == "org.expert-network.node.n-1.x"
    assert (agent["KeepAlive"], agent["RunAtLoad"], agent["ThrottleInterval"]) == (True, True, 10)
    assert agent["StandardOutPath"] == "/Users/x & y/Library/Logs/expert-network/node-n-1.x.log"
    assert agent["StandardErrorPath"] == agent["StandardOutPath"]
    assert agent["ExitTimeOut"] == 15
    assert "EnvironmentVariables" not in agent


def test_plist_refuses_control_characters() -> None:
    """What XML cannot hold is refused with a sentence."""
    with pytest.raises(ServiceError, match="control character"):
        Launchd(HOME).render(replace(NASTY, store="/a\x01b"))


def unit_lines(text: str) -> dict[str, str]:
    """A unit's settings; none here stands twice."""
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_unit_settings() -> None:
    """The unit restarts for ever, but not on a wrong command line, and waits for the drain."""
    unit = unit_lines(Systemd(HOME).render(NASTY))
    assert unit["Restart"] == "always"
    assert unit["StartLimitIntervalSec"] == "0"
    assert unit["RestartPreventExitStatus"] == "2"
    assert unit["TimeoutStopSec"] == "15"
    assert unit["WantedBy"] == "default.target"
    assert unit["Description"] == "Expert node n-1.x"


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("--roster=a,b", "--roster=a,b"),
        ("a b", '"a b"'),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ('a"b', '"a\\"b"'),
        ("a\\b", '"a\\\\b"'),
        ("a\nb", '"a\\x0ab"'),
        ("a'b", '"a\'b"'),
        (";", '";"'),
        ("", '""'),
        ("ü", '"ü"'),
    ],
)
def test_systemd_word(word: str, quoted: str) -> None:
    """Each character that means something to systemd is made to stand for itself."""
    assert systemd_word(word) == quoted


def verify(unit: Path, tmp_path: Path) -> str:
    """What systemd-analyze says about a unit, its debug output included."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    runtime = tmp_path / "run"
    runtime.mkdir()
    result = subprocess.run(
        [tool, "verify", "--user", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            "XDG_RUNTIME_DIR": str(runtime),
            "HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
            "SYSTEMD_LOG_LEVEL": "debug",
            "SYSTEMD_LOG_TARGET": "console",
        },
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout + result.stderr


def test_systemd_reads_the_unit_as_it_was_meant(tmp_path: Path) -> None:
    """systemd-analyze accepts the unit without a warning and reads exactly our arguments."""
    unit = tmp_path / "expert-node-n-1.x.service"
    unit.write_text(Systemd(HOME).render(NASTY))
    said = verify(unit, tmp_path)
    about = [line for line in said.splitlines() if f"{unit.name}:" in line or str(unit) in line]
    assert not [line for line in about if re.search(r"unknown|fail|invalid|ignor|bad", line, re.I)]
    command = next(line for line in said.splitlines() if "Command Line: " in line and "-m" in line)
    assert systemd_arguments(command.split("Command Line: ")[1]) == EXPECTED


def systemd_arguments(line: str) -> list[str]:
    """The words of a command line as systemd prints it: in double quotes, with C's escapes.

    It prints what it will execute but for `$$`, which becomes a dollar sign then.
    """
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    unescaped = [
        codecs.escape_decode(re.sub(r"\\([$`])", r"\1", quoted).encode())[0].decode()
        if quoted
        else plain
        for quoted, plain in words
    ]
    return [word.replace("$$", "$") for word in unescaped]


def test_dollar_signs_reach_the_node(tmp_path: Path) -> None:
    """A dollar sign in a path is no variable of systemd's."""
    config = replace(NASTY, store="/mnt/$HOME/${x}")
    unit = tmp_path / "expert-node-n-1.x.service"
    unit.write_text(Systemd(HOME).render(config))
    said = verify(unit, tmp_path)
    command = next(line for line in said.splitlines() if "Command Line: " in line and "-m" in line)
    assert "--store=/mnt/$HOME/${x}" in systemd_arguments(command.split("Command Line: ")[1])


def test_templates_are_found_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an installed package deploy/ stands beside the module; without it there is a sentence."""
    module = tmp_path / "expert_node" / "service.py"
    (module.parent / "deploy").mkdir(parents=True)
    (module.parent / "deploy" / "expert-node.service").write_text("here")
    monkeypatch.setattr(service, "__file__", str(module))
    assert template("expert-node.service") == "here"
    with pytest.raises(ServiceError, match="missing from this installation"):
        template("expert-node.plist")


# Installing, with tools that write down what they were asked


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A launchctl and a systemctl that log their arguments; the log.

    A service is never loaded, unless a file launchctl.active or systemctl.active is beside them.
    """
    log = tmp_path / "asked"
    for name in ("launchctl", "systemctl"):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(
            f'#!/bin/sh\necho {name} "$@" >> {shlex.quote(str(log))}\n'
            '[ ! -e "$0.fails" ] || { echo "no bus here" >&2; exit 5; }\n'
            'active=false; [ ! -e "$0.active" ] || active=true\n'
            '[ "$1" != print ] || $active || exit 113\n'
            "state=inactive; ! $active || state=deactivating\n"
            '[ "$2" != show ] || echo "ActiveState=$state"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return log


def asked(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def test_install_launchd(tools: Path, tmp_path: Path) -> None:
    """Installing writes the plist, loads it anew, and says where file and log are."""
    said = Launchd(tmp_path).install(NASTY)
    path = tmp_path / "Library" / "LaunchAgents" / "org.expert-network.node.n-1.x.plist"
    assert plistlib.loads(path.read_bytes())["ProgramArguments"] == EXPECTED
    domain = Launchd(HOME)._domain()
    label = f"{domain}/org.expert-network.node.n-1.x"
    assert asked(tools) == [
        f"launchctl bootout {label}",
        f"launchctl print {label}",
        f"launchctl bootstrap {domain} {path}",
    ]
    assert str(path) in said and "node-n-1.x.log" in said
    assert (tmp_path / "Library" / "Logs" / "expert-network").is_dir()


def test_install_systemd(tools: Path, tmp_path: Path) -> None:
    """Installing writes the unit, enables it and (re)starts it, and says where the logs are."""
    said = Systemd(tmp_path).install(NASTY)
    path = tmp_path / ".config" / "systemd" / "user" / "expert-node-n-1.x.service"
    assert unit_lines(path.read_text())["Restart"] == "always"
    assert asked(tools) == [
        "systemctl --user daemon-reload",
        "systemctl --user enable expert-node-n-1.x.service",
        "systemctl --user restart expert-node-n-1.x.service",
    ]
    assert "journalctl --user -u expert-node-n-1.x.service" in said


@pytest.mark.parametrize(
    ("configured", "folder"), [("/etc/x", "/etc/x"), ("cfg", "/home/x/.config")]
)
def test_a_unit_follows_the_config_home(configured: str, folder: str) -> None:
    """The unit goes where systemd looks for it: a relative folder is ignored."""
    path = Systemd(HOME, Path(configured)).path("a")
    assert path == Path(folder, "systemd", "user", "expert-node-a.service")


@pytest.mark.parametrize("manager", [Launchd, Systemd])
def test_install_without_starting(
    tools: Path, tmp_path: Path, manager: type[service.ServiceManager]
) -> None:
    """--no-start writes the file, calls nothing, and says how to start it."""
    it = manager(tmp_path)
    said = it.install(NASTY, start=False)
    assert it.path("n-1.x").exists()
    assert asked(tools) == []
    assert it.start_by_hand("n-1.x") in said


@pytest.mark.parametrize("manager", [Launchd, Systemd])
def test_uninstall(tools: Path, tmp_path: Path, manager: type[service.ServiceManager]) -> None:
    """Uninstalling stops the node and leaves no file; a second time there is nothing to remove."""
    it = manager(tmp_path)
    it.install(NASTY)
    said = it.uninstall("n-1.x")
    assert not it.path("n-1.x").exists()
    assert list(it.path("n-1.x").parent.iterdir()) == []
    assert str(it.path("n-1.x")) in said
    assert any("bootout" in line or "disable --now" in line for line in asked(tools))
    with pytest.raises(ServiceError, match=r"no service for node n-1\.x"):
        it.uninstall("n-1.x")


@pytest.mark.parametrize("manager", [Launchd, Systemd])
def test_a_service_that_does_not_stop(
    tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    manager: type[service.ServiceManager],
) -> None:
    """Uninstalling what goes on running says so and leaves the file, to be tried again."""
    monkeypatch.setattr(service, "MANAGER_SECONDS", 0.5)
    it = manager(tmp_path)
    it.install(NASTY)
    still = tmp_path / "bin" / f"{it.tool}.active"
    still.touch()
    with pytest.raises(ServiceError, match=r"service of node n-1\.x has not stopped"):
        it.uninstall("n-1.x")
    assert it.path("n-1.x").exists()
    still.unlink()
    it.uninstall("n-1.x")
    assert not it.path("n-1.x").exists()


def test_systemd_out_of_reach(tools: Path, tmp_path: Path) -> None:
    """Where systemd cannot be asked whether the node has stopped, nothing is removed."""
    it = Systemd(tmp_path)
    it.install(NASTY)
    (tmp_path / "bin" / "systemctl.fails").touch()
    with pytest.raises(ServiceError, match="no bus here"):
        it.uninstall("n-1.x")
    assert it.path("n-1.x").exists()


@pytest.mark.parametrize("manager", [Launchd, Systemd])
def test_without_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: type[service.ServiceManager]
) -> None:
    """Where launchctl or systemctl is missing nothing is written, and a way out is named."""
    monkeypatch.setenv("PATH", str(tmp_path))
    it = manager(tmp_path / "home")
    with pytest.raises(ServiceError, match=rf"{it.tool} is not on this machine.*service print"):
        it.install(NASTY)
    assert not (tmp_path / "home").exists()


def test_a_tool_that_refuses(tools: Path, tmp_path: Path) -> None:
    """What the tool said is passed on, with advice."""
    (tmp_path / "bin" / "systemctl.fails").touch()
    with pytest.raises(
        ServiceError, match=r"daemon-reload` failed with code 5: no bus here.*login"
    ):
        Systemd(tmp_path).install(NASTY)


def test_a_folder_that_cannot_be_written(tools: Path, tmp_path: Path) -> None:
    """A file in the way is an error with its path, and leaves nothing half-written."""
    (tmp_path / ".config").write_text("in the way")
    with pytest.raises(ServiceError, match=r"\.config/systemd/user/.* cannot be written"):
        Systemd(tmp_path).install(NASTY)


def test_other_systems() -> None:
    """On other systems the advice is to use what they have."""
    with pytest.raises(ServiceError, match="this is win32"):
        manager_for("win32")


# From the command line


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """The options of a node that would start."""
    write_store(tmp_path / "a store")
    return ["--roster", "a,b", "--me", "a", "--store", str(tmp_path / "a store")]


def test_print(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`service print` shows either platform's file and nothing else."""
    assert cli.run_cli(["service", "print", "--platform", "launchd", *options]) == 0
    agent = plistlib.loads(capsys.readouterr().out.encode())
    assert agent["ProgramArguments"][4:6] == ["--roster=a,b", "--me=a"]
    assert cli.run_cli(["service", "print", "--platform", "systemd", *options]) == 0
    assert "[Install]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--me", "c"], 3, "'c' is not in the roster"),
        (["--store", "/absent"], 3, "/absent"),
        (["--port", "x"], 2, "'x' is not a valid integer"),
        (["--host", "0.0.0.0"], 2, "lets other machines in"),
        (["--key-file", "/absent"], 3, "/absent"),
        (["--stop-at-eof"], 2, "No such option"),
    ],
)
def test_options_are_checked_before_anything_is_written(
    options: list[str],
    more: list[str],
    code: int,
    words: str,
    tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A node that would not start does not become a service."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cli.run_cli(["service", "install", *options, *more]) == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
    assert asked(tools) == []


def test_the_key_must_be_in_a_file(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key from the environment would be lost, and is never written into the file."""
    monkeypatch.setenv("EXPERT_NETWORK_KEY", "ab" * 32)
    assert cli.run_cli(["service", "print", "--platform", "systemd", *options]) == 2
    captured = capsys.readouterr()
    assert "--key-file" in captured.err
    assert "ab" * 32 not in captured.out + captured.err


def test_the_only_store_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second store in the models folder must not keep the service from starting later."""
    write_store(tmp_path / "models" / "tiny")
    words = ["--roster", "a", "--me", "a", "--home", str(tmp_path), "--platform", "launchd"]
    assert cli.run_cli(["service", "print", *words]) == 0
    arguments = plistlib.loads(capsys.readouterr().out.encode())["ProgramArguments"]
    assert f"--store={tmp_path}/models/tiny" in arguments


def test_install_from_the_command_line(
    options: list[str],
    tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`service install` and `uninstall` do it all and say so."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "cfg"))
    assert cli.run_cli(["service", "install", *options]) == 0
    if sys.platform == "linux":
        assert (tmp_path / "cfg" / "systemd" / "user" / "expert-node-a.service").exists()
    assert "node a runs" in capsys.readouterr().out
    assert cli.run_cli(["service", "uninstall", "--me", "a"]) == 0
    assert "stopped node a" in capsys.readouterr().out


def test_the_written_command_starts_the_node() -> None:
    """The command of a service is a command line that our own parser reads back."""
    start, words = service.command(NASTY)[:4], service.command(NASTY)[4:]
    assert start == [sys.executable, "-P", "-m", "expert_node"]
    assert NodeConfig(roster="a", me="a").arguments() == ["--roster=a", "--me=a"]
    assert words == NASTY.arguments()


def test_the_folder_it_starts_in_has_no_say(tmp_path: Path) -> None:
    """A module of our name in the working folder is not what the service runs."""
    (tmp_path / "expert_node.py").write_text("raise SystemExit('not this one')")
    words = [*service.command(NASTY)[:4], "--version"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
