"""What the library, the agents and the coordinator say to each other.

| module | what it is |
|---|---|
| `channel` | the line between an agent and one of its replicas |
| `hints` | what a job reports about itself |
"""
