"""User data: what an instance does when it boots, and when it ends itself."""

from __future__ import annotations

import json

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
    return f"setsid sh -c {_quoted(script)} >/dev/null 2>&1 </dev/null &"


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


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
