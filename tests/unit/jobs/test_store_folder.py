"""The folder store: write-once, complete or absent, never outside its folder, and closed codes for what a
disk can do."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from jobs.store import FolderStore, open_store
from jobs.store.base import IDENTITY_KEY, ObjectInfo
from pipelines.errors import ConfigError, ErrorCode, StoreError


@pytest.fixture(params=["nameless", "named"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FolderStore:
    """A store, and one on a file system without O_TMPFILE."""
    (tmp_path / "store").mkdir()
    made = FolderStore(tmp_path / "store")
    if request.param == "named":
        made._tmpfile = False
    return made


def test_the_first_put_stays(store: FolderStore) -> None:
    first = store.put("a/b/c.txt", b"one")
    second = store.put("a/b/c.txt", b"other")
    assert (first.created, second.created) == (True, False)
    assert second == first
    assert first.sha256 == hashlib.sha256(b"one").hexdigest()
    assert store.get("a/b/c.txt") == b"one"
    assert store.head("a/b/c.txt") == first


def test_a_file_is_put_like_bytes(store: FolderStore, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(os.urandom(3 << 20))
    with local.open("rb") as file:
        put = store.put("big", file)
    assert put.created
    assert store.get("big") == local.read_bytes()
    assert put == store.head("big")
    with local.open("rb") as file:
        assert not store.put("big", file).created


def test_nothing_but_the_object_is_left(store: FolderStore) -> None:
    store.put("a/x", b"1")
    store.put("a/x", b"2")
    assert [name for _, _, names in os.walk(store.root) for name in names] == ["x"]


def test_a_folder_that_goes_away_between_puts_is_made_anew(store: FolderStore, tmp_path: Path) -> None:
    for number, lose in enumerate((lambda path: path.rename(tmp_path / "moved"), shutil.rmtree)):
        store.put("a/b/first", b"1")
        lose(store.root / "a" / "b")
        assert store.put(f"a/b/{number}", b"2").created
        assert (store.root / "a" / "b" / str(number)).read_bytes() == b"2"
        assert not (store.root / "a" / "b" / "first").exists()


def test_a_link_set_in_a_folders_place_between_puts_is_not_followed(
    store: FolderStore, tmp_path: Path
) -> None:
    store.put("a/b/first", b"1")
    (store.root / "a" / "b").rename(tmp_path / "outside")
    (store.root / "a" / "b").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError) as caught:
        store.put("a/b/second", b"2")
    assert caught.value.code in {ErrorCode.STORE_BAD_KEY, ErrorCode.STORE_MISSING}
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["first"]


def test_handles_are_few_and_closed_with_their_store(tmp_path: Path) -> None:
    def handles() -> int:
        """Of this store: others of the process come and go."""
        found = 0
        for handle in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                found += os.readlink(f"/proc/self/fd/{handle}").startswith(str(tmp_path))
        return found

    store = FolderStore(tmp_path)
    for number in range(40):
        store.put(f"folder-{number}/x", b"1")
    # Four of its thread, one to sync by, and the root.
    assert 1 <= handles() <= 6
    del store
    assert handles() == 0


def test_a_range_is_the_bytes_that_are_there(store: FolderStore) -> None:
    store.put("a/pack.tar", b"0123456789")
    asked = [(0, 10), (3, 4), (8, 4), (10, 1), (20, 5), (4, 0)]
    assert [store.get_range("a/pack.tar", *one) for one in asked] == [
        b"0123456789",
        b"3456",
        b"89",
        b"",
        b"",
        b"",
    ]
    with pytest.raises(StoreError) as caught:
        store.get_range("a/none.tar", 0, 1)
    assert caught.value.code is ErrorCode.STORE_MISSING


def test_of_many_writers_one_wins(store: FolderStore) -> None:
    created: list[bytes] = []

    def write(data: bytes) -> None:
        if store.put("a/contended", data).created:
            created.append(data)

    threads = [threading.Thread(target=write, args=(bytes([number]) * 100_000,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(created) == 1
    assert store.get("a/contended") == created[0]


def test_missing_objects(store: FolderStore) -> None:
    store.put("a/x", b"")
    assert store.head("a/none") is None
    assert store.head("none/none") is None
    assert store.head("a/x/below-a-file") is None
    store.delete("a/none")
    for key in ("a/none", "none/none"):
        with pytest.raises(StoreError) as caught:
            store.get(key)
        assert caught.value.code is ErrorCode.STORE_MISSING


def test_delete_removes(store: FolderStore) -> None:
    store.put("a/x", b"1")
    store.delete("a/x")
    assert store.head("a/x") is None


def test_list_is_in_key_order_and_hides_what_is_not_an_object(store: FolderStore) -> None:
    keys = ["a/x", "a-b", "a/y/z", "a.c", "b", "a/y.z"]
    for key in keys:
        store.put(key, b"12")
    (store.root / ".nightjar").mkdir()
    (store.root / ".nightjar" / "ledger.sqlite").touch()
    (store.root / "a" / ".left.tmp").touch()
    assert [info.key for info in store.list("")] == sorted(keys)
    assert [info.key for info in store.list("a/")] == ["a/x", "a/y.z", "a/y/z"]
    assert [info.key for info in store.list("a/y")] == ["a/y.z", "a/y/z"]
    assert [info.bytes for info in store.list("b")] == [2]
    assert list(store.list("none/")) == []


def test_folders_of_others_with_odd_names_do_not_end_a_listing(store: FolderStore) -> None:
    store.put("jobs/a/x.wav", b"x")
    root = Path(store.uri("jobs"))
    for name in ("b\\c", "d\u00a0e", "f\ng"):
        (root / name).mkdir()
    (root / "d\u00a0e" / "notes").touch()
    os.mkdir(os.fsencode(root) + b"/\xff")
    assert [info.key for info in store.list("jobs/")] == ["jobs/a/x.wav", "jobs/d\u00a0e/notes"]


@pytest.mark.parametrize("link", ["out", "a/out"])
def test_a_symbolic_link_does_not_lead_out(store: FolderStore, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    store.put("a/x", b"1")
    (store.root / link).symlink_to(outside)
    (store.root / "file").symlink_to(outside / "secret")
    for key in (f"{link}/secret", "file"):
        with pytest.raises(StoreError):
            store.get(key)
    with pytest.raises(StoreError):
        store.put(f"{link}/new", b"1")
    store.delete(f"{link}/secret")
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert [info.key for info in store.list("")] == ["a/x"]


def test_a_folder_or_a_pipe_is_no_object(store: FolderStore) -> None:
    store.put("a/b/x", b"1")
    os.mkfifo(store.root / "pipe")
    for key in ("a/b", "pipe"):
        with pytest.raises(StoreError) as caught:
            store.get(key)
        assert caught.value.code is ErrorCode.STORE_BAD_KEY


def test_check_leaves_nothing(store: FolderStore) -> None:
    store.check()
    assert list(store.root.iterdir()) == []


def test_check_finds_a_store_that_overwrites(tmp_path: Path) -> None:
    class Overwriting(FolderStore):
        def put(self, key: str, *given: Any, **named: Any) -> ObjectInfo:
            self.delete(key)
            return super().put(key, *given, **named)

    with pytest.raises(StoreError, match="replaced an existing object") as caught:
        Overwriting(tmp_path).check()
    assert caught.value.code is ErrorCode.STORE_CONFLICT


def test_addresses(tmp_path: Path) -> None:
    for url in (str(tmp_path / "a b"), (tmp_path / "a b").as_uri(), tmp_path / "a b"):
        opened = open_store(url)
        assert opened.url == (tmp_path / "a b").as_uri()
        assert opened.uri("x/y") == str(tmp_path / "a b" / "x" / "y")
    for url in ("http://host/x", "file://host/x", "", "s3://"):
        with pytest.raises(ConfigError):
            open_store(url)


CHILD = """
import os, resource, sys
from jobs.store import open_store
from pipelines.errors import StoreError
if sys.argv[2] == "limited":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
elif os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    open_store(sys.argv[1]).put("a/x", b"1" * 5000)
except StoreError as error:
    print(error.code)
"""


@pytest.mark.parametrize(
    ("how", "code"), [("limited", ErrorCode.STORE_FULL), ("other-user", ErrorCode.STORE_FORBIDDEN)]
)
def test_a_disk_that_refuses(tmp_path: Path, how: str, code: ErrorCode) -> None:
    folder = tmp_path / "store"
    (folder / "a").mkdir(parents=True)
    for path in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        path.chmod(0o755)
    if os.geteuid() != 0:
        (folder / "a").chmod(0o500 if how == "other-user" else 0o700)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), how], capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == code
    assert list((folder / "a").iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], check=False
        ).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    try:
        small = FolderStore(folder)
        with pytest.raises(StoreError) as caught:
            small.put("a/x", bytes(200_000))
        assert caught.value.code is ErrorCode.STORE_FULL
        assert list(small.list("")) == []
        assert small.put("a/x", b"fits").created
        assert not small.put("a/x", bytes(200_000)).created, "what is there needs no room"
    finally:
        # Lazily: the store still holds the folder it wrote to.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_folders_that_become_empty_go_with_their_objects(store: FolderStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept.wav").write_bytes(b"kept")
    for key in (
        "jobs/a/audio/00000/1.wav",
        "jobs/a/audio/00001/2.wav",
        "jobs/a/input/0.zst",
        "jobs/b/audio/00000/1.wav",
    ):
        store.put(key, b"x")
    (tmp_path / "store/jobs/a/link").symlink_to(outside)
    store.delete_many(
        ["jobs/a/audio/00000/1.wav", "jobs/a/audio/00001/2.wav", "jobs/a/link/kept.wav", "jobs/a/none.wav"]
    )
    assert [path.name for path in sorted((tmp_path / "store/jobs/a").iterdir())] == ["input", "link"]
    (tmp_path / "store/jobs/a/link").unlink()
    store.delete_many(["jobs/a/input/0.zst", "jobs/b/audio/00000/1.wav"])
    assert list((tmp_path / "store").rglob("*")) == [tmp_path / "store/jobs"]
    assert (outside / "kept.wav").read_bytes() == b"kept"
    with pytest.raises(StoreError):
        store.delete_many(["jobs/../../outside/kept.wav"])


def test_a_store_is_known_by_what_its_first_submit_wrote(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "deep" / "store")
    identity = store.establish()
    assert FolderStore(store.root).establish() == identity
    assert FolderStore(store.root).establish("f" * 32) == identity
    (store.root / IDENTITY_KEY).write_bytes(b"")
    assert FolderStore(store.root).establish(identity) == identity, "a power cut left an empty file"
    FolderStore(store.root).confirm(identity)
    with pytest.raises(StoreError) as caught:
        FolderStore(store.root).confirm("f" * 32)
    assert caught.value.code is ErrorCode.STORE_UNREACHABLE
    assert all(part in caught.value.message for part in (str(store.root), IDENTITY_KEY, identity, "f" * 32))


def test_a_root_that_is_missing_is_away_and_is_not_made(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "none")
    calls: list[Callable[[], object]] = [
        lambda: store.put("a/x", b"1"),
        lambda: store.put("a/x", io.BytesIO(b"1")),
        lambda: store.get("a/x"),
        lambda: store.head("a/x"),
        lambda: list(store.list("a/")),
        lambda: store.delete("a/x"),
        lambda: store.delete_many(["a/x"]),
        lambda: store.confirm(None),
        store.sync,
        store.check,
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert (caught.value.code, str(store.root) in caught.value.message) == (
            ErrorCode.STORE_UNREACHABLE,
            True,
        )
    assert not store.root.exists()


def test_nothing_passes_while_another_folder_is_in_the_roots_place(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    identity = store.establish()
    store.put("a/x", b"1")
    store.root.rename(tmp_path / "elsewhere")
    store.root.mkdir()
    for call in (
        lambda: store.put("a/y", b"2"),
        lambda: store.get("a/x"),
        lambda: list(store.list("")),
        lambda: store.sync(),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.code is ErrorCode.STORE_UNREACHABLE
    assert list(store.root.iterdir()) == []
    store.root.rmdir()
    (tmp_path / "elsewhere").rename(store.root)
    assert store.put("a/y", b"2").created
    store.sync()
    store.confirm(identity)
