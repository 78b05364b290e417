#!/bin/sh
# upgrade.sh [options]: bring this checkout's code to this machine, without losing a request.
#
# Members first, one after the other, the head last. The new environment is made while the old one serves. Then this
# machine is drained, its daemon started anew with the new code, and waited for. If it does not come back, the old code
# does.
#
#   --environment DIR  use this environment (from `make setup`) instead of making one
#   --python COMMAND   which Python to use
#   --alone            go on although no other machine answers for this one's model
#   --new-ray          go on although the new code brings another Ray: all machines have to change before they speak again
#   --wait SECONDS     how long to wait for the answers that run here (600), and for the model afterwards (1800)
#   --prefix DIR, --supervisor KIND, --user NAME, --dry-run: as for install.sh

# shellcheck source=lib/common.sh
. "$(dirname "$0")/../lib/common.sh"
# shellcheck source=lib/release.sh
. "$deploy_folder/lib/release.sh"

environment=''
python_name=''
alone=no
new_ray=no
wait_s=600
while [ $# -gt 0 ]; do
    parse_common "$@"
    if [ "$taken" = 0 ]; then
        taken=2
        case $1 in
            --environment) need_value "$@"; environment=$2 ;;
            --python) need_value "$@"; check_word "$1" "$2"; python_name=$2 ;;
            --wait) need_value "$@"; check_word "$1" "$2"; wait_s=$2 ;;
            --alone) alone=yes taken=1 ;;
            --new-ray) new_ray=yes taken=1 ;;
            *) usage "$1 is no option" ;;
        esac
    fi
    shift "$taken"
done
settle
require_installation
address=$(address_here)
old=$(current_release)

versions() { "$1/bin/python" -c 'import sys; from importlib.metadata import version; print(version("ray"), *sys.version_info[:2])'; }

# give_back: the old code again, when the new one does not serve.
give_back() {
    say "- the new code does not answer: back to $(basename "$old")"
    stop_daemon
    use_release "$old"
    start_daemon
    fail "the upgrade was undone" "read $prefix/log/daemon.log, $prefix/log/ray.log and Ray's logs below $prefix/ray"
}

can_be_spared() {
    [ "$alone" = yes ] || [ "$new_ray" = yes ] ||
        step "ask whether the others can do without this machine" metalslots ready "$address" --others --wait 60
}

# stay FAILURE FIX: nothing was stopped yet, so go on as before.
stay() {
    step "give it requests again" metalslots undrain "$address"
    rm -rf "$release"
    fail "$1" "$2"
}

can_be_spared
make_release
old_versions=$(versions "$old")
new_versions=$old_versions
[ "$dry_run" = yes ] || new_versions=$(versions "$release")
if [ "$new_ray" = no ] && [ "$new_versions" != "$old_versions" ]; then
    rm -rf "$release"
    fail "the new code runs on Ray and Python $new_versions, the fleet on $old_versions" \
        "plan a pause, and run this with --new-ray on the head and then on every member"
fi
drain_here "$wait_s" || stay "answers still run here after $wait_s s" "wait longer: --wait $((2 * wait_s))"
# Somebody may have drained another machine meanwhile.
can_be_spared || stay "the others cannot do without this machine any more" "upgrade one machine at a time"
stop_daemon
use_release "$release"
prepare_machine
hand_over
register_daemon
start_daemon
step "wait until Ray is up" metalslots node state --wait 180 || give_back
ready_here || give_back
drop_old_releases "$old"
say "This machine runs the new code. The old one stays below $prefix/releases until the next upgrade."
