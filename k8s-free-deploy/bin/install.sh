#!/bin/sh
# install.sh --address ADDRESS [options]: make this machine the head of a fleet.
#
#   --address ADDRESS    this machine's address in the office network; fixed, not from a pool
#   --app FILE           what to serve (configs/apps/*.yaml); kept, and deployed again after every start
#   --port PORT          where the other machines come to (6379)
#   --tls                encrypt what the machines say to each other
#   --keep-state         let a restart of this machine end nobody: Ray keeps what it knows on disk (alpha in Ray)
#   --label LABEL        what a model's `only_on` may ask for; repeatable
#   --first-port PORT    Ray takes this port and the 999 after it (20000)
#   --wired-limit-mb MB  how much memory the Mac's GPU may hold fast
#   --python COMMAND     which Python to use
#   --environment DIR    use this environment (from `make setup`) instead of making one
#   --prefix DIR         where everything goes (/opt/metalslots)
#   --user NAME          who runs the daemon (you)
#   --supervisor KIND    launchd, systemd or none
#   --dry-run            say each step and change nothing
#
# Run it again whenever something is to change: it keeps the fleet's secret and what it does not have to change.

# shellcheck source=lib/common.sh
. "$(dirname "$0")/../lib/common.sh"
# shellcheck source=lib/release.sh
. "$deploy_folder/lib/release.sh"
# shellcheck source=lib/install.sh
. "$deploy_folder/lib/install.sh"

address=''
app=''
port=6379
tls=''
keep_state=''
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
            --app) need_value "$@"; app=$2 taken=2 ;;
            --port) need_value "$@"; port=$2 taken=2 ;;
            --tls) tls=--tls taken=1 ;;
            --keep-state) keep_state=--keep-state taken=1 ;;
            *) usage "$1 is no option" ;;
        esac
    fi
    shift "$taken"
done
[ -n "$address" ] || usage "--address is missing"
check_word --port "$port"
[ -z "$app" ] || [ -f "$app" ] || usage "--app is $app: there is no such file"
settle

install_release
# shellcheck disable=SC2086 # each of these is several words, or none
step "write the head's settings, secret and join ticket" \
    metalslots node make-head --address "$address" --port "$port" --first-port "$first_port" $tls $keep_state $labels
if [ -n "$app" ]; then
    step "check the app" metalslots deploy --check "$app"
    step "keep the app for every start" metalslots node keep-app "$app"
fi
run_daemon
say "This machine is the head. Next: copy $prefix/etc/join-ticket to each other machine (it is a secret), and run there:"
say "  k8s-free-deploy/bin/join.sh --ticket join-ticket --address ITS-ADDRESS"
