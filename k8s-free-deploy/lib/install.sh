# shellcheck shell=sh
# What making a head and making a member have in common. Sets the globals that are named in install.sh and join.sh.

parse_install() {
    taken=2
    case $1 in
        --address) need_value "$@"; check_word "$1" "$2"; address=$2 ;;
        --label) need_value "$@"; check_word "$1" "$2"; labels="$labels --label $2" ;;
        --first-port) need_value "$@"; check_word "$1" "$2"; first_port=$2 ;;
        --wired-limit-mb) need_value "$@"; check_word "$1" "$2"; wired_limit_mb=$2 ;;
        --python) need_value "$@"; check_word "$1" "$2"; python_name=$2 ;;
        --environment) need_value "$@"; environment=$2 ;;
        *) taken=0 ;;
    esac
}

# install_release: a new release, unless there is a current one: install.sh run again changes settings, upgrade.sh code.
install_release() {
    if [ -x "$prefix/current/bin/metalslots" ]; then
        say "- keep the release that is there (upgrade.sh brings a new one)"
        use_release "$(current_release)"
    else
        make_release
        use_release "$release"
    fi
}

run_daemon() {
    prepare_machine
    hand_over
    register_daemon
    start_daemon
    step "wait until Ray is up" metalslots node state --wait 180
}
