#!/bin/sh
# The bench's perftest rows on the kernel's soft RDMA devices, for machines whose kernel has them (root; rdma_rxe, siw).
# The rows of metaroce0 to compare with come from `cargo xtask bench` on the same machine.
#
#   packaging/soft-rdma.sh [NETDEV]     both devices, on this interface (default: that of the default route)
#   packaging/soft-rdma.sh -d DEVICE    the rows of a device that is there
set -u

rows='ib_write_bw 64 KiB|ib_write_bw -s 65536 -n 30000 --report_gbits
ib_write_bw 1 MiB|ib_write_bw -s 1048576 -n 2000 --report_gbits
ib_send_bw 64 KiB|ib_send_bw -s 65536 -n 30000 --report_gbits
ib_read_bw 64 KiB|ib_read_bw -s 65536 -n 30000 --report_gbits
8 B writes, 1 QP|ib_write_bw -s 8 -n 400000 -l 16 --report_gbits
ib_send_lat 2 B|ib_send_lat -s 2 -n 20000
ib_write_lat 2 B|ib_write_lat -s 2 -n 20000
ib_read_lat 2 B|ib_read_lat -s 2 -n 20000'

# listening PORT: something does, in /proc/net/tcp.
listening() {
    grep -qi "$(printf ':%04X [0-9A-F]*:0000 0A' "$1")" /proc/net/tcp /proc/net/tcp6
}

# measure DEVICE OPTIONS ADDRESS: a line per row.
measure() {
    port=18600
    echo "$rows" | while IFS='|' read -r name line; do
        port=$((port + 1))
        # shellcheck disable=SC2086 # words
        timeout 60 $line -d "$1" $2 -F -p $port </dev/null >/dev/null 2>&1 &
        server=$!
        until listening $port; do kill -0 $server 2>/dev/null || break; sleep 0.02; done
        # shellcheck disable=SC2086
        out=$(timeout 60 $line -d "$1" $2 -F -p $port "$3" </dev/null 2>&1)
        wait $server
        # The last row of numbers: of a _bw Gb/s and M/s, of a _lat the typical time and p99 in us.
        echo "$out" | awk -v name="$1: $name" '
            $1 ~ /^[0-9]+$/ && NF >= 4 && $4 ~ /^[0-9.]+$/ { row = $0 }
            END {
                if (row == "") { print "FAIL  " name; exit }
                n = split(row, f)
                if (n > 6) printf "%-36s %8.2f us  p99 %.2f us\n", name, f[5], f[8]
                else printf "%-36s %8.2f Gb/s  %.4f M/s\n", name, f[4], f[5]
            }'
    done
}

if [ "${1:-}" = -d ]; then
    measure "$2" "-x 0" 127.0.0.1
    exit
fi

net=${1:-$(ip route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -1)}
address=$(ip -4 -o address show dev "$net" | sed -n 's/.* inet \([0-9.]*\).*/\1/p' | head -1)
for kind in rxe siw; do
    module=$([ $kind = rxe ] && echo rdma_rxe || echo siw)
    if ! modprobe "$module" 2>/dev/null; then
        echo "SKIP  $kind: no kernel module $module, or not root"
        continue
    fi
    rdma link add bench_$kind type $kind netdev "$net" || continue
    # iWARP connects by rdma_cm alone.
    options=$([ $kind = siw ] && echo "-R" || echo "-x 1")
    measure bench_$kind "$options" "$address"
    rdma link delete bench_$kind
done
