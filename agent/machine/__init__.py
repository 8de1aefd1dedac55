"""What the machine reports about itself.

| question | module |
|---|---|
| Which instance is this, and will the cloud take it away? | `interruption` |
| Which GPUs are there, and how does each belong to one replica? | `devices`, `device_locks` |
| What has Slurm given to this process, and how does it end? | `slurm` (pure), `slurm_end` |
| Which process outlives the one that has started it? | `kept_process` |
| Is nothing left that could end this machine? | `dead_mans_switch` (decision), `node_end` (process) |
"""
