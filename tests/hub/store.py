# SPDX-License-Identifier: Apache-2.0
"""Repositories of the test Hub: commits, branches and tags over a heap of blobs."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field


class HubError(Exception):
    """An answer that is no success: HTTP status, and the code that the client makes an exception of."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Repo:
    """One repository. `commits` maps a hash to its parent, title and files (path -> SHA-256 of the content)."""

    kind: str
    name: str
    private: bool = False
    commits: dict[str, tuple[str | None, str, dict[str, str]]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.branches:
            self.branches["main"] = self._add(None, "initial commit", {})

    def _add(self, parent: str | None, title: str, files: dict[str, str]) -> str:
        text = f"{self.kind} {self.name} {parent} {title} {len(self.commits)} {sorted(files.items())}"
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = (parent, title, files)
        return name

    def resolve(self, revision: str) -> str:
        """Commit hash of a branch, tag or (short) hash."""
        found = self.branches.get(revision) or self.tags.get(revision)
        found = found or next((c for c in self.commits if len(revision) >= 7 and c.startswith(revision)), None)
        if found is None:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def files(self, revision: str) -> dict[str, str]:
        """Path to SHA-256 of the content."""
        return self.commits[self.resolve(revision)][2]

    def history(self, revision: str) -> list[tuple[str, str]]:
        """(hash, title), newest first."""
        found, commit = [], self.resolve(revision)
        while commit is not None:
            parent, title, _ = self.commits[commit]
            found.append((commit, title))
            commit = parent
        return found

    def commit(self, branch: str, title: str, changes: dict[str, str | None], parent: str | None = None) -> str:
        """
        Put changes on top of a branch.

        Args:
            changes (`dict`): Path to SHA-256 of the new content; None deletes the file, or the folder if it ends with `/`.
            parent (`str`, *optional*): The commit that the branch must still be at.
        """
        if branch not in self.branches:
            raise HubError(404, "RevisionNotFound", f"no branch {branch}")
        head = self.branches[branch]
        if parent not in (None, head):
            raise HubError(412, None, "A commit has happened since. Please refresh and try again.")
        files = dict(self.commits[head][2])
        for path, sha in changes.items():
            if sha is not None:
                files[path] = sha
            elif path.endswith("/"):
                files = {name: known for name, known in files.items() if not name.startswith(path)}
            else:
                files.pop(path, None)
        self.branches[branch] = self._add(head, title, files)
        return self.branches[branch]


@dataclass
class Store:
    """All repositories, and the contents of their files by SHA-256."""

    tokens: dict[str, str]  # token -> user
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def put(self, content: bytes) -> str:
        """Keep a content; returns its SHA-256."""
        sha = hashlib.sha256(content).hexdigest()
        self.blobs[sha] = content
        return sha

    def repo(self, kind: str, name: str, user: str | None) -> Repo:
        """A repository that `user` may read; to others a private one does not exist."""
        found = self.repos.get((kind, name))
        if found is None or (found.private and user != name.split("/")[0]):
            raise HubError(401 if user is None else 404, "RepoNotFound", "Repository not found")
        return found

    def content(self, kind: str, name: str, path: str, revision: str = "main") -> bytes:
        """A file, for tests to look at."""
        return self.blobs[self.repos[kind, name].files(revision)[path]]


def git_id(content: bytes) -> str:
    """What git calls a blob; the ETag of a file that is not LFS."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
