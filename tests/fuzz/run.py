"""Run as a script: fuzzers for what the C++ cores read, and their tests with sanitizers.

A target is a file of this folder. It is compiled with libFuzzer and the sanitizers of addresses and
of undefined behaviour, begins with the inputs in `corpus/`, and keeps what it finds in
`build/fuzz/`. With `--sanitize`, the core of links is compiled with the sanitizers of threads and
of addresses: two ends of a link run under each, and the links' own tests.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from skyward.device import build, toolchain
from skyward.wire import native

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "fuzz"
LINK_SOURCES = [native.SOURCES / f"{name}.cpp" for name in ("link", "calls", "connection")]
TARGETS = ("link", "coding", "worker", "peer", "client")
"""What is fuzzed: the records of links, the coding of a device's records, what a worker reads of a
client and of another worker, and what a client reads of a worker."""
SANITIZERS = {"thread": "libtsan.so", "address": "libasan.so"}
TESTS = ("tests/network/test_native_links.py", "tests/network/test_links.py")
TEST_SECONDS = 1500
"""What a test may take: a sanitizer makes it ten times longer."""
FLAGS = (
    *("-std=c++20", "-g1", "-O1", "-w", "-fPIC"),
    # Sessions that are made for each input are smaller then.
    "-DFUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION",
)
FUZZED = ("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined")
# Torch has no information about its types, and its headers read memory as it comes.
TORCH_FUZZED = "-fno-sanitize=vptr,function,alignment"
OPTIONS = {
    # Torch was compiled without the marks that this would need.
    "ASAN_OPTIONS": "detect_container_overflow=0:allocator_may_return_null=1"
    ":max_allocation_size_mb=1024",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"suppressions={HERE / 'thread.supp'}:die_after_fork=0:history_size=5",
}


def run(command: Sequence[str | Path], **environment: str) -> None:
    """Run a command; ends with its status if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **OPTIONS, **environment})
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(words)}")


def compiled(target: str) -> Path:
    """The fuzzer of a target."""
    clang = shutil.which("clang++")
    if clang is None:
        sys.exit("make fuzz needs clang++ with libFuzzer; install it: apt-get install clang")
    made, source = BUILD / target, HERE / f"{target}.cpp"
    made.parent.mkdir(parents=True, exist_ok=True)
    print(f"compiling {target}", flush=True)
    if target == "coding":
        run([clang, *FLAGS, *FUZZED, source, "-o", made])
    elif target == "link":
        run([clang, *FLAGS, *FUZZED, source, *LINK_SOURCES, "-o", made, "-ldl", "-pthread"])
    else:
        compiler, unit = build._compiler(), BUILD / f"{target}-core.cpp"
        part = "client" if target == "client" else "worker"
        words = "".join(each.text(compiler) for each in toolchain.units_of(part))
        # The fuzzer of the client has the registry in itself, to empty it after each input.
        lines = [line for line in words.splitlines() if "client/registry.cpp" not in line]
        unit.write_text("\n".join(lines) + "\n")
        # Torch must see the sanitizer's functions: it frees what the core allocates.
        link = [each for each in compiler.link if "--exclude-libs" not in each]
        torch = ("-isystem", compiler.include, *compiler.options, *link, "-pthread")
        run([clang, *FLAGS, *FUZZED, TORCH_FUZZED, unit, source, "-o", made, *torch])
    return made


def corpus(target: str) -> Path:
    """The inputs to begin with, each a file; in the tree they are lines of one file."""
    folder = BUILD / f"{target}-begin"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, line in enumerate((HERE / "corpus" / f"{target}.txt").read_text().split()):
        (folder / str(number)).write_bytes(base64.b64decode(line))
    return folder


def fuzz(target: str, seconds: int) -> None:
    """Let a fuzzer run for a time; ends with the input that it found, if it found one."""
    fuzzer, found = compiled(target), BUILD / f"{target}-corpus"
    found.mkdir(parents=True, exist_ok=True)
    # With torch, every look for leaks takes longer than a hundred inputs.
    leaks = int(target in ("link", "coding"))
    limits = (
        f"-detect_leaks={leaks}",
        "-max_len=4096",
        "-timeout=60",
        "-rss_limit_mb=8192",
        "-malloc_limit_mb=100000",
    )
    artifacts = f"-artifact_prefix={BUILD / target}-"
    run([fuzzer, f"-max_total_time={seconds}", *limits, artifacts, found, corpus(target)])


def keep(target: str) -> None:
    """Write few inputs that reach what all of them reach into the tree."""
    few = BUILD / f"{target}-few"
    shutil.rmtree(few, ignore_errors=True)
    few.mkdir()
    run([BUILD / target, "-set_cover_merge=1", few, corpus(target), BUILD / f"{target}-corpus"])
    inputs = sorted((path.read_bytes() for path in few.iterdir()), key=lambda i: (len(i), i))
    lines = [base64.b64encode(each).decode() + "\n" for each in inputs]
    (HERE / "corpus" / f"{target}.txt").write_text("".join(lines))


def sanitize(kind: str, seconds: int) -> None:
    """Run both ends of a link in one process, and then the links' tests, under a sanitizer."""
    compiler = os.environ.get("CXX", "g++")
    flags = ("-std=c++20", "-g", "-O1", "-fPIC", "-fno-omit-frame-pointer", f"-fsanitize={kind}")
    cache = BUILD / kind
    cache.mkdir(parents=True, exist_ok=True)
    print(f"compiling with the {kind} sanitizer", flush=True)
    ends = cache / "link_threads"
    libraries = ("-ldl", "-pthread")
    run([compiler, *flags, HERE / "link_threads.cpp", *LINK_SOURCES, "-o", ends, *libraries])
    run([ends, str(seconds)])
    os.environ["SKYWARD_CACHE"] = str(cache)
    core = native.place()
    core.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(native.SOURCES.glob("*.cpp"))
    run([compiler, *flags, "-shared", *sources, "-o", core, *libraries])
    # With the library of C++: the address sanitizer looks for its functions before Python has it.
    preloaded = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in (SANITIZERS[kind], "libstdc++.so.6")
    ]
    tests = (sys.executable, "-m", "pytest", "-q", "-o", f"timeout={TEST_SECONDS}", *TESTS)
    for old in cache.glob("report.*"):
        old.unlink()
    # To files, as pytest keeps what is printed. What Python itself never frees is no leak of ours;
    # the ends above were looked at for leaks.
    said = f":log_path={cache / 'report'}"
    options = {
        "TSAN_OPTIONS": OPTIONS["TSAN_OPTIONS"] + said,
        "ASAN_OPTIONS": f"{OPTIONS['ASAN_OPTIONS']}:detect_leaks=0{said}",
    }
    try:
        run(tests, LD_PRELOAD=" ".join(preloaded), **options)
    finally:
        for report in cache.glob("report.*"):
            print(report.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all, if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--sanitize", action="store_true", help="run the links' tests instead")
    parser.add_argument("--keep", action="store_true", help="write what was found to the corpora")
    wanted = parser.parse_args()
    if wanted.sanitize:
        for each in SANITIZERS:
            sanitize(each, wanted.seconds)
    for each in () if wanted.sanitize else wanted.targets or TARGETS:
        keep(each) if wanted.keep else fuzz(each, wanted.seconds)
