"""A node's machine on AWS: an instance, the SSH connection to it, and how it ends itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skyward.errors import (
    HostKeyError,
    LoginError,
    PoolStartError,
    SkywardError,
    UnreachableError,
)
from skyward.providers import Machine, Offer, Order
from skyward.providers.aws import interruption, session, tags
from skyward.providers.aws.account import RequestError
from skyward.providers.aws.instances import ENDED, STOPPED, Instance, Instances, state_of
from skyward.providers.aws.settings import Settings
from skyward.providers.aws.site import Keys, admit_again
from skyward.providers.hosts import Destination, HostAddress
from skyward.providers.hosts.machine import SSHMachine

BOOT_SECONDS = 600.0
"""How long an instance may take to answer; large ones take minutes."""
ANSWER_SECONDS = 10.0
"""How long to try to reach an instance that has booted."""
PROBE_SECONDS = 2.0
LEARN_SECONDS = 10.0
"""How often to look at the console for the keys of a host that shows unknown ones."""
REFUSED_SECONDS = 60.0
"""How long an instance may refuse a login: its user may not have the key yet."""
LOGIN_SECONDS = 15.0
LOOK_SECONDS = 15.0
"""How often to ask AWS about an instance that does not answer while it boots."""
SSH_PORT = 22
_HOST_KEYS = re.compile(
    r"-----BEGIN SSH HOST KEY KEYS-----\s*(.*?)-----END SSH HOST KEY KEYS-----", re.DOTALL
)
_ENDS = ENDED | STOPPED


class AWSMachine(Machine):
    """An instance that one node has for itself."""

    def __init__(
        self,
        instances: Instances,
        settings: Settings,
        instance: Instance,
        node: int,
        offer: Offer | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        self._instances, self._settings = instances, settings
        self._keys = Keys(instances.pool, settings.key)
        self._subnet = str(instance.get("SubnetId") or "")
        self._may_be_shut_out = settings.access == "ssh" and not is_new
        """Whether this client may have another address than when the pool was made."""
        self._user = tags.tags_of(instance).get(tags.USER) or "ec2-user"
        self._public = str(instance.get("PublicIpAddress") or "")
        self._ssh: SSHMachine | None = None
        self._reaching = asyncio.Lock()
        self._gone = False
        self.id = str(instance["InstanceId"])
        self.ended = state_of(instance) in _ENDS
        """Whether it did not run when it was found."""
        self.node = node
        self.address = str(instance.get("PrivateIpAddress") or "")
        self.listens = self.address
        """Its own address: its public one belongs to the network, and nothing can listen there."""
        self.python = settings.python
        self.offer = offer
        self.is_former = False
        """Whether the node had it before, and it may have been stopped meanwhile."""
        self.notice = interruption.__name__ if offer and offer.allocation == "spot" else ""

    def __repr__(self) -> str:
        return f"AWSMachine({self.id!r})"

    async def make(self, order: Order, seconds: float = BOOT_SECONDS) -> None:
        """Wait until the instance has booted, and make the machine's folder on it.

        Starts the script that ends the instance: an AMI without cloud-init did not.
        """
        order.tell("waiting for the machine to boot")
        async with self._reaching:
            self._ssh = await self._reach(seconds, new=True)
            self.direct = self._ssh.direct
        start = watch(idle=order.request.idle_timeout, ttl=order.request.ttl)
        command = ["sh", "-c", '[ "$(id -u)" = 0 ] || s="sudo -n"; $s sh -c "$1"', "sh", start]
        if await self._ssh.run(command):
            order.note(
                f"node {self.node}: the instance {self.id} cannot end itself if this process is "
                f"gone: its user {self._user!r} may not use sudo without a password"
            )

    async def reach(self) -> None:
        """Log in, so that `direct` is known."""
        await self._reached()

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run a command over SSH."""
        return await (await self._reached()).run(command, input=input, output=output)

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect to a socket of the instance over SSH."""
        return await (await self._reached()).dial(endpoint)

    async def alive(self) -> bool:
        """Whether the instance answers, or else whether AWS says that it still runs."""
        if self._gone:
            return False
        problem: PoolStartError | None = None
        if self._ssh is not None:
            try:
                return await self._ssh.alive()
            except PoolStartError as failure:
                problem = failure
        found = (await self._instances.look()).get(self.id)
        if found is None or state_of(found) in _ENDS:
            self._gone = True
            return False
        if problem is not None:
            raise problem
        return True

    async def after_start(self) -> None:
        """Have the instance go with its disk if it shuts itself down, as a new one would."""
        if self.is_former:
            await self._instances.on_shutdown("terminate", self.id)
            self.is_former = False

    async def destroy(self) -> None:
        """Terminate the instance."""
        ssh, self._ssh, self.direct = self._ssh, None, None
        if ssh is not None:
            await ssh.leave()
        await self._instances.terminate(self.id)

    # How the instance is reached.

    async def _reached(self) -> SSHMachine:
        if self._gone or self.ended:
            state = "has ended" if self._gone else "is stopped"
            raise UnreachableError(f"AWS: the instance {self.id} {state}")
        async with self._reaching:
            if self._ssh is None:
                self._ssh = await self._reach(ANSWER_SECONDS, new=False)
                self.direct = self._ssh.direct
            return self._ssh

    async def _reach(self, seconds: float, *, new: bool) -> SSHMachine:
        """Log in at the private address if that answers, else at the public one."""
        if not Path(self._keys.private).expanduser().exists():
            raise UnreachableError(
                f"AWS: the instance {self.id} cannot be entered from here: its key is not at "
                f"{self._keys.private}"
            )
        deadline = time.monotonic() + seconds
        looked = time.monotonic()
        addresses = [each for each in dict.fromkeys((self.address, self._public)) if each]
        problem: PoolStartError | None = None
        learned = False
        refused: float | None = None
        learn_at = 0.0
        while True:
            for address in await self._answering(addresses):
                machine = self._machine(address)
                try:
                    if new:
                        await machine.make()
                    else:
                        await machine.alive()
                    return machine
                except HostKeyError as failure:
                    problem = failure
                    if not learned:
                        if time.monotonic() >= learn_at:
                            learned = await self._learn_host_keys(addresses)
                            learn_at = time.monotonic() + LEARN_SECONDS
                    elif address != self._public and self._public:
                        # Another machine has this private address where the client is.
                        addresses = [self._public]
                    else:
                        raise HostKeyError(
                            f"AWS: the instance {self.id} was refused at {address}: its host key "
                            "is neither the one that it was given nor one that its console shows. "
                            f"Nothing was sent. {str(failure).splitlines()[0]}"
                        ) from failure
                except LoginError as failure:
                    # While an instance boots, its users have no keys yet.
                    problem, refused = failure, refused or time.monotonic()
                    await machine.leave()
                    if time.monotonic() - refused > REFUSED_SECONDS:
                        raise LoginError(
                            f"AWS: the instance {self.id} lets nobody in as {self._user!r}, which "
                            "is the user that its AMI's name suggests; name the right one with "
                            "user="
                        ) from failure
                except PoolStartError as failure:
                    problem = failure
                    await machine.leave()
            if problem is None and self._may_be_shut_out:
                self._may_be_shut_out = False
                with contextlib.suppress(SkywardError):
                    await asyncio.to_thread(
                        admit_again,
                        *(self._instances.account, self._instances.pool),
                        *(self._subnet, self._settings.admit),
                    )
                deadline = max(deadline, time.monotonic() + PROBE_SECONDS)
            if time.monotonic() > deadline:
                break
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                await self._check_that_it_runs()
            await asyncio.sleep(0.5)
        at = " or ".join(addresses) or "no address"
        raise UnreachableError(
            f"AWS: the instance {self.id} was not reached at {at} within {seconds:.0f} s: "
            f"{problem or 'it does not answer'}; see that its subnet and security group let this "
            "machine in, or use access='ssm'"
        )

    async def _answering(self, addresses: list[str]) -> list[str]:
        """The addresses at which something listens, the private one first."""
        if self._settings.access == "ssm":
            return addresses[:1] or [self.id]
        answers = await asyncio.gather(*(_answers(each) for each in addresses))
        return [each for each, answer in zip(addresses, answers, strict=True) if answer]

    def _machine(self, address: str) -> SSHMachine:
        region, profile = self._instances.account.region, self._instances.account.profile
        through_ssm = self._settings.access == "ssm"
        destination = Destination(
            HostAddress(address, self._user, SSH_PORT),
            self._keys.private,
            None,
            str(self._keys.known_hosts),
            "none",
            LOGIN_SECONDS,
            proxy=session.command(self.id, region, profile) if through_ssm else (),
        )
        direct = None if through_ssm else address
        return SSHMachine(self._instances.pool, self.node, destination, self.address, direct)

    async def _learn_host_keys(self, addresses: Sequence[str]) -> bool:
        """Trust the keys that the instance printed on its console, which only AWS can show.

        An AMI without cloud-init does not take the key that the client made for it.
        """
        # Not every type can show what is on the console at the moment.
        more: dict[str, Any]
        for more in ({"Latest": True}, {}):
            with contextlib.suppress(RequestError):
                answer = await asyncio.to_thread(self._console, more)
                if keys := _host_keys(answer):
                    await asyncio.to_thread(self._keys.trust, addresses, keys)
                    return True
        return False

    def _console(self, more: dict[str, Any]) -> Any:
        account = self._instances.account
        return account.call("ec2", "get_console_output", InstanceId=self.id, **more)

    async def _check_that_it_runs(self) -> None:
        found = (await self._instances.look()).get(self.id)
        if found is not None and state_of(found) in _ENDS:
            reason = found.get("StateReason", {}).get("Message") or "no reason given"
            raise RequestError(f"AWS: the instance {self.id} ended while it booted: {reason}")


def _host_keys(answer: dict[str, Any]) -> list[str]:
    """The public keys of a host between the marks that cloud-init prints."""
    found = _HOST_KEYS.findall(str(answer.get("Output") or ""))
    lines = found[-1].splitlines() if found else []
    return [" ".join(line.split()[:2]) for line in lines if len(line.split()) >= 2]


async def _answers(address: str) -> bool:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(address, SSH_PORT)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


# What an instance does when it boots, and when it ends itself.

LEAST_IDLE_SECONDS = 120
"""An instance must have time for its first command, however short `idle_timeout` is."""
_WATCH = """
cd /
busy() {
    for each in /proc/[0-9]*; do
        case $(readlink "$each/cwd" 2>/dev/null) in */skyward/machines/*) return 0 ;; esac
        line=$(tr '\\0' ' ' 2>/dev/null <"$each/cmdline")
        case $line in *skyward.worker.[a]gent*) return 0 ;; esac
    done
    return 1
}
mark=/run/skyward-watch
other=$(cat "$mark" 2>/dev/null)
if [ -n "$other" ] && kill -0 "$other" 2>/dev/null; then exit 0; fi
echo $$ >"$mark"
now() { read -r up rest </proc/uptime; echo "${up%.*}"; }
began=$(now) last=$(now)
while :; do
    sleep 5
    time=$(now)
    if busy; then last=$time; fi
    if [ $((time - last)) -ge IDLE ] || [ $((time - began)) -ge TTL ]; then
        shutdown -h now || poweroff || kill -s TERM 1
        sleep 60
    fi
done
"""
"""Ends an instance that has had no agent and no command of ours for IDLE seconds, or after TTL
seconds. Needs nothing but a shell: the client may vanish before anything is installed. The brackets
keep the script from finding itself. A container has no `shutdown`; the last resort ends it."""
EVERY_BOOT = "/var/lib/cloud/scripts/per-boot/skyward-watch"
"""What is there, cloud-init runs at every boot; `runcmd` only at the first one."""
FOREVER = 10 * 365 * 24 * 3600


def watch(*, idle: float, ttl: float | None) -> str:
    """A command for a shell that starts the script, unless it runs already; root runs it."""
    script = _WATCH.replace("IDLE", str(max(LEAST_IDLE_SECONDS, int(idle)))).replace(
        "TTL", str(FOREVER if ttl is None else max(1, int(ttl)))
    )
    return f"setsid sh -c {shlex.quote(script)} >/dev/null 2>&1 </dev/null &"


def user_data(private: str, public: str, *, idle: float, ttl: float | None) -> str:
    """The configuration for cloud-init: the host's key, and the script that ends the instance.

    The client made the host's key, of both halves, so it knows the instance before the first login.
    """
    start = watch(idle=idle, ttl=ttl)
    script = {"path": EVERY_BOOT, "permissions": "0755", "content": f"#!/bin/sh\n{start}\n"}
    # YAML reads JSON, and cloud-init reads YAML.
    document = {
        "ssh_keys": {"ed25519_private": private, "ed25519_public": public},
        # A stopped instance that is started again must end, too, if its client is gone meanwhile.
        "write_files": [script],
        "runcmd": [["sh", "-c", start]],
    }
    return "#cloud-config\n" + json.dumps(document)
