#!/bin/sh
# Run every check, also after one failed, and fail when any did. The tests come last: their count ends the output.
# usage: check.sh LINT IMPORTS TYPES PYTEST (each a command line)

failed=

check() {
    echo "== $1"
    $2 || failed="$failed $1"
}

check lint "$1"
check imports "$2"
check types "$3"
echo "== tests"
$4 || failed="$failed tests"

[ -z "$failed" ] && exit 0
echo "failed:$failed"
exit 1
