# Make the node's folder, unpack the includes into it, and report what the machine has.
folder=
for base in $(each_base); do
    [ -w "$base" ] || continue
    candidate=$base/sky.$pool.$node
    mkdir "$candidate" 2>/dev/null
    if is_mine "$candidate" && chmod 700 "$candidate" && mkdir -p "$candidate/work"; then
        folder=$candidate
        break
    fi
done
if [ -z "$folder" ]; then
    tell failed folder
    printf '%s\n' "no folder can be made in: $(each_base)"
    exit 1
fi

python=${given_python:-$environment/bin/python}
if [ -n "$includes" ]; then
    bundle=$cache/includes/$includes.tgz
    if [ ! -s "$bundle" ]; then
        tell missing includes
    elif is_ready; then
        if have tar && have gzip; then
            tar -xzopf "$bundle" -C "$folder/work"
        else
            # Pythons before 3.11.4 have no filters; the others would take bits away.
            "$python" -c 'import sys, tarfile
tar = tarfile.open(sys.argv[1])
tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
tar.extractall(sys.argv[2])' "$bundle" "$folder/work"
        fi || { tell failed includes; exit 1; }
        touch "$bundle"
    fi
fi
if ! is_ready; then
    tell missing environment
    [ -s "$cache/wheels/$wheel" ] || tell missing wheel
else
    [ -n "$given_python" ] || touch "$environment/.ready"
    # For commands that run there later and do not know which environment the node uses.
    ln -sf "$python" "$folder/python"
fi

tell hostname "$host"
tell cache "$cache"
tell platform "$(uname -s) $arch $libc"
have gzip && tell gzip yes
tell python "$python"
tell folder "$folder"
tell prepared yes
