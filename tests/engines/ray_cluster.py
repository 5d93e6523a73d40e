"""A Ray cluster of three nodes on this machine, until it is ended: prints its address, that for submitted jobs, and the
raylet of its head."""

from __future__ import annotations

import signal
import sys

NODE = {"num_cpus": 2, "object_store_memory": 100_000_000}


def main() -> None:
    from ray.cluster_utils import Cluster

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": True, "dashboard_port": 0})
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        cluster.wait_for_nodes(timeout=200)
        (raylet,) = cluster.head_node.all_processes["raylet"]
        sys.stdout.write(f"cluster {cluster.address} jobs {cluster.head_node.webui_url} raylet {raylet.process.pid}\n")
        sys.stdout.flush()
        signal.pause()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
