"""Bring node services up on machines that are reached over ssh, and pack what is sent to them.

| question | module |
|---|---|
| How is a command run on a node? | `ssh` |
| What is a node like, and how is the service installed there? | `nodes` |
| Which certificates, passwords and keys does a cluster have? | `credentials` |
| How does a person get into the store, and out? | `store_users` |
| Which wheel is shipped to a node? | `wheel` |
| What does `cluster up` do, in which order? | `bring_up` |
| How is a working directory packed? | `bundle` |
| How is this program packed for machines that a cloud starts? | `lock` |
"""
