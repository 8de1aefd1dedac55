"""A simulator that replays workloads against a policy with a simulated clock.

| question | module |
|---|---|
| How does the simulated time advance? | `engine` |
| How does one simulated job train? | `simulated_job` |
| How fast is an application on which nodes, as measured? | `application` |
| Which jobs arrive, and when? | `workload` |
| How is a workload made up? | `synthetic` |
| What does the policy know about a simulated job? | `reported` |
| Which other policies are compared? | `baselines` |
| How do prices and interruptions of nodes vary? | `simulated_market` |
| What does a workload cost under an autoscaler? | `market_run` |
| What would it cost at least under any autoscaler? | `market_bound` |
| How is the outcome summarised and drawn? | `outcome_report`, `simulation_plot` |
| How does `adaptdl simulate` work? | `simulate_command` |

`coordinator.simulated_policy` puts the real coordinator between the simulator and a policy.
"""
