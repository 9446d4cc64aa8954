#!/bin/sh
# Install what some tests need from the system: a browser, a sandbox, a database, a C++ compiler. Debian only, as root.
# Installed packages cost a moment and no network.

packages="bubblewrap chromium fonts-dejavu-core g++ postgresql"

fail() {
    echo "perilune: $*" >&2
    exit 1
}

if [ ! -e /etc/debian_version ] || ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    fail "make system-deps knows only Debian's apt-get; install these with your own package manager: $packages"
fi

missing=
for package in $packages; do
    case "$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null)" in
        "install ok installed") ;;
        *) missing="$missing $package" ;;
    esac
done
if [ -z "$missing" ]; then
    echo "== system packages present: $packages"
    exit 0
fi

[ "$(id -u)" = 0 ] || fail "make system-deps must run as root to install:$missing"
echo "== installing system packages:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update || fail "apt-get update failed (see above); is the network up?"
# The list is split into words on purpose.
apt-get -qq install -y --no-install-recommends $missing </dev/null || fail "apt-get could not install:$missing (see above)"
echo "== system packages installed"
