# SPDX-License-Identifier: Apache-2.0
"""The test Hub against the real client: what the other tests of this folder rely on."""

import pytest
from huggingface_hub import HfApi, ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .online import TOKEN, hub, online


def filled(name, files, **kwargs):
    """A new repository with these files in one commit."""
    api = HfApi()
    api.create_repo(name, **kwargs)
    for path, content in files.items():
        api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=name, repo_type=kwargs.get("repo_type"))
    return api


@online
def test_create_upload_list_and_download(tmp_path):
    api = HfApi()
    assert api.whoami()["name"] == "me"
    url = api.create_repo("plain")
    assert url.repo_id == "me/plain" and api.create_repo("me/plain", exist_ok=True).repo_id == "me/plain"
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo("me/plain")
    folder = tmp_path / "folder"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "README.md").write_text("hello")
    (folder / "deep" / "weights.bin").write_bytes(bytes(range(256)) * 100)
    (folder / "deep" / "er" / "x.json").write_text("{}")
    commit = api.upload_folder(repo_id="me/plain", folder_path=folder, commit_message="all")
    paths = ["README.md", "deep/er/x.json", "deep/weights.bin"]
    assert sorted(api.list_repo_files("me/plain")) == paths
    assert {entry.path for entry in api.list_repo_tree("me/plain")} == {"README.md", "deep"}
    assert [entry.path for entry in api.list_repo_tree("me/plain", "deep", recursive=True)].count(
        "deep/er/x.json"
    ) == 1
    (weights,) = api.get_paths_info("me/plain", ["deep/weights.bin"])
    assert weights.lfs.size == 25600
    assert [c.title for c in api.list_repo_commits("me/plain")] == ["all", "initial commit"]
    found = snapshot_download("me/plain", cache_dir=tmp_path / "cache")
    assert found.endswith(commit.oid)
    for path in paths:
        assert (folder / path).read_bytes() == open(f"{found}/{path}", "rb").read()
    before = len(hub().log)
    api.upload_folder(repo_id="me/plain", folder_path=folder, commit_message="the same again")
    assert not [line for line in hub().log[before:] if "/commit/" in line]  # the client sees that nothing changed
    api.delete_folder("deep", "me/plain")
    assert api.list_repo_files("me/plain") == ["README.md"]
    assert hub().unknown == []


@online
def test_branches_tags_and_commits_can_be_pinned(tmp_path):
    api = filled("me/pinned", {"a.txt": b"one"})
    first = api.model_info("me/pinned").sha
    api.create_tag("me/pinned", tag="v1")
    api.upload_file(path_or_fileobj=b"two", path_in_repo="a.txt", repo_id="me/pinned")
    api.create_branch("me/pinned", branch="side", revision="v1")
    api.upload_file(path_or_fileobj=b"three", path_in_repo="a.txt", repo_id="me/pinned", revision="side")

    def read(revision):
        return open(hf_hub_download("me/pinned", "a.txt", revision=revision, cache_dir=tmp_path)).read()

    assert [read(r) for r in (None, "main", "v1", first, "side")] == ["two", "two", "one", "one", "three"]
    refs = api.list_repo_refs("me/pinned")
    assert [b.name for b in refs.branches] == ["main", "side"] and refs.tags[0].target_commit == first
    with pytest.raises(RevisionNotFoundError):
        read("nowhere")
    with pytest.raises(HfHubHTTPError, match="412"):  # somebody else was faster
        api.upload_file(path_or_fileobj=b"x", path_in_repo="b", repo_id="me/pinned", parent_commit=first)


@online
def test_errors_are_those_of_the_hub(tmp_path):
    api = filled("me/secret", {"a.txt": b"one"}, private=True)
    assert api.model_info("me/secret").private
    assert open(hf_hub_download("me/secret", "a.txt", cache_dir=tmp_path / "mine")).read() == "one"
    for token in (False, "hf_ofSomebodyElse"):
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("me/secret", token=token)
        with pytest.raises((RepositoryNotFoundError, LocalEntryNotFoundError)):
            hf_hub_download("me/secret", "a.txt", token=token, cache_dir=tmp_path / "theirs")
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        api.whoami(token="hf_wrong")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("me/nothing")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("me/secret", "b.txt", cache_dir=tmp_path / "mine")
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_repo("you/mine")
    with pytest.raises(HfHubHTTPError, match="403"):
        filled("me/open", {"a.txt": b"1"}).upload_file(
            path_or_fileobj=b"2", path_in_repo="a.txt", repo_id="me/open", token="hf_ofSomebodyElse"
        )
    with pytest.raises(BadRequestError, match="pull request"):
        api.upload_file(path_or_fileobj=b"2", path_in_repo="a.txt", repo_id="me/open", create_pr=True)
    assert TOKEN not in "".join(hub().log)


@online
def test_datasets_and_cards():
    from datasets import Dataset, load_dataset

    rows = [{"text": f"row {i}", "number": i} for i in range(5)]
    Dataset.from_list(rows).push_to_hub("me/rows", private=True)
    assert list(load_dataset("me/rows", split="train")) == rows
    assert [row["number"] for row in load_dataset("me/rows", split="train", streaming=True)] == [0, 1, 2, 3, 4]
    filled("me/card", {})
    ModelCard("---\nlicense: mit\n---\n# A card\n").push_to_hub("me/card")
    assert ModelCard.load("me/card").data.license == "mit"
    assert hub().unknown == []
