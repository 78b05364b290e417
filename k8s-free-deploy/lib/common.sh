# shellcheck shell=sh
# What every script shares: steps that can be shown instead of done, the folder's layout, errors with one fix.
#
# Plain POSIX shell: macOS brings bash 3.2 and will not bring a newer one, and what dash runs, it runs too.
# Globals of all scripts, set by parse_common: prefix supervisor user dry_run.

set -eu
umask 022

LABEL=metalslots.node
WIRED_LABEL=metalslots.wired-limit
DEFAULT_PREFIX=/opt/metalslots
# Longer than a daemon needs to end: the engines give their memory back first (engine/core/async_engine.py).
END_LIMIT_S=150

deploy_folder=$(cd "$(dirname "$0")/.." && pwd)
checkout=$(cd "$deploy_folder/.." && pwd)
# shellcheck source=lib/supervisors.sh
. "$deploy_folder/lib/supervisors.sh"

prefix=$DEFAULT_PREFIX
supervisor=''
user=''
dry_run=no

say() { printf '%s\n' "$*"; }

# fail MESSAGE FIX: what happened, and one thing to do.
fail() {
    printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2
    exit 1
}

# step TEXT COMMAND...: say what is done and do it; with --dry-run only say it.
step() {
    say "- $1"
    shift
    if [ "$dry_run" = yes ]; then
        printf '    would run:'
        printf ' %s' "$@"
        printf '\n'
    else
        "$@"
    fi
}

# parse_common OPTION VALUE: take an option that all scripts have. Returns how many words it took in `taken`, 0 if none.
parse_common() {
    taken=2
    case $1 in
        --dry-run) dry_run=yes taken=1 ;;
        --prefix) need_value "$@"; prefix=$2 ;;
        --supervisor) need_value "$@"; supervisor=$2 ;;
        --user) need_value "$@"; user=$2 ;;
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) taken=0 ;;
    esac
}

need_value() {
    [ $# -ge 2 ] || usage "$1 needs a value"
}

usage() {
    printf 'error: %s\n  fix: %s --help\n' "$1" "$0" >&2
    exit 2
}

# What stands in settings, plists and units goes there as it is, so it may hold nothing that would need quoting.
check_word() {
    case $2 in
        '' | *[!A-Za-z0-9._:/@-]*) usage "$1 is \"$2\": only letters, digits and . _ : / @ - are allowed" ;;
    esac
}

# settle: after all options are read, decide what was left open, and refuse what cannot work.
settle() {
    check_word --prefix "$prefix"
    case $prefix in
        /*/*) ;;
        *) usage "--prefix is $prefix: name a folder of its own, such as $DEFAULT_PREFIX" ;;
    esac
    [ -n "$supervisor" ] || supervisor=$(default_supervisor)
    case $supervisor in
        none | launchd | systemd) ;;
        *) usage "--supervisor is $supervisor: use launchd, systemd or none" ;;
    esac
    # The loop runs as who starts it.
    if [ "$supervisor" = none ]; then user=$(id -un); fi
    [ -n "$user" ] || user=${SUDO_USER:-$(id -un)}
    check_word --user "$user"
    if [ "$supervisor" != none ] && [ "$dry_run" = no ] && [ "$(id -u)" != 0 ]; then
        fail "$supervisor takes daemons from the administrator only" "run it with sudo, or look first: --dry-run"
    fi
}

require_installation() {
    [ -f "$prefix/etc/node.yaml" ] || fail "$prefix is no installation" "name it with --prefix, or run install.sh"
}

role() { sed -n 's/^role: *//p' "$prefix/etc/node.yaml"; }

address_here() { sed -n 's/^address: *//p' "$prefix/etc/node.yaml"; }

metalslots() { "$prefix/bin/metalslots" "$@"; }

# drain_here SECONDS: give this machine nothing new, wait for what it answers, and note how many replicas it has, which is
# what is waited for when it comes back.
drain_here() {
    say "- give it nothing new, and wait for what it answers"
    if [ "$dry_run" = yes ]; then
        say "    would run: metalslots drain $(address_here) --wait $1"
        return
    fi
    drained=$(metalslots drain "$(address_here)" --wait "$1" --json) || return 1
    say "$drained" | sed -n 's/.*"replicas": *\([0-9]*\).*/\1/p' >"$prefix/run/replicas"
}

# ready_here: wait until everything that ran here before runs here again.
ready_here() {
    num_replicas=$(cat "$prefix/run/replicas" 2>/dev/null || say 0)
    step "wait until its $num_replicas replicas answer" \
        metalslots ready "$(address_here)" --replicas "$num_replicas" --wait 1800
}

# hand_over: what root has written below the prefix belongs to who runs the daemon.
hand_over() {
    if [ "$(id -u)" = 0 ] && [ "$user" != root ]; then
        step "give $prefix to $user" chown -R "$user" "$prefix"
    fi
}

# render TEMPLATE TARGET: fill in a daemon's template. Values were checked by check_word.
render() {
    sed -e "s|@PREFIX@|$prefix|g" -e "s|@USER@|$user|g" -e "s|@LABEL@|$LABEL|g" -e "s|@WIRED_LABEL@|$WIRED_LABEL|g" \
        -e "s|@END_LIMIT_S@|$END_LIMIT_S|g" -e "s|@WIRED_LIMIT_MB@|${wired_limit_mb:-0}|g" "$1" >"$2.new"
    chmod 644 "$2.new"
    mv "$2.new" "$2"
}
