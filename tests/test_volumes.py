"""Volumes on nodes: linked, mounted, copied and written back, and refused with a reason."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.compute.arguments import volume_plan
from skyward.errors import ConfigurationError, NodeLostError, PoolError
from skyward.files import mounts, volumes
from skyward.files.items import FileItem
from skyward.files.mounts import PROGRAMS, BucketPlace
from skyward.files.scanner import Scanner
from skyward.files.transfer import bring, send
from skyward.files.volumes import BucketCopy, NodeVolume
from skyward.nodes.deliveries import Deliveries, SentFolder
from skyward.wire.channel import ServiceConnection

from .conftest import PATIENCE, only_in_all, wait_until

pytest.importorskip("fsspec", reason="fsspec is not installed")

QUIET = sky.Options(console=False)


@sky.function
def read(path: str) -> str:
    return Path(path).read_text()


@sky.function
def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


@sky.function
def pid() -> int:
    return os.getpid()


def quiet(what: str) -> None:
    """Nobody to tell."""


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """What stands for a bucket: a folder that fsspec opens by a URL."""
    folder = tmp_path / "bucket"
    (folder / "deep").mkdir(parents=True)
    (folder / "data.txt").write_text("data")
    (folder / "deep" / "more.txt").write_text("more")
    return folder


class TestOnAPool:
    def test_a_bucket_is_copied_to_every_node_and_written_back(
        self, bucket: Path, tmp_path: Path
    ) -> None:
        target = tmp_path / "at"
        volume = sky.Volume(f"file://{bucket}", str(target))

        with sky.Compute(nodes=2, volumes=[volume], options=QUIET) as compute:
            assert read(f"{target}/deep/more.txt") @ compute == ["more", "more"]
            write(f"{target}/out/first.txt", "1") >> compute
            assert compute.write_back().files == 1
            assert (bucket / "out" / "first.txt").read_text() == "1"
            write(f"{target}/data.txt", "changed") >> compute

        assert (bucket / "data.txt").read_text() == "changed"
        assert not target.exists()

    def test_a_read_only_volume_is_not_written_back(self, bucket: Path, tmp_path: Path) -> None:
        target = tmp_path / "at"
        volume = sky.Volume(f"file://{bucket}", str(target), read_only=True)

        with sky.Compute(volumes=[volume], options=QUIET) as compute:
            write(f"{target}/data.txt", "changed") >> compute

        assert (bucket / "data.txt").read_text() == "data"

    def test_a_folder_of_this_machine_is_linked_for_local_nodes(
        self, bucket: Path, tmp_path: Path
    ) -> None:
        target = tmp_path / "link"
        volume = sky.Volume(str(bucket), str(target))

        with sky.Compute(nodes=2, volumes=[volume], options=QUIET) as compute:
            assert read(f"{target}/data.txt") @ compute == ["data", "data"]
            write(f"{target}/new", "new") >> compute

        assert (bucket / "new").read_text() == "new"
        assert not os.path.lexists(target)

    def test_a_path_that_is_taken_fails_the_start_and_says_so(
        self, bucket: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "file").touch()
        volume = sky.Volume(f"file://{bucket}", str(tmp_path / "taken"))

        with (
            pytest.raises(PoolError, match=r"taken is taken: .*choose another target"),
            sky.Compute(volumes=[volume], options=QUIET),
        ):
            raise AssertionError("started")

        assert (tmp_path / "taken" / "file").exists()

    @only_in_all
    def test_what_was_written_goes_back_when_the_client_is_gone(
        self, bucket: Path, tmp_path: Path, nothing_left: None
    ) -> None:
        target = tmp_path / "at"
        script = tmp_path / "client.py"
        script.write_text(
            "import os, pathlib, signal, skyward as sky\n"
            "@sky.function\n"
            "def write():\n"
            f"    pathlib.Path({str(target / 'late')!r}).write_text('late')\n"
            f"volume = sky.Volume('file://{bucket}', {str(target)!r})\n"
            "options = sky.Options(console=False)\n"
            "with sky.Compute(volumes=[volume], options=options) as compute:\n"
            "    write() >> compute\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )

        done = subprocess.run([sys.executable, str(script)], timeout=PATIENCE)
        assert done.returncode == -signal.SIGKILL

        wait_until(lambda: not target.exists(), what="the end of the node")
        assert (bucket / "late").read_text() == "late"


class TestNodesThatDoNotAnswer:
    """What cannot be written back is told, and keeps nothing else from ending."""

    def test_a_pool_ends_although_its_node_cannot_be_reached(
        self, bucket: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        volume = sky.Volume(f"file://{bucket}", str(tmp_path / "at"))

        with sky.Compute(volumes=[volume], options=QUIET) as compute:
            pool = compute._open_fleet
            worker = pid() >> compute
            pool.deliveries._open = _lost

        assert pool.closed
        assert not psutil.pid_exists(worker)
        assert "not everything was written back: " in capfd.readouterr().err

    def test_every_node_and_volume_is_tried_and_all_problems_are_told_at_the_end(
        self, tmp_path: Path
    ) -> None:
        asked: list[int] = []

        def open_service(node: int, name: str) -> ServiceConnection:
            asked.append(node)
            return _lost(node, name)

        volumes = [sky.Volume("s3://first", "/first"), sky.Volume("s3://second", "/second")]
        folder = SentFolder(tmp_path, "/there", back=True)
        deliveries = Deliveries([folder], volumes, open_service)

        with pytest.raises(
            PoolError, match=rf"first.*node 0.*second.*node 1.*{tmp_path}: node 1: gone"
        ):
            deliveries.write_back([0, 1], quiet)

        assert asked == [0, 1] * 3


def test_a_folder_of_another_machine_is_not_made_here(tmp_path: Path) -> None:
    told: list[str] = []
    folder = SentFolder(tmp_path / "away", "/there", back=True)

    Deliveries([folder], [], _lost).write_back([0], told.append)

    assert told == [f"there is no folder {tmp_path / 'away'} here: its files stay on nodes"]


def _lost(node: int, name: str) -> ServiceConnection:
    raise NodeLostError("gone")


class TestPlan:
    """Who makes a volume: the provider, the node, or the client, which sends it."""

    def test_providers_that_mount_folders_get_them(self) -> None:
        data, claim = sky.Volume("/usr", "/data"), sky.Volume("pvc://claim", "/claim")
        bucket = sky.Volume("s3://bucket/path", "/bucket")

        made = volume_plan(sky.Container(), [data, claim, bucket])

        assert (made.providers, made.nodes, made.sent) == ((data, claim), (bucket,), ())

    def test_hosts_get_a_copy_of_a_folder_that_comes_back_unless_it_is_read_only(
        self, tmp_path: Path
    ) -> None:
        hosts = sky.SSH(["one"])
        theirs = sky.Volume("/scratch")

        made = volume_plan(
            hosts,
            [
                sky.Volume(str(tmp_path), "/data"),
                sky.Volume(str(tmp_path), "/fixed", read_only=True),
                theirs,
            ],
        )

        assert made.providers == (theirs,)
        assert made.sent == (
            SentFolder(tmp_path, "/data", everything=True, back=True),
            SentFolder(tmp_path, "/fixed", everything=True, back=False),
        )

    @pytest.mark.parametrize("source", ["pvc://claim", "emptydir://"])
    def test_a_claim_is_refused_where_nothing_is_mounted(self, source: str) -> None:
        for provider in (sky.SSH(["one"]), sky.Local(), sky.Slurm(), sky.Ray("http://head:8265")):
            with pytest.raises(ConfigurationError, match=r"is of Kubernetes, and nodes of .* have"):
                sky.Compute(provider, volumes=[sky.Volume(source, "/data")])

    def test_a_folder_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"there is no folder .*nothing on this"):
            sky.Compute(volumes=[sky.Volume(str(tmp_path / "nothing"), "/data")])

    def test_two_volumes_at_one_path_are_refused(self) -> None:
        twice = [sky.Volume("s3://a", "/data"), sky.Volume("s3://b", "/data")]
        with pytest.raises(ConfigurationError, match="two of them have the target '/data'"):
            sky.Compute(volumes=twice)


class TestSentFolders:
    def test_what_functions_write_comes_back_and_nothing_is_removed_here(
        self, tmp_path: Path
    ) -> None:
        source, target = tmp_path / "here", tmp_path / "there"
        source.mkdir()
        (source / "kept").write_text("kept")
        (source / "changed").write_text("old")
        folder = SentFolder(source, str(target), everything=True, back=True)

        with sky.Compute(options=QUIET) as compute:
            deliveries = Deliveries([folder], [], compute._open_fleet.service)
            deliveries.deliver(0)
            write(str(target / "changed"), "new") >> compute
            write(str(target / "deep" / "made"), "made") >> compute
            (target / "kept").unlink()
            done = deliveries.write_back([0], quiet)

        assert (done.files, done.bytes) == (2, 7)
        assert (source / "kept").read_text() == "kept"
        assert (source / "changed").read_text() == "new"
        assert (source / "deep" / "made").read_text() == "made"

    def test_another_client_brings_back_what_functions_wrote_and_no_old_copies(
        self, tmp_path: Path
    ) -> None:
        source, target = tmp_path / "here", tmp_path / "there"
        source.mkdir()
        for name in ("mine", "theirs", "both"):
            (source / name).write_text("old")
        folder = SentFolder(source, str(target), everything=True, back=True)
        told: list[str] = []

        with sky.Compute(options=QUIET) as compute:
            service = compute._open_fleet.service
            Deliveries([folder], [], service).deliver(0)
            (source / "mine").write_text("newer here")
            (source / "both").write_text("newer here")
            write(str(target / "theirs"), "first") >> compute
            write(str(target / "both"), "new there") >> compute
            assert Deliveries([folder], [], service).write_back([0], told.append).files == 1
            assert (source / "theirs").read_text() == "first"
            write(str(target / "theirs"), "second") >> compute
            Deliveries([folder], [], service).write_back([0], quiet)

        assert (source / "theirs").read_text() == "second"
        assert (source / "mine").read_text() == "newer here"
        assert (source / "both").read_text() == "newer here"
        assert told[0].startswith(f"{source / 'both'} stays as it is: it has changed here, too")

    def test_the_last_of_several_nodes_that_change_a_file_wins(self, tmp_path: Path) -> None:
        source = tmp_path / "here"
        source.mkdir()
        (source / "result").write_text("old")
        brought: dict[str, FileItem] = {}

        with sky.Compute(options=QUIET) as compute:
            for target in (tmp_path / "first", tmp_path / "second"):
                with compute._open_fleet.service(0, "files") as connection:
                    scanner = Scanner(source, everything=True)
                    if target.name == "first":
                        listing = scanner.scan()
                    send(connection, listing, scanner.scan, source, str(target))
                    write(str(target / "result"), target.name) >> compute
                    bring(connection, str(target), source, brought)

                assert (source / "result").read_text() == target.name

    def test_links_that_lead_out_of_the_folder_do_not_come_back(self, tmp_path: Path) -> None:
        source, target, private = tmp_path / "here", tmp_path / "there", tmp_path / "private"
        for each in (source, private):
            each.mkdir()
        (source / "linked").symlink_to(private)
        folder = SentFolder(source, str(target), everything=True, back=True)
        told: list[str] = []

        with sky.Compute(options=QUIET) as compute:
            deliveries = Deliveries([folder], [], compute._open_fleet.service)
            deliveries.deliver(0)
            (target / "linked").unlink()
            write(str(target / "linked" / "key"), "theirs") >> compute
            (target / "out").symlink_to(private)
            (target / "in").symlink_to("linked/key")
            deliveries.write_back([0], told.append)

        assert not list(private.iterdir())
        assert not os.path.lexists(source / "out")
        assert os.readlink(source / "in") == "linked/key"
        assert any(f"a link to {private}, out of the folder" in each for each in told)
        assert any(f"{source / 'linked'} is a link or a file here" in each for each in told)

    def test_files_stay_as_private_as_they_were(self, tmp_path: Path) -> None:
        source, target = tmp_path / "here", tmp_path / "there"
        source.mkdir()
        (source / "key").write_text("old")
        (source / "key").chmod(0o600)
        folder = SentFolder(source, str(target), everything=True, back=True)

        with sky.Compute(options=QUIET) as compute:
            deliveries = Deliveries([folder], [], compute._open_fleet.service)
            deliveries.deliver(0)
            assert stat.S_IMODE((target / "key").stat().st_mode) == 0o600
            (target / "key").chmod(0o644)
            write(str(target / "key"), "new") >> compute
            deliveries.write_back([0], quiet)

        assert (source / "key").read_text() == "new"
        assert stat.S_IMODE((source / "key").stat().st_mode) == 0o600

    def test_a_folder_that_is_not_on_the_node_says_so(self, tmp_path: Path) -> None:
        with (
            sky.Compute(options=QUIET) as compute,
            compute._open_fleet.service(0, "files") as connection,
            pytest.raises(PoolError, match=r"No such file or directory: .*nothing"),
        ):
            bring(connection, str(tmp_path / "nothing"), tmp_path, {})


class TestCopies:
    def test_progress_is_told_in_bytes(self, bucket: Path, tmp_path: Path) -> None:
        told: list[str] = []
        (tmp_path / "at").mkdir()

        BucketCopy(f"file://{bucket}", tmp_path / "at").bring(told.append)

        assert told[-1] == f"copying file://{bucket}, 0.0 of 0.0 MB"
        assert len(told) == 2

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("file:///nothing/here", r"there is nothing at file:///nothing/here; check the name"),
            ("weather://paris", r"give a URL that fsspec knows"),
        ],
    )
    def test_what_cannot_be_copied_says_why(self, tmp_path: Path, url: str, message: str) -> None:
        with pytest.raises(PoolError, match=message):
            NodeVolume(url, str(tmp_path / "at"), read_only=True).open(quiet)

    def test_what_fails_leaves_no_folder_of_its_own_and_no_record(self, tmp_path: Path) -> None:
        volume = NodeVolume("file:///nothing/here", str(tmp_path / "a" / "at"), read_only=False)
        with pytest.raises(PoolError, match="there is nothing at"):
            volume.open(quiet)
        assert list(tmp_path.iterdir()) == []
        assert not volume._place.exists()

        (tmp_path / "a" / "at").mkdir(parents=True)
        with pytest.raises(PoolError, match="there is nothing at"):
            volume.open(quiet)
        assert (tmp_path / "a" / "at").exists(), "it was there before"

    def test_a_new_path_in_a_bucket_that_exists_is_made_by_what_is_written(
        self, bucket: Path, tmp_path: Path
    ) -> None:
        target = tmp_path / "at"
        url = f"file://{bucket}/run-7"
        with pytest.raises(PoolError, match="there is nothing at"):
            NodeVolume(url, str(target), read_only=True).open(quiet)

        volume = NodeVolume(url, str(target), read_only=False)
        volume.open(quiet)
        assert list(target.iterdir()) == []
        assert not (bucket / "run-7").exists()
        (target / "deep").mkdir()
        (target / "deep" / "model").write_text("weights")
        assert volume.close(quiet) == 1

        assert (bucket / "run-7" / "deep" / "model").read_text() == "weights"
        assert not target.exists()

    def test_of_a_bucket_only_the_bucket_has_to_be_there(self) -> None:
        assert volumes._holder("bucket/new/deep") == "bucket"
        assert volumes._holder("/data/new/deep") == "/data/new"
        assert volumes._holder("/new") == "/"

    def test_a_key_that_leads_out_of_the_volume_is_refused(
        self, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        volume = NodeVolume(f"file://{bucket}", str(tmp_path / "at"), read_only=True)
        found = {f"{bucket}/../escaped": {"size": 1}}
        monkeypatch.setattr(
            "fsspec.implementations.local.LocalFileSystem.find", lambda *_, **__: found
        )

        with pytest.raises(PoolError, match=r"the key '.*\.\./escaped' is no path below a folder"):
            volume.open(quiet)

    def test_what_is_written_after_the_first_user_left_is_written_back_by_the_second(
        self, bucket: Path, tmp_path: Path
    ) -> None:
        target = tmp_path / "at"
        first, second = (
            NodeVolume(f"file://{bucket}", str(target), read_only=False) for _ in range(2)
        )
        first.open(quiet)
        second.open(quiet)
        (target / "early").write_text("early")
        assert (first.write_back(quiet), second.write_back(quiet)) == (1, 0)

        first.close(quiet)
        (target / "late").write_text("late")
        assert second.close(quiet) == 1

        assert (bucket / "late").read_text() == "late"
        assert not target.exists()

    def test_missing_credentials_are_named_with_the_way_to_give_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("s3fs", reason="s3fs is not installed")
        for name in list(os.environ):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))

        with pytest.raises(PoolError, match=r"s3://bucket.*credentials.*Image\(env="):
            NodeVolume("s3://bucket/part", str(tmp_path / "at"), read_only=True).open(quiet)

    def test_too_little_room_is_told_before_anything_is_copied(
        self, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: Full())

        with pytest.raises(PoolError, match=r"has room for 0\.0 GB; mount it .*disk_gb"):
            NodeVolume(f"file://{bucket}", str(tmp_path / "at"), read_only=True).open(quiet)

    def test_a_target_that_may_not_be_made_is_named(self, bucket: Path) -> None:
        with pytest.raises(PoolError, match=r"/proc/data cannot be made on the node: .*below /tmp"):
            NodeVolume(f"file://{bucket}", "/proc/data", read_only=True).open(quiet)

    def test_a_copy_that_cannot_be_written_back_stays(
        self, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        volume = NodeVolume(f"file://{bucket}", str(tmp_path / "at"), read_only=False)
        volume.open(quiet)
        (tmp_path / "at" / "new").write_text("new")
        monkeypatch.setattr(BucketCopy, "_each", _no_copy)

        with pytest.raises(PoolError, match=r"no copy; what functions wrote is still .*/at"):
            volume.close(quiet)

        assert (tmp_path / "at" / "new").read_text() == "new"
        monkeypatch.undo()
        volume.open(quiet)
        assert (bucket / "new").read_text() == "new"
        volume.close(quiet)
        assert not (tmp_path / "at").exists()


class TestKilledUsers:
    """A copy whose processes were all killed: what functions wrote there is not lost."""

    @pytest.fixture
    def volume(
        self, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[NodeVolume]:
        killed = NodeVolume(f"file://{bucket}", str(tmp_path / "at"), read_only=False)
        killed.open(quiet)
        (tmp_path / "at" / "data.txt").write_text("DATA")
        (tmp_path / "at" / "new.txt").write_text("new")
        # Its id is that of this process now, as in a container that was started again.
        began = volumes._began(os.getpid())
        assert began is not None
        monkeypatch.setattr(volumes, "_began", lambda pid: began + 1)
        volume = NodeVolume(f"file://{bucket}", str(tmp_path / "at"), read_only=False)
        yield volume
        volume.close(quiet)

    def test_it_is_written_back_before_the_next_copy(
        self, volume: NodeVolume, bucket: Path, tmp_path: Path
    ) -> None:
        volume.open(quiet)

        assert (bucket / "data.txt").read_text() == "DATA"
        assert (bucket / "new.txt").read_text() == "new"
        assert (tmp_path / "at" / "data.txt").read_text() == "DATA"

    def test_a_file_that_has_changed_at_the_source_too_is_refused_until_one_side_is_taken(
        self, volume: NodeVolume, bucket: Path, tmp_path: Path
    ) -> None:
        (bucket / "data.txt").write_text("elsewhere")
        (bucket / "new.txt").write_text("new")  # the process was killed while it wrote back

        for _ in range(2):
            with pytest.raises(PoolError, match=r"also changed at the source: data\.txt\. To keep"):
                volume.open(quiet)
        assert (tmp_path / "at" / "data.txt").read_text() == "DATA"
        assert (bucket / "data.txt").read_text() == "elsewhere"

        shutil.rmtree(tmp_path / "at")
        volume.open(quiet)
        assert (tmp_path / "at" / "data.txt").read_text() == "elsewhere"

    def test_what_cannot_be_written_back_is_not_copied_over(
        self, volume: NodeVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(BucketCopy, "_each", _no_copy)
            with pytest.raises(PoolError, match=r"that was killed, that cannot be .* no copy\. To"):
                volume.open(quiet)
        assert (tmp_path / "at" / "data.txt").read_text() == "DATA"

    def test_another_source_is_not_taken_for_the_same(
        self, volume: NodeVolume, bucket: Path, tmp_path: Path
    ) -> None:
        other = NodeVolume(f"file://{bucket}/deep", str(tmp_path / "at"), read_only=False)
        with pytest.raises(PoolError, match=r"at is taken: the node has files there already"):
            other.open(quiet)
        volume.open(quiet)
        assert (bucket / "new.txt").read_text() == "new"


def test_a_process_is_told_from_another_by_its_start_and_uses_nothing_after_its_end() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        began = volumes._began(process.pid)
        assert began == volumes._began(process.pid) != volumes._began(os.getpid())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert volumes._began(process.pid) is None
    assert volumes._began(process.pid) is None


class Full:
    """A disk without room."""

    free = 0


class TestMounts:
    def test_programs_get_the_bucket_the_prefix_and_the_mode(self) -> None:
        place = BucketPlace.of("s3://bucket/a/b")

        first, second, third = (write(place, "/data", True) for write in PROGRAMS["s3"])
        (fuse, _) = (
            write(BucketPlace.of("gs://bucket"), "/data", False) for write in PROGRAMS["gs"]
        )

        assert first[:4] == ["mount-s3", "bucket", "/data", "--foreground"]
        assert first[-3:] == ["--prefix", "a/b/", "--read-only"]
        assert second == ["s3fs", "bucket:/a/b", "/data", "-f", "-o", "ro"]
        assert third == ["rclone", "mount", ":s3,env_auth:bucket/a/b", "/data", "--read-only"]
        assert fuse[-4:] == ["-o", "rw", "bucket", "/data"]

    @pytest.fixture
    def program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:  # type: ignore[type-arg]
        """Puts a program of a name on PATH, with `ismount` as the program says."""
        folder = tmp_path / "bin"
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setattr(mounts, "FUSE", str(folder))
        monkeypatch.setattr(os.path, "ismount", lambda path: (Path(path) / "mounted").exists())

        def put(name: str, script: str) -> None:
            path = folder / name
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

        return put

    def test_a_mounted_bucket_is_unmounted_at_the_end(
        self,
        program: Callable,  # type: ignore[type-arg]
        tmp_path: Path,
    ) -> None:
        program("s3fs", 'touch "$2/mounted"; exec sleep 1000')
        program("fusermount3", 'rm "$2/mounted"')
        volume = NodeVolume("s3://bucket", str(tmp_path / "at"), read_only=False)

        volume.open(quiet)
        assert (tmp_path / "at" / "mounted").exists()
        volume.close(quiet)

        assert not (tmp_path / "at").exists()

    def test_a_program_may_log_as_much_as_it_likes(
        self,
        program: Callable,  # type: ignore[type-arg]
        tmp_path: Path,
    ) -> None:
        # It mounts only after it has written more than a pipe holds.
        program("s3fs", 'head -c 200000 /dev/zero >&2; touch "$2/mounted"; exec sleep 1000')
        program("fusermount3", 'rm "$2/mounted"')
        volume = NodeVolume("s3://bucket", str(tmp_path / "at"), read_only=False)

        volume.open(quiet)
        volume.close(quiet)

        assert not (tmp_path / "at").exists()

    def test_a_mount_of_the_nodes_own_is_not_taken_for_the_volume(
        self,
        program: Callable,  # type: ignore[type-arg]
        tmp_path: Path,
    ) -> None:
        (tmp_path / "at").mkdir()
        (tmp_path / "at" / "mounted").touch()

        with pytest.raises(PoolError, match=r"at is taken: the node has files there already"):
            NodeVolume("s3://bucket", str(tmp_path / "at"), read_only=True).open(quiet)

    def test_a_program_that_does_not_unmount_is_ended_in_time(
        self,
        program: Callable,  # type: ignore[type-arg]
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        program("s3fs", 'touch "$2/mounted"; exec sleep 1000')
        program("fusermount3", "exec sleep 1000")
        program("fusermount", "exit 1")
        program("umount", 'rm "$1/mounted"')
        volume = NodeVolume("s3://bucket", str(tmp_path / "at"), read_only=False)
        volume.open(quiet)
        monkeypatch.setattr(mounts, "UNMOUNT_SECONDS", 1.0)

        volume.close(quiet)

        assert not (tmp_path / "at").exists()

    def test_a_file_server_that_does_not_answer_is_named(
        self,
        program: Callable,  # type: ignore[type-arg]
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        program("mount.nfs", "")
        program("mount", "sleep 1000")
        monkeypatch.setattr(mounts, "MOUNT_SECONDS", 0.2)

        with pytest.raises(PoolError, match=r"server did not answer in 0\.2 s; check its name"):
            NodeVolume("nfs://server/export", str(tmp_path / "at"), read_only=True).open(quiet)

    def test_a_program_that_fails_is_quoted_when_copying_fails_too(
        self,
        program: Callable,  # type: ignore[type-arg]
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        program("gcsfuse", "echo 'no permission for bucket' >&2; exit 1")
        monkeypatch.setattr("skyward.files.volumes._opened", _no_copy)

        with pytest.raises(PoolError, match=r"no copy \(and could not .*gcsfuse: no permission"):
            NodeVolume("gs://bucket", str(tmp_path / "at"), read_only=True).open(quiet)

    def test_nfs_is_mounted_and_never_copied(
        self,
        program: Callable,  # type: ignore[type-arg]
        tmp_path: Path,
    ) -> None:
        program("mount.nfs", "")
        program("mount", "echo 'access denied by server' >&2; exit 32")

        with pytest.raises(PoolError, match=r"mount: access denied by server; mounting NFS needs"):
            NodeVolume("nfs://server/export", str(tmp_path / "at"), read_only=True).open(quiet)


def _no_copy(*_: object) -> None:
    raise PoolError("no copy")
