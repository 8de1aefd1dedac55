"""What the commands of `adaptdl` and the node services have in common.

| question | module |
|---|---|
| How does a person sign a request, and how is the signature checked? | `signatures` |
| How is a node service reached? | `service_client` |
| Which submitted jobs may begin, and why does another one wait? | `admission` |
| Where does this user's machine keep what it knows of a cluster? | `context` |
| Which files does a node service have? | `service_config` |
| How are strangers' connections bounded? | `connections` |
| How are users of etcd managed? | `etcd_gateway` |
| How are submissions and registrations read from the store? | `submitted` |
"""
