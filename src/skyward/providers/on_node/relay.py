"""The relay: a program on a node whose standard streams lead to a socket there.

Run as `relay.py TARGET [framed | QUESTION]`. The target is an endpoint such as "unix:PATH", or
"keeper" for that of a Slurm job, or "keeper-now" for one that must be there already. Bytes are
copied both ways, until the target sends no more. Framed, each piece has its length before it, and
an empty one ends a direction: not every way to a node can close one direction of a program. A
question is sent to the keeper, whose answer is printed.
"""

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time

PLACES = ("/tmp", "/var/tmp")
CHUNK, PIECE = 256 << 10, 64 << 10
KEEPER_SECONDS = 20.0
"""How long the relay waits for the keeper, which Slurm starts at the same time."""
NO_KEEPER, REFUSED = 69, 111


def keeper_socket():
    # type: () -> str
    """The path of the keeper's socket; empty if there is none that belongs to this user."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    for place in PLACES:
        folder = os.path.join(place, "sky.slurm.%s.%s" % (os.environ["SLURM_JOB_ID"], node))
        path = os.path.join(folder, "s")
        try:
            if os.lstat(folder).st_uid == os.getuid() and os.path.exists(path):
                return path
        except OSError:
            continue
    return ""


def connect(target, seconds):
    # type: (str, float) -> socket.socket
    """Connect to the target; ends the program, with a word, if nobody listens there."""
    deadline = time.time() + seconds
    while target.startswith("keeper"):
        path = keeper_socket()
        if path:
            target = "unix:" + path
        elif target == "keeper-now" or time.time() > deadline:
            sys.stderr.write("skyward: no keeper runs on this node\n")
            sys.exit(NO_KEEPER)
        else:
            time.sleep(0.02)
    family, place = target.split(":", 1)
    try:
        if family == "unix":
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(place)
            return connection
        host, port = place.rsplit(":", 1)
        connection = socket.create_connection((host.strip("[]"), int(port)))
        # A small message must not wait for the acknowledgement of the one before.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except OSError as problem:
        sys.stderr.write("skyward: %s: %s\n" % (target, problem))
        sys.exit(REFUSED)


def address():
    # type: () -> str
    """The address of this node on the network from which the step was started."""
    login = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or ""
    try:
        probe = socket.socket(
            socket.AF_INET6 if ":" in login else socket.AF_INET, socket.SOCK_DGRAM
        )
        with probe:
            # Nothing is sent: the kernel only chooses the way.
            probe.connect((login, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def ask(target, question):
    # type: (str, str) -> None
    """Send a question to the keeper and print its answer."""
    with connect(target, KEEPER_SECONDS) as connection:
        connection.sendall(question.encode() + b"\n")
        connection.shutdown(socket.SHUT_WR)
        answer = bytearray()
        while True:
            piece = connection.recv(CHUNK)
            if not piece:
                break
            answer += piece
    if answer:
        told = json.loads(answer.decode())
        told["address"] = address()
        sys.stdout.write("skyward %s\n" % json.dumps(told))


def copy(target, framed):
    # type: (str, bool) -> None
    """Copy bytes between the standard streams and the target."""
    if os.isatty(1):
        # Slurm gives a step without buffers a terminal, which must leave the bytes as they are.
        import tty

        tty.setraw(1)
    connection = connect(target, KEEPER_SECONDS if target == "keeper" else 0.0)
    sending = threading.Thread(target=send_input, args=(connection, framed), daemon=True)
    sending.start()
    while True:
        try:
            data = connection.recv(PIECE if framed else CHUNK)
        except OSError:
            data = b""
        head = struct.pack(">I", len(data)) if framed else b""
        view = memoryview(head + data)
        while len(view):
            view = view[os.write(1, view) :]
        if not data:
            break
    if framed:
        sending.join()


def send_input(connection, framed):
    # type: (socket.socket, bool) -> None
    with contextlib.suppress(OSError):
        while True:
            size = struct.unpack(">I", read_input(4))[0] if framed else CHUNK
            data = read_input(size) if framed else os.read(0, size)
            if not data:
                break
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


def read_input(size):
    # type: (int) -> bytes
    """So many bytes of the input; ends the program if there are no more."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[2] != "framed":
        ask(sys.argv[1], sys.argv[2])
    else:
        copy(sys.argv[1], len(sys.argv) > 2)
