"""What the machine reports about itself.

| question | module |
|---|---|
| Which instance is this, and will the cloud take it away? | `interruption` |
| Is nothing left that could end this machine? | `dead_mans_switch` (decision), `node_end` (process) |
"""
