"""Define the formats in which library, agents and coordinator communicate.

| module | question that it answers |
|---|---|
| `channel` | How are an agent and one of its replicas connected? |
| `messages` | Which messages do an agent and a replica send each other? |
| `environment` | Which environment variables tell a replica its rank, generation and settings? |
| `hints` | What does a job report about itself to the coordinator? |
| `self_test` | How do the coordinator and `doctor` learn of NCCL's self-test? |
| `uncaught_error` | How does an agent learn which error ended its replica's script? |
"""
