"""One interface to the shared store, and the drivers behind it.

| question | module |
|---|---|
| What does a store promise? | `base` |
| Where is the store, and with which credentials is it reached? | `store_options` |
| Which driver fits the server that answers? | `connect` |
| What is read again when the server refuses it, and how does a user log in? | `credentials`, `login` |
| How do etcd's v3 API, its v2 API and a dictionary keep the promise? | `etcd_v3`, `etcd_v2`, `memory` |
| How are python-etcd's errors and time-outs made ours? | `etcd_v2_client` |
| How do other processes reach the dictionary of a standalone job's agent? | `local_socket` |
| How are several endpoints, HTTP streams and leases handled? | `endpoints`, `http`, `keepalive` |
| How are large plans kept in parts? | `plan_store` |
"""
