"""A local server that answers as Hugging Face does, as far as fetching a repository needs it."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

Commits = Mapping[str, Mapping[str, bytes]]


class RepositoryServer(ThreadingHTTPServer):
    """Serves one repository, and keeps a list of what was asked for.

    Attributes:
        requests: paths.
        headers: sent with files in place of the right ones; one that is empty is left out.
        description: put into what is said of a commit.
        redirects: where files are said to lie instead, by their names.
        refusal: headers of an answer 429 to everything that is asked; None for none.
        has_pages: whether a list of files names a next page, without end.
    """

    def __init__(self, name: str, commits: Commits) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository = name
        self.commits = commits
        self.requests: list[str] = []
        self.headers: dict[str, str] = {}
        self.description: dict[str, object] = {}
        self.redirects: dict[str, str] = {}
        self.refusal: dict[str, str] | None = None
        self.has_pages = False

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_port}"

    def find_commit(self, revision: str) -> str | None:
        """The commit of a revision; None if there is none."""
        if revision == "main":
            return list(self.commits)[-1]
        return revision if revision in self.commits else None


class _Handler(BaseHTTPRequestHandler):
    server: RepositoryServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(path)
        name = self.server.repository
        if self.server.refusal is not None:
            self.send_response(429)
            for key, value in {"Content-Length": "0", **self.server.refusal}.items():
                self.send_header(key, value)
            self.end_headers()
            return
        headers: dict[str, str] = {}
        content: bytes | None = None
        if path.startswith(f"{name}/resolve/"):
            revision, _, file = path.removeprefix(f"{name}/resolve/").partition("/")
            commit = self.server.find_commit(revision)
            content = None if commit is None else self.server.commits[commit].get(file)
            if commit is not None and content is not None:
                etag = hashlib.sha256(content).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit} | self.server.headers
                if address := self.server.redirects.get(file):
                    headers |= {"Location": address, "X-Linked-Etag": headers["ETag"]}
                    headers |= {"X-Linked-Size": str(len(content))}
        elif path.startswith(f"api/models/{name}/"):
            kind, _, revision = path.removeprefix(f"api/models/{name}/").partition("/")
            commit = self.server.find_commit(revision)
            if commit is not None and kind == "revision":
                content = json.dumps(self._describe(commit)).encode()
            elif commit is not None and kind == "tree":
                content = json.dumps(self._list_files(commit)).encode()
                if self.server.has_pages:
                    headers = {"Link": f'<{self.server.url}/{path}?cursor=1>; rel="next"'}
        self._send(content, headers, with_body=with_body)

    def _describe(self, commit: str) -> dict[str, object]:
        files = [{"rfilename": name} for name in self.server.commits[commit]]
        told = {"id": self.server.repository, "sha": commit, "siblings": files, "tags": []}
        return told | self.server.description

    def _list_files(self, commit: str) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            for name, content in self.server.commits[commit].items()
        ]

    def _send(self, content: bytes | None, headers: Mapping[str, str], *, with_body: bool) -> None:
        self.send_response(404 if content is None else 302 if "Location" in headers else 200)
        if content is None:
            headers = {"X-Error-Code": "RepoNotFound"}
        for key, value in {"Content-Length": str(len(content or b"")), **headers}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if with_body and content is not None:
            self.wfile.write(content)


@contextmanager
def serve_repository(name: str, commits: Commits) -> Iterator[RepositoryServer]:
    """Serve a repository.

    Args:
        name: organisation and repository.
        commits: the files of each commit, as bytes by their names; the last is the main branch.
    """
    server = RepositoryServer(name, commits)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files_of_folder(folder: Path) -> dict[str, bytes]:
    """The files of a folder, as bytes by their names."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
