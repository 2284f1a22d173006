"""From a bare machine to a running agent: real installs, in a scratch home on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyward import bootstrap
from skyward.bootstrap import Environment
from skyward.bootstrap.recipe import Recipe
from skyward.bootstrap.wheel import own_wheel
from skyward.errors import ImageError, PoolStartError
from skyward.providers import Order, Request
from skyward.providers.local import LocalMachine
from skyward.spec import Image, PipIndex
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.handshake import CLIENT, Authority, Credentials, connect, my_versions, node_name
from skyward.wire.messages import ExecutorUp, Hello, Message, Ping
from skyward.worker.config import AgentConfig
from skyward.worker.detached import start_mark

from ..conftest import only_in_all, other_case

ME = "{}.{}".format(*sys.version_info)
BASE = Path(sys.base_prefix, "bin")
POOL = f"boot{os.getpid()}"


class Bare(LocalMachine):
    """This machine with another home and no other variables; it keeps a list of what ran."""

    def __init__(self, folder: Path, **equipment: Any) -> None:
        super().__init__(folder, **equipment)
        self.python = None
        self.commands: list[Sequence[str]] = []
        self.environment: dict[str, str] = {}

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        self.commands.append(command)
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        whole = ["/usr/bin/env", "-i", *settings, *command]
        return await super().run(whole, input=input, output=output)


class Lab:
    """Machines that share one home, and what was said while they were prepared."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self.home = home
        self.cache = home / ".cache/skyward"
        self.phases: list[str] = []
        self.notes: list[str] = []
        self.made: list[tuple[Bare, int]] = []
        # One for all homes, so that only the first of them downloads.
        self.environment = {
            "HOME": str(home),
            "PATH": f"{BASE}:/usr/bin:/bin",
            "UV_CACHE_DIR": str(home.parent / "uv-cache"),
            **{name: os.environ[name] for name in os.environ if name.startswith("SKYWARD_TEST")},
        }

    def machine(self, node: int = 0) -> Bare:
        request = Request(None, None, None, Image(), ())
        machine = Bare.made(Order(POOL, node, request))
        assert isinstance(machine, Bare)
        machine.environment = self.environment
        self.made.append((machine, node))
        return machine

    async def prepare(self, machine: Bare, image: Image) -> Environment:
        return await bootstrap.prepare(
            machine, POOL, machine.node, image, self.phases.append, self.notes.append
        )

    def prepared(self, image: Image, node: int = 0) -> tuple[Bare, Environment]:
        machine = self.machine(node)
        return machine, asyncio.run(self.prepare(machine, image))

    def close(self) -> None:
        async def clean() -> None:
            for machine, node in self.made:
                await bootstrap.remove(machine, POOL, node)
                await machine.destroy()

        asyncio.run(clean())
        self.made.clear()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(scope="module")
def first(shelf: Path) -> tuple[Lab, Environment]:
    """A home in which one image has been built."""
    lab = Lab(shelf / "first")
    try:
        _, prepared = lab.prepared(Image(pip=["iniconfig"]))
    except ImageError as problem:
        if "the network or an index did not answer" in str(problem):
            pytest.skip("no package index can be reached")
        raise
    finally:
        lab.close()
    return lab, prepared


@pytest.fixture
def built(first: tuple[Lab, Environment]) -> Iterator[Lab]:
    lab = first[0]
    lab.phases, lab.notes = [], []
    yield lab
    lab.close()


@pytest.fixture
def lab(
    first: tuple[Lab, Environment], shelf: Path, request: pytest.FixtureRequest
) -> Iterator[Lab]:
    """A home with uv and nothing else."""
    made = Lab(shelf / request.node.name[:60].replace("[", "-").replace("]", ""))
    (made.cache / "uv").mkdir(parents=True)
    shutil.copy(first[0].cache / "uv/uv", made.cache / "uv/uv")
    yield made
    made.close()


def said_by(lab: Lab, python: str, code: str) -> str:
    found = subprocess.run(
        [python, "-c", code], env=lab.environment, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def test_a_machine_with_python_gets_uv_skyward_and_the_packages(
    first: tuple[Lab, Environment],
) -> None:
    lab, prepared = first
    assert not prepared.cached
    code = "import skyward, iniconfig, sys; print(sys.prefix); print(skyward.__file__)"
    prefix, file = said_by(lab, prepared.python, code).split("\n")
    assert Path(prefix).parent == lab.cache / "envs"
    assert file.startswith(prefix), "the wheel's, not this source tree's"
    assert said_by(lab, prepared.python, "import sys; print(sys.version)").startswith(ME)
    assert prepared.hostname == os.uname().nodename
    assert len(prepared.folder) <= 70


def test_the_same_image_again_is_one_command(built: Lab) -> None:
    machine, prepared = built.prepared(Image(pip=["iniconfig"]), node=1)
    assert prepared.cached
    assert machine.commands == [["sh", "-s"]]
    assert built.phases == ["looking at the machine"]
    assert os.stat(prepared.folder).st_mode & 0o777 == 0o700


def test_a_machine_that_has_all_is_only_looked_at(lab: Lab) -> None:
    machine = lab.machine()
    machine.python = sys.executable
    prepared = asyncio.run(lab.prepare(machine, Image(pip=["nosuchpackage-xyz"])))
    assert prepared.cached
    assert prepared.python == sys.executable
    assert machine.commands == [["sh", "-s"]]


def test_a_package_that_does_not_exist_is_named_with_the_line_that_asked_for_it(lab: Lab) -> None:
    image = Image(pip=["iniconfig", "nosuchpackage-xyz>=3"], env={"TOKEN": "very-secret"})
    with pytest.raises(ImageError) as caught:
        lab.prepared(image)
    message = str(caught.value)
    assert message.startswith(
        "node 0: installing packages failed for Image(pip=['nosuchpackage-xyz>=3'])\n"
    )
    assert "not found" in message
    assert "PipIndex(url, packages=['nosuchpackage-xyz'])" in message
    assert "very-secret" not in message
    machine = lab.made[0][0]
    assert not any("very-secret" in part for command in machine.commands for part in command)
    assert not list((lab.cache / "envs").glob("*/.ready"))


def index(folder: Path, **versions: tuple[str, Sequence[str]]) -> str:
    """A package index in a folder, each package a module that says where it is from."""
    for name, (version, requires) in versions.items():
        (folder / name).mkdir(parents=True)
        file = f"{name}-{version}-py3-none-any.whl"
        info = f"{name}-{version}.dist-info"
        lines = "".join(f"Requires-Dist: {other}\n" for other in requires)
        with zipfile.ZipFile(folder / name / file, "w") as wheel:
            wheel.writestr(f"{name}.py", f"origin = {folder.name!r}\n")
            header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}"
            wheel.writestr(f"{info}/METADATA", header)
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{info}/WHEEL", tag)
            wheel.writestr(f"{info}/RECORD", "")
        (folder / name / "index.html").write_text(f'<a href="{file}">{file}</a>')
    return folder.as_uri()


def test_an_index_serves_the_packages_it_is_for_and_no_others(lab: Lab, tmp_path: Path) -> None:
    """`skyalpha` is asked for, `skydelta` only by another package, `skybeta` is not for it."""
    main = index(
        tmp_path / "main",
        skyalpha=("9.0", ()),
        skybeta=("1.0", ()),
        skydelta=("9.0", ()),
        skytop=("1.0", ["skydelta"]),
    )
    special = index(
        tmp_path / "special",
        skyalpha=("0.5", ()),
        skybeta=("9.0", ()),
        skydelta=("0.5", ()),
        skyunused=("1.0", ()),
    )
    image = Image(
        pip=["skyalpha", "skybeta", "skytop"],
        pip_indexes=[PipIndex(special, packages=["SkyAlpha", "skydelta", "skyunused"])],
        env={"UV_INDEX": main},
    )
    _, prepared = lab.prepared(image)
    code = "import skyalpha as a, skybeta as b, skydelta as d; print(a.origin, b.origin, d.origin)"
    assert said_by(lab, prepared.python, code) == "special main special"
    code = "import importlib.util as u; print(u.find_spec('skyunused'))"
    assert said_by(lab, prepared.python, code) == "None"


@pytest.mark.parametrize("with_uv", [True, pytest.param(False, marks=only_in_all)])
def test_an_index_may_be_a_folder_of_wheels(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_uv: bool
) -> None:
    index(tmp_path / "wheels of mine", skyalpha=("1.0", ()))
    wheels = tmp_path / "wheels of mine" / "skyalpha"
    (wheels / "index.html").unlink()
    image = Image(pip=["skyalpha"], pip_indexes=[PipIndex(wheels.as_uri(), ["skyalpha"])])
    if not with_uv:
        instructions = Recipe.instructions
        monkeypatch.setattr(Recipe, "instructions", lambda self, uv: instructions(self, uv=False))
    _, prepared = lab.prepared(image)
    code = "import skyalpha; print(skyalpha.origin)"
    assert said_by(lab, prepared.python, code) == "wheels of mine"


def test_pips_own_settings_on_the_machine_are_heeded(lab: Lab, tmp_path: Path) -> None:
    mine = index(tmp_path / "mine", skyalpha=("1.0", ()))
    settings = lab.home / ".config/pip/pip.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[global]\n# mine\nextra-index-url =\n    {mine}\n")
    _, prepared = lab.prepared(Image(pip=["skyalpha"]))
    assert said_by(lab, prepared.python, "import skyalpha; print(skyalpha.origin)") == "mine"


def test_includes_are_in_the_working_directory_and_sent_once(
    built: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/helper.py").write_text("VALUE = 7\n")
    (tmp_path / "mine/helper.py").chmod(0o464)
    monkeypatch.chdir(tmp_path)
    image = Image(pip=["iniconfig"], includes=["mine"])
    machine, prepared = built.prepared(image)
    assert (Path(prepared.work) / "mine/helper.py").read_text() == "VALUE = 7\n"
    assert (Path(prepared.work) / "mine/helper.py").stat().st_mode & 0o777 == 0o464
    assert built.notes == ["includes: 1 file, 10 bytes"]
    assert len(machine.commands) == 3
    again, second = built.prepared(image, node=1)
    assert len(again.commands) == 1
    assert (Path(second.work) / "mine/helper.py").is_file()
    (tmp_path / "mine/helper.py").chmod(0o644)
    (tmp_path / "mine/helper.py").write_text("VALUE = 8\n")
    _, third = built.prepared(image, node=2)
    assert (Path(third.work) / "mine/helper.py").read_text() == "VALUE = 8\n"


def test_two_nodes_on_one_machine_build_once(lab: Lab) -> None:
    image = Image(pip=["iniconfig==2.0.0"])
    machines = [lab.machine(0), lab.machine(1)]

    async def both() -> list[Environment]:
        return await asyncio.gather(*(lab.prepare(machine, image) for machine in machines))

    one, other = asyncio.run(both())
    assert one.python == other.python
    assert one.folder != other.folder
    assert lab.phases.count("installing packages") == 1
    assert lab.phases.count("waiting for another node that builds this environment") <= 1


def test_an_interrupted_build_is_begun_again(lab: Lab) -> None:
    image = Image(pip=["iniconfig"])

    async def interrupted() -> None:
        machine = lab.machine()
        preparing = asyncio.create_task(lab.prepare(machine, image))
        while not list((lab.cache / "envs").glob("*/pyvenv.cfg")):
            await asyncio.sleep(0.005)
        preparing.cancel()
        await asyncio.wait([preparing])
        assert preparing.cancelled()

    asyncio.run(interrupted())
    assert list((lab.cache / "envs").glob("*.lock")), "as after a crash"
    assert not list((lab.cache / "envs").glob("*/.ready"))
    _, prepared = lab.prepared(image, node=1)
    assert not prepared.cached
    assert said_by(lab, prepared.python, "import iniconfig; print('there')") == "there"
    assert not list((lab.cache / "envs").glob("*.lock"))


@only_in_all
@pytest.mark.slow
def test_a_machine_with_hardly_more_than_sh_gets_uv_carried_there(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python is not on the PATH; there is no awk, find, tar, gzip or sed.

    Slow: uv is fetched here and installs everything there.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    basic = "sh cat chmod id ln ls mkdir mv readlink rm sleep touch uname wc"
    for name in basic.split():
        (programs / name).symlink_to(shutil.which(name) or "")
    versions = lab.home / ".pyenv/versions"
    versions.mkdir(parents=True)
    (versions / f"{ME}.0").symlink_to(sys.base_prefix)
    # Where its pip finds nothing, it has no use of it.
    lab.environment = {**lab.environment, "PATH": str(programs), "PIP_NO_INDEX": "1"}
    (lab.cache / "uv/uv").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "mine.txt").chmod(0o464)
    machine, prepared = lab.prepared(Image(includes=[str(tmp_path / "mine.txt")]))
    assert "sending uv" in lab.phases
    assert (lab.cache / "uv/uv").is_file()
    assert (Path(prepared.work) / "mine.txt").read_text() == "mine"
    assert (Path(prepared.work) / "mine.txt").stat().st_mode & 0o777 == 0o464
    assert len(machine.commands) == 6


@only_in_all
def test_a_python_that_cannot_be_had_is_named(lab: Lab, tmp_path: Path) -> None:
    Apt(lab, tmp_path / "apt")
    image = Image(python="3.14.99", env={"UV_PYTHON_INSTALL_MIRROR": tmp_path.as_uri()})
    with pytest.raises(ImageError, match=r"failed for Image\(python='3\.14\.99'\)"):
        lab.prepared(image)


class Apt:
    """A machine's package manager, as far as we use it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        folder.mkdir()
        self.installed = folder / "installed"
        self.calls = folder / "calls"
        self.installed.touch()
        self.calls.touch()
        self._program(
            folder / "dpkg-query",
            f'for name; do :; done\ngrep -qx "$name" {self.installed} && echo "installed 1.0"',
        )
        self._program(
            folder / "apt-get",
            f'echo "$DEBIAN_FRONTEND $*" >>{self.calls}\nfor last; do :; done\n'
            'if [ "$last" = nosuch ]; then\n'
            '    echo "E: Unable to locate package nosuch"; exit 100\nfi\n'
            f'case "$*" in *install*) echo "$last" >>{self.installed};; esac',
        )
        lab.environment = {**lab.environment, "PATH": f"{folder}:{lab.environment['PATH']}"}

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


@pytest.mark.skipif(os.getuid() != 0, reason="installing system packages takes root")
def test_system_packages_are_installed_where_they_are_missing(lab: Lab, tmp_path: Path) -> None:
    apt = Apt(lab, tmp_path / "apt")
    image = Image(apt=["ffmpeg"])
    lab.prepared(image)
    update, install = apt.calls.read_text().splitlines()
    assert update.startswith("noninteractive -qq -o DPkg::Lock::Timeout=180")
    assert install.endswith("install -y --no-install-recommends ffmpeg")
    assert "installing ffmpeg with apt" in lab.phases
    machine, prepared = lab.prepared(image, node=1)
    assert prepared.cached
    assert len(machine.commands) == 1
    apt.installed.write_text("")
    _, prepared = lab.prepared(image, node=2)
    assert not prepared.cached, "the environment is there, the system's package is not"


@only_in_all
@pytest.mark.skipif(os.getuid() != 0, reason="installing system packages takes root")
def test_a_system_package_that_does_not_exist_is_named(lab: Lab, tmp_path: Path) -> None:
    Apt(lab, tmp_path / "apt").installed.write_text("git\n")
    with pytest.raises(ImageError, match=r"with apt failed for Image\(apt=\['nosuch'\]\)\n  E: Un"):
        lab.prepared(Image(apt=["git", "nosuch"]))


def config(node: int, credentials: Credentials | None = None, direct: str = "") -> AgentConfig:
    own = credentials and (credentials.authority, credentials.certificate, credentials.key)
    return AgentConfig(
        pool=POOL,
        node=node,
        address="",
        folder="",
        workers=1,
        slots=1,
        threads=False,
        compute_pool=["{}"],
        visible=[""],
        env={},
        search_path=[],
        working_directory="",
        orphan_timeout=60.0,
        client_pid=0,
        credentials=own or None,
        blob_cap=1 << 20,
        plugged=False,
        direct=direct,
    )


def until(channel: Channel, kind: type[Message]) -> Message:
    while True:
        frame = channel.receive()
        message = messages.decode(frame.kind, frame.meta)
        if isinstance(message, kind):
            return message


def test_an_agent_lives_on_by_itself_until_it_is_removed(built: Lab) -> None:
    machine, prepared = built.prepared(Image(pip=["iniconfig"]))
    authority = Authority(POOL)
    name = node_name(POOL, 0)
    told = config(0, authority.issue(name), "127.0.0.1")
    machine.commands.clear()
    announced = asyncio.run(bootstrap.launch(machine, prepared, told))
    assert len(machine.commands) == 1
    direct, private = announced.endpoints
    assert direct.startswith("tcp:127.0.0.1:")
    assert private == f"unix:{prepared.folder}/agent.sock"

    client = authority.issue(CLIENT)
    for endpoint in announced.endpoints:
        channel, welcome = connect(endpoint, Hello(POOL, "control"), client, name)
        assert welcome.versions["python"].startswith(ME)
        assert "torch" not in welcome.versions or "torch" in my_versions()
        channel.send(Ping(5))
        assert until(channel, Ping) == Ping(5)
        if endpoint == direct:
            up = until(channel, ExecutorUp)
            assert isinstance(up, ExecutorUp)
            assert [place.partition(":")[0] for place in up.endpoint.split(" ")] == ["tcp", "unix"]
            executor = psutil.Process(up.pid)
            assert executor.cwd() == prepared.work
        channel.close()

    agent = psutil.Process(announced.pid)
    assert agent.ppid() != os.getpid()
    assert os.getsid(agent.pid) == agent.pid
    asyncio.run(bootstrap.remove(machine, POOL, 0))
    assert not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE
    assert not executor.is_running() or executor.status() == psutil.STATUS_ZOMBIE
    assert not Path(prepared.folder).exists()
    asyncio.run(bootstrap.remove(machine, POOL, 0))


def test_removal_ends_no_other_process_that_got_the_number(built: Lab) -> None:
    machine, prepared = built.prepared(Image(pip=["iniconfig"]))
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        Path(prepared.folder, "agent.pid").write_text(f"{bystander.pid} 1\n")
        asyncio.run(bootstrap.remove(machine, POOL, 0))
        assert bystander.poll() is None
        assert not Path(prepared.folder).exists()
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.slow
def test_an_agent_that_does_not_end_is_killed_with_its_children(
    built: Lab, eventually: Callable[..., None]
) -> None:
    """Slow: it gets five seconds to end by itself."""
    machine, prepared = built.prepared(Image(pip=["iniconfig"]))
    code = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    stubborn = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None
    with stubborn.stdout as said:
        child = psutil.Process(int(said.readline()))
    mark = f"{stubborn.pid} {start_mark(stubborn.pid)}\n"
    Path(prepared.folder, "agent.pid").write_text(mark)
    asyncio.run(bootstrap.remove(machine, POOL, 0))
    assert stubborn.wait(100) == -signal.SIGKILL
    eventually(
        lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE,
        10,
        "the end of the child",
    )
    assert not Path(prepared.folder).exists()


def test_an_agent_that_cannot_start_says_why(built: Lab) -> None:
    machine, prepared = built.prepared(Image(pip=["iniconfig"]))
    Path(prepared.folder, "agent.sock").touch()
    with pytest.raises(PoolStartError, match=r"(?s)did not start.*Address already in use"):
        asyncio.run(bootstrap.launch(machine, prepared, config(0)))


def test_the_output_of_a_failure_shows_no_secrets() -> None:
    image = Image(
        pip=["a", "b"],
        env={"PASSWORD": "hunter22"},
        pip_indexes=[PipIndex("https://me:s3cret@example.org/simple", packages=["b"])],
    )
    lines = ["error: hunter22 at https://me:s3cret@example.org/simple", "s3cret"]
    message = str(bootstrap.failure(3, "packages", "installing packages", image, "3.11", lines))
    assert "hunter22" not in message
    assert "s3cret" not in message
    assert "https://***@example.org/simple" in message


def test_a_failure_for_want_of_rights_or_room_says_so() -> None:
    image = Image(apt=["ffmpeg"], pip=["torch"])
    lines = ["installing system packages takes root, or sudo without a password"]
    message = str(bootstrap.failure(0, "root", "installing ffmpeg with apt", image, "3.11", lines))
    assert "log in there as root" in message
    lines = ["error: failed to write: No space left on device (os error 28)"]
    message = str(bootstrap.failure(0, "packages", "installing packages", image, "3.11", lines))
    assert "make room on the machine" in message


def test_variables_may_hold_anything_and_disturb_nothing(lab: Lab, tmp_path: Path) -> None:
    cache = tmp_path / """it's "odd" $(touch x) `touch x` \\ größe"""
    env = {
        "UV_CACHE_DIR": str(cache),
        "LINES": "one\ntwo\n",
        "IFS": "e",
        "cache": "/nowhere",
        "each": "x",
        "origins": "x",
        "wheel": "x",
        "apt": "nosuch",
        "project": "x",
        "EMPTY": "",
    }
    _, prepared = lab.prepared(Image(env=env))
    assert said_by(lab, prepared.python, "import skyward; print('there')") == "there"
    assert cache.is_dir()
    assert not list(Path(prepared.folder).rglob("x"))


@only_in_all
@pytest.mark.slow
def test_the_lock_of_a_machine_that_fell_silent_is_taken_over(lab: Lab) -> None:
    """Slow: another that shares the folder, in a container or over a network, is waited for."""
    image = Image()
    name = f"{Recipe(image, own_wheel()).key}-{os.uname().machine}-gnu.lock"
    envs = lab.cache / "envs"
    envs.mkdir(parents=True)
    (envs / name).symlink_to("elsewhere-pid:[1]:1:1")
    begun = time.monotonic()
    _, prepared = lab.prepared(image)
    assert time.monotonic() - begun > 25
    assert "waiting for another node that builds this environment" in lab.phases
    assert not prepared.cached
    assert not list(envs.glob("*.lock*"))


def test_a_start_after_a_failure_goes_on_from_what_is_there(lab: Lab, tmp_path: Path) -> None:
    """The same image: its package comes to the index after the first attempt."""
    folder = tmp_path / "mine"
    url = index(folder, skyalpha=("1.0", ()))
    image = Image(pip=["skybeta"], pip_indexes=[PipIndex(url, ["skybeta"])])
    with pytest.raises(ImageError, match=r"Image\(pip=\['skybeta'\]\)"):
        lab.prepared(image)
    left = [each.name for each in (lab.cache / "envs").iterdir()]
    assert not [name for name in left if name.endswith((".lock", ".build", ".beat"))]
    index(folder, skybeta=("1.0", ()))
    lab.phases.clear()
    _, prepared = lab.prepared(image, node=1)
    assert said_by(lab, prepared.python, "import skybeta; print(skybeta.origin)") == "mine"
    assert "sending skyward" not in lab.phases


@other_case
def test_packages_that_do_not_work_together_are_told_from_those_that_are_not_there(
    lab: Lab, tmp_path: Path
) -> None:
    """As where a library of the system is missing that a compiled package needs."""
    url = index(tmp_path / "mine", msgspec=("99.0", ()))
    image = Image(pip=["msgspec"], pip_indexes=[PipIndex(url, ["msgspec"])])
    with pytest.raises(ImageError) as caught:
        lab.prepared(image)
    message = str(caught.value)
    assert message.startswith("node 0: trying the environment failed for Image(pip=['msgspec'])\n")
    assert "AttributeError" in message
    assert "Image(apt=[...])" in message


def test_a_failing_network_is_tried_once_more_and_told_apart(lab: Lab) -> None:
    nobody = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    image = Image(pip=["nosuchpackage-xyz"], env=nobody)
    with pytest.raises(ImageError, match="the network or an index did not answer, twice"):
        lab.prepared(image)
    assert lab.phases.count("installing packages") == 2
    assert lab.notes == ["node 0: installing packages failed on the network; once more"]
