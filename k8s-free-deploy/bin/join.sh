#!/bin/sh
# join.sh --ticket FILE --address ADDRESS [options]: make this machine a member of a fleet.
#
#   --ticket FILE        the head's PREFIX/etc/join-ticket
#   --address ADDRESS    this machine's address in the office network; fixed, not from a pool
#   --label LABEL        what a model's `only_on` may ask for; repeatable
#   --first-port PORT    Ray takes this port and the 999 after it (20000)
#   --wired-limit-mb MB  how much memory the Mac's GPU may hold fast
#   --python COMMAND     which Python to use
#   --environment DIR    use this environment (from `make setup`) instead of making one
#   --prefix DIR         where everything goes (/opt/metalslots)
#   --user NAME          who runs the daemon (you)
#   --supervisor KIND    launchd, systemd or none
#   --dry-run            say each step and change nothing

# shellcheck source=lib/common.sh
. "$(dirname "$0")/../lib/common.sh"
# shellcheck source=lib/release.sh
. "$deploy_folder/lib/release.sh"
# shellcheck source=lib/install.sh
. "$deploy_folder/lib/install.sh"

address=''
ticket=''
labels=''
first_port=20000
wired_limit_mb=''
python_name=''
environment=''
while [ $# -gt 0 ]; do
    parse_common "$@"
    [ "$taken" != 0 ] || parse_install "$@"
    if [ "$taken" = 0 ]; then
        case $1 in
            --ticket) need_value "$@"; ticket=$2 taken=2 ;;
            *) usage "$1 is no option" ;;
        esac
    fi
    shift "$taken"
done
[ -n "$address" ] || usage "--address is missing"
[ -n "$ticket" ] || usage "--ticket is missing"
[ -f "$ticket" ] || usage "--ticket is $ticket: there is no such file"
settle

install_release
# shellcheck disable=SC2086 # each of these is several words, or none
step "write this member's settings from the ticket" \
    metalslots node make-member --ticket "$ticket" --address "$address" --first-port "$first_port" $labels
run_daemon
say "This machine is a member. Remove the copy of the ticket: rm $ticket"
