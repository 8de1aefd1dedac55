"""What the machine reports about itself.

| question | module |
|---|---|
| Which instance is this, and will the cloud take it away? | `interruption` |
"""
