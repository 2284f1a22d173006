# Build an environment: system packages, Python, uv, packages, and last the marker.
# Given besides: wheel_name, minor, uv_allowed, requirements, project, candidates, and the
# variables of the image, exported.
[ -n "${HOME:-}" ] || export HOME="$home"
build=$environment.build
lock=$environment.lock

give_up() {
    tell failed "$1"
    exit 1
}

# The lock is a link, which is made whole or not at all, and its target names the process that holds
# the lock. Containers that share this folder may have the same host name, so the name of a process
# has the namespace of its number in it.
place=$host-$(readlink /proc/self/ns/pid)
me=$place:$$:$(start_of $$)
silence=0 heard=
break_silence=0 breaker=
is_stale() {
    owner=$(readlink "$1") || return 1
    case $1,$owner in
        *,"$place":*)
            owner=${owner#"$place":}
            [ "$(start_of "${owner%%:*}")" != "${owner#*:}" ]
            ;;
        # A process of another machine counts as alive while its beat changes. A new owner has
        # written no beat yet, so a change of owner counts as well.
        "$lock",*)
            before=$heard
            heard="$owner $(cat "$lock.beat" 2>/dev/null)"
            if [ "$heard" != "$before" ]; then silence=0; fi
            silence=$((silence + 1))
            [ "$silence" -gt 150 ]
            ;;
        # Breaking a lock takes a moment only.
        *)
            if [ "$owner" != "$breaker" ]; then break_silence=0; fi
            breaker=$owner
            break_silence=$((break_silence + 1))
            [ "$break_silence" -gt 150 ]
            ;;
    esac
}
mkdir -p "$cache/envs"
waiting=
refusals=0
until ln -s "$me" "$lock" 2>/dev/null; do
    if [ ! -L "$lock" ]; then
        refusals=$((refusals + 1))
        if [ "$refusals" -gt 20 ]; then
            ln -s "$me" "$lock"
            give_up folder
        fi
    fi
    if is_stale "$lock"; then
        if ln -s "$me" "$lock.break" 2>/dev/null; then
            # Look again: another process may have taken the lock meanwhile.
            if is_stale "$lock"; then rm -f "$lock"; fi
            rm -f "$lock.break"
            continue
        elif is_stale "$lock.break"; then
            rm -f "$lock.break"
            continue
        fi
    fi
    if [ -z "$waiting" ]; then
        waiting=yes
        tell phase "waiting for another node that builds this environment"
    fi
    sleep 0.2 2>/dev/null || sleep 1
done
{
    trap 'kill "$nap"; exit' TERM
    times=0
    while kill -0 $$; do
        times=$((times + 1))
        printf '%s\n' "$me $times" >"$lock.beat"
        sleep 5 &
        nap=$!
        wait "$nap"
    done
} >/dev/null 2>&1 &
beat=$!
leave() {
    kill "$beat" 2>/dev/null
    # Another process may have taken this one for dead, and the lock; then nothing is removed.
    if [ "$(readlink "$lock")" = "$me" ]; then
        rm -rf "$build"
        rm -f "$lock.beat" "$lock"
    fi
}
trap leave EXIT
trap 'exit 1' HUP INT TERM PIPE

as_root() {
    if [ "$user" = 0 ]; then "$@"; else sudo -n "$@"; fi
}
may_be_root() { [ "$user" = 0 ] || { have sudo && sudo -n true 2>/dev/null; }; }
apt_get() {
    # All users must be able to read the system's files.
    (umask 022 && as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq \
        -o DPkg::Lock::Timeout=180 -o Dpkg::Use-Pty=0 "$@")
}
refresh_apt() {
    [ -z "${apt_fresh:-}" ] || return 0
    apt_get update && apt_fresh=yes
}

install_apt() {
    wanted=$(missing_apt)
    [ -n "$wanted" ] || return 0
    tell phase "installing ${wanted% } with apt"
    if ! have apt-get; then
        printf '%s\n' "this machine has no apt-get"
        give_up apt
    fi
    if ! may_be_root; then
        printf '%s\n' "installing system packages takes root, or sudo without a password"
        give_up root
    fi
    refresh_apt || give_up apt
    apt_get install -y --no-install-recommends $wanted || give_up apt
}

find_python() {
    for candidate in "python$minor" python3 python \
        "/usr/bin/python$minor" "/usr/local/bin/python$minor" /opt/conda/bin/python \
        "$cache/python"/*/bin/"python$minor" "$home"/.pyenv/versions/"$want"*/bin/python \
        "$home/.local/share/uv/python"/*/bin/"python$minor"; do
        have "$candidate" || continue
        python=$("$candidate" -c 'import sys
if "{}.{}.{}.".format(*sys.version_info[:3]).startswith(sys.argv[1] + "."): print(sys.executable)
' "$want" 2>/dev/null)
        [ -n "$python" ] && return 0
    done
    python=
    return 1
}

install_python() {
    find_python && return 0
    if have apt-cache && may_be_root; then
        refresh_apt >/dev/null 2>&1
        case $(apt-cache policy "python$minor" 2>/dev/null) in
            *"Candidate: $want"*)
                tell phase "installing Python $want with apt"
                apt_get install -y --no-install-recommends "python$minor" "python$minor-venv" &&
                    find_python && return 0
                ;;
        esac
    fi
    get_uv || give_up python
    tell phase "installing Python $want"
    use_pip_settings
    UV_PYTHON_INSTALL_DIR=$cache/python "$uv" python install --no-bin "$want" || give_up python
    find_python || give_up python
}

# Scoped indexes came with 0.4.23.
is_recent_uv() {
    case $("$1" --version 2>/dev/null) in
        "" | "uv 0."[0-4].*) return 1 ;;
    esac
}

get_uv() {
    [ -n "$uv_allowed" ] || return 1
    for uv in uv "$cache/uv/uv" "$home/.local/bin/uv" "$home/.cargo/bin/uv"; do
        is_recent_uv "$uv" && return 0
    done
    for pip in "$python" python3 python; do
        [ -n "$pip" ] && "$pip" -m pip --version >/dev/null 2>&1 || continue
        tell phase "installing uv"
        rm -rf "$build.uv"
        if "$pip" -m pip install -q --disable-pip-version-check --no-input --no-deps \
            --target "$build.uv" uv && is_recent_uv "$build.uv/bin/uv"; then
            mkdir -p "$cache/uv"
            mv -f "$build.uv/bin/uv" "$cache/uv/uv"
            rm -rf "$build.uv"
            uv=$cache/uv/uv
            return 0
        fi
        rm -rf "$build.uv"
    done
    tell missing uv
    exit 1
}

# Pass the machine's settings for pip on to uv, which reads neither pip's files nor its variables.
pip_setting() {
    have awk || return 0
    for file in /etc/xdg/pip/pip.conf /etc/pip.conf "$home/.pip/pip.conf" \
        "${XDG_CONFIG_HOME:-$home/.config}/pip/pip.conf" "${PIP_CONFIG_FILE:-}"; do
        [ -r "$file" ] && [ -f "$file" ] && cat "$file" && printf '\n[]\n'
    done | awk -v key="$1" '
        /^[ \t]*[#;]/ { next }
        /^\[/ { known = ($0 ~ /^\[(global|install)\]/); taking = 0; next }
        /^[ \t]/ { if (taking) value = value " " $0; next }
        {
            taking = 0
            name = $0; sub(/[ \t]*[=:].*/, "", name); gsub(/_/, "-", name)
            if (known && name == key) { value = $0; sub(/^[^=:]*[=:]/, "", value); taking = 1 }
        }
        END { $0 = value; $1 = $1; print }'
}
use_pip_settings() {
    index=${PIP_INDEX_URL:-$(pip_setting index-url)}
    more=${PIP_EXTRA_INDEX_URL:-$(pip_setting extra-index-url)}
    links=${PIP_FIND_LINKS:-$(pip_setting find-links)}
    certificates=${PIP_CERT:-$(pip_setting cert)}
    proxy=${PIP_PROXY:-$(pip_setting proxy)}
    if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] && [ -n "$index" ]; then
        export UV_DEFAULT_INDEX="$index"
    fi
    if [ -z "${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-}" ] && [ -n "$more" ]; then
        # To pip, all indexes are equal and the best version wins.
        export UV_INDEX="$more" UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
    fi
    if [ -z "${UV_FIND_LINKS:-}" ] && [ -n "$links" ]; then
        export UV_FIND_LINKS="$links"
    fi
    # uv has certificates of its own, without those that a company adds to its machines.
    for file in "$certificates" /etc/ssl/certs/ca-certificates.crt \
        /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem; do
        if [ -z "${SSL_CERT_FILE:-}" ] && [ -f "$file" ]; then
            export SSL_CERT_FILE="$file"
        fi
    done
    if [ -z "${ALL_PROXY:-}${HTTPS_PROXY:-}${https_proxy:-}" ] && [ -n "$proxy" ]; then
        export ALL_PROXY="$proxy"
    fi
}

# A scoped index also serves a package that only another package requires. uv applies scopes only to
# packages that are required by name, so this finds such packages first and then requires them.
needed_extras() {
    [ -n "$candidates" ] || return 0
    "$uv" pip compile -q --no-header --all-extras --annotation-style line \
        --python "$environment/bin/python" "$build/requirements.txt" "$build/pyproject.toml" \
        -o "$build/all.txt" >/dev/null 2>&1 || return 0
    while read -r pinned mark word origins; do
        for candidate in $candidates; do
            [ "${pinned%%[=@]*}" = "$candidate" ] || continue
            case $origins in *,*) printf '%s %s ' --extra "$candidate" ;; esac
        done
    done <"$build/all.txt"
}

install_packages() {
    rm -rf "$environment" "$build"
    mkdir "$build"
    printf '%s' "$requirements" >"$build/requirements.txt"
    if get_uv; then
        tell phase "installing packages"
        use_pip_settings
        export UV_NO_PROGRESS=1
        # On the file system of the environments, uv links files instead of copying them.
        [ -z "${SKYWARD_CACHE:-}" ] || export UV_CACHE_DIR="${UV_CACHE_DIR:-$cache/uv-cache}"
        "$uv" venv -q --no-project --python "$python" "$environment" || give_up python
        set --
        [ -z "$requirements" ] || set -- -r "$build/requirements.txt"
        if [ -n "$project" ]; then
            printf '%s' "$project" >"$build/pyproject.toml"
            set -- "$@" -r "$build/pyproject.toml" $(needed_extras)
        fi
        "$uv" pip install --python "$environment/bin/python" "$@" "$cache/wheels/$wheel" ||
            give_up packages
    else
        tell phase "installing packages with pip"
        "$python" -m venv "$environment" || give_up uv
        install_scoped_with_pip || give_up packages
        "$environment/bin/python" -m pip install --disable-pip-version-check --no-input \
            -r "$build/requirements.txt" "$cache/wheels/$wheel" || give_up packages
    fi
    tell phase "trying the environment"
    "$environment/bin/python" -c 'import skyward.worker.agent' || give_up environment
}

# No pool lives for 40 days: its certificates expire before.
remove_old_environments() {
    find "$cache/envs" -maxdepth 2 -name .ready -mtime +40 2>/dev/null | while read -r old; do
        rm -rf "${old%/.ready}"
    done
    find "$cache/includes" "$cache/wheels" -type f -mtime +40 -exec rm -f {} + 2>/dev/null
}

if ! is_ready; then
    python= uv=
    install_apt
    # Where machines share the folder, another may have built the environment. This machine can use
    # it once it has the system packages.
    is_built || install_python
    if ! is_built; then
        install_packages
        virtual=$(missing_apt)
        printf '%s\n' "${virtual% }" >"$environment/.ready"
        remove_old_environments
    fi
fi
