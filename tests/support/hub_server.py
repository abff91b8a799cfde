"""A stand-in for the Hugging Face hub: as much of its API as `datasets` needs to push files. It keeps what
it gets in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_testtoken"


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        #: Repository -> path -> content, after its commits.
        self.repositories: dict[str, dict[str, bytes]] = {}
        #: What was said of a repository when it was made.
        self.made: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.commits = 0
        #: Status of every answer; None: as the hub would.
        self.status: int | None = None


class _Handler(BaseHTTPRequestHandler):
    server: HubServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *_: object) -> None: ...

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self._refused():
            return
        if path == "/api/whoami-v2":
            self._json({"type": "user", "name": "someone", "orgs": []})
        elif path.startswith("/api/datasets/"):
            name, rest = self._split(path.removeprefix("/api/datasets/"))
            if name not in self.server.repositories:
                self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            elif rest.startswith("tree/"):
                self._tree(name, rest.split("/", 2)[2] if rest.count("/") > 1 else "")
            else:
                self._json(
                    {
                        "id": name,
                        "sha": "0" * 40,
                        "siblings": [],
                        "private": False,
                        "tags": [],
                        "downloads": 0,
                        "likes": 0,
                    }
                )
        else:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        path, body = (
            unquote(urlsplit(self.path).path),
            self.rfile.read(int(self.headers["Content-Length"] or 0)),
        )
        if self._refused():
            return
        if path == "/api/repos/create":
            about = json.loads(body)
            name = f"{about.get('organization') or 'someone'}/{about['name']}"
            self.server.repositories.setdefault(name, {})
            self.server.made[name] = about
            self._json({"url": f"{self.server.url}/datasets/{name}", "id": "1", "name": name})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    **one,
                    "actions": {"upload": {"href": f"{self.server.url}/objects/{one['oid']}", "header": {}}},
                }
                for one in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})
        elif "/preupload/" in path:
            files = [
                {**one, "uploadMode": "lfs" if one["path"].endswith(".parquet") else "regular"}
                for one in json.loads(body)["files"]
            ]
            self._json(
                {
                    "files": [
                        {"path": one["path"], "uploadMode": one["uploadMode"], "shouldIgnore": False}
                        for one in files
                    ]
                }
            )
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/paths-info/" in path:
            self._json([])
        elif "/commit/" in path:
            name, _ = self._split(path.removeprefix("/api/datasets/"))
            self._commit(name, [json.loads(line) for line in body.splitlines()])
        else:
            self._json({"error": path}, 404)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self._json({})

    def _commit(self, name: str, operations: list[dict[str, Any]]) -> None:
        files = self.server.repositories[name]
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        self.server.commits += 1
        address = f"{self.server.url}/datasets/{name}/commit/{'1' * 40}"
        self._json({"success": True, "commitOid": "1" * 40, "commitUrl": address, "hookOutput": ""})

    def _tree(self, name: str, folder: str) -> None:
        files = {
            path: data
            for path, data in self.server.repositories[name].items()
            if not folder or path.startswith(f"{folder}/")
        }
        if folder and not files:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        else:
            self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": "2" * 40}
                    for path, data in files.items()
                ]
            )

    def _split(self, path: str) -> tuple[str, str]:
        organization, name, *rest = path.split("/")
        return f"{organization}/{name}", "/".join(rest)

    def _refused(self) -> bool:
        if self.server.status is not None:
            self._json({"error": "no"}, self.server.status)
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._json({"error": "Invalid username or password."}, 401)
        else:
            return False
        return True

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def hub_server() -> Generator[HubServer, None, None]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
