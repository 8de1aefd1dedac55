"""Jobs of Slurm as a provider of nodes: each job is an agent on one node.

| question | module |
|---|---|
| How does the autoscaler ask for and release nodes? | `provider` |
| What do Slurm's answers mean? | `queue` |
"""
