#!/bin/sh
# Brings up one lab host: its network, its RDMA device, and the agent that runs what the tests ask for.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
value() { sed -n "s/.*lab\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mkdir -p /dev/shm /dev/pts /share
mount -t tmpfs -o size=70% shm /dev/shm
mount -t devpts pts /dev/pts
modprobe -a 9p 9pnet_virtio
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 share /share || echo "lab: no shared folder"
echo "lab: shared folder"
hostname "$(value name)"
echo "127.0.0.1 localhost" >/etc/hosts
ip link set lo up
modprobe -a virtio_net virtio_rng
ip link set eth0 up
for address in $(value addresses | tr , ' '); do ip address add "$address" dev eth0; done
modprobe -a rdma_rxe sch_netem sch_ingress cls_u32 cls_flower cls_matchall act_gact
rdma link add rxe0 type rxe netdev eth0
ulimit -l unlimited
ulimit -n 65536
echo "lab: network and device"
mkdir /lab/tree
tar -x -f /share/tree.tar -C /lab/tree
cd /lab/tree
echo "lab: up"
exec python3 /lab/agent.py
