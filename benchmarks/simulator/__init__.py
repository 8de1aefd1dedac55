"""A simulator that replays workloads against a policy with a simulated clock.

| question | module |
|---|---|
| How does the simulated time advance? | `engine` |
| How does one simulated job train? | `simulated_job` |
| How fast is an application on which nodes, as measured? | `application` |
| Which jobs arrive, and when? | `workload` |
| What does the policy know about a simulated job? | `reported` |
| Which other policies are compared? | `baselines` |
| How is the outcome summarised? | `outcome_report` |
"""
