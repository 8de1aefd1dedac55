"""The coordinator: decides which nodes each job of a cluster has, and writes plans.

| question | module |
|---|---|
| What is decided, and in which order? (pure) | `decide` |
| What are the inputs and outputs of a decision? | `decision_types`, `decision_builder` |
| In which phase is a job? | `job_phase` |
| What is done about failures, drains and stops? | `reactive`, `early_failure` |
| Which replicas survive a death? | `survivors` |
| What is the policy asked, and when? | `policy_adapter`, `rounds`, `job_models` |
| Which slots are free? | `slots` |
| What does a job's status say? | `status` |
| How does a leader exclude an older one? | `fence` |
| Which keys are deleted? | `garbage_collection` |
| How does a process run all that? | `process`, `following` |
| How does the simulator use the same code? | `simulated_policy` |
"""
