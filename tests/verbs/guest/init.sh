#!/bin/busybox sh
# First process of the guest: the host's files with a layer in memory over them become the root.
set -e
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /lower /rw /new
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do
  insmod "$module"
done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose,access=any host /lower
mount -t tmpfs -o size=75% rw /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work,xino=off overlay /new
for folder in proc sys dev; do
  mount --move "/$folder" "/new/$folder"
done
cp -r /job /new/run/guest
exec switch_root /new /bin/bash /run/guest/start.sh
