"""Two Ray nodes on this machine, each with its own object store and two devices that Ray only counts.

A program, because Ray's threads would go on in the tests' process. It prints the address of the nodes and the process
of the second one's raylet, and ends the nodes when its standard input ends.
"""

import json
import sys

from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    cpu.prepare_environment()
    from ray.cluster_utils import Cluster

    node = {"num_gpus": 2, "num_cpus": 8, "object_store_memory": 256 * 1024**2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(**node)
    (raylet,) = second.all_processes["raylet"]
    print(json.dumps({"address": cluster.address, "raylet": raylet.process.pid}), flush=True)
    sys.stdin.read()
    cluster.shutdown()
