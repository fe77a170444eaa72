"""A Hub on this machine for tests: the HTTP calls that huggingface_hub makes to push and to download, with Git LFS.

It checks what the real one checks (token, sha256, size, metadata of the card) and can misbehave on request.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


TOKEN = "hf_" + "UnguessableWriteTokenOfTests"
READ_TOKEN = "hf_" + "UnguessableReadTokenOfTests"
USER = "tester"
# As in the .gitattributes that a new repository of the real Hub has.
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".png")


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Repository:
    def __init__(self, private: bool):
        self.private = private
        self.branches: dict[str, dict[str, bytes]] = {"main": {}}
        self.commits: dict[str, str] = {"main": "0" * 40}
        self.log: list[dict] = []  # summary and changed paths of each commit, with its branch

    @property
    def files(self) -> dict[str, bytes]:
        return self.branches["main"]


class Hub(ThreadingHTTPServer):
    """The server; start it by `serve_hub`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.RLock()
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}  # LFS objects by sha256
        self.requests: list[tuple[str, str]] = []
        self.received: list[str] = []  # sha256 of the blobs that came in whole
        self.cards: list[str] = []  # that were sent to be validated
        # How it misbehaves: connections that are dropped in the middle of a blob, and answers to (method, path).
        self.drops = 0
        self.failures: list[tuple[str, str, int, int]] = []  # method, pattern of the path, status, times

    def fail(self, method: str, pattern: str, status: int, times: int = 1) -> None:
        self.failures.append((method, pattern, status, times))

    def forget_traffic(self) -> None:
        self.requests.clear()
        self.received.clear()


@contextmanager
def serve_hub():
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args) -> None:
        pass

    # --- plumbing ---------------------------------------------------------------------------------------------------

    def answer(self, status: int, value=None, content: bytes | None = None, **headers: str) -> None:
        body = content if content is not None else json.dumps(value if value is not None else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if content is None:
            self.send_header("Content-Type", "application/json")
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X_Error_Code": code} if code else {}
        self.answer(status, {"error": message}, X_Error_Message=message, **headers)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while (size := int(self.rfile.readline(), 16)) > 0:
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_method(self) -> None:
        path = unquote(urlsplit(self.path).path)
        hub = self.server
        with hub.lock:
            hub.requests.append((self.command, path))
            for number, (method, pattern, status, times) in enumerate(hub.failures):
                if times > 0 and method == self.command and re.search(pattern, path):
                    hub.failures[number] = (method, pattern, status, times - 1)
                    self.body()
                    return self.refuse(status, f"told to answer {status}")
        for methods, pattern, handle, public in ROUTES:
            found = re.fullmatch(pattern, path)
            if found is None or self.command not in methods:
                continue
            if not public and not self.may(writing=self.command in ("POST", "PUT")):
                self.body()
                return None
            return handle(self, **found.groupdict())
        self.body()
        return self.refuse(404, f"no such address: {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_method  # noqa: N815 (names of the standard library)

    def may(self, writing: bool) -> bool:
        authorization = self.headers.get("Authorization")
        if authorization not in (f"Bearer {TOKEN}", f"Bearer {READ_TOKEN}"):
            self.refuse(401, "Invalid username or password.")
            return False
        if writing and authorization == f"Bearer {READ_TOKEN}":
            self.refuse(403, "You don't have the rights to do this with this token.")
            return False
        return True

    def repository(self, repo: str, branch: str = "main") -> Repository | None:
        repository = self.server.repositories.get(repo)
        if repository is None:
            self.refuse(404, "Repository not found", "RepoNotFound")
            return None
        if branch not in repository.branches and branch not in repository.commits.values():
            self.refuse(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            return None
        return repository

    def tree(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]]:
        for branch, oid in repository.commits.items():
            if revision in (branch, oid):
                return oid, repository.branches[branch]
        raise AssertionError(revision)

    # --- accounts and repositories ----------------------------------------------------------------------------------

    def whoami(self) -> None:
        self.answer(200, {"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token"}})

    def create(self) -> None:
        request = json.loads(self.body())
        owner = request["organization"] or USER
        repo = f"{owner}/{request['name']}"
        if owner != USER:
            return self.refuse(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        with self.server.lock:
            exists = repo in self.server.repositories
            if not exists:
                private = request.get("visibility") == "private"
                self.server.repositories[repo] = Repository(private)
        return self.answer(409 if exists else 200, {"url": f"{self.server.url}/{repo}", "name": repo})

    def auth_check(self, repo: str, write: str | None) -> None:
        if write and not self.may(writing=True):
            return
        if self.repository(repo) is not None:
            self.answer(200, {})

    def branch(self, repo: str, branch: str) -> None:
        self.body()
        if (repository := self.repository(repo)) is None:
            return None
        if branch in repository.branches:
            return self.refuse(409, f"Reference already exists: {branch}")
        repository.branches[branch] = dict(repository.files)
        repository.commits[branch] = repository.commits["main"]
        self.answer(200)
        return None

    def info(self, repo: str, revision: str | None = None) -> None:
        if (repository := self.repository(repo, revision or "main")) is None:
            return
        oid, files = self.tree(repository, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(files)]
        self.answer(200, {"id": repo, "sha": oid, "private": repository.private, "siblings": siblings, "tags": []})

    def list_tree(self, repo: str, revision: str, folder: str | None = None) -> None:
        if (repository := self.repository(repo, revision)) is None:
            return
        _, files = self.tree(repository, revision)
        entries = []
        for path, content in sorted(files.items()):
            if folder and not path.startswith(f"{folder}/"):
                continue
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
            if path.endswith(LFS_SUFFIXES):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            entries.append(entry)
        self.answer(200, entries)

    def validate(self) -> None:
        """The rules for metadata that huggingface.co states in its documentation of model cards."""
        content = json.loads(self.body())["content"]
        self.server.cards.append(content)
        data = yaml.safe_load(content.split("---\n")[1])
        errors = []
        for name in ("base_model", "datasets"):
            ids = data.get(name, [])
            for one in [ids] if isinstance(ids, str) else ids:
                if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", one):
                    errors.append(f'"{name}" with value "{one}" is not valid. Use a model id from https://hf.co')
        messages = [{"message": error} for error in errors]
        self.answer(400 if errors else 200, {"errors": messages, "warnings": []})

    # --- upload -----------------------------------------------------------------------------------------------------

    def preupload(self, repo: str, revision: str) -> None:
        request = json.loads(self.body())
        if (repository := self.repository(repo, revision)) is None:
            return
        _, files = self.tree(repository, revision)
        answers = []
        for file in request["files"]:
            lfs = file["path"].endswith(LFS_SUFFIXES)
            content = files.get(file["path"])
            answer = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            if content is not None:
                answer["oid"] = hashlib.sha256(content).hexdigest() if lfs else git_oid(content)
            answers.append(answer)
        self.answer(200, {"files": answers})

    def lfs_batch(self, repo: str) -> None:
        request = json.loads(self.body())
        if self.repository(repo) is None:
            return
        assert request["operation"] == "upload"
        assert request["hash_algo"] == "sha256"
        hub, objects = self.server, []
        for item in request["objects"]:
            oid, size = item["oid"], item["size"]
            entry = {"oid": oid, "size": size}
            if oid not in hub.blobs:
                verify = {"href": f"{hub.url}/{repo}.git/info/lfs/verify"}
                upload = {"href": f"{hub.url}/lfs/{oid}/{size}", "header": {}}
                entry["actions"] = {"upload": upload, "verify": verify}
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def put_blob(self, oid: str, size: str) -> None:
        with self.server.lock:
            drop = self.server.drops > 0
            self.server.drops -= drop
        if drop:
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.close_connection = True
            return self.connection.close()
        content = self.body()
        if hashlib.sha256(content).hexdigest() != oid:
            return self.refuse(400, "sha256 does not match")
        with self.server.lock:
            self.server.blobs[oid] = content
            self.server.received.append(oid)
        return self.answer(200)

    def verify(self, repo: str) -> None:
        request = json.loads(self.body())
        blob = self.server.blobs.get(request["oid"])
        if blob is None or len(blob) != request["size"]:
            return self.refuse(404, "Object does not exist on the server")
        return self.answer(200)

    def commit(self, repo: str, branch: str) -> None:
        lines = [json.loads(line) for line in self.body().splitlines()]
        if (repository := self.repository(repo, branch)) is None:
            return None
        with self.server.lock:
            files, changed = dict(repository.branches[branch]), []
            for line in lines[1:]:
                value = line["value"]
                changed.append(value["path"])
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    if len(self.server.blobs.get(value["oid"], b"")) != value["size"]:
                        return self.refuse(400, f"{value['path']}: the LFS object was not uploaded")
                    files[value["path"]] = self.server.blobs[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            oid = hashlib.sha1(json.dumps([repository.commits[branch], sorted(changed)]).encode()).hexdigest()
            repository.branches[branch], repository.commits[branch] = files, oid
            repository.log.append({"branch": branch, "summary": lines[0]["value"]["summary"], "paths": changed})
        return self.answer(200, {"commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "commitOid": oid})

    # --- download ---------------------------------------------------------------------------------------------------

    def resolve(self, repo: str, revision: str, path: str) -> None:
        if (repository := self.repository(repo, revision)) is None:
            return None
        oid, files = self.tree(repository, revision)
        if path not in files:
            return self.refuse(404, "Entry not found", "EntryNotFound")
        content = files[path]
        etag = hashlib.sha256(content).hexdigest() if path.endswith(LFS_SUFFIXES) else git_oid(content)
        return self.answer(200, content=content, ETag=f'"{etag}"', X_Repo_Commit=oid)


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_MODEL = rf"/api/models/{_REPO}"
# Methods, path, handler, and whether it needs no token (as presigned addresses of a storage).
ROUTES = [
    (("GET",), r"/api/whoami-v2", Handler.whoami, False),
    (("POST",), r"/api/repos/create", Handler.create, False),
    (("POST",), r"/api/validate-yaml", Handler.validate, True),
    (("GET",), rf"{_MODEL}/auth-check(?P<write>/write)?", Handler.auth_check, False),
    (("POST",), rf"{_MODEL}/branch/(?P<branch>.+)", Handler.branch, False),
    (("GET",), rf"{_MODEL}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", Handler.list_tree, False),
    (("POST",), rf"{_MODEL}/preupload/(?P<revision>.+)", Handler.preupload, False),
    (("POST",), rf"{_MODEL}/commit/(?P<branch>.+)", Handler.commit, False),
    (("GET",), rf"{_MODEL}(?:/revision/(?P<revision>.+))?", Handler.info, False),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch, False),
    (("POST",), rf"/{_REPO}\.git/info/lfs/verify", Handler.verify, False),
    (("PUT",), r"/lfs/(?P<oid>\w{64})/(?P<size>\d+)", Handler.put_blob, True),
    (("GET", "HEAD"), rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve, False),
]
