# The shell tests' one tool, to be sourced: `check "what" command...` runs the command, counts, and shows its
# output when it fails; `check_report suite` prints the closing line and gives the exit status.
# shellcheck shell=bash
check_passed=0 check_failed=0

check()
{
    local what=$1 output status
    shift
    output=$("$@" 2>&1)
    status=$?
    if [ "$status" = 0 ]; then
        check_passed=$((check_passed + 1))
    else
        check_failed=$((check_failed + 1))
        echo "FAILED: $what (exit status $status): $*"
        tail -n 15 <<<"$output" | sed 's/^/    /'
    fi
}

# The command must end with this status, and its output, both streams, must match the pattern.
check_output() # WHAT STATUS PATTERN COMMAND... (STATUS may be a shell pattern)
{
    local what=$1 expected=$2 pattern=$3 output status
    shift 3
    output=$("$@" 2>&1)
    status=$?
    if [[ $status == $expected ]] && grep -qE -- "$pattern" <<<"$output"; then
        check_passed=$((check_passed + 1))
    else
        check_failed=$((check_failed + 1))
        echo "FAILED: $what: exit status $status, expected $expected and output like \"$pattern\": $*"
        tail -n 15 <<<"$output" | sed 's/^/    /'
    fi
}

check_report() # SUITE
{
    echo "$1: $check_passed passed, $check_failed failed"
    [ "$check_failed" = 0 ]
}
