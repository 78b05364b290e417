#!/bin/sh
# keep-alive.sh PREFIX: run the daemon, and run it again when it ends; what launchd and systemd do with more rights.
#
# For machines where nobody may register daemons, and for the tests. It does not survive a reboot.

set -u
prefix=$1
stopping=no
child=''
trap 'stopping=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT
trap '' HUP

while [ "$stopping" = no ]; do
    "$prefix/bin/metalslots" node run &
    child=$!
    # A signal ends `wait` before the child has ended.
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    child=''
    [ "$stopping" = yes ] || sleep 2
done
rm -f "$prefix/run/loop.pid"
