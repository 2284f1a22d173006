"""Wheels that carry the compiled cores of the torch device, for machines without a compiler.

python tools/wheels.py                        # every platform, every supported torch, into dist/
python tools/wheels.py --only linux-x86_64    # one platform
python tools/wheels.py --torch-wheels FOLDER  # torch's wheels for macOS from a folder
python tools/wheels.py --here                 # this machine and the torch that is installed here
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import macho

from skyward.device import build, toolchain
from skyward.device.toolchain import Compiler, run
from skyward.wire import native

ROOT = Path(__file__).parents[1]
OLDER_GLIBC = Path(__file__).with_name("older_glibc.h")
CONSTRAINTS = ROOT / "constraints-dev.txt"
LOCK = ROOT / "requirements-release.txt"
"""What a release is installed with, by version and hash; `make lock` writes it."""
TORCH = {minor: f"{minor}.0" for minor in ("2.11", "2.12", "2.13", "2.14", "2.15")}
LINUX = ("x86_64", "aarch64")
ABI = 1
"""All of torch's wheels since 2.7 have libstdc++'s C++11 ABI; on macOS they say so, too."""
MACOS = "14.0"
GLIBC, GLIBCXX = (2, 28), (3, 4, 25)
"""What torch's own wheels need, manylinux_2_28, and what the libstdc++ of such a system has."""
_CHAR = "cNS_11char_traitsIcEE"
_STRING = f"I{_CHAR}NS_9allocatorIcEEEE"
NEW_TO_TORCH = {
    "__ZNSt3__115recursive_mutex8try_lockEv",
    "__ZNSt3__15mutex8try_lockEv",
    "__ZdlPvm",
    f"__ZTVNSt3__115basic_streambufI{_CHAR}EE",
    f"__ZTVNSt3__115basic_stringbuf{_STRING}",
    *(
        f"__{table}NSt3__119basic_{way}stringstream{_STRING}"
        for table in ("ZTT", "ZTV")
        for way in ("i", "o")
    ),
}
"""What our cores need of libc++ and torch does not, which is for older systems.

macOS has had the tables of streams into strings since 12, the rest since 10.12.
"""
RPATH = "../../../torch/lib"
"""From skyward/device/cores to torch, for a program that has not imported torch yet."""
UNITS = 2
"""On every machine, so that every machine makes the same cores."""


class WheelError(Exception):
    """A wheel cannot be made; the message says what is missing."""


@dataclass(frozen=True)
class Headers:
    """An unpacked torch for macOS: its headers serve every platform, its libraries macOS."""

    minor: str
    home: Path


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = [f"linux-{machine}" for machine in LINUX] + ["macos-arm64"]
    arguments.add_argument("--only", choices=every, action="append", help="one platform")
    arguments.add_argument("--torch", choices=TORCH, action="append", help="one version of torch")
    arguments.add_argument("--torch-wheels", type=Path, metavar="FOLDER")
    arguments.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments.add_argument("--work", type=Path, default=ROOT / "build" / "wheels")
    arguments.add_argument("--here", action="store_true", help="this machine, its torch")
    chosen = arguments.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    chosen.out.mkdir(parents=True, exist_ok=True)
    pure = pure_wheel(chosen.work)
    if chosen.here:
        print(here(pure, chosen.out))
        return
    headers = [unpacked(minor, chosen) for minor in chosen.torch or TORCH]
    platforms = chosen.only or every
    cores = chosen.work / "cores"
    # Nodes run Linux, whatever the client runs: each wheel has the workers of both machines.
    workers = [
        linux_core("worker", machine, each, cores, chosen.work)
        for machine in LINUX
        for each in headers
    ]
    first = headers[0]
    workers += [linux_core(build.LINK, machine, first, cores, chosen.work) for machine in LINUX]
    for name in platforms:
        system, machine = name.split("-")
        if system == "macos":
            made = [macos_client(each, cores, chosen.work) for each in headers]
            made.append(macos_link(first, cores, chosen.work))
            tag = f"macosx_{MACOS.replace('.', '_')}_arm64"
        else:
            made = [linux_core("client", machine, each, cores, chosen.work) for each in headers]
            tag = manylinux([*made, *workers], machine)
        print(platform_wheel(pure, {p.name: p for p in [*made, *workers]}, tag, chosen.out))


def here(pure: Path, out: Path) -> Path:
    """A wheel with the cores that this machine made for the torch installed here."""
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    system, machine = platform.system().lower(), platform.machine()
    abi = int(torch.compiled_with_cxx11_abi())
    cores = {
        build.shipped_name(part, minor, abi, system, machine): made
        for part in (*build.PARTS, build.LINK)
        for made in build.libraries([part])
    }
    # Its own compiler and libraries made it, so it promises no other system anything.
    return platform_wheel(pure, cores, f"linux_{machine}", out)


def pure_wheel(work: Path) -> Path:
    """The wheel for every platform, which has the sources alone."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        # Its backend signs the wheel with its version. pip has two names for what binds one.
        bound = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), str(CONSTRAINTS))
        pip("wheel", "--no-deps", "-w", folder, str(ROOT), **bound)
        (made,) = Path(folder).glob("*.whl")
        return Path(shutil.move(made, work / made.name))


def unpacked(minor: str, chosen: argparse.Namespace) -> Headers:
    """Torch for macOS arm64: 80 to 110 MB, where a wheel for Linux has CUDA and 500 MB."""
    version = TORCH[minor]
    home = chosen.work / f"torch-{version}"
    if not (home / "complete").exists():
        folder = chosen.torch_wheels or chosen.work / "torch-wheels"
        if not chosen.torch_wheels and not list(folder.glob(f"torch-{version}-*macosx*.whl")):
            platforms = ("macosx_11_0_arm64", "macosx_14_0_arm64")
            options = [word for each in platforms for word in ("--platform", each)]
            options += ["--python-version", "3.12", "--only-binary=:all:", "--no-deps"]
            pip("download", *options, "-d", str(folder), f"torch=={version}")
        wheels = list(folder.glob(f"torch-{version}-*macosx*arm64.whl"))
        if not wheels:
            raise WheelError(f"there is no torch-{version}-*-macosx_*_arm64.whl in {folder}")
        wanted = re.compile(r"torch/include/|torch/lib/lib(c10|torch_cpu)\.dylib$")
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(home, [name for name in archive.namelist() if wanted.match(name)])
        (home / "complete").touch()
    return Headers(minor, home / "torch")


def linux_core(part: str, machine: str, headers: Headers, cores: Path, work: Path) -> Path:
    """A core for Linux, linked without torch: it finds torch's libraries by their names."""
    command = f"{machine}-linux-gnu-g++"
    if shutil.which(command) is None:
        package = f"g++-{machine.replace('_', '-')}-linux-gnu"
        raise WheelError(f"there is no {command}; install it with: apt-get install {package}")
    stubs = work / f"stubs-{machine}"
    for name in ("c10", "torch_cpu"):
        stub = stubs / f"lib{name}.so"
        if not stub.exists():
            stubs.mkdir(exist_ok=True)
            empty = ("-nostdlib", "-x", "c++", "/dev/null", f"-Wl,-soname,{stub.name}")
            run(command, "-shared", *empty, "-o", str(stub))
    # Objects that were made with other names are other objects.
    names = native.digest([OLDER_GLIBC], ())
    compiler = Compiler(
        (command,),
        headers.home / "include",
        headers.minor,
        options=(
            f"-D_GLIBCXX_USE_CXX11_ABI={ABI}",
            "-include",
            str(OLDER_GLIBC),
            f"-DSKY_OLDER_GLIBC={names}",
        ),
        link=(
            f"-L{stubs}",
            "-Wl,--no-as-needed",
            "-ltorch_cpu",
            "-lc10",
            "-Wl,--as-needed",
            "-Wl,-s",
            f"-Wl,-rpath,$ORIGIN/{RPATH}",
        ),
        units=UNITS,
    )
    made = cores / build.shipped_name(part, headers.minor, ABI, "linux", machine)
    compile_core(part, made, compiler, work)
    return made


def macos_client(headers: Headers, cores: Path, work: Path) -> Path:
    """The client's core for macOS, linked with torch's libraries and the system's libc++.

    Zig brings headers and a linker for macOS, and a libc++ of its own. Two of these in one process
    would not know each other's exceptions, so a stub stands for the system's.
    """
    if importlib.util.find_spec("ziglang") is None:
        raise WheelError("there is no ziglang; install it with: pip install ziglang")
    zig = (sys.executable, "-m", "ziglang")
    target = ("-target", f"aarch64-macos.{MACOS}")
    made = cores / build.shipped_name("client", headers.minor, ABI, "darwin", "arm64")
    stub = work / f"libc++-{headers.minor}.tbd"
    compiler = Compiler(
        (*zig, "c++", *target),
        headers.home / "include",
        headers.minor,
        options=(
            "-Wno-unknown-warning-option",
            # Only what the libc++ of that macOS has: its headers are newer.
            "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1",
        ),
        linker=(*zig, "cc", *target),
        link=(
            f"-L{headers.home / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
            str(stub),
            f"-Wl,-rpath,@loader_path/{RPATH}",
            f"-Wl,-install_name,@rpath/{made.name}",
        ),
        units=UNITS,
    )
    units = toolchain.units_of("client", UNITS)
    objects = toolchain.compile_units(units, compiler, work / "objects")
    stub.write_text(libcxx_stub(headers, objects.values()))
    compile_core("client", made, compiler, work)
    return made


def macos_link(headers: Headers, cores: Path, work: Path) -> Path:
    """The core of links for macOS, with zig's libc++ in it: it shares no C++ with others."""
    zig = (sys.executable, "-m", "ziglang", "c++", "-target", f"aarch64-macos.{MACOS}")
    made = cores / build.shipped_name(build.LINK, headers.minor, ABI, "darwin", "arm64")
    compile_core(build.LINK, made, Compiler(zig, headers.home / "include", headers.minor), work)
    return made


def libcxx_stub(headers: Headers, objects: Iterable[Path]) -> str:
    """A text that stands for the system's libc++ when objects are linked."""
    torch = [macho.symbols(headers.home / "lib" / f"lib{n}.dylib") for n in ("c10", "torch_cpu")]
    exported = frozenset().union(*(each.defined for each in torch))
    known = frozenset().union(*(each.undefined for each in torch), NEW_TO_TORCH)
    needed: set[str] = set()
    ours: set[str] = set()
    for path in objects:
        symbols = macho.symbols(path)
        needed |= symbols.undefined
        ours |= symbols.defined
    names = {
        name
        for name in needed - ours - exported
        if re.match(r"__Z|___(cxa_(?!atexit)|gxx_|dynamic_cast)", name)
    }
    if names - known:
        raise WheelError(
            f"torch {headers.minor} does not use these symbols, so macOS {MACOS} may not have "
            f"them: {', '.join(sorted(names - known))}; if it has, add them to NEW_TO_TORCH"
        )
    return (
        "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
        "install-name: '/usr/lib/libc++.1.dylib'\nexports:\n  - targets: [ arm64-macos ]\n"
        f"    symbols: [ {', '.join(sorted(names))} ]\n...\n"
    )


def compile_core(part: str, made: Path, compiler: Compiler, work: Path) -> None:
    print(f"compiling {made.name}", flush=True)
    made.parent.mkdir(parents=True, exist_ok=True)
    toolchain.make({part: made}, compiler, work / "objects")


def manylinux(cores: Iterable[Path], machine: str) -> str:
    """The tag that says which glibc the cores need, by the versions of symbols they ask for."""
    glibc: tuple[int, ...] = (2, 17)
    for core in cores:
        text = run("readelf", "--version-info", "--wide", str(core))
        for library, version in re.findall(r"Name: (GLIBC|GLIBCXX)_([\d.]+)", text):
            number = tuple(map(int, version.split(".")))
            limit = GLIBC if library == "GLIBC" else GLIBCXX
            if number > limit:
                raise WheelError(
                    f"{core.name} needs {library}_{version}, torch's own wheels only "
                    f"{'.'.join(map(str, limit))}; `readelf --dyn-syms` names the symbol, which "
                    f"belongs in {OLDER_GLIBC.name}"
                )
            if library == "GLIBC":
                glibc = max(glibc, number[:2])
    return f"manylinux_{glibc[0]}_{glibc[1]}_{machine}"


def platform_wheel(pure: Path, cores: Mapping[str, Path], tag: str, out: Path) -> Path:
    """The pure wheel with cores in it, by their names, for the platform that the tag names.

    The same members make the same bytes, whenever the wheel is made, with the same zlib.
    """
    made = out / pure.name.replace("-any.whl", f"-{tag}.whl")
    with zipfile.ZipFile(pure) as source:
        members = {name: source.read(name) for name in source.namelist()}
    (info,) = (name.removesuffix("/WHEEL") for name in members if name.endswith(".dist-info/WHEEL"))
    text = members[f"{info}/WHEEL"].decode()
    text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    members[f"{info}/WHEEL"] = text.replace("-none-any", f"-none-{tag}").encode()
    added = {f"skyward/device/cores/{name}": path.read_bytes() for name, path in cores.items()}
    members |= added
    name, version = info.removesuffix(".dist-info").split("-")
    # Where PEP 770 has them.
    members[f"{info}/sboms/{name}.cdx.json"] = bill_of_materials(version, added)
    del members[f"{info}/RECORD"]
    # What describes the wheel goes last, as the format recommends.
    names = sorted(members, key=lambda each: (each.startswith(info), each))
    records = [
        f"{each},sha256={_base64(hashlib.sha256(members[each]).digest())},{len(members[each])}\n"
        for each in names
    ]
    members[f"{info}/RECORD"] = "".join([*records, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as into:
        for each in [*names, f"{info}/RECORD"]:
            member = zipfile.ZipInfo(each, (1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = (0o100755 if each.endswith(".so") else 0o100644) << 16
            into.writestr(member, members[each])
    return made


def _base64(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


# What a wheel is made of and needs.


@dataclass(frozen=True)
class Pinned:
    """A package that a release is installed with, and the packages that need it."""

    name: str
    version: str
    needed_by: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def pinned(text: str) -> list[Pinned]:
    """The packages of a lock, which says below each what needs it."""
    found = []
    for block in re.split(r"\n(?=\w)", text):
        if named := re.match(r"([\w.-]+)==([^\s;]+)", block):
            needed_by = re.findall(r"^    #(?: via| ) +(\w[\w.-]*)", block, re.MULTILINE)
            found.append(Pinned(named[1], named[2], tuple(needed_by)))
    return found


def bill_of_materials(version: str, cores: Mapping[str, bytes]) -> bytes:
    """What is in a wheel, and what it needs, in the form of CycloneDX 1.6.

    It has neither a time nor a random number: the same wheel has the same one.
    """
    own = Pinned("skyward-torch", version, ())
    packages = pinned(LOCK.read_text())
    # What every user has; the rest comes with extras.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[^\w.-]", each)[0] for each in project["dependencies"]}
    required: set[str] = set()
    while wanted:
        required |= wanted
        wanted = {each.name for each in packages if required & {*each.needed_by} - {own.name}}
        wanted -= required
    components: list[dict[str, Any]] = [
        {
            "type": "file",
            "bom-ref": name,
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
        }
        for name, data in sorted(cores.items())
    ]
    linked = [each["name"] for each in components if "/link-darwin-" in each["name"]]
    if linked:
        zig = Pinned("ziglang", metadata.version("ziglang"), ())
        components.append(_component(zig) | {"description": f"its libc++ is in {linked[0]}"})
    components += [
        _component(each) | {"scope": "required" if each.name in required else "optional"}
        for each in packages
    ]
    parts = [each["bom-ref"] for each in components if each["type"] == "file"]
    needs = [
        {
            "ref": each.url,
            "dependsOn": [
                *(parts if each is own else ()),
                *sorted(other.url for other in packages if each.name in other.needed_by),
            ],
        }
        for each in [own, *packages]
    ]
    licence = {"license": {"id": "MIT"}}
    told = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component(own) | {"licenses": [licence]}},
        "components": components,
        "dependencies": needs,
    }
    named = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(told))
    return json.dumps({**told, "serialNumber": f"urn:uuid:{named}"}, indent=1).encode()


def _component(package: Pinned) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": package.url,
        "name": package.name,
        "version": package.version,
        "purl": package.url,
    }


def pip(*words: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", *words]
    done = subprocess.run(command, env=os.environ | variables, check=False)
    if done.returncode:
        raise WheelError(f"pip {' '.join(words)} failed")


if __name__ == "__main__":
    try:
        main()
    except (WheelError, toolchain.CompilerError) as problem:
        sys.exit(str(problem))
