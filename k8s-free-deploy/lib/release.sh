# shellcheck shell=sh
# Releases: environments side by side below the prefix, one of them current.
#
# A new one is whole before anything is stopped, and the old one stays until the new one has answered, so that going
# back is changing one link.

MIN_FREE_KB=4000000

# find_python: the newest Python that will do, or the one named with --python.
find_python() {
    for candidate in ${python_name:-python3.13 python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer is found" "install one (macOS: brew install python@3.12), or name it with --python"
}

# make_release: leaves the new release's folder in `release`. With --environment it is a link to one that is there.
make_release() {
    release=$prefix/releases/$(date +%Y%m%d-%H%M%S)-$$
    step "make $prefix" mkdir -p "$prefix/releases" "$prefix/bin" "$prefix/etc" "$prefix/log" "$prefix/run"
    if [ -n "${environment:-}" ]; then
        [ -x "$environment/bin/metalslots" ] || fail "$environment holds no metalslots" "make it with \`make setup\`"
        step "use the environment $environment" ln -s "$environment" "$release"
        return
    fi
    python=$(find_python)
    free_kb=$(df -Pk "$(existing "$prefix")" | awk 'NR == 2 { print $4 }')
    [ "$free_kb" -ge "$MIN_FREE_KB" ] || fail "$prefix has $((free_kb / 1000)) MB free, and $((MIN_FREE_KB / 1000)) MB are needed" \
        "free some, or choose another --prefix"
    # What is half made must not be taken for a release.
    trap 'rm -rf "$release"' EXIT
    step "make an environment with $python" "$python" -m venv "$release"
    step "install metalslots from $checkout (about 1.1 GB)" "$release/bin/python" -m pip install --quiet \
        --disable-pip-version-check --no-input -c "$checkout/constraints.txt" "${checkout}[cpu]"
    # A Mac computes with Metal. Elsewhere the processor does, and needs a good matrix product.
    if [ "$(uname -s)" != Darwin ]; then
        step "build the fast matrix product for this processor" "$release/bin/python" -m engine.mlx_backend.blas build ||
            say "  no compiler: the engine is right, but slow"
    fi
    trap - EXIT
}

existing() {
    folder=$1
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    say "$folder"
}

# use_release RELEASE: make it current, and put the command in place that knows this installation.
use_release() {
    step "make $(basename "$1") current" link_current "$1"
    step "write $prefix/bin/metalslots" write_command
}

link_current() {
    ln -sfn "$1" "$prefix/current"
}

write_command() {
    cat >"$prefix/bin/metalslots.new" <<END
#!/bin/sh
# metalslots with this installation's settings and secrets.
export METALSLOTS_PREFIX=$prefix METALSLOTS_KEYS_FILE=$prefix/etc/keys.yaml
exec $prefix/current/bin/metalslots "\$@"
END
    chmod 755 "$prefix/bin/metalslots.new"
    mv "$prefix/bin/metalslots.new" "$prefix/bin/metalslots"
}

# current_release: where the link points, or nothing.
current_release() { readlink "$prefix/current" 2>/dev/null || :; }

# drop_old_releases KEEP: remove every release but the current one and KEEP.
drop_old_releases() {
    current=$(current_release)
    for old in "$prefix"/releases/*; do
        case $old in
            "$current" | "$1" | "$prefix/releases/*") ;;
            *) step "remove the old $(basename "$old")" rm -rf "$old" ;;
        esac
    done
}
