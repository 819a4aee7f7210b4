"""A node that is always on: a launchd agent on macOS, a systemd user unit on Linux.

`render` is pure; `install` and `uninstall` write one file and talk to launchctl or systemctl.
The files' fixed parts stand in deploy/.
"""

from __future__ import annotations

import math
import os
import plistlib
import re
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from string import Template
from types import MappingProxyType

from expert_network import disk
from expert_network.errors import ServiceError
from expert_node.config import NodeConfig

#: Beyond the drain: to write the last log line and to leave.
STOP_MARGIN = 5
MANAGER_SECONDS = 60  # for launchctl and systemctl to answer

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./:=,@+-]+")


class ServiceManager(ABC):
    """Writes, starts, stops and removes one node's service."""

    tool: str
    #: What to look at when the tool refuses.
    advice: str

    def __init__(self, home: Path, config_home: Path | None = None) -> None:
        """`home` is the user's folder, `config_home` what XDG_CONFIG_HOME names, if it is set."""
        self.home = home
        # systemd itself reads this variable; a relative one is ignored, as the standard asks.
        configured = config_home is not None and config_home.is_absolute()
        self.config_home = config_home if config_home and configured else home / ".config"

    @abstractmethod
    def path(self, node: str) -> Path:
        """The service's file."""

    @abstractmethod
    def render(self, config: NodeConfig) -> str:
        """The text of the service's file."""

    @abstractmethod
    def logs(self, node: str) -> str:
        """How to see what the node says."""

    @abstractmethod
    def start(self, node: str) -> str:
        """Start it now and at every login; what to know about that."""

    @abstractmethod
    def stop(self, node: str) -> None:
        """Stop it if it runs."""

    @abstractmethod
    def active(self, node: str) -> bool:
        """Whether the service manager still has it, running or ending."""

    @abstractmethod
    def start_by_hand(self, node: str) -> str:
        """The command that does what `start` does."""

    def install(self, config: NodeConfig, start: bool = True) -> str:
        """Write the file, replacing what an earlier install wrote, and start it; what was done."""
        node, text = config.me, self.render(config)
        if start:
            self._require_tool()
        path = self.path(node)
        self._write(path, text)
        said = [f"wrote {path}"]
        if start:
            said.append(self.start(node))
        else:
            said.append(f"start it with: {self.start_by_hand(node)}")
        return "\n".join([*said, f"logs: {self.logs(node)}"])

    def uninstall(self, node: str) -> str:
        """Stop the service and remove its file; what was done.

        Raises ServiceError, with the file left as it is, if the service does not stop.
        """
        path = self.path(node)
        if not path.exists():
            problem = f"there is no service for node {node} ({path} does not exist)"
            raise ServiceError(problem, "check the name given with --me")
        self._require_tool()
        self.stop(node)
        if self.active(node):
            problem = f"the service of node {node} has not stopped, and {path} is left as it is"
            raise ServiceError(problem, "see its log, and uninstall it again once it has ended")
        path.unlink()
        self.forget()
        return f"stopped node {node} and removed {path}"

    @abstractmethod
    def forget(self) -> None:
        """Tell the service manager that a file is gone, if it wants to know."""

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with disk.replacing(path) as file:
                file.write(text.encode())
        except OSError as error:
            problem = f"{path} cannot be written ({error.strerror})"
            raise ServiceError(problem, "check the permissions of that folder") from error

    def _require_tool(self) -> None:
        if shutil.which(self.tool) is None:
            raise ServiceError(
                f"{self.tool} is not on this machine",
                "use `expert-node service print` and start the command with what is",
            )

    def _run(self, *words: str) -> str:
        """What the tool writes. Raises ServiceError if it fails."""
        result = self._call(*words)
        if result.returncode:
            said = " ".join((result.stderr or result.stdout).split()) or "without a word"
            command = " ".join([self.tool, *words])
            problem = f"`{command}` failed with code {result.returncode}: {said}"
            raise ServiceError(problem.rstrip("."), self.advice)
        return result.stdout

    def _call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [self.tool, *words]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=MANAGER_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"`{' '.join(command)}` could not be run ({error})"
            raise ServiceError(problem, "run it by hand to see more") from error


class Launchd(ServiceManager):
    """macOS: an agent of the logged-in user."""

    tool = "launchctl"
    advice = "log in to the desktop of that user first; an agent needs one"

    def path(self, node: str) -> Path:
        return self.home / "Library" / "LaunchAgents" / f"{_label(node)}.plist"

    def logs(self, node: str) -> str:
        return str(self._log(node))

    def render(self, config: NodeConfig) -> str:
        agent = plistlib.loads(template("expert-node.plist").encode())
        log = str(self._log(config.me))
        agent |= {
            "Label": _label(config.me),
            "ProgramArguments": command(config),
            "ExitTimeOut": _stop_seconds(config),
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
        try:
            return plistlib.dumps(agent, sort_keys=False).decode()
        except ValueError as error:
            problem = "an option has a control character, which a plist cannot hold"
            raise ServiceError(problem, "rename that file or folder") from error

    def start(self, node: str) -> str:
        self._log(node).parent.mkdir(parents=True, exist_ok=True)
        # An agent that is loaded keeps its old arguments until it is loaded anew.
        self.stop(node)
        self._run("bootstrap", self._domain(), str(self.path(node)))
        return f"node {node} runs, and starts again at every login"

    def stop(self, node: str) -> None:
        # It fails where nothing is loaded; `active` says what has become of it.
        self._call("bootout", self._service(node))
        # bootout may answer before the node has drained, and bootstrap refuses until it has.
        deadline = time.monotonic() + MANAGER_SECONDS
        while self.active(node) and time.monotonic() < deadline:
            time.sleep(0.2)

    def active(self, node: str) -> bool:
        return not self._call("print", self._service(node)).returncode

    def forget(self) -> None:
        pass  # bootout has

    def start_by_hand(self, node: str) -> str:
        return f'launchctl bootstrap {self._domain()} "{self.path(node)}"'

    def _service(self, node: str) -> str:
        return f"{self._domain()}/{_label(node)}"

    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    def _log(self, node: str) -> Path:
        return self.home / "Library" / "Logs" / "expert-network" / f"node-{node}.log"


class Systemd(ServiceManager):
    """Linux: a unit of the user's own systemd."""

    tool = "systemctl"
    advice = "a user unit needs a login session of that user (`loginctl enable-linger` gives one)"

    def path(self, node: str) -> Path:
        return self.config_home / "systemd" / "user" / _unit(node)

    def logs(self, node: str) -> str:
        return f"journalctl --user -u {_unit(node)}"

    def render(self, config: NodeConfig) -> str:
        python, *words = command(config)
        # The program itself takes no variables, so a dollar sign stands for itself there.
        line = " ".join([systemd_word(python, "$"), *map(systemd_word, words)])
        return Template(template("expert-node.service")).substitute(
            DESCRIPTION=f"Expert node {config.me}",
            COMMAND=line,
            STOP_SECONDS=_stop_seconds(config),
        )

    def start(self, node: str) -> str:
        self._run("--user", "daemon-reload")
        self._run("--user", "enable", _unit(node))
        # Not `enable --now`: a node that runs would keep its old options.
        self._run("--user", "restart", _unit(node))
        return (
            f"node {node} runs, and starts again at every login; to have it run from boot on, "
            "without a login: loginctl enable-linger"
        )

    def stop(self, node: str) -> None:
        self._run("--user", "disable", "--now", _unit(node))

    def active(self, node: str) -> bool:
        # Not is-active, which fails alike for a unit that has stopped and a bus that is not there.
        state = self._run("--user", "show", "--property=ActiveState", _unit(node)).strip()
        return state not in ("ActiveState=inactive", "ActiveState=failed")

    def forget(self) -> None:
        self._call("--user", "daemon-reload")

    def start_by_hand(self, node: str) -> str:
        return f"systemctl --user daemon-reload && systemctl --user enable --now {_unit(node)}"


MANAGERS: Mapping[str, type[ServiceManager]] = MappingProxyType(
    {"launchd": Launchd, "systemd": Systemd}
)


def manager_for(system: str) -> type[ServiceManager]:
    """The manager of a `sys.platform`. Raises ServiceError where there is none."""
    match system:
        case "darwin":
            return Launchd
        case "linux":
            return Systemd
    raise ServiceError(
        f"services are set up on macOS and Linux, and this is {system}",
        "start expert-node with what this system has",
    )


def command(config: NodeConfig) -> list[str]:
    """The command that starts this node from any folder. The key is named, never shown."""
    # -P: modules come from the installation only, whatever lies in the folder it is started in.
    return [sys.executable, "-P", "-m", "expert_node", *config.arguments()]


def systemd_word(word: str, dollar: str = "$$") -> str:
    """`word` as one argument of an ExecStart: quoted, with no specifier and no variable in it."""
    if _PLAIN_WORD.fullmatch(word):
        return word
    doubled = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    doubled = doubled.replace("$", dollar)
    shown = "".join(f"\\x{ord(char):02x}" if ord(char) < 32 else char for char in doubled)
    return f'"{shown}"'


def template(name: str) -> str:
    """A file of deploy/: beside this module in an installed package, at the top of a checkout."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "deploy", here.parents[2] / "deploy"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    raise ServiceError(f"{name} is missing from this installation", "install expert-network again")


def _label(node: str) -> str:
    return f"org.expert-network.node.{node}"


def _unit(node: str) -> str:
    return f"expert-node-{node}.service"


def _stop_seconds(config: NodeConfig) -> int:
    handover = config.handover_seconds if config.join is not None else 0
    return math.ceil(config.drain_seconds + handover) + STOP_MARGIN
