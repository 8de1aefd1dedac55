"""The subcommands of `adaptdl`; `adaptdl_elastic.autoscaler.cli` lists them.

| subcommands | module |
|---|---|
| `ls`, `queue`, `history` | `job_lists` |
| `status`, `scale`, `checkpoint`, `stop` | `jobs` |
| `submit`, `cancel`, `resume` | `submit` |
| `submit --array` | `job_array` (pure) |
| `logs` | `logs` |
| `cp`, `tensorboard` | `copy` |
| `explain` | `explain` |
| `report` | `report` |
| `replay` | `replay` |
| `coordinator`, `nodes`, `drain`, `events` | `cluster` |
| `cluster up`, `add`, `remove`, `status`, `down`, `grant`, `revoke` | `cluster_setup` |
| `autoscale` | `autoscale` |
| `cloud` | `cloud` |
| `doctor` | `doctor` |
| `web` | `web.command` |

`tables` reads stores and prints tables. `job_requests` writes what a person asks of a job.
"""
