"""`expert-net download`, against a hub on this machine that speaks the real one's API."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.constants import DOWNLOAD_CHUNK_SIZE

from expert_driver import hub as module
from expert_driver.cli import main
from expert_driver.commands.download import Source, resolve
from expert_driver.hub import RemoteFile, Snapshot
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
    """The hub, as the one of this process."""
    use(hub, monkeypatch)
    return hub


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it this process's hub: huggingface_hub has read HF_ENDPOINT long ago."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)


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
    files = dict.fromkeys([*wanted, *unwanted], RemoteFile(1))
    assert sorted(module.wanted(REPO, files)) == sorted(wanted)
    assert "consolidated.safetensors" in module.wanted(
        REPO, dict.fromkeys(["consolidated.safetensors", "config.json"], RemoteFile(1))
    )
    with pytest.raises(HubError, match="it has no safetensors files"):
        module.wanted(REPO, dict.fromkeys(["x.bin", "config.json"], RemoteFile(1)))
    with pytest.raises(HubError, match=r"it has no config\.json"):
        module.wanted(REPO, {"model.safetensors": RemoteFile(1)})


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


def test_a_gated_repo_lists_its_files_only(
    here: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Consent is asked for when the first file is, and nothing is left behind."""
    here.refuse, here.only_files = "403 GatedRepo", True
    assert main(["download", REPO, "-o", str(tmp_path / "out" / "store")]) == 4
    assert "its owner asks for consent first" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


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


def test_a_file_that_is_not_whole_is_fetched_again(
    here: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    """A file of the wrong size under the final name does not pass for the whole one."""
    source = tmp_path / "source"
    found = module.find(REPO, None, source)
    with module.prepared(found, source):
        module.fetch(found, source, silent)
        (source / "config.json").write_text("{")
        assert found.missing(source) == ["config.json"]
        module.fetch(found, source, silent)
    assert found.missing(source) == []
    assert (source / "config.json").read_text() == (checkpoint / "config.json").read_text()


@pytest.mark.parametrize("whole", [False, True])
def test_a_part_is_gone_on_with(here: Hub, tmp_path: Path, whole: bool) -> None:
    """Only the rest is asked for, a server that sends all the same is coped with, progress fits."""
    here.whole = whole
    source, name = tmp_path / "source", "model-00002-of-00003.safetensors"
    found = module.find(REPO, None, source)
    seen: list[tuple[int, int]] = []
    with module.prepared(found, source):
        data = (here.folder / name).read_bytes()
        (source / f"{name}.part").write_bytes(data[:1000])
        module.fetch(found, source, lambda done, total, what: seen.append((done, total)))
    assert (source / name).read_bytes() == data
    assert [text for _, _, text in here.requests if text] == ["bytes=1000-"]
    assert seen[0] == (1000, found.nbytes)
    assert seen[-1] == (found.nbytes, found.nbytes)


def test_a_file_that_arrives_damaged_is_not_kept(here: Hub, tmp_path: Path) -> None:
    """Weights whose sha256 is not the hub's are thrown away, and fetched by the next run."""
    source, name = tmp_path / "source", "model-00001-of-00003.safetensors"
    found = module.find(REPO, None, source)
    with module.prepared(found, source):
        here.spoil = name
        with pytest.raises(HubError, match=f"{name} arrived damaged"):
            module.fetch(found, source, silent)
        assert not any(name in path.name for path in source.iterdir())
        here.spoil = None
        module.fetch(found, source, silent)
    assert found.missing(source) == []


def test_a_copy_in_the_hubs_cache_is_used(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another program has fetched whole is found; a part of it is not enough."""
    found = snapshot(checkpoint)
    folder = tmp_path / "cache" / "models--org--tiny" / "snapshots" / COMMIT
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert module.cached(found) is None
    folder.parent.mkdir(parents=True)
    checkpoint.rename(folder)
    assert module.cached(found) == folder
    (folder / "tokenizer.json").unlink()
    assert module.cached(found) is None


def snapshot(checkpoint: Path, commit: str = COMMIT) -> Snapshot:
    files = {path.name: RemoteFile(path.stat().st_size) for path in checkpoint.iterdir()}
    return Snapshot(REPO, "main", commit, files)


def test_another_commit_starts_over(checkpoint: Path, tmp_path: Path) -> None:
    """What an earlier commit left is not mixed with the new one."""
    source = tmp_path / "source"
    for commit, left in [(COMMIT, False), (COMMIT, True), ("0" * 40, False)]:
        with module.prepared(snapshot(checkpoint, commit), source):
            assert (source / "model-00009.safetensors").exists() == left
            (source / "model-00009.safetensors").write_bytes(b"x")


def test_a_folder_of_someone_else_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A folder in the way that no download made is not touched."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "thesis.tex").touch()
    with pytest.raises(StoreError, match="this folder is in the way of the download"):
        module.prepared(snapshot(checkpoint), source).__enter__()
    assert (source / "thesis.tex").exists()


def test_one_download_at_a_time(checkpoint: Path, tmp_path: Path) -> None:
    """A second download into the same folder is told so."""
    found = snapshot(checkpoint)
    with (
        module.prepared(found, tmp_path / "source"),
        pytest.raises(StoreError, match="another process is downloading into it now"),
        module.prepared(found, tmp_path / "source"),
    ):
        pass


def test_too_small_a_disk_is_told_beforehand(here: Hub, tmp_path: Path) -> None:
    """There must be room for the checkpoint and the store together before the long part."""
    with small_disk(tmp_path / "disk", 800_000) as disk:
        found = module.find(REPO, None, disk / "source")
        with module.prepared(found, disk / "source"), pytest.raises(DiskFull, match="is needed"):
            module.fetch(found, disk / "source", silent, then=found.nbytes)
    assert here.fetched() == []


def test_a_disk_that_fills_up_meanwhile(here: Hub, tmp_path: Path) -> None:
    """A disk that is full in the middle is a DiskFull, and not the hub's fault."""
    with small_disk(tmp_path / "disk", 800_000) as disk:
        found = module.find(REPO, None, disk / "source")
        with module.prepared(found, disk / "source"):
            module.fetch_configs(found, disk / "source")
            free = shutil.disk_usage(disk).free

            def fill(done: int, total: int, what: str) -> None:
                if not (disk / "ballast").exists():
                    (disk / "ballast").write_bytes(bytes(free - 100_000))

            with pytest.raises(DiskFull, match="the disk is full"):
                module.fetch(found, disk / "source", fill)


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


def test_a_killed_download_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a SIGKILL the same command asks only for the rest; offline it says what it lacks."""
    # huggingface_hub hands on 10 MB at a time: of a file more than twice as long, half is sent.
    checkpoint = make_checkpoint(tmp_path / "repo", Shape("olmoe", 2, 16, 4, 256, 512))
    words = ["download", REPO, "-o", str(tmp_path / "store"), "--keep-source"]
    with serving(Hub(REPO, checkpoint)) as hub:
        hub.hold = "model.safetensors"
        env = environment(tmp_path, HF_ENDPOINT=hub.url)
        with subprocess.Popen(command_line(*words), env=env, stderr=subprocess.DEVNULL) as child:
            assert hub.held.wait(60)
            part = tmp_path / "store.source" / "model.safetensors.part"
            while not part.exists() or part.stat().st_size < DOWNLOAD_CHUNK_SIZE:
                pass
            child.kill()
        assert not (tmp_path / "store").exists()
        hub.hold = None
        hub.requests.clear()
        use(hub, monkeypatch)
        with monkeypatch.context() as offline:
            offline.setattr(constants, "HF_HUB_OFFLINE", True)
            assert main(words) == 4
        assert f"error: {REPO}: HF_HUB_OFFLINE is set" in capsys.readouterr().err
        assert main(words) == 0
    assert f"source      {tmp_path}/store.source" in capsys.readouterr().out
    assert hub.fetched() == ["model.safetensors"]
    assert [text for _, _, text in hub.requests if text] == [f"bytes={DOWNLOAD_CHUNK_SIZE}-"]
    assert Store.open(tmp_path / "store").verify() == []
    # The hub is gone, and all that is needed is here.
    (tmp_path / "store").rename(tmp_path / "old")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(words) == 0


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
    here: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    entries: dict[str, object],
    words: list[str],
    sentence: str,
) -> None:
    """A model that will not do is refused before its weights are fetched, and leaves nothing."""
    config = json.loads((here.folder / "config.json").read_text()) | entries
    (here.folder / "config.json").write_text(json.dumps(config))
    assert main(["download", REPO, "-o", str(tmp_path / "out" / "store"), *words]) == 3
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert sentence in err
    assert list((tmp_path / "out").iterdir()) == []
    assert not any("safetensors" in name for name in here.fetched())


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
