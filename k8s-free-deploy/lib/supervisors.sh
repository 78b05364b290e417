# shellcheck shell=sh
# The three that keep the daemon alive: launchd on a Mac, systemd on Linux, and a loop that needs no rights.
#
# This is the only place where they differ. Each has the same four verbs: register, start, stop, unregister; all can be
# done twice. Tests run the loop for real, and the other two against stand-ins for launchctl and systemctl.

LAUNCHD_FOLDER=${METALSLOTS_LAUNCHD_FOLDER:-/Library/LaunchDaemons}
SYSTEMD_FOLDER=${METALSLOTS_SYSTEMD_FOLDER:-/etc/systemd/system}
# The firewall's command is on nobody's path.
FIREWALL=${METALSLOTS_FIREWALL:-/usr/libexec/ApplicationFirewall/socketfilterfw}

default_supervisor() {
    case $(uname -s) in
        Darwin) say launchd ;;
        *) if command -v systemctl >/dev/null 2>&1; then say systemd; else say none; fi ;;
    esac
}

register_daemon() {
    case $supervisor in
        launchd)
            step "write $LAUNCHD_FOLDER/$LABEL.plist" \
                render "$deploy_folder/launchd/node.plist.in" "$LAUNCHD_FOLDER/$LABEL.plist"
            ;;
        systemd)
            step "write $SYSTEMD_FOLDER/$LABEL.service" \
                render "$deploy_folder/systemd/node.service.in" "$SYSTEMD_FOLDER/$LABEL.service"
            step "let systemd read it" systemctl daemon-reload
            step "start it at every boot" systemctl enable --quiet "$LABEL.service"
            ;;
        none) step "keep the loop that stands in for a supervisor" cp "$deploy_folder/lib/keep-alive.sh" "$prefix/bin/" ;;
    esac
}

start_daemon() {
    case $supervisor in
        launchd)
            # A daemon that is loaded already would go on with its old definition.
            stop_daemon
            step "start the daemon, now and at every boot" launchctl bootstrap system "$LAUNCHD_FOLDER/$LABEL.plist"
            ;;
        systemd) step "start the daemon" systemctl restart "$LABEL.service" ;;
        none)
            stop_daemon
            step "start the daemon" start_loop
            ;;
    esac
}

stop_daemon() {
    case $supervisor in
        launchd)
            if launchctl print "system/$LABEL" >/dev/null 2>&1; then
                step "stop the daemon; its engines give their memory back" launchctl bootout "system/$LABEL"
                # bootout returns before the daemon is gone, and a bootstrap until then fails.
                [ "$dry_run" = yes ] || wait_until_not launchctl print "system/$LABEL"
            fi
            ;;
        systemd)
            if systemctl is-active --quiet "$LABEL.service"; then
                step "stop the daemon; its engines give their memory back" systemctl stop "$LABEL.service"
            fi
            ;;
        none)
            if loop_runs; then
                step "stop the daemon; its engines give their memory back" kill -TERM "$(cat "$prefix/run/loop.pid")"
                [ "$dry_run" = yes ] || wait_until_not loop_runs
            fi
            ;;
    esac
}

unregister_daemon() {
    case $supervisor in
        launchd) step "forget the daemon" rm -f "$LAUNCHD_FOLDER/$LABEL.plist" ;;
        systemd)
            if [ -f "$SYSTEMD_FOLDER/$LABEL.service" ]; then
                step "no more start at boot" systemctl disable --quiet "$LABEL.service"
                step "forget the daemon" rm -f "$SYSTEMD_FOLDER/$LABEL.service"
                step "let systemd forget it" systemctl daemon-reload
            fi
            ;;
        none) step "forget the daemon" rm -f "$prefix/bin/keep-alive.sh" ;;
    esac
}

start_loop() {
    # The shell gives a background command no terminal input; nohup lets it outlive the session.
    nohup sh "$prefix/bin/keep-alive.sh" "$prefix" </dev/null >>"$prefix/log/daemon.log" 2>&1 &
    printf '%s\n' "$!" >"$prefix/run/loop.pid"
}

# By its words as well as by its number, which after a reboot may be somebody else's.
loop_runs() {
    [ -f "$prefix/run/loop.pid" ] || return 1
    case $(ps -o args= -p "$(cat "$prefix/run/loop.pid")" 2>/dev/null) in
        *"keep-alive.sh $prefix") return 0 ;;
        *) return 1 ;;
    esac
}

wait_until_not() {
    waited=0
    while "$@" >/dev/null 2>&1; do
        [ "$waited" -lt "$END_LIMIT_S" ] || fail "the daemon has not ended in $END_LIMIT_S s" "read $prefix/log/daemon.log"
        sleep 1
        waited=$((waited + 1))
    done
}

# prepare_machine: what a Mac needs so that it serves day and night. On Linux a server has it already; the checks say.
prepare_machine() {
    [ "$supervisor" = launchd ] || return 0
    # A sleeping member is a frozen one: the others wait for it until its silence is noticed.
    step "never sleep, wake for the network, start again after a power cut" \
        pmset -a sleep 0 disksleep 0 powernap 0 womp 1 autorestart 1
    if [ -x "$FIREWALL" ]; then
        # The application firewall would ask somebody at the screen, and a daemon has none.
        python=$prefix/current/bin/python
        step "let the firewall know the program" "$FIREWALL" --add "$(resolve "$python")"
        step "let it take connections" "$FIREWALL" --unblockapp "$(resolve "$python")"
    fi
    if [ -n "${wired_limit_mb:-}" ]; then
        # macOS forgets the limit at every boot, so a daemon of its own sets it again.
        step "write $LAUNCHD_FOLDER/$WIRED_LABEL.plist" \
            render "$deploy_folder/launchd/wired-limit.plist.in" "$LAUNCHD_FOLDER/$WIRED_LABEL.plist"
        if launchctl print "system/$WIRED_LABEL" >/dev/null 2>&1; then
            step "stop the old limit" launchctl bootout "system/$WIRED_LABEL"
        fi
        step "set the GPU's memory limit, now and at every boot" \
            launchctl bootstrap system "$LAUNCHD_FOLDER/$WIRED_LABEL.plist"
    fi
}

# resolve PATH: follow links, since the firewall knows programs by their real place. macOS has no readlink -f before 12.3.
resolve() {
    target=$1
    while [ -L "$target" ]; do
        link=$(readlink "$target")
        case $link in
            /*) target=$link ;;
            *) target=$(dirname "$target")/$link ;;
        esac
    done
    say "$target"
}
