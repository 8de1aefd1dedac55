"""The coordinator: decides which nodes each job of a cluster has, and writes plans.

| question | module |
|---|---|
| What is decided, and in which order? (pure) | `decide` |
| What are the inputs and outputs of a decision? | `decision_types`, `decision_builder` |
| In which phase is a job? | `job_phase` |
| Which nodes of a job's plan run, have ended or are lost? | `job_health` |
| What is done about failures, drains and stops? | `reactive` |
| Whose failure is it: a node's, a size's or the script's? (pure) | `failure_owner` |
| Which replicas survive a death? | `survivors` |
| What is the policy asked? | `policy_adapter` |
| When is the policy asked, and which parts of its answer are used? | `rounds` |
| How long will a change pause a job? | `policy_adapter` (`expected_pause`) |
| What do the links between its nodes say about sizes that a job has not run at? | `job_links` |
| How long did past changes pause a job? | `job_phase` (`pause`), `status` (`typical_pause`) |
| What is a job's goodput at other sizes? | `job_models`, on other types of nodes `node_types` |
| Which nodes are slower than others of their type? | `node_speeds` |
| Which slots are free? | `slots` |
| What does a job's status say? | `status` |
| How does a leader exclude an older one? | `decide` (`fence_off`) |
| Which keys are deleted? | `garbage_collection` |
| Which decisions are kept, to be replayed? | `decision_recorder` |
| How does a process run all that? | `process`, `following` |
"""
