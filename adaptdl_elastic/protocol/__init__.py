"""The formats in which library, agents and coordinator communicate.

| module | what it defines |
|---|---|
| `channel` | the connection between an agent and one of its replicas |
| `messages` | the messages on that connection |
| `environment` | the names of a replica's environment variables |
| `hints` | what a job reports about itself |
"""
