"""`expert-net download`, against a hub on this machine that speaks the real one's API."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from expert_driver import hub as module
from expert_driver.cli import main
from expert_driver.commands.download import Source, resolve
from expert_driver.hub import Snapshot
from expert_network.errors import DiskFull, HubError, InputError, StoreError
from expert_network.progress import silent
from expert_network.store.convert import preprocess
from expert_network.store.reader import Store
from tests.support.cli import command_line, environment, expert_net
from tests.support.hub import COMMIT, Hub, serving
from tests.support.small_disk import small_disk
from tests.support.synthetic import Shape, add_tokenizer, make_checkpoint

REPO = "org/tiny"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = make_checkpoint(tmp_path / "repo", Shape("olmoe"), shard_bytes=200_000)
    add_tokenizer(path)
    return path


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    with serving(Hub(REPO, checkpoint)) as hub:
        yield hub


@pytest.fixture
def here(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, as the one of this process, which has read HF_ENDPOINT long ago."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    return hub


# --- what is meant


def test_a_name_of_the_catalog_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known name is that model in whatever case; ./NAME is a folder of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "GLM-4.5-Air").mkdir()
    assert resolve("glm-4.5-air") == Source("GLM-4.5-Air", repo="mlx-community/GLM-4.5-Air-4bit")
    assert resolve("./GLM-4.5-Air").folder == Path("GLM-4.5-Air")


def test_a_folder_wins_over_a_repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """org/name is a folder if there is one, else a repo, called by its last part."""
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Source("name", repo="org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name") == Source("name", folder=Path("org/name"))


def test_a_name_that_means_nothing() -> None:
    """A word that is none of them gets the names that are near it."""
    with pytest.raises(
        InputError, match=r"none of the names .* mean gpt-oss-20b or gpt-oss-120b\?"
    ):
        resolve("GPT-OSS")
    with pytest.raises(InputError, match=r"Did you mean OLMoE-1B-7B\?"):
        resolve("olmo-1b7b")
    with pytest.raises(InputError, match=r"none of the names in `expert-net models`\.$"):
        resolve("weather")


def test_which_files_are_wanted() -> None:
    """Weights once, configs and tokenizer; no folders, code, pickles or second copies."""
    wanted = ["model-1.safetensors", "config.json", "a.index.json", "merges.txt", "t.model"]
    unwanted = ["original/model.safetensors", "consolidated.safetensors", "x.py", "pytorch.bin"]
    unwanted += ["README.md", ".gitattributes", "../model.safetensors", "x/../config.json"]
    files = dict.fromkeys([*wanted, *unwanted], 1)
    assert sorted(module.wanted(REPO, files)) == sorted(wanted)
    assert "consolidated.safetensors" in module.wanted(
        REPO, {"consolidated.safetensors": 1, "config.json": 1}
    )
    with pytest.raises(HubError, match="it has no safetensors files"):
        module.wanted(REPO, {"pytorch_model.bin": 1, "config.json": 1})
    with pytest.raises(HubError, match=r"it has no config\.json"):
        module.wanted(REPO, {"model.safetensors": 1})


# --- what the hub may answer


@pytest.mark.parametrize(
    ("refuse", "sentence"),
    [
        ("404 RepoNotFound", "has no such model, or it is private"),
        ("401 RepoNotFound", "has no such model, or it is private"),
        ("403 GatedRepo", "its owner asks for consent first; give it at http://127.0.0.1"),
        ("401", "refuses access"),
        ("500", "answered with 500"),
    ],
)
def test_a_refusal_is_a_sentence(here: Hub, tmp_path: Path, refuse: str, sentence: str) -> None:
    """Absent, private, gated and broken repos each say what to do."""
    here.refuse = refuse
    with pytest.raises(HubError, match=f"^{REPO}: .*{sentence}"):
        module.find(REPO, None, tmp_path / "source")
    assert not (tmp_path / "source").exists()


def test_a_revision_that_is_not_there(here: Hub, tmp_path: Path) -> None:
    """A branch that does not exist is named."""
    with pytest.raises(HubError, match="it has no revision 'v9'"):
        module.find(REPO, "v9", tmp_path / "source")
    assert module.find(REPO, COMMIT, tmp_path / "source").commit == COMMIT


def test_a_hub_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection is a sentence that says to go on later."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"broke off .*, then run the same command again"):
        module.find(REPO, None, tmp_path / "source")


# --- fetching


def snapshot(checkpoint: Path) -> Snapshot:
    files = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    return Snapshot(REPO, "main", COMMIT, files)


def test_a_file_that_is_not_whole_is_fetched_again(
    here: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    """A file of the wrong size under the final name does not pass for the whole one."""
    source = tmp_path / "source"
    found = module.find(REPO, None, source)
    module.prepare(found, source)
    module.fetch(found, source, silent)
    (source / "config.json").write_text("{")
    assert found.missing(source) == ["config.json"]
    module.fetch(found, source, silent)
    assert found.missing(source) == []
    assert (source / "config.json").read_text() == (checkpoint / "config.json").read_text()


def test_another_commit_starts_over(checkpoint: Path, tmp_path: Path) -> None:
    """What an earlier commit left is not mixed with the new one."""
    source = tmp_path / "source"
    first = snapshot(checkpoint)
    module.prepare(first, source)
    (source / "model-00009.safetensors").touch()
    module.prepare(first, source)
    assert (source / "model-00009.safetensors").exists()
    module.prepare(Snapshot(REPO, "main", "0" * 40, first.files), source)
    assert not (source / "model-00009.safetensors").exists()


def test_a_folder_of_someone_else_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A folder in the way that no download made is not touched."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "thesis.tex").touch()
    with pytest.raises(StoreError, match="this folder is in the way of the download"):
        module.prepare(snapshot(checkpoint), source)
    assert (source / "thesis.tex").exists()


def test_too_small_a_disk_is_told_beforehand(here: Hub, tmp_path: Path) -> None:
    """There must be room for the checkpoint and the store together before the long part."""
    with small_disk(tmp_path / "disk", 800_000) as disk:
        found = module.find(REPO, None, disk / "source")
        module.prepare(found, disk / "source")
        with pytest.raises(DiskFull, match="is needed and"):
            module.fetch(found, disk / "source", silent, then=found.nbytes)
    assert here.fetched() == []


# --- the command


def test_from_a_repo_to_a_store(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    """A repo becomes a store in the models folder, and its checkpoint is removed."""
    (checkpoint / "original").mkdir()
    (checkpoint / "original" / "model.safetensors").write_bytes(bytes(100))
    (checkpoint / "modeling.py").touch()
    done = expert_net("download", REPO, env=environment(tmp_path, HF_ENDPOINT=hub.url))
    assert done.returncode == 0, done.stderr
    store = Store.open(tmp_path / "models" / "tiny")
    assert store.digest == preprocess(checkpoint, tmp_path / "same").digest
    assert store.digest in done.stdout
    assert "expert-net tiny --chat" in done.stdout
    assert "downloading: " in done.stderr
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny"]
    assert "modeling.py" not in hub.fetched()
    assert not any("original" in path for _, path, _ in hub.requests)


def test_a_killed_download_is_gone_on_with(tmp_path: Path) -> None:
    """After a SIGKILL the same command asks only for the rest; offline it says what it lacks."""
    # huggingface_hub writes 10 MB at a time: of one file more than twice that, half is sent.
    checkpoint = make_checkpoint(tmp_path / "repo", Shape("olmoe", 2, 16, 4, 256, 512))
    with serving(Hub(REPO, checkpoint)) as hub:
        hub.hold = "model.safetensors"
        env = environment(tmp_path, HF_ENDPOINT=hub.url)
        words = ("download", REPO, "-o", tmp_path / "store", "--keep-source")
        with subprocess.Popen(command_line(*words), env=env, stderr=subprocess.DEVNULL) as child:
            assert hub.held.wait(60)
            written = wait_for_bytes(tmp_path / "store.source")
            child.kill()
        assert not (tmp_path / "store").exists()
        offline = expert_net(*words, env=env | {"HF_HUB_OFFLINE": "1"})
        assert offline.returncode == 4
        assert offline.stderr.startswith(f"error: {REPO}: HF_HUB_OFFLINE is set")
        hub.hold = None
        hub.requests.clear()
        done = expert_net(*words, env=env)
    assert done.returncode == 0, done.stderr
    assert f"source      {tmp_path}/store.source" in done.stdout
    assert hub.fetched() == ["model.safetensors"]
    assert [text for _, _, text in hub.requests if text] == [f"bytes={written}-"]
    assert Store.open(tmp_path / "store").verify() == []
    # The hub is gone, and all that is needed is here.
    (tmp_path / "store").rename(tmp_path / "old")
    again = expert_net(*words, env=env | {"HF_HUB_OFFLINE": "1"})
    assert again.returncode == 0, again.stderr


def wait_for_bytes(folder: Path) -> int:
    """Wait until an unfinished file below `folder` has bytes; how many."""
    while True:
        for path in folder.rglob("*.incomplete"):
            if size := path.stat().st_size:
                return size


@pytest.mark.parametrize(
    ("entries", "words", "sentence"),
    [
        ({"model_type": "nothing_known"}, [], "mlx-lm knows no model_type 'nothing_known'"),
        ({"auto_map": {"AutoModel": "x"}}, [], "asks to run code of its own ('auto_map' in config"),
        ({"quantization": {"bits": 4}}, ["--bits", "4"], "quantized already; leave out --bits"),
        (
            {"model_type": "llama", "num_key_value_heads": 4},
            [],
            "this llama is not a mixture-of-experts model",
        ),
    ],
)
def test_the_config_is_looked_at_first(
    hub: Hub,
    checkpoint: Path,
    tmp_path: Path,
    entries: dict[str, object],
    words: list[str],
    sentence: str,
) -> None:
    """A model that will not do is refused before its weights are fetched, and leaves nothing."""
    config = json.loads((checkpoint / "config.json").read_text()) | entries
    (checkpoint / "config.json").write_text(json.dumps(config))
    env = environment(tmp_path / "home", HF_ENDPOINT=hub.url)
    done = expert_net("download", REPO, "-o", tmp_path / "out" / "store", *words, env=env)
    assert done.returncode == 3
    assert sentence in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []
    assert not any("safetensors" in name for name in hub.fetched())


def test_a_checkpoint_that_is_here_is_kept(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path is converted where it is and never removed."""
    words = ["download", str(checkpoint), "-o", str(tmp_path / "store"), "--bits", "8"]
    assert main(words) == 0
    assert (checkpoint / "config.json").exists()
    assert "8-bit affine" in capsys.readouterr().out
    assert main(words) == 3
    assert "a store stands here already" in capsys.readouterr().err
