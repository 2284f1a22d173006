"""The keeper: the process on a node that runs the client's commands, and keeps what they start.

What a command starts lives on below the keeper, also when the client's connection has ended. The
keeper ends with its owner, kills all that it has started, and removes the node's folders. Its owner
is a job of Slurm's, which has one task on each node, or an actor of Ray's, which holds a pipe to
the keeper. The client sends the text of this file.

Run as `keeper.py CONFIG`, this is the task of a job. An actor calls `keep_for_actor`. Run below a
keeper and without arguments, this ends with a line, "SECONDS REASON", when Slurm says that it will
end the job.
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
VARIABLE = "SKYWARD_KEEPER"
"""The variable with the keeper's folder, which every process below a keeper has."""
CHUNK = 256 << 10
END_SECONDS = 3.0
"""How long the agents of a job have to end before they are killed."""
KILL_ROUNDS = 50
"""How often processes are looked for that a dying process has started, 20 ms apart."""
NOTICE_SECONDS = 5.0
"""How long after the end of a keeper its notice is waited for again."""
NO_CONTAINERS = 79
UNKNOWN_LEFT = 60
"""How many seconds a job has left if Slurm does not say."""
KNOWN_ENTRIES = (".", ".ssh", ".bashrc", ".profile", ".bash_profile", ".cache")
"""What tells one home folder from another: two with the same numbers for all are the same."""
OF_STEP = ("SLURM_", "PMI_", "PMIX_")
"""How the variables of a step begin.

Frameworks take them for a launch of theirs, and number their processes by them.
"""
OF_JOB = ("SLURM_JOB_", "SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT")


# Processes.


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


def keeper_of(pid):
    # type: (int) -> str
    """The folder of the keeper that a process is below; empty if there is none, or it has ended."""
    with contextlib.suppress(OSError):
        with open("/proc/%d/environ" % pid, "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(VARIABLE.encode() + b"="):
                    return os.fsdecode(variable.partition(b"=")[2])
    return ""


def processes_of(folder):
    # type: (str) -> list[int]
    """The processes of a keeper, also if it was killed: its folder is among their variables."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and keeper_of(pid) == folder]


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


def environment(dropped, kept=()):
    # type: (tuple[str, ...], tuple[str, ...]) -> dict[str, str]
    """The variables of this process, without those that begin with what is dropped."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(dropped) or name.startswith(kept)
    }


# Folders.


def cache_folder():
    # type: () -> str
    """Where what is made for nodes is kept."""
    return os.environ.get("SKYWARD_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "skyward"
    )


def remove_node_folders(name, places, keeper=""):
    # type: (str, tuple[str, ...], str) -> None
    """Remove what agents of one node left, unless it is in use below another keeper."""
    for place in places:
        folder = os.path.join(place, name)
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(os.path.join(folder, "agent.pid")) as file:
                if keeper_of(int(file.read().split()[0])) not in ("", keeper):
                    continue
        with contextlib.suppress(OSError):
            if os.stat(folder).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def remove_folders(folder, node_folder):
    # type: (str, str) -> None
    """Remove what a keeper and the agents below it have made, after their end."""
    remove_node_folders(node_folder, (*PLACES, cache_folder()), folder)
    shutil.rmtree(folder, ignore_errors=True)


def clear(folder, node_folder):
    # type: (str, str) -> None
    """Do what a keeper does at its end, if it was killed."""
    for _ in range(KILL_ROUNDS):
        found = processes_of(folder)
        if not found:
            break
        send_signal(found, signal.SIGKILL)
        time.sleep(0.02)
    remove_folders(folder, node_folder)


class Keeper:
    """Serves the client on a socket, until its owner ends or nobody needs the node any more."""

    def __init__(self, name, node, config, variables):
        # type: (str, int, dict[str, object], dict[str, str]) -> None
        """`name` is that of its folder; commands have the `variables`."""
        self.name = name
        self.node = node
        self.node_folder = "sky.%s.%d" % (config["pool"], node)
        idle = config.get("idle")
        self.idle_seconds = None if idle is None else float(str(idle))
        self.end_seconds = float(str(config.get("end", END_SECONDS)))
        self.inside = inside(config)
        self.variables = variables
        self.token = uuid.uuid4().hex
        self.notice = threading.Event()
        self.told = ""
        self.used = time.time()
        self.busy = 0
        self.lock = threading.Lock()
        self.commands = set()  # type: set[subprocess.Popen[bytes]]
        self.ending = False
        self.folder = ""

    def listen(self):
        # type: () -> socket.socket
        """Listen where only this user can connect; what commands make has the user's own mask."""
        # Also those of an earlier job, if this node was lost with it.
        remove_node_folders(self.node_folder, PLACES)
        mask = os.umask(0o077)
        try:
            return self.listen_privately()
        finally:
            os.umask(mask)

    def listen_privately(self):
        # type: () -> socket.socket
        for place in PLACES:
            folder = os.path.join(place, self.name)
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

    def serve(self, listener, owner=None):
        # type: (socket.socket, int | None) -> None
        """Serve until the end: a signal, or the end of the pipe that the `owner` holds."""
        adopt_orphans()
        waking, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_signal)
        ends = [listener.fileno(), waking] + ([] if owner is None else [owner])
        while not self.ending:
            ready = select.select(ends, [], [], 1.0)[0]
            if waking in ready:
                os.read(waking, CHUNK)
            if owner is not None and owner in ready and not os.read(owner, CHUNK):
                self.ending = True
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

    def look(self):
        # type: () -> None
        """Reap what ended, and end the keeper if nobody has needed the node for a while."""
        with self.lock:
            is_used = self.busy > 0
            self.reap({each.pid for each in self.commands})
        if self.idle_seconds is None:
            return
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
                left = seconds_of(str(asked["left"]))
                self.told = "%d %s" % (UNKNOWN_LEFT if left is None else left, asked["reason"])
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
            "slurm": slurm_name(),
            "home": home_entries(),
        }

    def run(self, connection, command):
        # type: (socket.socket, list[str]) -> None
        """Run a command whose input and output are the connection; it ends if the client goes."""
        variables = dict(self.variables)
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
        deadline = time.time() + self.end_seconds
        while processes_below(os.getpid()) and time.time() < deadline:
            self.reap(set())
            time.sleep(0.02)
        while processes_below(os.getpid()) and time.time() < deadline + END_SECONDS:
            send_signal(processes_below(os.getpid()), signal.SIGKILL)
            self.reap(set())
            time.sleep(0.02)
        self.reap(set())
        remove_folders(self.folder, self.node_folder)
        # The threads of connections need not be waited for.
        os._exit(0)

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


def read_line(connection):
    # type: (socket.socket) -> bytes
    """A line; what comes after it stays in the connection, for the command."""
    line = bytearray()
    while not line.endswith(b"\n"):
        seen = connection.recv(CHUNK, socket.MSG_PEEK)
        piece = connection.recv(seen.find(b"\n") + 1 or len(seen))
        if not piece:
            raise EOFError("the client has gone")
        line += piece
    return bytes(line)


# The task of a job.


def folder_name():
    # type: () -> str
    """The name of the keeper's folder: nodes may share the file system of their /tmp."""
    return "sky.slurm.%s.%s" % (os.environ["SLURM_JOB_ID"], slurm_name())


def slurm_name():
    # type: () -> str
    """The name of the node for Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def home_entries():
    # type: () -> dict[str, int]
    """The file system's numbers of well-known entries of the home folder."""
    home = os.path.expanduser("~")
    found = {}
    for name in KNOWN_ENTRIES:
        with contextlib.suppress(OSError):
            found[name] = os.stat(os.path.join(home, name)).st_ino
    return found


def seconds_of(text):
    # type: (str) -> int | None
    """A time as Slurm writes it, "1-02:03:04" or "2:03"; None for a word."""
    days, _, clock = text.strip().rpartition("-")
    try:
        total = 0
        for part in clock.split(":"):
            total = total * 60 + int(part)
        return total + 86400 * int(days or 0)
    except ValueError:
        return None


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


def keep_for_job(config):
    # type: (dict[str, object]) -> None
    """Keep a node for a job, of which this process is the task there."""
    nodes = config["nodes"]
    assert isinstance(nodes, list)
    node = int(nodes[int(os.environ.get("SLURM_PROCID") or 0)])
    keeper = Keeper(folder_name(), node, config, environment(OF_STEP, OF_JOB))
    keeper.serve(keeper.listen())


def await_notice():
    # type: () -> str
    """What the keeper of this process says when Slurm will end the job."""
    if VARIABLE not in os.environ:
        sys.exit("%s is not set: this runs below the keeper of a job" % VARIABLE)
    while True:
        with contextlib.suppress(OSError):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(os.path.join(os.environ[VARIABLE], "s"))
                connection.sendall(b'{"ask": "wait"}\n')
                with connection.makefile() as answer:
                    told = answer.readline().strip()
            if told:
                return told
        time.sleep(NOTICE_SECONDS)


# The child of an actor.


def keep_for_actor(config):
    # type: (dict[str, object]) -> None
    """Keep a node until the pipe closes that is the standard input; tells the folder."""
    # Ray kills the children of an actor's process: as a grandchild, the keeper ends in order.
    if os.fork():
        os._exit(0)
    os.setsid()
    dropped = config["dropped"]
    assert isinstance(dropped, list)
    variables = environment(tuple(dropped))
    keeper = Keeper(str(config["name"]), int(str(config["node"])), config, variables)
    listener = keeper.listen()
    os.write(1, keeper.folder.encode() + b"\n")
    keeper.serve(listener, owner=0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        keep_for_job(json.loads(sys.argv[1]))
    else:
        print(await_notice())
        sys.stdout.flush()
