#!/bin/bash
# Runs the guest's command with the Soft-RoCE devices that it is there for, then ends the guest.
# Two devices, joined by a link: rxe0 is 10.0.0.1, rxe1 is 10.0.0.2.
finish() {
  sync
  echo o > /proc/sysrq-trigger
  sleep infinity
}
trap finish EXIT
set -e
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
source /run/guest/settings  # OUT

mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none out "$OUT"
ulimit -l unlimited
hostname guest
ip link set lo up

ip link add veth0 type veth peer name veth1
sysctl -q -w net.ipv6.conf.all.disable_ipv6=1
for end in 0 1; do
  device="veth$end"
  # Both ends are in one network namespace, as this rxe knows no other, so each address is local to
  # the other end too.
  sysctl -q -w "net.ipv4.conf.$device.accept_local=1" "net.ipv4.conf.$device.rp_filter=0"
  ip addr add "10.0.0.$((end + 1))/24" dev "$device"
  ip link set "$device" mtu 4500 up
  rdma link add "rxe$end" type rxe netdev "$device"
done

stty -F /dev/ttyS1 raw
set +e
bash /run/guest/command > /dev/ttyS1 2>&1 < /dev/null
echo $? > "$OUT/guest.status"
