"""What the machine reports about itself.

| question | module |
|---|---|
| Which instance is this, and will the cloud take it away? | `interruption` |
| Which GPUs are there, and how does each belong to one replica? | `devices`, `device_locks` |
| Is nothing left that could end this machine? | `dead_mans_switch` (decision), `node_end` (process) |
"""
