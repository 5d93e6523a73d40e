#!/bin/sh
# Brings up one lab host: its network, its RDMA device, and the agent that runs what the tests ask for.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
value() { sed -n "s/.*lab\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o size=70% shm /dev/shm
mount -t devpts pts /dev/pts
hostname "$(value name)"
echo "127.0.0.1 localhost" >/etc/hosts
ip link set lo up
modprobe -a virtio_net virtio_rng
if [ -e /sys/class/net/eth1 ]; then
  # Two cables end here: this host joins them, and its own address is at the bridge.
  modprobe bridge
  mtu=$(cat /sys/class/net/eth0/mtu)
  ip link set eth0 name port0
  ip link set eth1 name port1
  ip link add eth0 mtu "$mtu" type bridge forward_delay 0
  for port in port0 port1; do ip link set "$port" master eth0 up; done
fi
ip link set eth0 up
ip address add "$(value address)" dev eth0
modprobe -a rdma_rxe sch_netem sch_ingress sch_prio cls_u32 cls_flower cls_matchall act_gact
rdma link add rxe0 type rxe netdev eth0
ulimit -l unlimited
ulimit -n 65536
echo "lab: network and device"
# The second disk is the archive itself: the program under test.
mkdir /lab/tree /lab/cgroup
mount -t cgroup2 cgroup /lab/cgroup
tar -x -f /dev/vdb -C /lab/tree
# All hosts of the lab have the same key, as those of a cluster with one home folder.
(umask 077 && printf '%064d\n' 7 >/lab/key)
cd /lab/tree
echo "lab: up"
exec python3 /lab/agent.py
