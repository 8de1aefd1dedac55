"""One interface to the shared store, and its drivers.

| question | module |
|---|---|
| What does every store guarantee? | `base` |
| How does one follow what is under a prefix? | `follow` |
| How does one hold a copy of it, and what of records that cannot be read? | `prefix_cache` |
| Where is the store, and with which credentials is it reached? | `store_options` |
| Which driver fits the server that answers? | `connect` |
| Which files are read again after a refusal, and how does an etcd user log in? | `credentials`, `login` |
| How do etcd's v3 API, its v2 API and a dictionary give these guarantees? | `etcd_v3`, `etcd_v2`, `memory` |
| How are python-etcd's errors and time-outs translated? | `etcd_v2_client` |
| How do other processes reach the dictionary in a standalone job's agent? | `local_socket` |
| Why did an endpoint give no answer, and what helps? | `connection_error` |
| How are several endpoints, HTTP streams and leases handled? | `endpoints`, `http`, `keepalive` |
"""
