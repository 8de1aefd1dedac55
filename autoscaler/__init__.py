"""The whole cluster: which job gets which nodes, and how many nodes there are.

| question | module or package |
|---|---|
| Which job gets how many replicas, on which nodes? (pure) | `policy` |
| How do the policy's answers become plans in the store? | `coordinator` |
| How long will a change pause a job? | `coordinator.policy_adapter` (`expected_pause`) |
| How many nodes should there be, and which ones are bought or released? | `scaling` |
| How are nodes started and stopped? | `providers` |
| How do the coordinator and the autoscaler see the records in the store? | `cluster_view` |
| What do the records of nodes say of each generation? | `held_facts` |
| What does the command `adaptdl` consist of, and how does it find a store? | `cli`, `commands` |
| Why does a job have its size, and is the cluster in order? | `diagnostics` |
| How is a cluster set up over ssh? | `provisioning` |
| What does the page of `adaptdl web` show? | `web` |
"""
