#!/bin/sh
# remove.sh [options]: take this machine out of the fleet and remove everything that install.sh or join.sh has made.
#
#   --yes           do not ask
#   --wait SECONDS  how long to wait for the answers that run here (600)
#   --prefix DIR, --supervisor KIND, --dry-run: as for install.sh
#
# The Mac's settings for sleep and firewall stay as they are.

# shellcheck source=lib/common.sh
. "$(dirname "$0")/../lib/common.sh"

yes=no
wait_s=600
while [ $# -gt 0 ]; do
    parse_common "$@"
    if [ "$taken" = 0 ]; then
        case $1 in
            --yes) yes=yes taken=1 ;;
            --wait) need_value "$@"; check_word "$1" "$2"; wait_s=$2 taken=2 ;;
            *) usage "$1 is no option" ;;
        esac
    fi
    shift "$taken"
done
settle
if [ ! -f "$prefix/etc/node.yaml" ]; then
    say "$prefix is no installation: there is nothing to remove"
    exit 0
fi
[ "$(role)" != head ] || say "This is the head: without it the others stop serving after ten minutes."
if [ "$yes" = no ] && [ "$dry_run" = no ]; then
    printf 'Remove %s and everything in it, models as well? [y/N] ' "$prefix"
    read -r answer
    case $answer in
        y | Y | yes) ;;
        *) fail "nothing was removed" "answer y, or give --yes" ;;
    esac
fi

if metalslots node state >/dev/null 2>&1; then
    drain_here "$wait_s" ||
        say "  it could not be drained: answers that run here are broken off"
fi
stop_daemon
unregister_daemon
if [ "$supervisor" = launchd ] && [ -f "$LAUNCHD_FOLDER/$WIRED_LABEL.plist" ]; then
    step "no more GPU memory limit at boot" launchctl bootout "system/$WIRED_LABEL" || :
    step "forget it" rm -f "$LAUNCHD_FOLDER/$WIRED_LABEL.plist"
fi
step "remove $prefix" rm -rf "$prefix"
