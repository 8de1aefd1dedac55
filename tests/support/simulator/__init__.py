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
| How is the outcome summarised and drawn? | `outcome_report`, `simulation_plot` |
| Which command runs it (`benchmarks/replay.py`)? | `simulate_command` |
| How is the real coordinator put between the simulator and a policy? | `through_coordinator` |
"""
