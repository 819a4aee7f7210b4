"""Every error a user or a peer can meet.

ExpertNetworkError                      exit code 1
  BackendMissing                        1   no MLX backend is installed
  InputError                            3   what was given cannot be used
    CheckpointError                         a Hugging Face checkpoint
    StoreError                              a store on disk
      StoreCorrupt                          bytes that do not match the manifest
    BlockCorrupt                            the same, in a node's memory
    RosterError                             a roster, a node name, a weight
    ConfigRefused                           a config that asks to run code
  ResourceError                         5   the machine has too little of something
    OutOfMemory
    DiskFull
    AddressInUse
  NodeError                             4   one node, by name or address
    NodeUnreachable                         refused, unresolvable
    NodeTimeout                             silent for longer than the deadline
    NodeClosed                              reset or closed
    NodeRefused                             it answered with an ERROR frame or an HTTP error
    NotANode                                something else listens there
  NetworkMismatch                       4   nodes that cannot work together
    NotOwned                                a block that is not where it was asked for
  KeyRefused                            4   no key, a wrong key, a replayed answer
  ProtocolError                         4
    LocalProtocolError                 70   our own mistake: a frame we may not send now
    RemoteProtocolError                     the peer's: what arrived is not the protocol
  HubError                              4   the model hub refuses, or cannot be reached
  ServiceError                          1   launchd or systemd could not be used
  Cancelled                           130   stopped on request

`str(error)` is one sentence or two: what happened, where, and what to do. Fields carry the facts.
Click's usage errors exit with 2.
"""

from __future__ import annotations

from pathlib import Path


class ExpertNetworkError(Exception):
    """Root of the tree. `exit_code` is what a command exits with."""

    exit_code = 1


class BackendMissing(ExpertNetworkError):
    """MLX has no backend on this machine; the sentence names the extra to install."""


class InputError(ExpertNetworkError):
    """Something given on the command line or on disk cannot be used."""

    exit_code = 3


class CheckpointError(InputError):
    """A checkpoint that cannot be converted."""

    def __init__(self, path: Path | str, problem: str, advice: str) -> None:
        super().__init__(path, problem, advice)
        self.path, self.problem, self.advice = Path(path), problem, advice

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.advice}."


class StoreError(InputError):
    """A store that cannot be opened, read or written."""

    def __init__(self, path: Path | str, problem: str, advice: str) -> None:
        super().__init__(path, problem, advice)
        self.path, self.problem, self.advice = Path(path), problem, advice

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.advice}."


class StoreCorrupt(StoreError):
    """Bytes on disk or from a peer that do not match the manifest's sha256."""


class BlockCorrupt(InputError):
    """A node computes with other bytes than the manifest says."""

    def __init__(self, node: str, layer: int, expert: int) -> None:
        super().__init__(node, layer, expert)
        self.node, self.layer, self.expert = node, layer, expert

    def __str__(self) -> str:
        return (
            f"node {self.node} has a damaged block ({self.layer}, {self.expert}) in memory; start "
            "it again, and if that comes back, test that machine's memory."
        )


class RosterError(InputError):
    """A roster that cannot be read, or a name that is not in it."""


class ConfigRefused(InputError):
    """A config that asks to run code of its own."""

    def __init__(self, path: Path | str, entry: str) -> None:
        super().__init__(path, entry)
        self.path, self.entry = Path(path), entry

    def __str__(self) -> str:
        return (
            f"{self.path} asks to run code of its own ({self.entry!r}), which is never done here; "
            f"if this model's type is supported without it, remove {self.entry!r} from that file."
        )


class ResourceError(ExpertNetworkError):
    """Too little memory, disk, or a port that is taken."""

    exit_code = 5


class OutOfMemory(ResourceError):
    """What is to be loaded does not fit the memory that is available. Sizes in bytes."""

    def __init__(self, what: str, needed: int, available: int, advice: str) -> None:
        super().__init__(what, needed, available, advice)
        self.what, self.needed, self.available, self.advice = what, needed, available, advice

    def __str__(self) -> str:
        from expert_network.units import size

        return (
            f"{self.what} needs {size(self.needed)} of memory and {size(self.available)} is "
            f"available, {size(self.needed - self.available)} short; {self.advice}."
        )


class DiskFull(ResourceError):
    """No room for what is to be written. Sizes in bytes; `needed` None: met while writing."""

    def __init__(self, path: Path | str, needed: int | None, available: int) -> None:
        super().__init__(path, needed, available)
        self.path, self.needed, self.available = Path(path), needed, available

    def __str__(self) -> str:
        from expert_network.units import size

        need = "the disk is full" if self.needed is None else f"{size(self.needed)} is needed"
        return (
            f"{self.path}: {need} and {size(self.available)} is free; free some space or choose "
            "another disk, then run the same command again."
        )


class AddressInUse(ResourceError):
    """The port is taken."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.host, self.port = host, port

    def __str__(self) -> str:
        return (
            f"{self.host}:{self.port} is in use by another program; choose another --port, or "
            "stop what listens there (a node may already be running)."
        )


class NodeError(ExpertNetworkError):
    """Something went wrong with one node. `node` is its name, or its URL while unnamed."""

    exit_code = 4

    def __init__(self, node: str, problem: str, advice: str) -> None:
        super().__init__(node, problem, advice)
        self.node, self.problem, self.advice = node, problem, advice

    def __str__(self) -> str:
        return f"node {self.node} {self.problem}; {self.advice}."


class NodeUnreachable(NodeError):
    """No connection could be made."""


class NodeTimeout(NodeError):
    """Nothing came within the deadline."""


class NodeClosed(NodeError):
    """The connection ended while an answer was owed."""


class NodeRefused(NodeError):
    """The node answered with a refusal; `code` is the ERROR frame's code or the HTTP status."""

    def __init__(self, node: str, problem: str, advice: str, code: int = 0) -> None:
        super().__init__(node, problem, advice)
        self.code = code


class NotANode(NodeError):
    """Something listens there that is not an expert-node."""


class NetworkMismatch(ExpertNetworkError):
    """Nodes that cannot work together: rosters, models, versions, numerics or coverage differ."""

    exit_code = 4


class NotOwned(NetworkMismatch):
    """A block was asked for where it is not held."""

    def __init__(self, layer: int, expert: int) -> None:
        super().__init__(layer, expert)
        self.layer, self.expert = layer, expert

    def __str__(self) -> str:
        return (
            f"block ({self.layer}, {self.expert}) is not held here; "
            "start all nodes with the same roster, and the driver with all of their addresses."
        )


class KeyRefused(ExpertNetworkError):
    """The cluster key is missing, wrong, or its answer was used before."""

    exit_code = 4


class ProtocolError(ExpertNetworkError):
    """Root of what can go wrong inside a link."""

    exit_code = 4


class LocalProtocolError(ProtocolError):
    """We tried to send what may not be sent now: a bug of ours."""

    exit_code = 70


class RemoteProtocolError(ProtocolError):
    """What the peer sent is not the protocol. `code` is an ErrorCode value to answer with."""

    def __init__(self, problem: str, code: int = 1) -> None:
        super().__init__(problem, code)
        self.problem, self.code = problem, code

    def __str__(self) -> str:
        return self.problem


class HubError(ExpertNetworkError):
    """A model could not be fetched from the hub. `repo` is org/name."""

    exit_code = 4

    def __init__(self, repo: str, problem: str, advice: str) -> None:
        super().__init__(repo, problem, advice)
        self.repo, self.problem, self.advice = repo, problem, advice

    def __str__(self) -> str:
        return f"{self.repo}: {self.problem}; {self.advice}."


class ServiceError(ExpertNetworkError):
    """A node could not be made a service of this machine, or taken away as one."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(problem, advice)
        self.problem, self.advice = problem, advice

    def __str__(self) -> str:
        return f"{self.problem}; {self.advice}."


class Cancelled(ExpertNetworkError):
    """Stopped on request, between two frames."""

    exit_code = 130
