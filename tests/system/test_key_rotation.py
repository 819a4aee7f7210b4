"""A cluster key is replaced while nodes and drivers run."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Event
from time import monotonic

from expert_driver.cli import main
from expert_driver.config import NetworkConfig, Sampling
from expert_driver.opening import opened
from expert_network.errors import KeyRefused
from expert_network.net.auth import ClusterKey
from expert_network.net.stream import open_link
from tests.driver.programs import DEMO_STORE
from tests.support.nodes import node_process

#: Seconds for a node to read its file again, on a busy machine.
SOON = 60.0


def lets_in(url: str, key: ClusterKey) -> bool:
    try:
        open_link(url, key, 5.0).close()
    except KeyRefused:
        return False
    return True


def test_nodes_and_drivers_that_run_take_a_new_key(tmp_path: Path) -> None:
    """Both keys are good after `rotate`, the new one alone after `--finish`; nothing restarts."""
    files = [tmp_path / name for name in ("a", "b", "driver")]
    assert main(["key", "new", str(files[0])]) == 0
    for file in files[1:]:
        shutil.copy(files[0], file)
    old = ClusterKey.from_text(files[0].read_text())
    with (
        node_process("a,b", "a", DEMO_STORE, "--key-file", str(files[0])) as a,
        node_process("a,b", "b", DEMO_STORE, "--key-file", str(files[1])) as b,
    ):
        config = NetworkConfig((a.url, b.url), True, None, ClusterKey.read(files[2]), tmp_path)
        with opened(str(DEMO_STORE), config, with_text=False) as session:

            def reply() -> list[int]:
                engine = session.engine
                sampling = Sampling(max_tokens=8, ignore_eos=True)
                return list(engine.generate([5, 6, 7], engine.context(), sampling))

            expected = reply()
            assert main(["key", "rotate", str(files[0])]) == 0
            new = ClusterKey(ClusterKey.from_text(files[0].read_text()).secret)
            shutil.copy(files[0], files[1])
            wait, deadline = Event(), monotonic() + SOON
            while not all(lets_in(node.url, new) for node in (a, b)):
                assert monotonic() < deadline, "the new key is not taken"
                wait.wait(0.2)  # nothing tells when a node has looked at its file
            assert all(lets_in(node.url, old) for node in (a, b))
            assert reply() == expected
            shutil.copy(files[0], files[2])
            assert main(["key", "rotate", str(files[0]), "--finish"]) == 0
            for file in files[1:]:
                shutil.copy(files[0], file)
            while any(lets_in(node.url, old) for node in (a, b)):
                assert monotonic() < deadline + SOON, "the older key is still taken"
                wait.wait(0.2)
            assert all(lets_in(node.url, new) for node in (a, b))
            network = session.network
            assert network is not None
            for link in network.links:
                link.close()
            assert reply() == expected
