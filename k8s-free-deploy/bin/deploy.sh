#!/bin/sh
# deploy.sh FILE [options]: on the head, serve what an app file says, from now on and after every start.
#
# A running app is updated one machine at a time, without losing a request.
#
#   --prefix DIR    where the installation is (/opt/metalslots)
#   --user NAME     who runs the daemon (you)
#   --dry-run       say each step and change nothing

# shellcheck source=lib/common.sh
. "$(dirname "$0")/../lib/common.sh"

file=
while [ $# -gt 0 ]; do
    parse_common "$@"
    if [ "$taken" = 0 ]; then
        case $1 in
            -*) usage "$1 is no option" ;;
            *) file=$1 taken=1 ;;
        esac
    fi
    shift "$taken"
done
[ -n "$file" ] || usage "which app file?"
supervisor=none
settle
require_installation

step "check the app" metalslots deploy --check "$file"
step "keep it for every start" metalslots node keep-app "$file"
hand_over
step "deploy it" metalslots deploy "$prefix/etc/app.yaml"
