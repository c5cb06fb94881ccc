# SPDX-License-Identifier: Apache-2.0
"""
A Hub on this machine for tests: the part of the protocol that `huggingface_hub`, `transformers` and `datasets` speak when
they create, push and pull repositories (models and datasets; Git LFS, no Xet).

Requests that it does not know are answered with 501 and kept in `Hub.unknown`, so that a test notices them.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from .store import HubError, Repo, Store, git_id


DATE = "2026-01-01T00:00:00.000Z"
LFS_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".parquet", ".arrow", ".png")
ROUTES: list[tuple[str, re.Pattern, Callable]] = []


def route(method: str, pattern: str) -> Callable:
    """Register a function of [`Hub`] for a method and a path; groups of the pattern become its arguments."""

    def register(function: Callable) -> Callable:
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


API = r"/api/(models|datasets)/([^/]+/[^/]+)"
GIT = r"/(?:(datasets)/)?([^/]+/[^/]+)"


def is_lfs(path: str) -> bool:
    """Whether a file would be kept by Git LFS, as a fresh repository's `.gitattributes` says."""
    return path.endswith(LFS_ENDINGS)


class Request:
    """What a handler needs to know of a request."""

    def __init__(self, method: str, target: str, headers: Any, body: bytes) -> None:
        parts = urlsplit(target)
        self.method, self.path, self.headers, self.body = method, parts.path, headers, body
        self.query = {key: values[-1] for key, values in parse_qs(parts.query).items()}

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Answer:
    """Status, headers and body of an answer; an object becomes JSON."""

    def __init__(self, body: Any = None, status: int = 200, **headers: str) -> None:
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if not isinstance(body, bytes):
            body = json.dumps({} if body is None else body).encode()
            self.headers["Content-Type"] = "application/json"
        self.body = body


class Hub:
    """
    The server. Use as a context manager; `url` is what `HF_ENDPOINT` must be.

    Args:
        tokens (`dict[str, str]`): Access token to user name. A user writes below their own name, and reads private
            repositories there.
    """

    def __init__(self, tokens: dict[str, str]) -> None:
        self.store = Store(tokens)
        self.log: list[str] = []  # "METHOD /path" of every request
        self.unknown: list[str] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._cdn = f"http://localhost:{self._server.server_port}/test-cdn"  # another host to the client

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: Request) -> Answer:
        """Find the route and run it."""
        self.log.append(f"{request.method} {unquote(request.path)}")
        try:
            user = self._user(request)
            for method, pattern, function in ROUTES:
                found = pattern.fullmatch(request.path)
                if found and request.method in method.split():
                    with self.store.lock:
                        return function(self, request, user, *(g and unquote(g) for g in found.groups()))
        except HubError as error:
            code = {} if error.code is None else {"X_Error_Code": error.code}
            return Answer({"error": str(error)}, error.status, X_Error_Message=str(error), **code)
        self.unknown.append(self.log[-1])
        return Answer({"error": "the test Hub does not know this"}, 501)

    def _user(self, request: Request) -> str | None:
        header = request.headers.get("Authorization", "")
        if not header:
            return None
        user = self.store.tokens.get(header.removeprefix("Bearer "))
        if user is None:
            raise HubError(401, None, "Invalid credentials in Authorization header")
        return user

    def _writable(self, kind: str, name: str, user: str | None) -> Repo:
        repo = self.store.repo(kind, name, user)
        if user is None:
            raise HubError(401, None, "Invalid username or password.")
        if user != name.split("/")[0]:
            raise HubError(403, None, "You don't have the rights to write here")
        return repo

    # ------------------------------------------------------------------ account and repositories
    @route("GET", "/api/whoami-v2")
    def whoami(self, request: Request, user: str | None) -> Answer:
        if user is None:
            raise HubError(401, None, "Invalid username or password.")
        token = {"displayName": "test", "role": "write"}
        return Answer(
            {
                "type": "user",
                "id": "0",
                "name": user,
                "orgs": [],
                "auth": {"type": "access_token", "accessToken": token},
            }
        )

    @route("POST", "/api/repos/create")
    def create(self, request: Request, user: str | None) -> Answer:
        if user is None:
            raise HubError(401, None, "Invalid username or password.")
        kind, name = request.json.get("type") or "model", request.json["name"]
        owner = request.json.get("organization") or user
        if owner != user:
            raise HubError(403, None, f"You don't have the rights to create a {kind} under the namespace {owner}")
        full = f"{owner}/{name}"
        exists = (kind, full) in self.store.repos
        if not exists:
            private = request.json.get("private") or request.json.get("visibility") == "private"
            self.store.repos[kind, full] = Repo(kind, full, bool(private))
        url = f"{self.url}/{'datasets/' if kind == 'dataset' else ''}{full}"
        error = {"error": "You already created this repo"} if exists else {}
        return Answer({"url": url, "name": full, "id": "0", **error}, 409 if exists else 200)

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self, request: Request, user: str | None) -> Answer:
        return Answer({"errors": [], "warnings": []})

    @route("GET", API)
    def info(self, request: Request, user: str | None, kinds: str, name: str, revision: str = "main") -> Answer:
        repo = self.store.repo(kinds[:-1], name, user)
        commit = repo.resolve(revision)
        siblings = [{"rfilename": path} for path in sorted(repo.files(commit))]
        known = {"_id": "0", "id": name, "author": name.split("/")[0], "sha": commit, "siblings": siblings}
        empty = {"disabled": False, "gated": False, "downloads": 0, "likes": 0, "tags": []}
        return Answer({**known, **empty, "private": repo.private, "lastModified": DATE, "createdAt": DATE})

    @route("GET", API + "/revision/(.+)")
    def revision(self, request: Request, user: str | None, kinds: str, name: str, revision: str) -> Answer:
        return Hub.info(self, request, user, kinds, name, revision)

    @route("GET", API + "/refs")
    def refs(self, request: Request, user: str | None, kinds: str, name: str) -> Answer:
        repo = self.store.repo(kinds[:-1], name, user)
        heads = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in repo.branches.items()]
        tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": c} for n, c in repo.tags.items()]
        return Answer({"branches": heads, "converts": [], "tags": tags})

    @route("GET", API + "/commits/(.+)")
    def commits(self, request: Request, user: str | None, kinds: str, name: str, revision: str) -> Answer:
        history = self.store.repo(kinds[:-1], name, user).history(revision)
        return Answer([{"id": c, "title": t, "message": "", "date": DATE, "authors": []} for c, t in history])

    @route("POST", API + "/(branch|tag)/(.+)")
    def new_ref(self, request: Request, user: str | None, kinds: str, name: str, what: str, ref: str) -> Answer:
        repo = self._writable(kinds[:-1], name, user)
        given = request.json if request.body else {}
        known, new = (repo.branches, ref) if what == "branch" else (repo.tags, given["tag"])
        if new in known:
            raise HubError(409, None, f"Reference already exists: {new}")
        known[new] = repo.resolve(given.get("startingPoint") or "main" if what == "branch" else ref)
        return Answer()

    # ------------------------------------------------------------------ reading
    def _entry(self, path: str, sha: str) -> dict[str, Any]:
        content = self.store.blobs[sha]
        lfs = {"lfs": {"oid": sha, "size": len(content), "pointerSize": 134}} if is_lfs(path) else {}
        return {"type": "file", "oid": git_id(content), "size": len(content), "path": path, **lfs}

    @route("GET", API + "/tree/([^/]+)(?:/(.+))?")
    def tree(self, request: Request, user: str | None, kinds: str, name: str, rev: str, folder: str | None) -> Answer:
        files = self.store.repo(kinds[:-1], name, user).files(rev)
        start = f"{folder}/" if folder else ""
        inside = [path for path in sorted(files) if path.startswith(start)]
        if folder and not inside:
            raise HubError(404, "EntryNotFound", f"{folder} does not exist on {rev}")
        deep = request.query.get("recursive", "").lower() == "true"
        entries = [self._entry(p, files[p]) for p in inside if deep or "/" not in p[len(start) :]]
        steps = {p[len(start) :].rsplit("/", i)[0] for p in inside for i in range(1, p[len(start) :].count("/") + 1)}
        folders = [start + step for step in sorted(steps) if deep or "/" not in step]
        return Answer([*({"type": "directory", "oid": "0" * 40, "size": 0, "path": p} for p in folders), *entries])

    @route("POST", API + "/paths-info/(.+)")
    def paths_info(self, request: Request, user: str | None, kinds: str, name: str, revision: str) -> Answer:
        files = self.store.repo(kinds[:-1], name, user).files(revision)
        form = request.headers.get("Content-Type", "").startswith("application/x-www-form-urlencoded")
        paths = parse_qs(request.body.decode())["paths"] if form else request.json["paths"]
        folders = {path for path in paths if any(name.startswith(f"{path}/") for name in files)}
        entries = [self._entry(path, files[path]) for path in paths if path in files]
        return Answer([*entries, *({"type": "directory", "oid": "0" * 40, "size": 0, "path": p} for p in folders)])

    @route("GET HEAD", GIT + "/resolve/([^/]+)/(.+)")
    def resolve(self, request: Request, user: str | None, kinds: str, name: str, rev: str, path: str) -> Answer:
        repo = self.store.repo((kinds or "models")[:-1], name, user)
        commit = repo.resolve(rev)
        sha = repo.files(commit).get(path)
        if sha is None:
            text = f"{path} does not exist on {rev}"
            return Answer(
                {"error": text}, 404, X_Error_Code="EntryNotFound", X_Error_Message=text, X_Repo_Commit=commit
            )
        content = self.store.blobs[sha]
        if not is_lfs(path):
            return _part(request, content, ETag=f'"{git_id(content)}"', X_Repo_Commit=commit)
        linked = {"X_Linked_Size": str(len(content)), "X_Linked_ETag": f'"{sha}"', "X_Repo_Commit": commit}
        return Answer(b"", 302, Location=f"{self._cdn}/{sha}", **linked)

    @route("GET HEAD", "/test-cdn/(.+)")
    def download(self, request: Request, user: str | None, sha: str) -> Answer:
        if "Authorization" in request.headers:  # as the Hub's storage, which must not see tokens
            raise HubError(400, None, "Only one auth mechanism allowed")
        return _part(request, self.store.blobs[sha], ETag=f'"{sha}"')

    # ------------------------------------------------------------------ writing
    @route("POST", API + "/preupload/(.+)")
    def preupload(self, request: Request, user: str | None, kinds: str, name: str, revision: str) -> Answer:
        files = self._writable(kinds[:-1], name, user).files(revision)
        answers = []
        for path in (each["path"] for each in request.json["files"]):
            old = files.get(path)
            oid = None if old is None else old if is_lfs(path) else git_id(self.store.blobs[old])
            mode = "lfs" if is_lfs(path) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return Answer({"files": answers})

    @route("POST", GIT + r"\.git/info/lfs/objects/batch")
    def lfs_batch(self, request: Request, user: str | None, kinds: str, name: str) -> Answer:
        self._writable((kinds or "models")[:-1], name, user)
        objects = []
        for each in request.json["objects"]:
            upload = {"upload": {"href": f"{self.url}/test-lfs/{each['oid']}"}}
            missing = {} if each["oid"] in self.store.blobs else {"actions": upload}
            objects.append({"oid": each["oid"], "size": each["size"], **missing})
        return Answer({"transfer": "basic", "objects": objects})

    @route("PUT", "/test-lfs/(.+)")
    def lfs_upload(self, request: Request, user: str | None, sha: str) -> Answer:
        if self.store.put(request.body) != sha:
            raise HubError(400, None, "The content does not have the announced SHA-256")
        return Answer()

    @route("POST", API + "/commit/(.+)")
    def commit(self, request: Request, user: str | None, kinds: str, name: str, branch: str) -> Answer:
        repo = self._writable(kinds[:-1], name, user)
        if request.query.get("create_pr"):
            raise HubError(400, None, "The test Hub has no pull requests")
        title, parent, changes = "", None, {}
        for line in request.body.splitlines():
            key, value = (entry := json.loads(line))["key"], entry["value"]
            if key == "header":
                title, parent = value["summary"], value.get("parentCommit")
            elif key == "file":
                changes[value["path"]] = self.store.put(base64.b64decode(value["content"]))
            elif key == "lfsFile" and value["oid"] in self.store.blobs:
                changes[value["path"]] = value["oid"]
            elif key == "deletedFile":
                changes[value["path"]] = None
            elif key == "deletedFolder":
                changes[value["path"].rstrip("/") + "/"] = None
            else:
                raise HubError(400, None, f"Cannot commit {key}: {value}")
        commit = repo.commit(branch, title, changes, parent)
        return Answer({"success": True, "commitOid": commit, "commitUrl": f"{self.url}/{name}/commit/{commit}"})


def _part(request: Request, content: bytes, **headers: str) -> Answer:
    """A file, or the bytes of it that were asked for."""
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if wanted is None:
        return Answer(content, Accept_Ranges="bytes", **headers)
    first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
    return Answer(content[first : last + 1], 206, Content_Range=f"bytes {first}-{last}/{len(content)}", **headers)


class _Handler(BaseHTTPRequestHandler):
    """HTTP around [`Hub.answer`]."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Nothing on stderr."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _handle(self) -> None:
        answer = self.hub.answer(Request(self.command, self.path, self.headers, self._body()))
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _handle
