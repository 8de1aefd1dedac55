"""The agent's side of the cluster: the store, the job's records, archived checkpoints, the coordinator.

| question | module |
|---|---|
| How does an agent read, watch and write the store, and keep its lease? | `store_link` |
| Which events follow from a change of the store? | `store_view` |
| How does an agent register and join a job? | `job_joining` |
| How fast is the link from another node of the job? | `link_probe` |
| What happens if the job has ended already? | `ended_run` |
| What does an agent report about its replicas? | `node_reporter` |
| How busy are a node's processors, GPUs and memory? | `usage_reporter` |
| Where do the checkpoints of a finished job go? | `checkpoint_archive` |
| Which secret do the agents and replicas of a run share? | `run_secret` |
| How is etcd started, with users and passwords? | `etcd_server` |
| Who serves the store of an allocation of Slurm, and how do its other nodes find it? | `allocation_store` |
| Which agent runs a coordinator as its child process? | `coordinator_host` |
"""
