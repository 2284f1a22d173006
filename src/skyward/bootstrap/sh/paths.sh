# Paths on a machine, and functions that the other scripts use.
# POSIX sh and little else: `sed`, `awk` and `find` may be missing on a bare machine.
# Given: pool, node, key, want, apt, wheel, includes, given_python.
set -u
umask 077

tell() { printf '@sky %s\n' "$*"; }
have() { command -v "$1" >/dev/null 2>&1; }
has_wheels() { for each in "$1"/*.whl; do [ -e "$each" ] && return 0; done; return 1; }
is_mine() { [ -d "$1" ] && [ ! -L "$1" ] && [ -O "$1" ]; }

user=$(id -u)
host=$(uname -n)
arch=$(uname -m)
libc=none
if [ "$(uname -s)" = Linux ]; then
    libc=musl
    for loader in /lib/ld-linux* /lib64/ld-linux* /lib/*/ld-linux* /lib64/ld64*; do
        if [ -e "$loader" ]; then libc=gnu; fi
    done
fi

home=${HOME:-}
[ -d "$home" ] || home=$(cd ~ 2>/dev/null && pwd)
cache=${SKYWARD_CACHE:-${XDG_CACHE_HOME:-${home:+${home%/}/.cache}}/skyward}
if [ "$cache" = /skyward ] || ! mkdir -p "$cache" 2>/dev/null || ! [ -w "$cache" ]; then
    for cache in "/var/tmp/skyward-$user" "/tmp/skyward-$user" ""; do
        mkdir "$cache" 2>/dev/null
        if is_mine "$cache"; then break; fi
    done
    if [ -z "$cache" ]; then
        printf '%s\n' "there is no folder to work in: not in ~/.cache, /var/tmp or /tmp"
        exit 1
    fi
fi
[ -n "$home" ] || home=$cache
environment=$cache/envs/$key-$arch-$libc

# When a process started: its number alone may be another process by now.
start_of() {
    if [ -d /proc/self ]; then
        read -r stat 2>/dev/null <"/proc/$1/stat" || return 0
        # The name, in parentheses, may hold anything; the 22nd field is the 20th after it.
        set -- ${stat##*) }
        [ "$1" = Z ] || printf '%s' "${20}"
    else
        set -- $(ps -o lstart= -p "$1" 2>/dev/null)
        (IFS=-; printf '%s' "$*")
    fi
}

# The packages of the system that the image asks for and dpkg does not have.
missing_apt() {
    for package in $apt; do
        name=${package%%[=/]*}
        found=$(dpkg-query -W -f '${db:Status-Status} ${Version}' "$name" 2>/dev/null)
        case $package in
            *=*) [ "$found" = "installed ${package#*=}" ] && continue ;;
            *) [ "${found%% *}" = installed ] && continue ;;
        esac
        printf '%s ' "$package"
    done
}

# The marker is written last. It lists packages that apt installed and dpkg does not know.
is_built() { [ -f "$environment/.ready" ] && [ -x "$environment/bin/python" ]; }
is_ready() {
    [ -n "$given_python" ] && return 0
    is_built || return 1
    [ -z "$apt" ] && return 0
    virtual=
    read -r virtual <"$environment/.ready"
    [ "$(missing_apt)" = "${virtual:+$virtual }" ]
}

# Short paths, for Unix sockets; not XDG_RUNTIME_DIR, which is removed when its user logs out.
each_base() { printf '%s\n' /tmp /var/tmp "$cache"; }
