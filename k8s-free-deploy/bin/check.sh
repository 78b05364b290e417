#!/bin/sh
# check.sh [options]: say whether this machine can be, and is, a good part of a fleet. Changes nothing.
#
#   --head ADDRESS:PORT  before joining: can this machine reach the head?
#   --prefix DIR, --supervisor KIND: as for install.sh
#
# Before an installation it asks for what install.sh needs; afterwards `metalslots doctor` asks for the rest.

# shellcheck source=lib/common.sh
. "$(dirname "$0")/../lib/common.sh"
# shellcheck source=lib/release.sh
. "$deploy_folder/lib/release.sh"

head=''
python_name=''
while [ $# -gt 0 ]; do
    parse_common "$@"
    if [ "$taken" = 0 ]; then
        case $1 in
            --head) need_value "$@"; check_word "$1" "$2"; head=$2 taken=2 ;;
            *) usage "$1 is no option" ;;
        esac
    fi
    shift "$taken"
done
dry_run=yes
settle

if [ -x "$prefix/bin/metalslots" ]; then
    metalslots node check
    exit
fi
python=$(find_python)
say "Python     $("$python" --version) ($python)"
say "disk       $(df -Pk "$(existing "$prefix")" | awk 'NR == 2 { print int($4 / 1000) }') MB free; $((MIN_FREE_KB / 1000)) MB are needed, and room for models"
say "supervisor $supervisor, as $user"
# The same checks as after the installation: they need nothing but Python.
PYTHONPATH=$checkout "$python" -m serve_app.node.machine_checks ${head:+"$head"}
