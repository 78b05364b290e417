#!/bin/sh
# drain.sh [options]: take this machine out of service for a while, without breaking off an answer.
#
#   --stop          end its daemon as well, when nothing runs any more
#   --undo          put it back into service
#   --wait SECONDS  how long to wait for the answers that run here (600)
#   --prefix DIR, --supervisor KIND, --dry-run: as for install.sh

# shellcheck source=lib/common.sh
. "$(dirname "$0")/../lib/common.sh"

stop=no
undo=no
wait_s=600
while [ $# -gt 0 ]; do
    parse_common "$@"
    if [ "$taken" = 0 ]; then
        case $1 in
            --stop) stop=yes taken=1 ;;
            --undo) undo=yes taken=1 ;;
            --wait) need_value "$@"; check_word "$1" "$2"; wait_s=$2 taken=2 ;;
            *) usage "$1 is no option" ;;
        esac
    fi
    shift "$taken"
done
settle
require_installation
address=$(address_here)

if [ "$undo" = yes ]; then
    if ! metalslots node state >/dev/null; then
        start_daemon
        step "wait until Ray is up" metalslots node state --wait 180
    fi
    ready_here
    step "give it requests again" metalslots undrain "$address"
    exit 0
fi
drain_here "$wait_s" || fail "answers still run here" "wait longer: --wait $((2 * wait_s))"
[ "$stop" = no ] || stop_daemon
