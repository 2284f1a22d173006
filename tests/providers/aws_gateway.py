"""A gateway before the testbed's EC2: counts calls, fails as told, and adds what moto lacks."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .aws_account import Account
from .aws_booting import as_booting, rewritten, widened, without
from .aws_faults import MESSAGES, Fault
from .aws_messages import Answer, Call, accepted, read_call, refusal
from .aws_metadata import Metadata
from .aws_policy import refused_action
from .aws_stand_ins import StandIns

_HOP = {"connection", "content-length", "transfer-encoding", "keep-alive"}
_RESOURCE = re.compile(r"(?:i|sg|vol|eni|key|lt|fleet|sir|pg)-[0-9a-f]{8,}")


def podman_variables() -> dict[str, str]:
    """What leads the `podman` command to the testbed's containers."""
    folder = Path(os.environ.get("TESTBED_STATE", "/var/tmp/skyward-testbed"), "podman")
    return {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }


@dataclass
class Hold:
    """A call that waits for its answer."""

    action: str
    done_first: bool
    """Whether AWS has done what was asked before the client waits."""
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class Gateway:
    """AWS, as far as a client can tell, over an account of its own in moto.

    Without an `upstream`, only what the stand-ins know is answered: catalogue, prices and quotas.
    """

    def __init__(self, upstream: str = "", port: int = 0) -> None:
        self._lock = threading.Lock()
        self._upstream = urlsplit(upstream)
        self.account = Account(upstream)
        self.stand_ins = StandIns()
        self.calls: list[Call] = []
        self.denied: list[str] = []
        """Actions that the policy did not allow."""
        self.policy: Mapping[str, Any] | None = None
        """If there is one, it is enforced."""
        self.delay = 0.0
        """How many seconds every answer takes."""
        self.room: dict[str, int] = {}
        """How many instances more there is room for, by zone; any other has room for all."""
        self._faults: list[Fault] = []
        self._holds: list[Hold] = []
        self._lost: Counter[str] = Counter()
        self._boot_seconds = 0.0
        self._missing_lists = 0
        self._missed: Counter[str] = Counter()
        """How many lists each new instance was missing from."""
        self._launched: dict[str, float] = {}
        self._tokens: dict[str, tuple[Mapping[str, Any], Answer]] = {}
        self._timers: list[threading.Timer] = []
        self._settled = 0.0
        self.metadata = Metadata(self._instance_of)
        self._server = _Server(("127.0.0.1", port), self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="gateway", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering; removes what is left in the account."""
        self.reset()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.metadata.close()

    def reset(self) -> None:
        """Forget calls, faults, the policy and notices, and remove what is in the account."""
        with self._lock:
            for hold in self._holds:
                hold.released.set()
            for timer in self._timers:
                timer.cancel()
            self._faults, self._holds, self._timers = [], [], []
            self._lost.clear()
            self.calls, self.denied, self.policy = [], [], None
            self.delay = self._boot_seconds = 0.0
            self._missing_lists = 0
            self._missed.clear()
            self.room = {}
        self.metadata.reset()
        self.account.clean()
        self.stand_ins = StandIns()

    # What tests arrange.

    def fail(
        self,
        action: str,
        code: str,
        message: str = "",
        *,
        status: int = 0,
        times: int | None = None,
        when: Callable[[Call], bool] = lambda call: True,
    ) -> Fault:
        """Refuse an action ("*" for every one), so many times or until it is removed."""
        usual_status, usual = MESSAGES.get(code, (400, code))
        fault = Fault(action, code, message or usual, status or usual_status, when, times)
        with self._lock:
            self._faults.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Refuse no longer."""
        with self._lock:
            self._faults.remove(fault)

    @contextlib.contextmanager
    def holding(self, action: str, *, done_first: bool = True) -> Iterator[Hold]:
        """Let the next such call wait for its answer, until the block ends."""
        hold = Hold(action, done_first)
        with self._lock:
            self._holds.append(hold)
        try:
            yield hold
        finally:
            hold.released.set()

    def lose(self, action: str, times: int = 1) -> None:
        """Do what is asked, and end the connection before the answer."""
        with self._lock:
            self._lost[action] += times

    def slow_boot(self, seconds: float) -> None:
        """Let instances be "pending" for so long, though the testbed's are up at once."""
        self._boot_seconds = seconds

    def slow_to_appear(self, lists: int) -> None:
        """Let new instances be missing from so many lists, as AWS says that they may be."""
        self._missing_lists = lists

    def interrupt(self, seconds: float = 120.0, *instances: str) -> None:
        """Tell instances, or all, that they end so many seconds from now; and end them then."""
        for instance in instances or (None,):
            self.metadata.announce(seconds, instance)
        names = instances or [each["InstanceId"] for each in self.account.instances()]
        timer = threading.Timer(seconds, self.account.terminate, names)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    # What tests ask.

    def counted(self) -> Counter[str]:
        """How many calls there were of each operation, such as "ec2:RunInstances"."""
        with self._lock:
            return Counter(call.name for call in self.calls)

    def made(self, action: str) -> list[Call]:
        """The calls of an operation."""
        with self._lock:
            return [call for call in self.calls if call.action == action]

    def leftovers(self) -> list[str]:
        """Everything that is in the account, with its region and its kind."""
        self._settle()
        groups = [
            f"{region}: placement group {name}" for region, name in list(self.stand_ins.groups)
        ]
        return self.account.leftovers() + groups

    # What the server does.

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The answer to a request."""
        call = read_call(method, path, headers, body)
        if self._upstream.netloc and call.service == "ec2":
            self.account.connect(call.region)
        if call.action == "RunInstances":
            zone = call.parameters.get("Placement.AvailabilityZone") or self.account.zone_of(
                call.subnet, call.region
            )
            call = replace(call, zone=str(zone))
        with self._lock:
            self.calls.append(call)
            fault = next((each for each in self._faults if each.takes(call)), None)
            hold = next((each for each in self._holds if each.action == call.action), None)
            if hold is not None:
                self._holds.remove(hold)
        if self.delay:
            time.sleep(self.delay)
        if hold is not None and not hold.done_first:
            hold.reached.set()
            hold.released.wait()
        if fault is not None:
            return self._refuse(call, fault.code, fault.message, fault.status)
        found = self._checked(call) or self.stand_ins.answer(call)
        found = found or self._repeated(call) or self._passed(call, method, path, headers, body)
        if self._upstream.netloc and call.service == "ec2":
            # Again: somebody may have looked since, before the call has made something.
            self.account.connect(call.region)
        if hold is not None and hold.done_first:
            hold.reached.set()
            hold.released.wait()
        with self._lock:
            if self._lost[call.action]:
                self._lost[call.action] -= 1
                raise ConnectionAbortedError(f"the answer to {call.name} is lost")
        return found

    def _refuse(self, call: Call, code: str, message: str, status: int, action: str = "") -> Answer:
        words = {"type": call.instance_type, "zone": call.zone, "action": action or call.name}
        for word, value in words.items():
            message = message.replace(f"{{{word}}}", value)
        return refusal(call, code, message, status)

    def _checked(self, call: Call) -> Answer | None:
        """A refusal, if there is a policy and it does not allow the call."""
        if self.policy is None:
            return None
        action = refused_action(self.policy, call, self._tags_of)
        if action is None:
            return None
        with self._lock:
            self.denied.append(action)
        code = "UnauthorizedOperation" if call.service == "ec2" else "AccessDeniedException"
        status, message = MESSAGES[code]
        return self._refuse(call, code, message, status, action)

    def _tags_of(self, call: Call) -> list[Mapping[str, str]]:
        named = [
            each for value in call.parameters.values() for each in _RESOURCE.findall(str(value))
        ]
        found = self.account.tags_of(sorted(set(named)), call.region)
        group = self.stand_ins.groups.get((call.region, str(call.parameters.get("GroupName"))))
        if group is not None:
            found.append({tag["Key"]: tag["Value"] for tag in group["Tags"]})
        if name := call.parameters.get("KeyName"):
            with contextlib.suppress(Exception):
                pairs = self.account.ec2(call.region).describe_key_pairs(KeyNames=[name])
                tags = pairs["KeyPairs"][0].get("Tags", [])
                found.append({tag["Key"]: tag["Value"] for tag in tags})
        return found

    def _repeated(self, call: Call) -> Answer | None:
        """The answer to an earlier call with the same token: moto would launch once more."""
        token = call.parameters.get("ClientToken")
        if call.action != "RunInstances" or token not in self._tokens:
            return None
        parameters, answer = self._tokens[token]
        if parameters == call.parameters:
            return answer
        message = (
            "Arguments on this idempotent request are inconsistent with arguments used in previous "
            "request(s)."
        )
        return refusal(call, "IdempotentParameterMismatch", message, 400)

    def _passed(
        self, call: Call, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        """moto's answer."""
        if not self._upstream.netloc:
            return refusal(call, "ServiceUnavailable", f"{call.name} is not served", 400)
        shown = self._wanted_states(call)
        if shown is not None:
            body = widened(call)
        if call.action == "DescribeInstances":
            self._settle()
        if call.action == "RunInstances":
            count = self._taken(call)
            if count < int(call.parameters.get("MinCount", 1)):
                status, message = MESSAGES["InsufficientInstanceCapacity"]
                return self._refuse(call, "InsufficientInstanceCapacity", message, status)
            # moto launches as few as are asked for, and AWS as many as it has.
            body = rewritten(call, {"MinCount": str(count), "MaxCount": str(count)})
        if call.action == "TerminateInstances" and (ended := self._ended(call)):
            return ended
        answer = self._forward(method, path, headers, body)
        if call.action == "RunInstances" and answer.status == 200:
            if token := call.parameters.get("ClientToken"):
                self._tokens[token] = (call.parameters, answer)
            for instance in re.findall(rb"<instanceId>(i-\w+)", answer.body):
                self._launched[instance.decode()] = time.monotonic()
        if call.action == "DescribeInstances" and answer.status == 200:
            answer.body = without(answer.body, self._hidden())
        booting = self._launched_within(self._boot_seconds)
        if booting and answer.status == 200:
            if call.action == "DescribeInstances":
                answer.body = as_booting(answer.body, booting, shown)
            elif call.action == "GetConsoleOutput" and call.parameters["InstanceId"] in booting:
                return accepted(call, {"InstanceId": call.parameters["InstanceId"]})
        return answer

    def _hidden(self) -> set[str]:
        """The new instances that this list leaves out."""
        with self._lock:
            hidden = {each for each in self._launched if self._missed[each] < self._missing_lists}
            self._missed.update(hidden)
        return hidden

    def _ended(self, call: Call) -> Answer | None:
        """The answer for instances that have all ended already, which moto cannot end again."""
        gone = {each["InstanceId"] for each in self.account.instances("terminated")}
        if not gone.issuperset(names := call.listed("InstanceId")):
            return None
        state = {"Code": 48, "Name": "terminated"}
        ended = [{"InstanceId": each, "CurrentState": state} for each in names]
        return accepted(call, {"TerminatingInstances": ended})

    def _taken(self, call: Call) -> int:
        """How many of the instances that a call asks for its zone has; they are taken."""
        with self._lock:
            free = self.room.get(call.zone)
            if free is None:
                return call.count
            count = min(call.count, free)
            if count >= int(call.parameters.get("MinCount", 1)):
                self.room[call.zone] = free - count
            return count

    def _forward(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection(
            str(self._upstream.hostname), self._upstream.port, timeout=300
        )
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.putheader("x-moto-account-id", self.account.number)
            connection.endheaders(body)
            reply = connection.getresponse()
            given = [(k, v) for k, v in reply.getheaders() if k.lower() not in _HOP]
            if method == "HEAD" and (length := reply.headers["Content-Length"]):
                given.append(("Content-Length", length))
            return Answer(reply.status, reply.read(), given)

    def _wanted_states(self, call: Call) -> list[str] | None:
        """The states that a client asks for, if instances may be in others than moto says."""
        if call.action != "DescribeInstances" or not self._launched_within(self._boot_seconds):
            return None
        return call.filters().get("instance-state-name")

    def _launched_within(self, seconds: float) -> set[str]:
        since = time.monotonic() - seconds
        return {name for name, at in list(self._launched.items()) if at > since}

    def _instance_of(self, address: str) -> Mapping[str, Any] | None:
        found = self.account.instances("running")
        return next((each for each in found if each.get("PrivateIpAddress") == address), None)

    def _settle(self) -> None:
        """Terminate instances whose machine has ended itself, as AWS does if launched so."""
        has_machines = self._upstream.netloc and shutil.which("podman")
        if not has_machines or time.monotonic() - self._settled < 1:
            return
        self._settled = time.monotonic()
        command = ["podman", "ps", "-a", "--filter", "status=exited", "--format", "{{.Names}}"]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | podman_variables()
        )
        stopped = {each["InstanceId"] for each in self.account.instances("stopped")}
        if ended := set(done.stdout.split()) - stopped:
            self.account.terminate(*ended)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], gateway: Gateway) -> None:
        self.gateway = gateway
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    # Else an answer waits for the client's acknowledgement of its headers, some 40 ms.
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        body = self._body()
        try:
            answer = self.server.gateway.answer(self.command, self.path, self.headers, body)
        except ConnectionAbortedError:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if self.command == "HEAD":
            self.end_headers()
            return
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    """Serve before a moto whose URL is given, and print the variables that lead here."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    gateway = Gateway(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"export AWS_ENDPOINT_URL='{gateway.url}'")
    print(f"export AWS_EC2_METADATA_SERVICE_ENDPOINT='{gateway.metadata.url}'", flush=True)
    signal.sigwait(ends)
    gateway.close()


if __name__ == "__main__":
    main()
