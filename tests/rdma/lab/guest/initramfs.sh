#!/bin/sh
# The first process of a lab host: finds the disk image, lays memory over it, and goes on inside.
/bin/busybox mkdir -p /proc /sys /dev /disk /memory /root
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules/order); do
  /bin/busybox insmod "/modules/$module" || echo "lab: $module could not be loaded"
done
case " $(/bin/busybox cat /proc/cmdline) " in
*" lab.probe=1 "*)
  echo "lab: the kernel runs"
  echo o >/proc/sysrq-trigger
  /bin/busybox sleep 60
  ;;
esac
echo "lab: kernel"
/bin/busybox mount -t ext4 -o ro /dev/vda /disk
/bin/busybox mount -t tmpfs -o size=70% memory /memory
/bin/busybox mkdir -p /memory/upper /memory/work
/bin/busybox mount -t overlay -o lowerdir=/disk,upperdir=/memory/upper,workdir=/memory/work overlay /root
/bin/busybox mount --move /dev /root/dev
/bin/busybox mount --move /sys /root/sys
/bin/busybox mount --move /proc /root/proc
exec /bin/busybox switch_root /root /bin/sh /lab/start.sh
