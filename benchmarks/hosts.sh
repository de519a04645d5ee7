#!/usr/bin/env bash
# Run a horovodrun command on several "hosts": network namespaces joined by a bridge, each link limited.
#
#   benchmarks/hosts.sh COUNT RATE -- horovodrun -np COUNT -H {hosts} --network-interfaces eth0 ...
#
# {hosts} becomes HOST:1,HOST:1,...; without the interface Gloo would pick the loopback. Every host has
# one link to the bridge; each direction of each link is limited to RATE (what tc understands, or
# "unlimited"), as on a switched network. The command runs on the first host and reaches the others as
# it would reach real ones, by ssh: here a stand-in that enters the namespace. Needs root, iproute2 and
# the tbf scheduler. All is removed at the end, also on Ctrl-C.
set -euo pipefail

usage() { echo "usage: $0 COUNT RATE -- command [argument ...]" >&2; exit 2; }
[ $# -ge 4 ] && [ "$3" = -- ] || usage
count=$1 rate=$2
shift 3
[[ $count =~ ^[0-9]+$ ]] && [ "$count" -ge 1 ] && [ "$count" -le 64 ] || usage
for tool in ip tc; do
    command -v "$tool" >/dev/null || { echo "$0: $tool not found; on Debian: apt-get install iproute2" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "$0: network namespaces need root" >&2; exit 1; }

name=hvd_fec_$$
net=10.77.0
work=$(mktemp -d)
spaces() { ip netns list | awk '{print $1}' | grep "^${name}_" || true; }
signal() { for s in $(spaces); do ip netns pids "$s" | xargs -r kill "-$1" 2>/dev/null || true; done; }
cleanup() {
    trap - EXIT INT TERM
    if [ -n "$(for s in $(spaces); do ip netns pids "$s"; done)" ]; then
        signal TERM
        sleep 1
        signal KILL
    fi
    for s in $(spaces); do
        ip netns del "$s"
        rm -rf "/etc/netns/$s"
    done
    rm -rf "$work"
}
trap 'cleanup; exit 130' INT
trap 'cleanup; exit 143' TERM
trap cleanup EXIT

limit() { # namespace, device
    [ "$rate" = unlimited ] || ip netns exec "$1" tc qdisc add dev "$2" root tbf rate "$rate" burst 256kb latency 100ms
}
switch=${name}_switch
ip netns add "$switch"
ip -n "$switch" link add br0 type bridge
ip -n "$switch" link set br0 up
hosts=
for i in $(seq "$count"); do
    host=${name}_$i
    ip netns add "$host"
    # Horovod looks up its own host name for process sets, whatever interface it was given.
    mkdir -p "/etc/netns/$host"
    printf '127.0.0.1 localhost\n%s %s\n' "$net.$i" "$(hostname)" >"/etc/netns/$host/hosts"
    ip -n "$host" link set lo up
    ip -n "$host" link add eth0 type veth peer name "port$i" netns "$switch"
    ip -n "$host" addr add "$net.$i/24" dev eth0
    ip -n "$host" link set eth0 up
    ip -n "$switch" link set "port$i" master br0 up
    limit "$host" eth0
    limit "$switch" "port$i"
    hosts+=${hosts:+,}$net.$i:1
done

cat >"$work/ssh" <<SSH
#!/usr/bin/env bash
# ssh [options] HOST [options] command ...: the command, in the namespace of that host.
while [[ \${1:-} != $net.* ]]; do
    [ \$# -gt 0 ] || { echo "ssh stand-in: no host of $net.0/24 among the arguments" >&2; exit 255; }
    shift
done
host=\${1##*.}
shift
while [[ \${1:-} == -? ]]; do shift 2; done
exec ip netns exec ${name}_\$host bash -c "\$*"
SSH
chmod +x "$work/ssh"

PATH=$work:$PATH ip netns exec "${name}_1" "${@//\{hosts\}/$hosts}" &
wait $!
