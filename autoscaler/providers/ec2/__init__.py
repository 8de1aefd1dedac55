"""EC2 auto-scaling groups as a provider of nodes.

| question | module |
|---|---|
| How does the autoscaler ask for and release instances? | `provider` |
| What do EC2's answers mean? | `responses` |
| What do botocore's errors mean? | `errors` |
| Which cluster controls a group? | `ownership` |
| Which instances will be interrupted? | `notice_queue` |
| How are stacks made, found and taken down? | `stack_up`, `stacks` |
| What does an hour cost? | `prices` |
| Are the account and its groups set up correctly? | `account_checks` |
"""
