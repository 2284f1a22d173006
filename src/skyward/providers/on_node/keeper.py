"""The keeper: the task of a pool's job on one node, which runs the commands of the client.

What a command starts lives on below the keeper, also when the client's connection has ended: a step
of Slurm's takes all its processes with it. Without a client and an agent, the keeper ends itself,
and after the last keeper the job ends. The client sends the text of this file with the job.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

PLACES = ("/tmp", "/var/tmp")
VARIABLE = "SKYWARD_SLURM_KEEPER"
CHUNK = 256 << 10
END_SECONDS = 3.0
"""How long agents have to end before they are killed."""
NO_CONTAINERS = 79
UNKNOWN_LEFT = 60
"""How many seconds a job has left if Slurm does not say."""
KNOWN_ENTRIES = (".", ".ssh", ".bashrc", ".profile", ".bash_profile", ".cache")
"""What tells one home folder from another: two with the same numbers for all are the same."""
OURS = ("SLURM_JOB_", "SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT")


def folder_name():
    # type: () -> str
    """The name of the keeper's folder: nodes may share the file system of their /tmp."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return "sky.slurm.%s.%s" % (os.environ["SLURM_JOB_ID"], node)


def home_entries():
    # type: () -> dict[str, int]
    """The file system's numbers of well-known entries of the home folder."""
    home = os.path.expanduser("~")
    found = {}
    for name in KNOWN_ENTRIES:
        with contextlib.suppress(OSError):
            found[name] = os.stat(os.path.join(home, name)).st_ino
    return found


def environment():
    # type: () -> dict[str, str]
    """The variables of the job, without those of the step.

    Frameworks take the step's variables for a launch of theirs, and number their processes by them.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "PMI_", "PMIX_")) or name.startswith(OURS)
    }


def processes_below(top):
    # type: (int) -> list[int]
    """All processes that descend from one, those nearest to it first."""
    children = {}  # type: dict[int, list[int]]
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    state, parent = file.read().rpartition(b") ")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found, next_ones = [], [top]
    while next_ones:
        next_ones = [child for each in next_ones for child in children.get(each, ())]
        found += next_ones
    return found


def adopt_orphans():
    # type: () -> None
    """Have the processes that outlive their parents become children of this one."""
    try:
        import ctypes

        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def send_signal(pids, number):
    # type: (list[int], int) -> None
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


class Keeper:
    """Serves the client on a socket, until the job ends or nobody needs the node any more."""

    def __init__(self, config):
        # type: (dict[str, object]) -> None
        nodes = config["nodes"]
        assert isinstance(nodes, list)
        self.pool = str(config["pool"])
        self.node = int(nodes[int(os.environ.get("SLURM_PROCID") or 0)])
        self.idle_seconds = float(str(config["idle"]))
        self.inside = inside(config)
        self.token = uuid.uuid4().hex
        self.notice = threading.Event()
        self.told = ""
        self.used = time.time()
        self.busy = 0
        self.lock = threading.Lock()
        self.commands = set()  # type: set[subprocess.Popen[bytes]]
        self.ending = False
        self.folder = ""

    def serve(self):
        # type: () -> None
        """Listen in a private folder, and serve until the end."""
        adopt_orphans()
        waking, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_signal)
        self.remove_node_folders()
        listener = self.listen()
        while not self.ending:
            ready = select.select([listener.fileno(), waking], [], [], 1.0)[0]
            if waking in ready:
                os.read(waking, CHUNK)
            if listener.fileno() in ready:
                connection = listener.accept()[0]
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()
            self.look()
        self.end()

    def on_signal(self, number, frame):
        # type: (int, object) -> None
        """End with the job; the agents have got the same signal from Slurm."""
        if number != signal.SIGHUP:
            self.ending = True

    def listen(self):
        # type: () -> socket.socket
        """Listen where only this user can connect; what commands make has the user's own mask."""
        mask = os.umask(0o077)
        try:
            return self.listen_privately()
        finally:
            os.umask(mask)

    def listen_privately(self):
        # type: () -> socket.socket
        for place in PLACES:
            folder = os.path.join(place, folder_name())
            # One that is left is from an earlier run of the job: Slurm had to kill its keeper.
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.mkdir(folder, 0o700)
            except OSError:
                continue
            self.folder = folder
            listener = socket.socket(socket.AF_UNIX)
            # Renamed when it listens: who finds it can connect.
            listener.bind(os.path.join(folder, "new"))
            listener.listen(128)
            os.rename(os.path.join(folder, "new"), os.path.join(folder, "s"))
            return listener
        sys.exit("skyward: no folder can be made in %s" % " or ".join(PLACES))

    def look(self):
        # type: () -> None
        """Reap what ended, and end the keeper if nobody has needed the node for a while."""
        with self.lock:
            is_used = self.busy > 0
            self.reap({each.pid for each in self.commands})
        if is_used or processes_below(os.getpid()):
            self.used = time.time()
        elif time.time() - self.used > self.idle_seconds:
            self.ending = True

    def children(self):
        # type: () -> list[int]
        """The children of this process, also those that have ended."""
        try:
            found = []
            for task in os.listdir("/proc/self/task"):
                with open("/proc/self/task/%s/children" % task) as file:
                    found += [int(each) for each in file.read().split()]
            return found
        except OSError:
            return []

    # What the client asks for.

    def answer(self, connection):
        # type: (socket.socket) -> None
        with self.lock:
            self.busy += 1
        try:
            asked = json.loads(read_line(connection).decode())
            kind = asked["ask"]
            if kind == "run":
                self.run(connection, asked["command"])
            elif kind == "hello":
                connection.sendall(json.dumps(self.facts()).encode() + b"\n")
            elif kind == "notice":
                self.told = "%d %s" % (seconds_of(str(asked["left"])), asked["reason"])
                self.notice.set()
            elif kind == "wait":
                # Who waits needs nobody: it must not keep the node.
                with self.lock:
                    self.busy -= 1
                try:
                    while not self.notice.wait(5.0) and not has_gone(connection):
                        pass
                finally:
                    with self.lock:
                        self.busy += 1
                connection.sendall(self.told.encode() + b"\n")
            elif kind == "end":
                self.ending = True
        except (OSError, EOFError, ValueError, KeyError):
            pass
        finally:
            connection.close()
            with self.lock:
                self.busy -= 1
            self.used = time.time()

    def facts(self):
        # type: () -> dict[str, object]
        """What the client wants to know about the node."""
        return {
            "node": self.node,
            "token": self.token,
            "slurm": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "home": home_entries(),
        }

    def run(self, connection, command):
        # type: (socket.socket, list[str]) -> None
        """Run a command whose input and output are the connection; it ends if the client goes."""
        variables = environment()
        variables[VARIABLE] = self.folder
        # Known before it can end: else `look` would take its status.
        with self.lock:
            process = subprocess.Popen(
                self.inside + command,
                stdin=connection.fileno(),
                stdout=connection.fileno(),
                stderr=subprocess.DEVNULL,
                cwd=self.folder,
                env=variables,
                start_new_session=True,
            )
            self.commands.add(process)
        closed = select.poll()
        closed.register(connection, 0)
        try:
            while process.poll() is None:
                if closed.poll(50):
                    with contextlib.suppress(OSError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        finally:
            with self.lock:
                self.commands.discard(process)

    # The end.

    def end(self):
        # type: () -> None
        """End all processes below this one, and remove the folders."""
        below = processes_below(os.getpid())
        send_signal(below, signal.SIGTERM)
        send_signal(below, signal.SIGCONT)
        deadline = time.time() + END_SECONDS
        while processes_below(os.getpid()) and time.time() < deadline:
            self.reap(set())
            time.sleep(0.02)
        while processes_below(os.getpid()) and time.time() < deadline + END_SECONDS:
            send_signal(processes_below(os.getpid()), signal.SIGKILL)
            self.reap(set())
            time.sleep(0.02)
        self.remove_node_folders()
        shutil.rmtree(self.folder, ignore_errors=True)
        # The threads of connections need not be waited for.
        os._exit(0)

    def remove_node_folders(self):
        # type: () -> None
        """Remove what agents left: also one of an earlier job, if this node was lost with it."""
        for place in PLACES:
            folder = os.path.join(place, "sky.%s.%d" % (self.pool, self.node))
            if not os.path.isdir(folder) or os.stat(folder).st_uid != os.getuid():
                continue
            try:
                with open(os.path.join(folder, "agent.pid")) as file:
                    os.kill(int(file.read().split()[0]), 0)
            except (OSError, ValueError, IndexError):
                shutil.rmtree(folder, ignore_errors=True)

    def reap(self, own):
        # type: (set[int]) -> None
        """Take the status of children that have ended, except those that others wait for."""
        for pid in self.children():
            if pid not in own:
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)


def has_gone(connection):
    # type: (socket.socket) -> bool
    """Whether the other end has closed a connection on which it sends nothing more."""
    if not select.select([connection], [], [], 0)[0]:
        return False
    return not connection.recv(1)


def seconds_of(left):
    # type: (str) -> int
    """The seconds that a job has left, as Slurm writes them: "1-02:03:04", "2:03" or a word."""
    days, _, clock = left.strip().rpartition("-")
    try:
        total = 0
        for part in clock.split(":"):
            total = total * 60 + int(part)
        return total + 86400 * int(days or 0)
    except ValueError:
        return UNKNOWN_LEFT


def inside(config):
    # type: (dict[str, object]) -> list[str]
    """The command that runs another one in the container; empty without a container."""
    image = str(config.get("container") or "")
    if not image:
        return []
    program = shutil.which("apptainer") or shutil.which("singularity")
    if program is None:
        sys.stderr.write("skyward: there is no apptainer on %s\n" % socket.gethostname())
        sys.exit(NO_CONTAINERS)
    options = config.get("container_options")
    assert isinstance(options, list)
    return [program, "--quiet", "exec"] + options + [image]


def read_line(connection):
    # type: (socket.socket) -> bytes
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            raise EOFError("the client has gone")
        line += piece
    return bytes(line)


if __name__ == "__main__":
    Keeper(json.loads(sys.argv[1])).serve()
