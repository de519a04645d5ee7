#!/usr/bin/env bash
# Run a command on a network of its own, whose loopback is as fast as you say.
#
#   benchmarks/netns.sh RATE -- command [argument ...]
#
# RATE is what tc understands (100mbit, 1gbit, 10gbit) or "unlimited". Both directions of loopback
# traffic share the rate, as two hosts on one half-duplex link would; a ring or an allgather between
# two local ranks sends its bytes through it once each. Needs root, iproute2 and the tbf scheduler.
# The namespace is removed when the command ends, also on Ctrl-C.
set -euo pipefail

usage() { echo "usage: $0 RATE -- command [argument ...]" >&2; exit 2; }
[ $# -ge 3 ] && [ "$2" = -- ] || usage
rate=$1
shift 2
for tool in ip tc; do
    command -v "$tool" >/dev/null || { echo "$0: $tool not found; on Debian: apt-get install iproute2" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "$0: network namespaces need root" >&2; exit 1; }

space=hvd_fec_$$
child=
cleanup() {
    trap - EXIT INT TERM
    # Every process of the namespace, whoever its parent is now: ranks outlive a killed launcher.
    pids=$(ip netns pids "$space" 2>/dev/null) && [ -n "$pids" ] && kill -TERM $pids 2>/dev/null && sleep 1
    pids=$(ip netns pids "$space" 2>/dev/null) && [ -n "$pids" ] && kill -KILL $pids 2>/dev/null
    ip netns del "$space" 2>/dev/null
}
trap 'cleanup; exit 130' INT
trap 'cleanup; exit 143' TERM
trap cleanup EXIT

ip netns add "$space"
ip -n "$space" link set lo up
if [ "$rate" != unlimited ]; then
    # A large loopback MTU makes one packet as large as a small bucket; 1500 is what Ethernet has,
    # but one packet per 1500 bytes would measure this machine's packet rate instead of the link.
    ip -n "$space" link set lo mtu 9000
    ip netns exec "$space" tc qdisc add dev lo root tbf rate "$rate" burst 256kb latency 100ms
fi

ip netns exec "$space" "$@" &
child=$!
wait "$child"
