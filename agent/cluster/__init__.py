"""The agent's side of the cluster: the store, the job's records, archived checkpoints, the coordinator.

| question | module |
|---|---|
| How does an agent read, watch and write the store, and keep its lease? | `store_link` |
| Which events follow from a change of the store? | `store_view` |
| How does an agent come into a job? | `job_joining` |
| What does an agent report about its replicas? | `node_reporter` |
| Where do the checkpoints of a finished job go? | `checkpoint_archive` |
| Which agent runs a coordinator as its child? | `coordinator_host` |
"""
